"""What an engine over memory nodes keeps and computes itself: new-token attention, prompts that are
being prefilled, states, and how rows reach this machine's memory."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from memory.attention.grouped import group_layers
from memory.attention.seam import AttentionLayer, PlannedAttention, layers_in
from memory.attention.tiled import TILED_TYPES
from memory.kv_beside_states import KVBesideStates
from memory.kv_manager import KVManager
from memory.nodes.attach import AttachRequest
from memory.nodes.new_token_attention import (
    NewTokenAttention,
    PlainNewTokenAttention,
    TiledNewTokenAttention,
)
from memory.nodes.prompt_tail_cache import PromptTailCache
from memory.nodes.staging import HOST_STAGING, Staging
from memory.pages.layer_groups import PageLayout
from memory.pages.linux_vmm import LinuxMemory
from ops.backend import Backend
from serve.config import EngineConfig
from serve.errors import ConfigError
from serve.loading.kv_layouts import kv_layout, layer_groups, state_layout
from serve.loading.kv_sizing import reserving
from serve.loading.precision import Precision
from serve.machine import has_idle_core
from serve.models import ModelSpec
from serve.units import format_memory

if TYPE_CHECKING:
    from memory.nodes.engine_lanes import EngineLanes
    from memory.states.layout import StateLayout
    from memory.states.local import LocalStates

logger = logging.getLogger(__name__)

# Of the mappings that Linux allows a process, besides those of K/V that comes here when no node is
# left (MAX_MAPPINGS in memory/kv_manager.py).
_MAX_MAPPINGS = 12_000


class EngineShare(Protocol):
    """The engine's share of attention. backend rotates and merges where the model computes."""

    @property
    def backend(self) -> Backend: ...

    @property
    def staging(self) -> Staging: ...

    @property
    def lanes(self) -> EngineLanes | None:
        """The lanes of the stream that computes; None: the host posts all rows."""

    def tail_cache(self, template: AttachRequest, max_len: int) -> PromptTailCache:
        """Returns the cache of prompts that are being prefilled."""

    def new_token_attention(
        self, template: AttachRequest, tail_cache: PromptTailCache | None
    ) -> NewTokenAttention:
        """Returns attention over the step's own rows and over the cache."""


class HostShare:
    """The share of an engine that computes in this machine's memory."""

    staging = HOST_STAGING
    lanes = None

    def __init__(
        self, config: EngineConfig, precision: Precision, backend: Backend, local_bytes: int
    ) -> None:
        """local_bytes: the memory for prompts that are being prefilled."""
        self.backend = backend
        self._config, self._precision, self._local_bytes = config, precision, local_bytes

    def tail_cache(self, template: AttachRequest, max_len: int) -> PromptTailCache:
        return PromptTailCache(template, max_len, self._local_bytes)

    def new_token_attention(
        self, template: AttachRequest, tail_cache: PromptTailCache | None
    ) -> NewTokenAttention:
        config, layers = self._config, template.layers
        kv = self._precision.kv
        if kv in TILED_TYPES:
            rows, sequences = config.batched_tokens, config.max_num_seqs
            return TiledNewTokenAttention(layers, kv, config.kv_group, rows, sequences, tail_cache)
        dtype = getattr(torch, kv)
        return PlainNewTokenAttention(layers, dtype, self.backend, tail_cache)


@dataclass(slots=True)
class NodeStates:
    """The states' layout, the records for which there is memory, and the bytes that they take."""

    layout: StateLayout
    num_records: int

    @property
    def num_bytes(self) -> int:
        return self.num_records * self.layout.record_bytes

    def open(self, config: EngineConfig, max_model_len: int) -> RecordMemory:
        """Reserves the records of sequences up to max_model_len. The caller closes the result."""
        from memory.states.local import LocalStates  # only models with states need it

        layout = self.layout
        with reserving(self.num_bytes, "kv_cache_bytes"):
            memory = LinuxMemory(layout.record_bytes, self.num_records)
        try:
            kv = KVManager(
                memory,
                num_pages=self.num_records,
                num_ranges=config.max_num_seqs,
                max_model_len=max_model_len,
                groups=[layout.group()],
                max_rows=config.chunk_tokens,
                in_background=has_idle_core(config.compute_threads),
                most_mappings=_MAX_MAPPINGS,
            )
            with reserving(kv.total_bytes, "max_num_seqs and max_model_len"):
                address = memory.reserve(kv.total_bytes)
        except BaseException:
            memory.close()
            raise
        logger.info(
            "%d states of %s every %d tokens in this machine's memory",
            self.num_records,
            format_memory(layout.record_bytes),
            layout.interval,
        )
        return RecordMemory(memory, kv, LocalStates(layout, address, kv.total_bytes))


@dataclass(slots=True)
class RecordMemory:
    """Records in this machine's memory: their accounting, and the states in them."""

    memory: LinuxMemory
    kv: KVManager
    states: LocalStates

    def beside(self, attention: PlannedAttention, kv: KVBesideStates) -> PlannedAttention:
        """Returns attention with the states."""
        from memory.states.local import StatefulAttention

        return StatefulAttention(attention, self.states, kv.record_start)

    def close(self) -> None:
        self.memory.close()


def size_states(
    config: EngineConfig,
    precision: Precision,
    spec: ModelSpec,
    layers: Sequence[AttentionLayer],
    local_bytes: int,
) -> NodeStates | None:
    """Returns the records for which there is memory: half of local_bytes, or what the longest
    sequence needs, but no more than all sequences can have. None without states. ConfigError names
    the setting."""
    max_len = config.max_model_len or spec.max_model_len
    groups = group_layers(layers, max_len)
    layouts = [kv_layout(config, precision, layers_in(layers, ids)) for _, ids in groups]
    stored = layer_groups(layouts, [window for window, _ in groups])
    layout = state_layout(config, spec, stored, page_bytes=mmap.PAGESIZE)
    if layout is None:
        return None
    layout.pad(-(-layout.record_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
    pages = PageLayout([layout.group()], layout.record_bytes, max_len, config.chunk_tokens)
    least = pages.pages_for(max_len)
    if least * layout.record_bytes > local_bytes:
        raise ConfigError(
            f"kv_cache_bytes {local_bytes} is too little for the {least} states of"
            f" {format_memory(layout.record_bytes)} that one sequence needs in this machine's"
            " memory beside memory_nodes; raise it, or lower max_chunk_tokens"
        )
    most = config.max_num_seqs * pages.groups[0].slots_for(max_len)
    return NodeStates(layout, min(most, max(least, local_bytes // 2 // layout.record_bytes)))
