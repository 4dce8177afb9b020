"""The K/V of a model that several ranks hold: one accounting, and each rank's own memory.

All ranks lay out pages and ranges alike, for the rank that stores most of a token, so an edit of
the address space is the same on each (memory/edit_recorder.py). A rank stores its own layers and
heads there. Memory that nothing is written to costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from memory.attention.grouped import GroupedAttention, group_layers
from memory.attention.layouts import Layout
from memory.attention.seam import AttentionLayer, PlannedAttention, layers_in
from memory.attention.tiled import RecentLayers, RecentStore
from memory.edit_recorder import EditRecorder
from memory.kv_manager import KVManager
from memory.nodes.attach import AttachRequest
from memory.nodes.rank_links import HeldEditRecorder, HolderGeometry, RankHolders
from memory.pages.layer_groups import LayerGroup
from memory.pages.linux_vmm import LinuxMemory
from memory.pages.virtual_memory import VirtualMemory
from ops.backend import Backend
from serve.config import EngineConfig
from serve.errors import ConfigError
from serve.loading.kv_layouts import (
    kv_layout,
    recent_group,
    recent_layout,
    stored_layers,
)
from serve.loading.kv_sizing import reserving, size_kv
from serve.loading.precision import Precision
from serve.loading.runtime import group_attention
from serve.loading.segment_folding import fold_segments, segmented_layers
from serve.models import ModelSpec
from serve.models.shard import Shard

if TYPE_CHECKING:
    from serve.loading.kvp import SegmentSizes


@dataclass(frozen=True, slots=True)
class RankGeometry:
    """How every rank lays out its K/V.

    windows, token_bytes: those of each layer group, padding included. offsets: where each group's
    ranges begin in a rank's reservation, and its end. segment_tokens: of the segments over which
    attention of the first group is folded; 0: it is not. holders: what holds later segments.
    """

    page_bytes: int
    num_pages: int
    max_model_len: int
    windows: tuple[int | None, ...]
    token_bytes: tuple[int, ...]
    offsets: tuple[int, ...]
    segment_tokens: int = 0
    holders: HolderGeometry | None = None

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, object]) -> RankGeometry:
        """Parses a geometry. Raises ValueError for anything else."""
        numbers = [content.get(name) for name in ("page_bytes", "num_pages", "max_model_len")]
        lists = [content.get(name) for name in ("windows", "token_bytes", "offsets")]
        if not all(type(each) is int and each > 0 for each in numbers):
            raise ValueError("the geometry's sizes are no positive integers")
        if not all(isinstance(each, list) for each in lists):
            raise ValueError("the geometry's groups are no lists")
        tuples: list[tuple[Any, ...]] = [tuple(each) for each in lists if isinstance(each, list)]
        windows, token_bytes, offsets = tuples
        if not 0 < len(windows) == len(token_bytes) == len(offsets) - 1:
            raise ValueError("the geometry's groups contradict one another")
        if not all(type(each) is int and each >= 0 for each in (*token_bytes, *offsets)):
            raise ValueError("the geometry's groups are no sizes")
        if not all(each is None or (type(each) is int and each > 0) for each in windows):
            raise ValueError("the geometry's windows are no numbers of tokens")
        page_bytes, num_pages, max_model_len = numbers
        assert isinstance(page_bytes, int) and isinstance(num_pages, int)
        assert isinstance(max_model_len, int)
        segment_tokens, holders = content.get("segment_tokens"), content.get("holders")
        if type(segment_tokens) is not int or segment_tokens < 0:
            raise ValueError("the geometry's segments are no number of tokens")
        if holders is not None and not segment_tokens:
            raise ValueError("the geometry has holders without segments")
        return cls(
            page_bytes,
            num_pages,
            max_model_len,
            windows,
            token_bytes,
            offsets,
            segment_tokens,
            None if holders is None else HolderGeometry.from_json(holders),
        )


def widest_groups(
    config: EngineConfig, spec: ModelSpec, precision: Precision, shards: Sequence[Shard]
) -> list[LayerGroup]:
    """Returns the layer groups, without padding, of the shard that stores most in each."""
    groups = group_layers(spec.attention_layers, config.max_model_len or spec.max_model_len)
    found = []
    for index, (window, _) in enumerate(groups):
        widest: LayerGroup | None = None
        for shard in shards:
            layers = shard.spec(spec).attention_layers
            numbers = numbers_of_group(config, spec, layers, index)
            if not numbers:
                continue
            layout = stored_layers(config, precision, layers_in(layers, numbers))
            most = config.kvp_segment_tokens if config.kvp and window is None else None
            group = LayerGroup(layout.token_bytes, layout.tile_tokens, window, max_tokens=most)
            if widest is None or group.token_bytes > widest.token_bytes:
                widest = group
        assert widest is not None, "some shard has a layer of each group"
        found.append(widest)
    own = [shard.spec(spec).attention_layers for shard in shards]
    layouts = [recent_layout(config, precision, layers) for layers in own]
    recent = [layout for layout in layouts if layout is not None]
    if recent:
        found.append(recent_group(max(recent, key=lambda layout: layout.token_bytes)))
    return found


def numbers_of_group(
    config: EngineConfig, spec: ModelSpec, layers: Sequence[AttentionLayer], index: int
) -> list[int]:
    """Returns the numbers of a shard's layers that belong to a layer group of the model."""
    max_len = config.max_model_len or spec.max_model_len
    whole = spec.attention_layers
    window, ids = group_layers(whole, max_len)[index]
    has_chunks = whole[ids[0]].chunk is not None
    for each, numbers in group_layers(layers, max_len):
        if each == window and (layers[numbers[0]].chunk is not None) == has_chunks:
            return numbers
    return []


def make_accounting(
    config: EngineConfig,
    spec: ModelSpec,
    precision: Precision,
    shards: Sequence[Shard],
    free_bytes: int,
    *,
    unit_bytes: int | None = None,
) -> tuple[KVManager, EditRecorder, RankGeometry, SegmentSizes | None]:
    """Makes the one accounting of all ranks. free_bytes: what one rank may take for K/V.
    unit_bytes: what a device maps at a time; None: this machine's pages. The last result: with
    kvp, what holders will hold beside it."""
    groups = widest_groups(config, spec, precision, shards)
    # kv_cache_bytes bounds all ranks of a machine, of which free_bytes is one rank's part
    config = replace(config, kv_cache_bytes=None if config.kv_cache_bytes is None else free_bytes)
    sizes = size_kv(config, spec, groups, free_bytes=free_bytes, unit_bytes=unit_bytes)
    segment_tokens, holders = _segments(config, spec, precision, shards, sizes.max_model_len)
    own_tokens = sizes.max_model_len if holders is None else holders.max_model_len
    if holders is not None and len(groups) == 1:
        own_tokens = min(own_tokens, segment_tokens)
    recorder = (
        EditRecorder(sizes.page_bytes) if holders is None else HeldEditRecorder(sizes.page_bytes)
    )
    kv = KVManager(
        recorder,
        num_pages=sizes.num_pages,
        num_ranges=config.max_num_seqs,
        max_model_len=own_tokens,
        groups=sizes.groups,
        max_rows=config.chunk_tokens,
        in_background=False,
        **{} if unit_bytes is None else device_mappings(sizes.num_pages, config),
    )
    geometry = RankGeometry(
        sizes.page_bytes,
        sizes.num_pages,
        sizes.max_model_len,
        tuple(group.window for group in sizes.groups),
        tuple(group.token_bytes for group in sizes.groups),
        tuple(kv.group_offset(number) for number in range(len(sizes.groups) + 1)),
        segment_tokens,
        None if holders is None else holders.of_ranks,
    )
    return kv, recorder, geometry, holders


def _segments(
    config: EngineConfig,
    spec: ModelSpec,
    precision: Precision,
    shards: Sequence[Shard],
    max_model_len: int,
) -> tuple[int, SegmentSizes | None]:
    """Returns the tokens of a segment, or 0 if no sequence is cut into segments, and the sizes of
    the holders, if any. ConfigError names the setting."""
    if not config.kvp and max_model_len <= config.kvp_segment_tokens:
        return 0, None
    from serve.loading import kvp

    window, ids = group_layers(spec.attention_layers, config.max_model_len or spec.max_model_len)[0]
    layers = layers_in(spec.attention_layers, ids)
    if not kvp.can_cut(config, layers, window, max_model_len):
        return 0, None
    if not config.kvp:
        return config.kvp_segment_tokens, None
    parts = []
    for shard in shards:
        own = shard.spec(spec).attention_layers
        numbers = numbers_of_group(config, spec, own, 0)
        if not numbers:
            raise ConfigError(
                "kvp: each stage of pipeline_parallel_size needs a layer without a window"
            )
        parts.append(segmented_layers(layers_in(own, numbers)))
    layers = segmented_layers(layers)
    connect = kvp.connect_for(config, layers, max_model_len)
    sizes = kvp.SegmentSizes(config, precision, layers, max_model_len, connect, 0, parts)
    return config.kvp_segment_tokens, sizes


def device_mappings(num_pages: int, config: EngineConfig) -> dict[str, int]:
    """Returns the bounds of mappings on a device, where nothing but pages bounds them."""
    most = 2 * num_pages + config.max_num_seqs
    return {"max_mappings": most, "most_mappings": most}


class KVOfRank(Protocol):
    """One rank's K/V: its address space, and attention over it."""

    @property
    def memory(self) -> VirtualMemory: ...

    @property
    def attention(self) -> PlannedAttention: ...

    def close(self) -> None:
        """Frees the memory."""


class RankMemory:
    """One rank's K/V, and attention over it."""

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        precision: Precision,
        layers: Sequence[AttentionLayer],
        geometry: RankGeometry,
        backend: Backend,
        number: int = 0,
    ) -> None:
        """spec: the whole model's; layers: those of this rank, with their sinks. number: the
        rank's. ConfigError names the setting if there is no memory."""
        self.holders: RankHolders | None = None  # which are not attached yet
        self._number = number
        with reserving(geometry.page_bytes * geometry.num_pages, "kv_cache_bytes"):
            self.memory: VirtualMemory = LinuxMemory(geometry.page_bytes, geometry.num_pages)
        try:
            with reserving(geometry.offsets[-1], "max_num_seqs and max_model_len"):
                address = self.memory.reserve(geometry.offsets[-1])
            self.attention = self._make(config, spec, precision, layers, geometry, address, backend)
        except BaseException:
            self.memory.close()
            raise

    def _make(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        precision: Precision,
        layers: Sequence[AttentionLayer],
        geometry: RankGeometry,
        address: int,
        backend: Backend,
    ) -> PlannedAttention:
        parts: list[PlannedAttention] = []
        ids_of: list[list[int]] = []
        windows, store = list(geometry.windows), None
        recent = recent_layout(config, precision, layers)
        if recent is not None:
            recent.pad(geometry.token_bytes[-1] * recent.tile_tokens)
            store = RecentStore(recent, address + geometry.offsets[-2])
            windows.pop()
        for number, window in enumerate(windows):
            numbers = numbers_of_group(config, spec, layers, number)
            if not numbers:
                continue
            layout = kv_layout(config, precision, layers_in(layers, numbers))
            layout.pad(geometry.token_bytes[number] * layout.tile_tokens)
            start, end = geometry.offsets[number : number + 2]
            own = None if store is None else store.of(numbers)
            part = group_attention(layout, address + start, end - start, window, backend, own)
            if number == 0 and geometry.segment_tokens:
                where = (address + start, address + end)
                part = self._folded(config, precision, part, layout, where, geometry, backend, own)
            parts.append(part)
            ids_of.append(numbers)
        if not parts:
            raise ConfigError("a rank without layers")
        return parts[0] if len(parts) == 1 else GroupedAttention(parts, ids_of)

    def _folded(
        self,
        config: EngineConfig,
        precision: Precision,
        inner: PlannedAttention,
        layout: Layout,
        where: tuple[int, int],
        geometry: RankGeometry,
        backend: Backend,
        recent: RecentLayers | None,
    ) -> PlannedAttention:
        """Returns attention over segments, as one process has it."""
        from serve.loading import kvp

        held = None
        if geometry.holders is not None:
            layers = segmented_layers(layout.layers)
            request = _request(config, precision, layers, geometry.holders, self._number)
            connect = kvp.connect_for(config, layers, geometry.max_model_len)
            self.holders = RankHolders(config.kvp, request, connect, geometry.segment_tokens)
            held = self.holders, self.holders.locate, ()
        return fold_segments(inner, layout, where, backend, geometry.segment_tokens, held, recent)

    def close(self) -> None:
        if self.holders is not None:
            self.holders.close()
        del self.attention  # views of the reservation must go before it
        self.memory.close()


def _request(
    config: EngineConfig,
    precision: Precision,
    layers: Sequence[AttentionLayer],
    geometry: HolderGeometry,
    number: int,
) -> AttachRequest:
    """Returns the request of a rank to a holder."""
    return AttachRequest(
        engine=f"{geometry.engine}.{number}",
        epoch=1,
        kv_dtype=precision.kv,
        kv_group=config.kv_group,
        layers=list(layers),
        group_layers=[list(range(len(layers)))],
        page_tokens=[geometry.page_tokens],
        num_places=[geometry.num_places],
        num_ranges=geometry.num_ranges,
        num_pages=1,
        min_pages=1,
        max_rows=geometry.max_rows,
        by_segment=True,
    )
