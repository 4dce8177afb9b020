"""A loaded model: weights, K/V memory and attention.

This module knows precisions and sizes but no requests. The engine's loader and the evaluation call
it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from memory.attention.chunked import ChunkedAttention
from memory.attention.grouped import GroupedAttention
from memory.attention.layouts import Layout, local_attention
from memory.attention.seam import PlannedAttention, layers_in
from memory.attention.tiled import RecentLayers, RecentStore, TiledKVLayout
from memory.evicting_kv import EvictingKV
from memory.kv_manager import KVManager
from memory.kv_memory import KVMemory
from memory.pages.linux_vmm import LinuxMemory
from memory.policies.selection import Selection
from memory.prefix.sequence_names import SequenceNames
from ops import Backend
from serve.config import EngineConfig
from serve.errors import ConfigError
from serve.loading.disk_store import use_stores
from serve.loading.footprint import weight_budget
from serve.loading.kv_layouts import (
    check_offload,
    check_policy,
    grouped_layers,
    kv_layout,
    layer_groups,
    open_selection,
    recent_group,
    recent_layout,
    selects,
    state_layout,
)
from serve.loading.kv_sizing import KVSizes, reserving, size_kv
from serve.loading.model_source import ModelSource, load_shard, load_weights, read_source
from serve.loading.precision import Precision
from serve.machine import has_idle_core, local_kv_bytes
from serve.models import ModelSpec, StepModel
from serve.models.progress import LoadProgress
from serve.models.shard import WHOLE
from serve.node_addresses import check_copies
from serve.runner.runner import Closable, ClosedBehind, Runner
from serve.setting_checks import check_for_states

if TYPE_CHECKING:
    from memory.nodes.node_set import NodeSet
    from memory.offload.residency import Residency
    from memory.states.layout import StateLayout
    from serve.loading.host_weights.cache import HostWeights
    from serve.loading.kvp import Segments
    from serve.loading.streaming.stream import WeightStream
    from serve.runner.step_device import StepDevice
    from serve.weight_peers.peers import WeightPeers

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Runtime:
    """A loaded model. `memory` holds the K/V that `attention` reads; close it last."""

    spec: ModelSpec
    precision: Precision
    model: StepModel
    attention: PlannedAttention
    kv: KVMemory
    memory: Closable
    prefix_secret: bytes | None = None  # the secret of page keys, unless it is drawn
    nodes: NodeSet | None = None
    runner: Runner | None = None  # set on devices with a runner of their own
    use_peer: Callable[[str], None] | None = None  # pulls K/V from the engine at an address, too
    names: SequenceNames | None = None  # those of pages of its sequences, for peers
    peer_ids: Mapping[str, str] = field(default_factory=dict)  # ids of engines in kv_peers
    weight_peers: WeightPeers | None = None
    selection: Selection | None = None  # which tiles decoded rows read; None: all
    weight_stream: WeightStream | HostWeights | None = None
    offload: Residency | None = None  # of K/V that is partly on the disk


def load_runtime(
    config: EngineConfig,
    progress: LoadProgress | None = None,
    *,
    kv_share: float = 1.0,
    device: StepDevice | None = None,
) -> Runtime:
    """Loads the weights and reserves the K/V. Call it in the compute thread. kv_share: the part of
    the K/V memory that is the model's; the rest is a draft model's. device: that of a draft model,
    where it computes on a GPU."""
    source = read_source(config)
    runtime = _load(source, progress or LoadProgress(), kv_share, device)
    peers = source.peers
    if peers is not None:
        try:
            peers.listen(0)
        except BaseException:
            runtime.memory.close()
            raise
        runtime.memory = ClosedBehind(peers.forget, runtime.memory)
        runtime.weight_peers = peers
    return runtime


def _load(
    source: ModelSource, progress: LoadProgress, kv_share: float, device: StepDevice | None
) -> Runtime:
    config, spec, precision, *_ = source
    check_copies(config)
    if spec.state_layers:
        check_for_states(config, spec.model_type, precision.backend)
    check_policy(config, precision, spec)
    check_offload(config, precision, spec)
    source = source._replace(weight_budget=weight_budget(config, spec, precision))
    if precision.backend == "cuda":
        return _load_cuda(source, progress, kv_share, device)
    model = load_weights(source, progress)
    if source.weight_budget is None:
        return _load_beside(source, model, kv_share)
    stream: WeightStream = model.weights.stream  # type: ignore[attr-defined]
    try:
        runtime = _load_beside(source, model, kv_share)
    except BaseException:
        stream.close()
        raise
    runtime.memory = ClosedBehind(stream.close, runtime.memory)
    runtime.weight_stream = stream
    return runtime


def _load_beside(source: ModelSource, model: StepModel, kv_share: float) -> Runtime:
    """Makes K/V and attention for a model on CPUs."""
    config, spec, precision, backend, *_ = source
    if config.memory_nodes:
        return _load_remote(config, spec, precision, model, backend)
    if config.kv_offload_bytes is not None:
        return _load_offloaded(config, spec, precision, model)
    free_bytes = None
    if kv_share < 1.0 and config.kv_cache_bytes is None:
        free_bytes = int(local_kv_bytes() * kv_share)
    elif config.kv_cache_bytes is not None:
        config = replace(config, kv_cache_bytes=max(1, int(config.kv_cache_bytes * kv_share)))
    return load_local(config, spec, precision, model, backend, free_bytes)


def _load_remote(
    config: EngineConfig, spec: ModelSpec, precision: Precision, model: StepModel, backend: Backend
) -> Runtime:
    """Makes K/V and attention on memory nodes, whose modules are imported only here."""
    from serve.loading.engine_share import HostShare, size_states
    from serve.loading.remote_memory import open_remote_memory

    layers = model.attention_layers()
    local_bytes = config.kv_cache_bytes or local_kv_bytes()
    states = size_states(config, precision, spec, layers, local_bytes)
    if states is not None:
        local_bytes -= states.num_bytes
    share = HostShare(config, precision, backend, local_bytes)
    remote = open_remote_memory(
        config, precision, spec, layers, backend, local_bytes, share, states
    )
    return Runtime(
        spec,
        precision,
        model,
        remote.with_states,
        remote.kv,
        remote,
        nodes=remote.nodes,
        selection=remote.attention.selection,
    )


def _load_offloaded(
    config: EngineConfig, spec: ModelSpec, precision: Precision, model: StepModel
) -> Runtime:
    """Makes K/V in memory and on the disk, whose modules are imported only here."""
    from serve.loading.kv_offload import open_offloaded

    found = open_offloaded(config, spec, precision, model.attention_layers())
    log_sizes(config, precision, found.kv)
    made = Runtime(spec, precision, model, found.attention, found.kv, found.memory)
    made.selection, made.offload = found.selection, found.units
    return made


def _load_cuda(
    source: ModelSource, progress: LoadProgress, kv_share: float, device: StepDevice | None
) -> Runtime:
    """Loads everything on a GPU; the GPU's modules are imported only here."""
    config, spec, precision, backend, *_ = source
    if config.kv_peers or config.kv_listen is not None:
        raise ConfigError("kv_peers and kv_listen need K/V in host memory: use the cpu back end")
    from serve.loading import cuda_runtime

    max_len = config.max_model_len or spec.max_model_len
    # refuses what the kernels do not have before the weights are read
    cuda_runtime.kv_layouts(config, precision, spec.attention_layers, max_len)
    device = device or cuda_runtime.make_step_device(backend.device)
    model = load_shard(source, progress, WHOLE)
    if config.memory_nodes:
        from serve.loading import cuda_remote

        far = cuda_remote.load_cuda_over_nodes(config, spec, precision, model, device, backend)
        remote = far.remote
        made = Runtime(spec, precision, model, remote.attention, remote.kv, remote)
        made.nodes, made.runner = remote.nodes, far.runner
        return made
    if config.kv_cache_bytes is not None:
        config = replace(config, kv_cache_bytes=max(1, int(config.kv_cache_bytes * kv_share)))
    stream = model.weights.stream
    try:  # the host takes part in steps with a stream, so that they cannot be graphs
        parts = cuda_runtime.load_cuda(
            config, spec, precision, model, device, captures=stream is None, kv_share=kv_share
        )
    except BaseException:
        if stream is not None:
            stream.close()
        raise
    log_sizes(config, precision, parts.kv)
    made = Runtime(spec, precision, model, parts.attention, parts.kv, parts.memory, parts.secret)
    made.runner, made.selection = parts.runner, parts.selection
    if stream is not None:
        made.weight_stream = stream  # type: ignore[assignment]
        made.memory = ClosedBehind(stream.close, parts.memory)  # for those that run no steps
    return made


def load_local(
    config: EngineConfig,
    spec: ModelSpec,
    precision: Precision,
    model: StepModel,
    backend: Backend,
    free_bytes: int | None = None,
) -> Runtime:
    """Makes K/V and attention in this machine's memory. free_bytes: see size_kv."""
    policy = config.policy if config.policy is not None and config.policy.evicts else None
    layers = model.attention_layers()
    selection = open_selection(config, precision, layers)
    max_len = config.max_model_len or spec.max_model_len
    groups = grouped_layers(config, precision, layers, max_len)
    layouts = [kv_layout(config, precision, layers_in(layers, ids)) for _, ids in groups]
    windows = [window for window, _ in groups]
    stored = layer_groups(layouts, windows, config.kvp_segment_tokens if config.holders else None)
    recent = recent_layout(config, precision, layers)
    if recent is not None:
        layouts.append(recent)
        stored.append(recent_group(recent))
    states = state_layout(config, spec, stored)
    if states is not None:
        stored.append(states.group())
    sizes = size_kv(config, spec, stored, free_bytes=free_bytes)
    for layout, padded in zip(layouts, sizes.groups, strict=False):
        layout.pad(padded.token_bytes * padded.tile_tokens)
    if states is not None:
        states.pad(sizes.groups[-1].token_bytes * states.interval)
    with reserving(sizes.page_bytes * sizes.num_pages, "kv_cache_bytes"):
        memory = LinuxMemory(sizes.page_bytes, sizes.num_pages)
    segments = None
    try:
        segments = _segments(config, precision, layouts, groups, sizes)
        kv = (KVManager if policy is None else EvictingKV)(
            memory,
            num_pages=sizes.num_pages,
            num_ranges=config.max_num_seqs,
            max_model_len=sizes.max_model_len if segments is None else segments.own_tokens,
            groups=sizes.groups,
            max_rows=config.chunk_tokens,
            in_background=has_idle_core(config.compute_threads),
        )
        with reserving(kv.total_bytes, "max_num_seqs and max_model_len"):
            address = memory.reserve(kv.total_bytes)
        all_kv: KVMemory = kv if segments is None else segments.join(kv)
        attention = _attention(kv, layouts, groups, address, backend, segments, recent, selection)
        if policy is not None:
            from serve.eviction.start import with_eviction

            starts = [address + kv.group_offset(i) for i in range(len(groups))]
            attention = with_eviction(config, spec, attention, layouts, starts)
        if states is not None:
            attention = _with_states(attention, kv, states, address)
        stores = use_stores(config, precision, kv, memory, backend)
    except BaseException:
        if segments is not None:
            segments.close()
        memory.close()
        raise
    log_sizes(config, precision, all_kv)
    closable = memory if segments is None else segments.closing(memory)
    made = Runtime(spec, precision, model, attention, all_kv, closable, **stores)
    made.nodes = None if segments is None else segments.nodes
    made.selection = selection
    return made


def _with_states(
    attention: PlannedAttention, kv: KVManager, layout: StateLayout, address: int
) -> PlannedAttention:
    """Adds the states, whose ranges are the last ones of the reservation at `address`."""
    from memory.states.local import LocalStates, StatefulAttention

    first, end = (kv.group_offset(len(kv.layout.groups) - i) for i in (1, 0))
    return StatefulAttention(attention, LocalStates(layout, address + first, end - first))


def _segments(
    config: EngineConfig,
    precision: Precision,
    layouts: list[Layout],
    groups: list[tuple[int | None, list[int]]],
    sizes: KVSizes,
) -> Segments | None:
    """Returns the segments of sequences that may be longer than one, with their holders; imported
    only here."""
    if not config.holders and sizes.max_model_len <= config.kvp_segment_tokens:
        return None
    from serve.loading import kvp

    if selects(config):
        raise ConfigError("kv_policy needs a kvp_segment_tokens of at least max_model_len")
    windows = [window for window, _ in groups]
    layers, own_bytes = layouts[0].layers, sizes.num_pages * sizes.page_bytes
    return kvp.open_segments(config, precision, layers, windows, sizes.max_model_len, own_bytes)


def log_sizes(config: EngineConfig, precision: Precision, kv: KVMemory) -> None:
    """Logs how K/V is stored."""
    logger.info(
        "%s: %s, context %d, %d K/V pages of %d KiB or %d tokens%s (%s bytes a token)",
        config.model_name,
        precision,
        kv.max_model_len,
        kv.num_pages,
        kv.page_bytes >> 10,
        kv.layout.groups[0].tokens_in(1),
        "" if config.num_ranks == 1 else " on each rank",
        " + ".join(str(group.layers) for group in kv.layout.groups),
    )


def _attention(
    kv: KVManager,
    layouts: list[Layout],
    groups: list[tuple[int | None, list[int]]],
    address: int,
    backend: Backend,
    segments: Segments | None,
    recent: TiledKVLayout | None,
    selection: Selection | None,
) -> PlannedAttention:
    """Makes attention over the reservation at `address`; groups: window and layer numbers of each
    layout. segments: those of the first group. recent: the layout of all layers' recent tokens,
    whose ranges are the last ones. selection: see local_attention."""
    store = None
    if recent is not None:
        store = RecentStore(recent, address + kv.group_offset(len(groups)))
    parts: list[PlannedAttention] = []
    for number, (window, ids) in enumerate(groups):
        layout, own = layouts[number], None if store is None else store.of(ids)
        start, end = (address + kv.group_offset(i) for i in (number, number + 1))
        size = end - start
        parts.append(group_attention(layout, start, size, window, backend, own, selection))
        if number == 0 and segments is not None:
            parts[-1] = segments.over(parts[-1], layout, (start, end), backend, own)
    return parts[0] if len(parts) == 1 else GroupedAttention(parts, [ids for _, ids in groups])


def group_attention(
    layout: Layout,
    address: int,
    num_bytes: int,
    window: int | None,
    backend: Backend,
    recent: RecentLayers | None = None,
    selection: Selection | None = None,
) -> PlannedAttention:
    """Makes the attention of a layer group whose ranges take num_bytes from `address` on. recent:
    the store of its recent tokens. selection: see local_attention."""
    part = local_attention(layout, address, num_bytes, backend, recent=recent, selection=selection)
    chunk = layout.layers[0].chunk
    if chunk is None or window is None:
        return part
    if chunk % layout.tile_tokens:
        raise ConfigError(
            f"attention_chunk_size is {chunk}; K/V in {layout.tile_tokens} tokens a tile "
            "needs a multiple of them: use kv_dtype bfloat16 or float32"
        )
    return ChunkedAttention(part, chunk)
