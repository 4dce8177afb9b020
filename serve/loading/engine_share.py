"""What an engine over memory nodes keeps and computes itself: new-token attention, prompts that are
being prefilled, and how rows reach this machine's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from memory.attention.tiled import TILED_TYPES
from memory.nodes.attach import AttachRequest
from memory.nodes.new_token_attention import (
    NewTokenAttention,
    PlainNewTokenAttention,
    TiledNewTokenAttention,
)
from memory.nodes.prompt_tail_cache import PromptTailCache
from memory.nodes.staging import HOST_STAGING, Staging
from ops.backend import Backend
from serve.config import EngineConfig
from serve.loading.precision import Precision

if TYPE_CHECKING:
    from memory.nodes.engine_lanes import EngineLanes


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
