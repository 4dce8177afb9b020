"""K/V parallelism: memory nodes onto which long sequences grow, and attention over segments.

Layers without windows are one group (`group_layers`), the first; only its K/V is cut into segments.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from memory.attention.layouts import Layout, make_layout
from memory.attention.seam import AttentionLayer, PlannedAttention
from memory.attention.tiled import RecentLayers
from memory.kv_manager import KVManager
from memory.kv_memory import KVMemory
from memory.nodes.attach import MAX_ADDRESSES, AttachRequest, NodeLayout
from memory.nodes.edit_log import EditLog
from memory.nodes.node_set import Connect, NodePartition, NodeSet, make_kv_managers
from memory.nodes.placement import MAX_PAGES, PageGeometry, page_geometry
from memory.nodes.rank_links import HolderGeometry
from memory.nodes.wire import FULL_WIRE
from memory.nodes.wire_rows import largest_message
from memory.segmented_kv import SegmentedKV
from ops.backend import Backend
from serve.config import EngineConfig
from serve.errors import ConfigError
from serve.loading.node_connection import (
    connect_all,
    connect_present,
    connect_with,
    node_sizes,
)
from serve.loading.precision import Precision
from serve.loading.segment_folding import fold_segments, segmented_layers
from serve.runner.runner import Closable
from serve.units import format_memory

logger = logging.getLogger(__name__)

_MAX_MESSAGE_ROWS = 1 << 16  # as memory.nodes.attach
_MAX_SLOTS = 1 << 24  # of all ranges on a holder, so that its accounting stays small
_FEWEST_PAGES = 2000  # a node has at least that many, if it is large enough


@dataclass(slots=True)
class HolderMemory:
    """The K/V of holders: the nodes, and the accounting of each."""

    nodes: NodeSet
    memories: list[KVManager]
    max_model_len: int
    most_segments: int  # of a sequence on one node
    setting: str  # that names the nodes


class Segments:
    """The segments of an engine's sequences, in this machine's memory and on holders, if any."""

    def __init__(
        self,
        config: EngineConfig,
        own_tokens: int,
        holders: HolderMemory | None,
    ) -> None:
        """own_tokens: the tokens of a sequence for which this machine has addresses."""
        self.own_tokens = own_tokens
        self._length = config.kvp_segment_tokens
        self._holders = holders
        self._kv: SegmentedKV | None = None

    @property
    def nodes(self) -> NodeSet | None:
        return None if self._holders is None else self._holders.nodes

    def join(self, own: KVManager) -> KVMemory:
        """Returns all memory as one. ConfigError if a sequence of max_model_len does not fit."""
        if self._holders is None:
            return own
        self._kv = join(own, self._holders, self._length)
        return self._kv

    def over(
        self,
        inner: PlannedAttention,
        layout: Layout,
        where: tuple[int, int],
        backend: Backend,
        recent: RecentLayers | None,
    ) -> PlannedAttention:
        """Returns attention that is the fold over segments. where: the address and the end of this
        machine's K/V of these layers, which `inner` attends over. recent: the store of their recent
        tokens."""
        held = None
        if self._holders is not None:
            assert self._kv is not None, "memory is joined first"
            held = self._holders.nodes, self._kv.locate, self._kv.begun_away
        return fold_segments(inner, layout, where, backend, self._length, held, recent)

    def closing(self, local: Closable) -> Closable:
        """Returns what closes the holders and this machine's memory."""
        return local if self._holders is None else _LocalAndHolders(local, self)

    def close(self) -> None:
        """Closes the holders."""
        if self._holders is not None:
            self._holders.nodes.close()


@dataclass(slots=True)
class _LocalAndHolders:
    local: Closable
    segments: Segments

    def close(self) -> None:
        self.segments.close()
        self.local.close()


def join(own: KVManager, holders: HolderMemory, segment_tokens: int) -> SegmentedKV:
    """Returns this machine's memory and that of holders as one. ConfigError if a sequence of
    max_model_len does not fit."""
    max_len = holders.max_model_len
    kv = SegmentedKV(
        own,
        holders.memories,
        segment_tokens,
        max_len,
        holders.most_segments,
        takes_whole=holders.setting == "borrow",
    )
    if not kv.fits_alone(max_len):
        raise ConfigError(
            f"{holders.setting}: the nodes have no room for one sequence of max_model_len"
            f" {max_len}; lower it, or raise memory_node_bytes"
        )
    return kv


def open_segments(
    config: EngineConfig,
    precision: Precision,
    layers: Sequence[AttentionLayer],
    windows: Sequence[int | None],
    max_model_len: int,
    own_bytes: int,
) -> Segments | None:
    """Returns the segments of sequences up to max_model_len, or None if the model's layers cannot
    be cut into segments. layers: those of the first group. windows: that of each group. own_bytes:
    of this machine's K/V. ConfigError names the setting. The caller closes the result."""
    if config.borrow and len(windows) > 1:
        raise ConfigError("borrow: layers with a window stay in this machine's memory; use kvp")
    if not can_cut(config, layers, windows[0], max_model_len):
        return None
    if not config.holders:
        return Segments(config, max_model_len, None)
    holders = open_holders(config, precision, layers, max_model_len, own_bytes)
    own_tokens = holders.max_model_len
    if len(windows) == 1:
        own_tokens = min(own_tokens, config.kvp_segment_tokens)
    return Segments(config, own_tokens, holders)


def can_cut(
    config: EngineConfig, layers: Sequence[AttentionLayer], window: int | None, max_model_len: int
) -> bool:
    """Returns whether sequences are cut into segments. layers, window: of the first group.
    ConfigError if they are not, and kvp or borrow is set."""
    if window is None and all(x.window is None or x.window >= max_model_len for x in layers):
        return True
    if config.holders:
        raise ConfigError(
            f"{'kvp' if config.kvp else 'borrow'}: a layer without a window is needed, and none"
            " that shares its K/V with one that has a window"
        )
    return False


class SegmentSizes:
    """The pages of segments on holders, and the longest sequence."""

    def __init__(
        self,
        config: EngineConfig,
        precision: Precision,
        layers: Sequence[AttentionLayer],
        max_model_len: int,
        connect: Connect,
        own_bytes: int,
        parts: Sequence[Sequence[AttentionLayer]] | None = None,
    ) -> None:
        """parts: the layers of each rank, which has its own pages on each holder; None: one rank
        has all."""
        self._config, self._layers, self._kv_dtype = config, list(layers), precision.kv
        self._engine = secrets.token_hex(16)
        self.connect = connect
        parts = [layers] if parts is None else parts
        self.length, num_nodes = config.kvp_segment_tokens, len(config.holders)
        self.setting = "kvp" if config.kvp else "borrow"
        self.is_optional = not config.kvp and max_model_len <= self.length
        """Whether sequences do without these nodes, which may be absent."""
        if self.is_optional:  # as if each lent what this machine has
            bytes_, whole, max_message = own_bytes, own_bytes, 1 << 62
        else:
            found = node_sizes(self.setting, config.holders, connect, config.memory_node_bytes)
            bytes_, _, whole, max_message = found
        layout = make_layout(layers, precision.kv, config.kv_group)
        whole = min(whole, MAX_PAGES // _FEWEST_PAGES * bytes_)
        self.geometry: PageGeometry = page_geometry(
            [layout.token_bytes], [None], "head", len(parts), whole
        )
        self.range_tokens = min(self.length, max_model_len)
        [tokens], [slots] = self.geometry.page_tokens, self.geometry.range_slots(self.range_tokens)
        # of all ranks together
        self.page_bytes = sum(NodeLayout(self.request(1, 1, own)).page_bytes for own in parts)
        self.num_pages = num_pages = bytes_ // self.page_bytes
        self.max_model_len = self._fitted(max_model_len, num_pages, -(-self.length // tokens))
        self.per_holder = -(-self._num_segments // num_nodes)
        page_bytes = self.geometry.page_bytes
        self.num_ranges = min(
            config.max_num_seqs * self.per_holder,
            config.max_num_seqs + num_pages // slots + 1,
            max(1, _MAX_SLOTS // slots),
            max(1, MAX_ADDRESSES // 2 // (slots * page_bytes)),
        )
        self._check_messages(max_message)

    def _check_messages(self, max_message: int) -> None:
        largest = largest_message(self._layers, self.max_rows, FULL_WIRE)
        if largest > max_message:
            raise ConfigError(
                f"{self.setting}: {self.max_rows} rows, max_num_batched_tokens over"
                f" {self.per_holder} segments on a node, take messages of"
                f" {format_memory(largest)}, and a node takes {format_memory(max_message)};"
                " lower max_num_batched_tokens or raise kvp_segment_tokens"
            )

    @property
    def _num_segments(self) -> int:
        """The segments of the longest sequence on holders."""
        return max(1, -(-self.max_model_len // self.length) - (self.setting == "kvp"))

    def _fitted(self, max_model_len: int, num_pages: int, segment_pages: int) -> int:
        """Returns the longest context for which holders of so many pages have room."""
        if self.is_optional:
            return max_model_len
        num_nodes = len(self._config.holders)
        whole, rest = divmod(num_pages, segment_pages)
        fits = self.length * (1 + num_nodes * whole)
        fits += min(self.length - 1, rest * self.geometry.page_tokens[0])
        if fits >= max_model_len:
            return max_model_len
        if self._config.max_model_len is not None:
            raise ConfigError(
                f"max_model_len {max_model_len} does not fit onto {num_nodes} {self.setting} nodes"
                f" of {num_pages} pages; they have room for {fits} tokens"
            )
        logger.warning(
            "max_model_len is lowered from %d to %d: the %s nodes have no room for longer "
            "sequences",
            max_model_len,
            fits,
            self.setting,
        )
        return fits

    @property
    def max_rows(self) -> int:
        """The most rows of a message: each row may attend over all segments on a holder."""
        return min(_MAX_MESSAGE_ROWS, self._config.batched_tokens * self.per_holder)

    @property
    def of_ranks(self) -> HolderGeometry:
        """What the requests of all ranks have alike."""
        whole = self.template
        [tokens], [places] = whole.page_tokens, whole.num_places
        return HolderGeometry(whole.engine, tokens, places, whole.num_ranges, whole.max_rows)

    @property
    def template(self) -> AttachRequest:
        return self.request(self.num_ranges, self.max_rows, self._layers)

    def request(
        self, num_ranges: int, max_rows: int, layers: Sequence[AttentionLayer]
    ) -> AttachRequest:
        return AttachRequest(
            engine=self._engine,
            epoch=1,
            kv_dtype=self._kv_dtype,
            kv_group=self._config.kv_group,
            layers=list(layers),
            group_layers=[list(range(len(layers)))],
            page_tokens=self.geometry.page_tokens,
            num_places=self.geometry.range_slots(self.range_tokens),
            num_ranges=num_ranges,
            num_pages=MAX_PAGES,
            min_pages=1,
            max_rows=max_rows,
            by_segment=True,
        )

    def partitions(self) -> list[NodePartition]:
        """Returns a partition for each holder, without links."""
        slots = self.template.num_places
        return [
            NodePartition([url], EditLog(self.geometry.page_bytes, self.num_ranges, slots))
            for url in self._config.holders
        ]


def open_holders(
    config: EngineConfig,
    precision: Precision,
    layers: Sequence[AttentionLayer],
    max_model_len: int,
    own_bytes: int,
) -> HolderMemory:
    """Connects to the nodes of kvp or borrow and attaches to each; replicas that lend may be
    absent. layers: those of the group without windows. own_bytes: of this machine's K/V.
    ConfigError names the setting. The caller closes the result."""
    layers = segmented_layers(layers)
    connect = connect_for(config, layers, max_model_len)
    sizes = SegmentSizes(config, precision, layers, max_model_len, connect, own_bytes)
    template = sizes.template
    nodes = NodeSet(
        sizes.partitions(),
        template,
        "request",
        connect,
        bytes_per_node=config.memory_node_bytes,
    )
    try:
        connect_nodes = connect_present if sizes.is_optional else connect_all
        connect_nodes(sizes.setting, nodes)
        memories = account(config, sizes, nodes)
    except BaseException:
        nodes.close()
        raise
    return HolderMemory(nodes, memories, sizes.max_model_len, sizes.per_holder, sizes.setting)


def connect_for(
    config: EngineConfig, layers: Sequence[AttentionLayer], max_model_len: int
) -> Connect:
    """Returns what connects to holders of sequences up to max_model_len."""
    num_segments = -(-max_model_len // config.kvp_segment_tokens)
    most_rows = config.batched_tokens * -(-num_segments // len(config.holders))
    largest = largest_message(layers, min(_MAX_MESSAGE_ROWS, most_rows), FULL_WIRE)
    return connect_with(config, largest)


def account(config: EngineConfig, sizes: SegmentSizes, nodes: NodeSet) -> list[KVManager]:
    """Returns the accounting of each holder, whose memory is placed."""
    memories = make_kv_managers(
        nodes.partitions,
        sizes.geometry,
        num_ranges=sizes.num_ranges,
        max_model_len=sizes.range_tokens,
        max_rows=min(config.chunk_tokens, sizes.range_tokens),
    )
    beyond = max(1, min(sizes.length, sizes.max_model_len - sizes.length))
    nodes.min_pages = memories[0].pages_for(sizes.range_tokens if config.borrow else beyond)
    logger.info(
        "sequences grow onto %s in segments of %d tokens: context %d, %d pages of %d tokens each",
        ", ".join(config.holders),
        sizes.length,
        sizes.max_model_len,
        min(memory.num_pages for memory in memories),
        sizes.geometry.page_tokens[0],
    )
    return memories
