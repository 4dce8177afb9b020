"""A model in this machine's memory, ready to compute: weights, K/V, attention.

Knows precisions and sizes; knows nothing of requests. The engine's loader and the evaluation
both start here.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from memory.attention import AttentionLayer, PlannedAttention
from memory.grouped_attention import GroupedAttention, group_layers
from memory.int8_attention import Int8KVLayout, Int8LocalAttention
from memory.kv_cache import KVCache, KVLayout
from memory.kv_manager import KVManager
from memory.layer_groups import LayerGroup, PageLayout
from memory.local_attention import LocalAttention
from memory.node_set import NodeSet
from memory.split_kv import Books
from memory.vmm import LinuxMemory
from ops import Backend, get_backend, native
from ops.heap import keep_freed_memory
from quant.int4 import int4_linear, nf4_linear
from quant.linear import int8_linear
from serve.config import EngineConfig
from serve.errors import ConfigError
from serve.kv_store import open_kv_store
from serve.models import Decoder, ModelSpec, load_model, read_spec
from serve.models.weights import MakeLinear, joining
from serve.precision import Precision, resolve_precision
from serve.remote_kv import open_remote
from serve.runner import Closes

logger = logging.getLogger(__name__)

_MIB = 1 << 20
_TOKENS_PER_PAGE = 16
_MIN_PAGE_BYTES = 16 << 10
_MAX_PAGE_BYTES = 2 * _MIB
_SYSTEM_PAGE_BYTES = 4096
_LINE_BYTES = 64
# Linux allows 65,530 mappings in a process; every page can become one of them.
_MAX_PAGES = 30_000
_KV_SHARE_OF_FREE_MEMORY = 0.4
_LINEARS4 = {"int4": int4_linear, "nf4": nf4_linear}


@dataclass(slots=True)
class Runtime:
    """What computes. `memory` holds the K/V that `attention` reads; close it last."""

    spec: ModelSpec
    precision: Precision
    model: Decoder
    attention: PlannedAttention
    kv: Books
    memory: Closes
    prefix_secret: bytes | None = None  # of the pages on disk, if there are any
    nodes: NodeSet | None = None


def load_runtime(config: EngineConfig, *, progress: bool = False) -> Runtime:
    """Load the weights and reserve the K/V. Call it in the thread that will compute."""
    keep_freed_memory()
    spec = read_spec(config.model_path)
    precision = resolve_precision(config, spec)
    _set_threads(config)
    try:
        backend = get_backend(config.backend)
    except ValueError as error:
        raise ConfigError(f"backend: {error}") from error
    model = _load_model(config, precision, backend, progress)
    layers = model.attention_layers()
    _leave_cores_to_native(precision, layers)
    if config.memory_nodes:
        local_bytes = config.kv_cache_bytes or int(available_memory() * _KV_SHARE_OF_FREE_MEMORY)
        remote = open_remote(config, precision, spec, layers, backend, local_bytes)
        return Runtime(
            spec, precision, model, remote.attention, remote.kv, remote, nodes=remote.nodes
        )
    return _load_local(config, spec, precision, model, backend)


def _load_local(
    config: EngineConfig, spec: ModelSpec, precision: Precision, model: Decoder, backend: Backend
) -> Runtime:
    """K/V in this machine's memory."""
    layers = model.attention_layers()
    groups = group_layers(layers, config.max_model_len or spec.max_model_len)
    layouts = [_kv_layout(config, precision, [layers[i] for i in ids]) for _, ids in groups]
    windows = [window for window, _ in groups]
    sizes = size_kv(
        config,
        spec,
        [
            LayerGroup(layout.token_bytes, layout.tile_tokens, window)
            for layout, window in zip(layouts, windows, strict=True)
        ],
    )
    for layout, padded in zip(layouts, sizes.groups, strict=True):
        layout.pad(padded.token_bytes * padded.tile_tokens)
    memory = LinuxMemory(sizes.page_bytes, sizes.num_pages)
    try:
        kv = KVManager(
            memory,
            num_pages=sizes.num_pages,
            num_ranges=config.max_num_seqs,
            max_model_len=sizes.max_model_len,
            groups=sizes.groups,
            max_rows=config.chunk_tokens,
            in_background=_has_idle_core(config),
        )
        address = memory.reserve(kv.total_bytes)
        attention = _attention(kv, layouts, [ids for _, ids in groups], address, backend)
        secret = None
        if config.kv_cache_dir is not None:
            store, secret = open_kv_store(
                config,
                precision,
                backend=backend.name,
                groups=sizes.groups,
                page_bytes=sizes.page_bytes,
            )
            kv.prefixes.use_store(store, memory.page_address, memory.keep_pages)
    except BaseException:
        memory.close()
        raise
    logger.info(
        "%s: %s, context %d, %d K/V pages of %d KiB or %d tokens (%s bytes a token)",
        config.model_name,
        precision,
        sizes.max_model_len,
        sizes.num_pages,
        sizes.page_bytes >> 10,
        kv.layout.groups[0].tokens_in(1),
        " + ".join(str(group) for group in sizes.groups),
    )
    return Runtime(spec, precision, model, attention, kv, memory, secret)


def _set_threads(config: EngineConfig) -> None:
    """Two teams of threads on the same cores would wait for each other: one has to be alone."""
    # not torch's own count: an engine that was started before may have lowered it
    processors = usable_processors()
    count = min(config.compute_threads or processors, processors)
    torch.set_num_threads(count)
    if not native.is_available():
        return
    # one team serves all engines of the process; only an explicit setting makes it smaller
    native.set_num_threads(count)
    logger.info("native kernels: %s, %d threads", native.instruction_set(), native.num_threads())


def _has_idle_core(config: EngineConfig) -> bool:
    """Where every core computes, a thread that maps ahead takes the turn of one that the others
    wait for, which costs more than mapping at the step."""
    processors = usable_processors()
    return min(config.compute_threads or processors, processors) < processors


def _leave_cores_to_native(precision: Precision, layers: list[AttentionLayer]) -> None:
    """What is left to torch in a step is small; its team would only stand in the way of ours."""
    if not native.is_available() or precision.compute == torch.float16:
        return
    has_attention = native.instruction_set() != "portable" and layers[0].head_dim % 16 == 0
    if precision.kv == "int8" or has_attention:
        torch.set_num_threads(1)


def _load_model(
    config: EngineConfig, precision: Precision, backend: Backend, progress: bool
) -> Decoder:
    path = config.model_path
    q_first = bool(config.memory_nodes)  # so that nodes have it early
    if not precision.is_int8:
        return load_model(
            path,
            dtype=precision.compute,
            backend=backend,
            unpack=True,
            q_first=q_first,
            progress=progress,
        )
    make_linear: MakeLinear = int8_linear
    if precision.weights in _LINEARS4:
        make_linear = joining(partial(_LINEARS4[precision.weights], group=config.weight_group))
    return load_model(
        path,
        dtype=precision.compute,
        backend=backend,
        make_linear=make_linear,
        make_head=int8_linear,
        keep_weight_dtype=True,
        q_first=q_first,
        progress=progress,
    )


def _kv_layout(
    config: EngineConfig, precision: Precision, layers: list[AttentionLayer]
) -> KVLayout | Int8KVLayout:
    if precision.kv == "int8":
        return Int8KVLayout(layers, config.kv_group)
    return KVLayout(layers, getattr(torch, precision.kv))


def _attention(
    kv: KVManager,
    layouts: list[KVLayout | Int8KVLayout],
    layers_of: list[list[int]],
    address: int,
    backend: Backend,
) -> PlannedAttention:
    """Over the reservation at `address`. layers_of: of each layout, its layers' numbers."""
    parts: list[PlannedAttention] = []
    for number, layout in enumerate(layouts):
        start, end = (address + kv.group_offset(i) for i in (number, number + 1))
        if isinstance(layout, Int8KVLayout):
            parts.append(Int8LocalAttention(layout, start))
        else:
            cache = KVCache(layout, start, end - start)
            parts.append(LocalAttention(layout.layers, cache, backend))
    return parts[0] if len(parts) == 1 else GroupedAttention(parts, layers_of)


@dataclass(frozen=True, slots=True)
class KVSizes:
    """groups: of layers, with the bytes from one token to the next, padding included."""

    page_bytes: int
    groups: list[LayerGroup]
    num_pages: int
    max_model_len: int


def size_kv(config: EngineConfig, spec: ModelSpec, groups: Sequence[LayerGroup]) -> KVSizes:
    """Pages and context that fit the memory. ConfigError names the setting to change."""
    max_len = spec.max_model_len
    if config.max_model_len is not None:
        if config.max_model_len > max_len:
            raise ConfigError(
                f"max_model_len {config.max_model_len} is above the model's {max_len}"
            )
        max_len = config.max_model_len
    budget = config.kv_cache_bytes or int(available_memory() * _KV_SHARE_OF_FREE_MEMORY)
    # More than every sequence at its longest is of no use.
    token_bytes = sum(group.token_bytes for group in groups)
    budget = min(budget, config.max_num_seqs * (max_len * token_bytes + _MAX_PAGE_BYTES))
    page, padded = config.kv_page_bytes, list(groups)
    if page is None:
        page, padded = _page_of_groups(groups, budget)
    elif page > budget:
        raise ConfigError(f"kv_page_bytes {page} is more than the K/V memory of {budget} bytes")
    elif budget // page > _MAX_PAGES:
        raise ConfigError(
            f"kv_page_bytes {page} gives more than {_MAX_PAGES} pages; use a larger page"
        )
    else:
        padded = _padded_for(groups, page)
    num_pages = budget // page
    pages_for = PageLayout(padded, page, max_len, config.chunk_tokens).pages_for
    fits = bisect_right(range(1, max_len + 1), num_pages, key=pages_for)
    if fits < max_len:
        if config.kv_cache_bytes is not None or config.max_model_len is not None or fits < 1:
            raise ConfigError(
                f"kv_cache_bytes {budget} holds {fits} tokens, less than one sequence of "
                f"max_model_len {max_len}; raise the one or lower the other"
            )
        logger.warning("memory holds %d tokens; max_model_len is lowered from %d", fits, max_len)
        max_len = fits
    return KVSizes(page, padded, num_pages, max_len)


def _padded_for(groups: Sequence[LayerGroup], page_bytes: int) -> list[LayerGroup]:
    """As `_page_of_groups` pads them, where it comes to this page; tiles cross pages where that
    would cost too much."""
    padded = []
    for group in groups:
        tile = group.token_bytes * group.tile_tokens
        if page_bytes >= tile:
            tile = _tile_in(page_bytes, tile)
        padded.append(replace(group, token_bytes=tile // group.tile_tokens))
    return padded


def _page_of_groups(groups: Sequence[LayerGroup], budget: int) -> tuple[int, list[LayerGroup]]:
    """Bytes of a page, and the groups padded for it: as the one with the most bytes needs it."""
    widest = max(groups, key=lambda group: group.token_bytes)
    page, tile = _page_of_tiles(widest.token_bytes * widest.tile_tokens, widest.tile_tokens, budget)
    tiles = [
        tile if group is widest else _tile_in(page, group.token_bytes * group.tile_tokens)
        for group in groups
    ]
    return page, [
        replace(group, token_bytes=tile // group.tile_tokens)
        for group, tile in zip(groups, tiles, strict=True)
    ]


def _tile_in(page_bytes: int, tile_bytes: int) -> int:
    """Bytes from tile to tile so that a page holds a whole number of them, if that costs little;
    else they cross pages."""
    count = page_bytes // tile_bytes
    while count and page_bytes <= 1.02 * count * tile_bytes:
        if page_bytes % count == 0 and page_bytes // count % _LINE_BYTES == 0:
            return page_bytes // count
        count -= 1
    return -(-tile_bytes // _LINE_BYTES) * _LINE_BYTES


def _page_of_tiles(tile_bytes: int, tile_tokens: int, budget: int) -> tuple[int, int]:
    """Bytes of a page that holds a whole number of tiles, and of such a tile, a little padded.

    Then a page can be shared the moment its tokens are computed, and nothing but the last tile's
    places is mapped in vain.
    """
    tiles = 1
    while tiles * tile_tokens < _TOKENS_PER_PAGE and 2 * tiles * tile_bytes <= _MAX_PAGE_BYTES:
        tiles *= 2
    while tiles * tile_bytes < _MIN_PAGE_BYTES or budget // (tiles * tile_bytes) > _MAX_PAGES:
        tiles *= 2
    if _padded(tile_bytes, tiles) > 1.02 * tile_bytes:  # worth half a page more in vain
        tiles *= 2
    padded = _padded(tile_bytes, tiles)
    return tiles * padded, padded


def _padded(tile_bytes: int, tiles: int) -> int:
    """Bytes from tile to tile, so that `tiles` of them fill whole pages of the system."""
    unit = max(_LINE_BYTES, _SYSTEM_PAGE_BYTES // tiles)
    return -(-tile_bytes // unit) * unit


def available_memory() -> int:
    """Bytes this process may still take: free system memory, capped by the cgroup's limit."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for limit_file, usage_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        limit, usage = _read(limit_file).strip(), _read(usage_file).strip()
        if limit.isdigit() and usage.isdigit():
            available = min(available, max(0, int(limit) - int(usage)))
    return available


def usable_processors() -> int:
    """Those this process may run on, capped by the cgroup's quota of their time."""
    processors = len(os.sched_getaffinity(0))
    v1 = "/sys/fs/cgroup/cpu/cpu.cfs_"
    for text in (
        _read("/sys/fs/cgroup/cpu.max"),
        f"{_read(f'{v1}quota_us')} {_read(f'{v1}period_us')}",
    ):
        numbers = text.split()  # "max" or -1 is no limit
        if len(numbers) == 2 and all(number.isdigit() for number in numbers):
            quota, period = map(int, numbers)
            if quota and period:
                processors = min(processors, -(-quota // period))
    return processors


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
