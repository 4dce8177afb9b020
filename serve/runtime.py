"""A model in this machine's memory, ready to compute: weights, K/V, attention.

Knows precisions and sizes; knows nothing of requests. The engine's loader and the evaluation
both start here.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from memory.attention import AttentionLayer, PlannedAttention
from memory.int8_attention import Int8KVLayout, Int8LocalAttention
from memory.kv_cache import KVCache, KVLayout
from memory.kv_manager import KVManager
from memory.local_attention import LocalAttention
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
    kv: KVManager
    memory: LinuxMemory
    prefix_secret: bytes | None = None  # of the pages on disk, if there are any


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
    layout = _kv_layout(config, precision, layers)
    sizes = size_kv(config, spec, layout.token_bytes, layout.tile_tokens)
    layout.pad(sizes.tile_bytes)
    memory = LinuxMemory(sizes.page_bytes, sizes.num_pages)
    try:
        kv = KVManager(
            memory,
            num_pages=sizes.num_pages,
            num_ranges=config.max_num_seqs,
            max_model_len=sizes.max_model_len,
            token_bytes=layout.token_bytes,
            tile_tokens=layout.tile_tokens,
        )
        attention = _attention(layout, memory.reserve(kv.total_bytes), kv.total_bytes, backend)
        secret = None
        if config.kv_cache_dir is not None:
            store, secret = open_kv_store(
                config, precision, token_bytes=layout.token_bytes, page_bytes=sizes.page_bytes
            )
            kv.prefixes.use_store(store, memory.page_address, memory.keep_pages)
    except BaseException:
        memory.close()
        raise
    logger.info(
        "%s: %s, context %d, %d K/V pages of %d KiB (%d bytes a token)",
        config.model_name,
        precision,
        sizes.max_model_len,
        sizes.num_pages,
        sizes.page_bytes >> 10,
        layout.token_bytes,
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
    if not precision.is_int8:
        return load_model(
            path, dtype=precision.compute, backend=backend, unpack=True, progress=progress
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
        progress=progress,
    )


def _kv_layout(
    config: EngineConfig, precision: Precision, layers: list[AttentionLayer]
) -> KVLayout | Int8KVLayout:
    if precision.kv == "int8":
        return Int8KVLayout(layers, config.kv_group)
    return KVLayout(layers, getattr(torch, precision.kv))


def _attention(
    layout: KVLayout | Int8KVLayout, address: int, size_bytes: int, backend: Backend
) -> PlannedAttention:
    if isinstance(layout, Int8KVLayout):
        return Int8LocalAttention(layout, address)
    return LocalAttention(layout.layers, KVCache(layout, address, size_bytes), backend)


@dataclass(frozen=True, slots=True)
class KVSizes:
    """tile_bytes: from one tile to the next, padding included."""

    page_bytes: int
    tile_bytes: int
    num_pages: int
    max_model_len: int


def size_kv(
    config: EngineConfig, spec: ModelSpec, token_bytes: int, tile_tokens: int = 1
) -> KVSizes:
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
    most = config.max_num_seqs * (max_len * token_bytes + _MAX_PAGE_BYTES)
    budget = min(budget, most)
    tile = token_bytes * tile_tokens
    page = config.kv_page_bytes
    if page is None:
        page, tile = _page_of_tiles(tile, tile_tokens, budget)
    elif page > budget:
        raise ConfigError(f"kv_page_bytes {page} is more than the K/V memory of {budget} bytes")
    elif budget // page > _MAX_PAGES:
        raise ConfigError(
            f"kv_page_bytes {page} gives more than {_MAX_PAGES} pages; use a larger page"
        )
    num_pages = budget // page
    fits = num_pages * page // tile * tile_tokens
    if fits < max_len:
        if config.kv_cache_bytes is not None or config.max_model_len is not None or fits < 1:
            raise ConfigError(
                f"kv_cache_bytes {budget} holds {fits} tokens, less than one sequence of "
                f"max_model_len {max_len}; raise the one or lower the other"
            )
        logger.warning("memory holds %d tokens; max_model_len is lowered from %d", fits, max_len)
        max_len = fits
    return KVSizes(page, tile, num_pages, max_len)


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
