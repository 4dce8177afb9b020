"""Memory nodes of an engine: from the settings to connections, K/V accounting and attention."""

from __future__ import annotations

import logging
import secrets
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from memory.attention.grouped import group_layers
from memory.attention.seam import AttentionLayer, PlannedAttention, layers_in
from memory.attention.tiled import TILED_TYPES
from memory.kv_beside_states import KVBesideStates
from memory.kv_manager import KVManager
from memory.kv_memory import KVMemory
from memory.nodes.attach import STRIPE_TOKENS, AttachRequest, NodeLayout, accounting_bytes
from memory.nodes.edit_log import EditLog
from memory.nodes.node_set import NodePartition, NodeSet, make_kv_managers, shard_request
from memory.nodes.placement import (
    MAX_PAGES,
    PageGeometry,
    PlacementError,
    Shard,
    largest_lists,
    page_geometry,
    resolve_partition,
)
from memory.nodes.prompt_tail_cache import PromptTailCache
from memory.nodes.remote_attention import RemoteAttention
from memory.nodes.server.node import MemoryNode
from memory.nodes.wire import WireFormat, WireType
from memory.nodes.wire_rows import fits_int8, kv_type, largest_message
from memory.pages.layer_groups import PageLayout
from memory.partitioned_kv import PartitionedKV
from ops.backend import Backend
from serve.config import EngineConfig
from serve.errors import ConfigError
from serve.loading.engine_share import EngineShare, NodeStates, RecordMemory
from serve.loading.kv_layouts import kv_layout, open_selection
from serve.loading.kv_sizing import refuse_chunks
from serve.loading.node_connection import connect_all, connect_with, node_sizes
from serve.loading.precision import Precision
from serve.models import ModelSpec
from transport.base import Endpoint
from transport.direct import direct_pair

logger = logging.getLogger(__name__)

_FEWEST_PAGES = 2000  # a node has at least that many, if it is large enough
_WIRE_TYPES = {torch.float32: WireType.FLOAT32, torch.bfloat16: WireType.BFLOAT16}


@dataclass(slots=True)
class RemoteMemory:
    """The K/V of memory nodes: accounting, attention and the nodes, which `close` closes last.
    records: the states of other layers, if they have any."""

    kv: KVMemory
    attention: RemoteAttention
    nodes: NodeSet
    records: RecordMemory | None = None

    @property
    def with_states(self) -> PlannedAttention:
        """Attention, and the states of other layers."""
        if self.records is None:
            return self.attention
        assert isinstance(self.kv, KVBesideStates), "made with the records"
        return self.records.beside(self.attention, self.kv)

    def close(self) -> None:
        self.nodes.close()
        if self.nodes.lanes is not None:
            self.nodes.lanes.close()
        if self.records is not None:
            self.records.close()
        try:
            self.attention.staging.close()
        finally:  # the device may be lost
            if self.attention.tail_cache is not None:
                self.attention.tail_cache.close()


def open_remote_memory(
    config: EngineConfig,
    precision: Precision,
    spec: ModelSpec,
    layers: Sequence[AttentionLayer],
    backend: Backend,
    local_bytes: int,
    share: EngineShare,
    states: NodeStates | None = None,
) -> RemoteMemory:
    """Connects to the nodes and partitions the K/V over them.

    backend, local_bytes: of this machine as a node, which has all K/V when no node is left.
    states: those of the other layers, if they have any. ConfigError names the setting. The caller
    closes the result.
    """
    setup = _RemoteSetup(config, precision, spec, layers, backend, local_bytes)
    nodes = setup.nodes()
    nodes.lanes = share.lanes
    opened: list[RecordMemory | PromptTailCache] = []
    try:
        connect_all("memory_nodes", nodes)
        memories = setup.kv_managers(nodes)
        tail_cache = setup.prompt_tail_cache(memories, share)
        opened += [tail_cache] if tail_cache is not None else []
        new_token_attention = share.new_token_attention(setup.template, tail_cache)
        records = None if states is None else states.open(config, memories[0].max_model_len)
        opened += [records] if records is not None else []
        kv = _as_one(memories, records)
        attention = RemoteAttention(
            layers,
            new_token_attention,
            share.backend,
            nodes,
            kv.layout.range_tokens,
            config.max_num_seqs,
            setup.wire,
            tail_cache,
            share.staging,
            open_selection(config, precision, layers),
        )
    except BaseException:
        nodes.close()
        for memory in reversed(opened):
            memory.close()
        raise
    logger.info(
        "K/V in %s, %.5g MiB on %s (%s partition): context %d, %d pages of %d tokens",
        precision.kv,
        kv.num_pages * kv.page_bytes / 2**20,
        ", ".join(config.memory_nodes),
        setup.partition,
        kv.max_model_len,
        kv.num_pages,
        setup.geometry.page_tokens[0],
    )
    return RemoteMemory(kv, attention, nodes, records)


def _as_one(memories: list[KVManager], records: RecordMemory | None) -> KVMemory:
    """Returns the nodes' memories as one, with the records of states beside them."""
    if records is not None:
        return KVBesideStates(memories, records.kv)
    return memories[0] if len(memories) == 1 else PartitionedKV(memories)


class _RemoteSetup:
    """Everything that is decided before the nodes allocate memory."""

    def __init__(
        self,
        config: EngineConfig,
        precision: Precision,
        spec: ModelSpec,
        layers: Sequence[AttentionLayer],
        backend: Backend,
        local_bytes: int,
    ) -> None:
        self._config, self._layers, self._backend = config, list(layers), backend
        self._precision, self._local_bytes = precision, local_bytes
        self._max_len = config.max_model_len or spec.max_model_len
        if self._max_len > spec.max_model_len:
            raise ConfigError(
                f"max_model_len {self._max_len} is above the model's {spec.max_model_len}"
            )
        urls = config.memory_nodes
        try:
            self.partition = resolve_partition(config.memory_partition, layers, len(urls))
        except PlacementError as error:
            raise ConfigError(str(error)) from error
        self.wire = _wire_format(config, precision, layers)
        self._connect = connect_with(config, self._largest_message())
        node_bytes, most, capacity, _ = node_sizes(
            "memory_nodes", urls, self._connect, config.memory_node_bytes
        )
        if self.partition != "request" and most > 2 * node_bytes:
            logger.warning(
                "the smallest memory node has %.5g MiB, the largest %.5g; the %s partition uses as "
                "much of each node as the smallest has (memory_partition request uses all)",
                node_bytes / 2**20,
                most / 2**20,
                self.partition,
            )
        refuse_chunks(layers, self._max_len, "on memory nodes")
        groups = group_layers(layers, self._max_len)
        # An engine that uses a part of a node gets that part of its mappings and so of its pages.
        whole = min(capacity, MAX_PAGES // _FEWEST_PAGES * node_bytes)
        self.geometry = _geometry(config, precision, layers, groups, self.partition, whole)
        self._group_layers = [ids for _, ids in groups]
        if config.max_model_len is None:
            self._fit_into(node_bytes)

    def _largest_message(self) -> int:
        rows = self._config.batched_tokens
        largest = largest_message(self._layers, rows, self.wire)
        if self.partition == "sequence" and self._config.policy is not None:  # one node may be left
            num_tiles = self._max_len // STRIPE_TOKENS + 1
            largest = max(largest, largest_lists(self._layers, num_tiles, rows))
        return largest

    def _fit_into(self, node_bytes: int) -> None:
        """Lowers the context length to what fits the nodes."""
        count = len(self._config.memory_nodes)
        requests = [
            shard_request(self.template, Shard(self.partition, i, count)) for i in range(count)
        ]
        page_bytes = max(NodeLayout(request).page_bytes for request in requests)
        pages_for = PageLayout(
            self.geometry.groups, self.geometry.page_bytes, self._max_len, self._config.chunk_tokens
        ).pages_for

        def needed(num_tokens: int) -> int:
            slots = self.geometry.range_slots(num_tokens)
            accounting = accounting_bytes(self._config.max_num_seqs, slots)
            return pages_for(num_tokens) * page_bytes + accounting

        fits = bisect_right(range(1, self._max_len + 1), node_bytes, key=needed)
        if 0 < fits < self._max_len:
            logger.warning(
                "max_model_len is lowered from %d to %d: the smallest memory node has no room "
                "for longer sequences; more K/V memory on each node raises it",
                self._max_len,
                fits,
            )
            self._max_len = fits

    @property
    def template(self) -> AttachRequest:
        return AttachRequest(
            engine=secrets.token_hex(16),
            epoch=1,
            kv_dtype=self._precision.kv,
            kv_group=self._config.kv_group,
            layers=self._layers,
            group_layers=self._group_layers,
            page_tokens=self.geometry.page_tokens,
            num_places=self.geometry.range_slots(self._max_len),
            num_ranges=self._config.max_num_seqs,
            num_pages=MAX_PAGES,
            min_pages=1,
            max_rows=self._config.batched_tokens,
            prefix_only=self.partition == "sequence",
            kv_policy=self._config.policy,
        )

    def nodes(self) -> NodeSet:
        """Returns the nodes, not yet connected."""
        config, template = self._config, self.template
        urls = config.memory_nodes
        partition_urls = [[url] for url in urls] if self.partition == "request" else [list(urls)]
        partitions = [
            NodePartition(
                urls_of_one,
                EditLog(self.geometry.page_bytes, config.max_num_seqs, template.num_places),
            )
            for urls_of_one in partition_urls
        ]
        return NodeSet(
            partitions,
            template,
            self.partition,
            self._connect,
            wire=self.wire,
            local=_local_node(self._local_bytes, self._backend),
            bytes_per_node=config.memory_node_bytes,
        )

    def kv_managers(self, nodes: NodeSet) -> list[KVManager]:
        config, geometry, max_len = self._config, self.geometry, self._max_len
        memories = make_kv_managers(
            nodes.partitions,
            geometry,
            num_ranges=config.max_num_seqs,
            max_model_len=max_len,
            max_rows=config.chunk_tokens,
        )
        nodes.min_pages = memories[0].pages_for(max_len)
        fewest = min(one.num_pages for one in memories)
        if nodes.min_pages > fewest:
            raise ConfigError(
                f"memory_nodes: {fewest} pages of {geometry.page_tokens[0]} tokens are less than "
                f"one sequence of max_model_len {max_len}; lower it, raise memory_node_bytes, or "
                "lower it for other engines that hold the rest"
            )
        if self._local_bytes < nodes.min_pages * geometry.page_bytes:
            logger.warning(
                "kv_cache_bytes %d is too little to continue when no memory node is left; one "
                "sequence of %d tokens takes %d",
                self._local_bytes,
                max_len,
                nodes.min_pages * geometry.page_bytes,
            )
        return memories

    def prompt_tail_cache(
        self, memories: Sequence[KVManager], share: EngineShare
    ) -> PromptTailCache | None:
        if self._config.memory_prefill != "local":
            return None
        tail_cache = share.tail_cache(self.template, self._max_len)
        for partition in memories:
            partition.on_close = lambda target: tail_cache.drop(target.start)
        return tail_cache


def _geometry(
    config: EngineConfig,
    precision: Precision,
    layers: Sequence[AttentionLayer],
    groups: Sequence[tuple[int | None, list[int]]],
    partition: str,
    node_bytes: int,
) -> PageGeometry:
    token_bytes = []
    for _, ids in groups:
        chosen = layers_in(layers, ids)
        token_bytes.append(kv_layout(config, precision, chosen).token_bytes)
    windows = [window for window, _ in groups]
    return page_geometry(token_bytes, windows, partition, len(config.memory_nodes), node_bytes)


def _wire_format(
    config: EngineConfig, precision: Precision, layers: Sequence[AttentionLayer]
) -> WireFormat:
    """Returns the formats of rows in messages; those of `auto` are exact."""
    if config.memory_wire == "auto":
        rows = _WIRE_TYPES.get(precision.compute, WireType.FLOAT32)
        # k is rotated in fp32 before it is quantized.
        return WireFormat(rows, WireType.FLOAT32 if precision.kv in TILED_TYPES else rows)
    if config.memory_wire == "int8" and not all(fits_int8(layer.head_dim) for layer in layers):
        raise ConfigError("memory_wire int8: the model's head_dim is not a multiple of 16")
    rows = WireType[config.memory_wire.upper()]
    return WireFormat(rows, kv_type(rows))


def _local_node(num_bytes: int, backend: Backend) -> Callable[[], Endpoint]:
    """Returns a function that connects to this machine's memory as a memory node."""
    node = MemoryNode(num_bytes, backend)

    def attach() -> Endpoint:
        engine_end, node_end = direct_pair()
        node.adopt(node_end)
        return engine_end

    return attach
