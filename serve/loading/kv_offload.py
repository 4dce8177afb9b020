"""K/V of running sequences beyond memory (kv_offload_bytes): its sizes, and its parts.

Pages are those of memory and of the file together, and are counted as if all of them were memory.
Below the accounting a residency keeps the parts of pages in memory that attention reads.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from memory.attention.offloaded import OffloadedAttention
from memory.attention.offloaded_layout import OffloadedKVLayout, aligned
from memory.attention.recent_blocks import RecentBlocks
from memory.attention.seam import AttentionLayer
from memory.attention.tiled import RecentStore, TiledKVLayout
from memory.kv_manager import KVManager
from memory.offload.block_memory import BlockMemory
from memory.offload.frames import Frames
from memory.offload.offloaded_memory import OffloadedMemory
from memory.offload.residency import Residency
from memory.offload.scratch_file import open_file
from memory.pages.layer_groups import LayerGroup
from memory.policies.selection import Selection
from memory.tiers.disk_directory import DiskDirectoryError, check_parent
from quant.kv import RECENT_BLOCK, TILE_TOKENS
from serve.config import EngineConfig
from serve.errors import ConfigError, reason
from serve.loading.kv_layouts import OFFLOAD as NAME
from serve.loading.kv_layouts import open_selection, recent_layout
from serve.loading.kv_sizing import MAX_PAGE_BYTES, HasContext, KVSizes, reserving, size_kv
from serve.loading.precision import Precision
from serve.machine import has_idle_core, local_kv_bytes, total_memory
from serve.models import ModelSpec
from serve.regular_file import user_cache
from serve.runner.runner import Closable, ClosedBehind
from serve.units import format_memory

logger = logging.getLogger(__name__)

# The least K/V in memory, in layers of the longest sequence: a step may read a whole layer.
_ROOM = 1.25
_MOST_FIXED = 0.5  # of the memory, for what is always there; more gets a warning
_MOST_PADDING = 0.03  # of bounds, in the K/V, where larger pages pad them less


@dataclass(frozen=True, slots=True)
class OffloadedKV:
    """The parts of an engine whose K/V is partly on the disk. Close memory last."""

    kv: KVManager
    attention: OffloadedAttention
    memory: Closable
    units: Residency
    selection: Selection | None


@dataclass(frozen=True, slots=True)
class OffloadSizes:
    """pages: of memory and the file together. resident_bytes: the most K/V in memory, beside the
    bounds and the recent tokens. bounds_page_bytes: the bounds of a page, all of which are in
    memory. recent_bytes: the most of recent tokens, which are there, too."""

    pages: KVSizes
    resident_bytes: int
    bounds_page_bytes: int
    recent_bytes: int

    @property
    def pool_bytes(self) -> int:
        return self.pages.page_bytes * self.pages.num_pages

    @property
    def bounds_bytes(self) -> int:
        return self.bounds_page_bytes * self.pages.num_pages

    @property
    def fixed_bytes(self) -> int:
        """What is always in memory."""
        return self.bounds_bytes + self.recent_bytes

    @property
    def fixed_parts(self) -> str:
        """Names it, "" if there is none."""
        parts = {
            "the bounds of all keys": self.bounds_bytes,
            "recent tokens in int8 of max_num_seqs sequences": self.recent_bytes,
        }
        found = [f"{name} ({format_memory(size)})" for name, size in parts.items() if size]
        return " and ".join(found)


def size_offload(
    config: EngineConfig,
    spec: HasContext,
    layout: OffloadedKVLayout,
    recent: TiledKVLayout | None,
    *,
    total_bytes: int | None = None,
    is_trial: bool = False,
) -> OffloadSizes:
    """Returns the sizes of K/V in memory and in the file, and pads the layouts. ConfigError names
    the setting. recent: of recent tokens of int4 K/V. total_bytes: of the machine; None: of this
    one. is_trial: nothing is logged."""
    assert config.kv_offload_bytes is not None
    memory_bytes = config.kv_cache_bytes or local_kv_bytes()
    total, machine = total_bytes, "the machine"
    if total is None:
        total, machine = total_memory(), "this machine or its cgroup"
    if memory_bytes > total:
        raise ConfigError(
            f"kv_cache_bytes: {format_memory(memory_bytes)} asked for, but {machine} has"
            f" {format_memory(total)}"
        )
    tile = layout.tile_bytes
    if config.kv_page_bytes is not None and config.kv_page_bytes % tile:
        raise ConfigError(
            f"kv_page_bytes {config.kv_page_bytes} cannot be used with {NAME}: for this model it"
            f" must be a multiple of {tile}"
        )
    recent_bytes = 0
    if recent is not None:
        recent.pad(aligned(recent.tile_bytes))
        # two blocks of each sequence, and the rows of a step (memory.attention.recent_blocks)
        tokens = 2 * RECENT_BLOCK * config.max_num_seqs + config.batched_tokens
        recent_bytes = tokens * recent.token_bytes
    hit_tokens = 1 if recent is None else RECENT_BLOCK
    pool_bytes = max(0, memory_bytes - recent_bytes) + config.kv_offload_bytes
    sizes = _size_pages(config, spec, layout, hit_tokens, pool_bytes, is_trial=is_trial)
    assert sizes.groups[0].token_bytes == layout.token_bytes, "tiles need no padding"
    if config.kv_offload_bytes < sizes.page_bytes:
        raise ConfigError(
            f"{NAME} {config.kv_offload_bytes} is less than a page of K/V,"
            f" {sizes.page_bytes} bytes for this model"
        )
    tiles_per_page = sizes.page_bytes // tile
    layout.pad_bounds(tiles_per_page)
    bounds_page_bytes = layout.bounds_tile_bytes * tiles_per_page
    fixed = bounds_page_bytes * sizes.num_pages + recent_bytes
    resident = min(sizes.page_bytes * sizes.num_pages, memory_bytes - fixed)
    found = OffloadSizes(sizes, resident, bounds_page_bytes, recent_bytes)
    _check_memory(config, memory_bytes, found, max(layout.unit_bytes))
    if not is_trial:
        _log_memory(config, memory_bytes, found)
    return found


def _size_pages(
    config: EngineConfig,
    spec: HasContext,
    layout: OffloadedKVLayout,
    hit_tokens: int,
    pool_bytes: int,
    *,
    is_trial: bool,
) -> KVSizes:
    """Returns the pages of memory and file together. Those whose size no setting gives are large
    enough that the bounds of a page fill whole system pages nearly."""
    assert config.kv_offload_bytes is not None
    group = LayerGroup(layout.token_bytes, layout.tile_tokens, hit_tokens=hit_tokens)

    def sizes_with(page_bytes: int | None, *, is_trial: bool) -> KVSizes:
        return size_kv(
            replace(config, kv_cache_bytes=None, kv_page_bytes=page_bytes),
            spec,
            [group],
            free_bytes=pool_bytes,
            setting=f"kv_cache_bytes and {NAME}, together",
            is_trial=is_trial,
        )

    page = config.kv_page_bytes
    if page is None and layout.bounds_tile_bytes:
        first, tile = sizes_with(None, is_trial=True), layout.tile_bytes
        page, pool = first.page_bytes, first.page_bytes * first.num_pages
        most = min(MAX_PAGE_BYTES, config.kv_offload_bytes)
        while layout.bounds_padding(page // tile) > _MOST_PADDING * tile and 2 * page <= most:
            if pool // (2 * page) * (2 * page // tile) * TILE_TOKENS < first.max_model_len:
                break  # the last half page is needed
            page *= 2
    return sizes_with(page, is_trial=is_trial)


def _check_memory(config: EngineConfig, memory_bytes: int, sizes: OffloadSizes, unit: int) -> None:
    """Raises ConfigError if a layer of the longest sequence does not fit beside what is always in
    memory. unit: bytes of a layer's K/V in a tile."""
    max_len = sizes.pages.max_model_len
    least = int(_ROOM * -(-max_len // TILE_TOKENS) * unit)
    if sizes.resident_bytes >= least:
        return
    beside = f" beside {sizes.fixed_parts}" if sizes.fixed_bytes else ""
    lower = f"max_num_seqs, {NAME}" if sizes.recent_bytes else NAME
    raise ConfigError(
        f"kv_cache_bytes {memory_bytes} is too little for {NAME} {config.kv_offload_bytes}: a layer"
        f" of {max_len} tokens takes {format_memory(least)}{beside},"
        f" {format_memory(least + sizes.fixed_bytes)} in all; raise it, or lower {lower} or"
        " max_model_len"
    )


def _log_memory(config: EngineConfig, memory_bytes: int, sizes: OffloadSizes) -> None:
    """Logs what of the memory and the file has no use, or another one than K/V."""
    assert config.kv_offload_bytes is not None
    asked = memory_bytes + config.kv_offload_bytes
    used = sizes.pool_bytes + sizes.recent_bytes
    if asked - used >= sizes.pages.page_bytes:
        logger.info(
            "kv_cache_bytes and %s are %s, of which at most %s could be used by max_num_seqs"
            " sequences of max_model_len; no more is taken",
            NAME,
            format_memory(asked),
            format_memory(used),
        )
    if sizes.fixed_bytes > _MOST_FIXED * memory_bytes:
        logger.warning(
            "kv_cache_bytes: of %s in memory, %s are taken by %s, so that %s are left for other"
            " K/V, %.2g %% of what memory and file hold; raise kv_cache_bytes, or lower %s%s",
            format_memory(memory_bytes),
            format_memory(sizes.fixed_bytes),
            sizes.fixed_parts,
            format_memory(sizes.resident_bytes),
            100 * sizes.resident_bytes / sizes.pool_bytes,
            "max_num_seqs or " if sizes.recent_bytes else "",
            NAME,
        )


def offloaded_layout(
    config: EngineConfig,
    precision: Precision,
    layers: Sequence[AttentionLayer],
    selection: Selection | None,
) -> OffloadedKVLayout:
    has_bounds = selection is not None
    return OffloadedKVLayout(layers, precision.kv, config.kv_group, has_bounds=has_bounds)


def open_offloaded(
    config: EngineConfig,
    spec: ModelSpec,
    precision: Precision,
    layers: Sequence[AttentionLayer],
) -> OffloadedKV:
    """Makes K/V in memory and in a file. ConfigError names the setting."""
    selection = open_selection(config, precision, layers)
    layout = offloaded_layout(config, precision, layers, selection)
    recent_tokens = recent_layout(config, precision, layers)
    sizes = size_offload(config, spec, layout, recent_tokens)
    pages, folder = sizes.pages, _folder(config)
    with _opening(folder, sizes.pool_bytes):
        _make(folder, is_named=config.kv_offload_dir is not None)
        check_parent(folder)
        file = open_file(folder, sizes.pool_bytes)
    with contextlib.ExitStack() as undo:
        undo.callback(file.close)
        with reserving(sizes.pool_bytes, f"kv_cache_bytes and {NAME}"):
            memory = OffloadedMemory(
                pages.page_bytes,
                pages.num_pages,
                sizes.bounds_page_bytes,
                tile_bytes=layout.tile_bytes,
            )
        undo.callback(memory.close)
        frame_bytes = max(layout.unit_bytes)
        with reserving(sizes.resident_bytes, "kv_cache_bytes"):
            frames = Frames(frame_bytes, sizes.resident_bytes // frame_bytes)
        undo.callback(frames.close)
        with _opening(folder, sizes.pool_bytes):
            units = Residency(memory, file, frames, layout.unit_bytes)
        undo.callback(units.close)
        kv = KVManager(
            memory,
            num_pages=pages.num_pages,
            num_ranges=config.max_num_seqs,
            max_model_len=pages.max_model_len,
            groups=pages.groups,
            max_rows=config.chunk_tokens,
            in_background=has_idle_core(config.compute_threads),
        )
        with reserving(kv.total_bytes, "max_num_seqs and max_model_len"):
            memory.reserve(kv.total_bytes)
        blocks = None if recent_tokens is None else _block_memory(config, recent_tokens, kv)
        undo.pop_all()
    recent = None
    if blocks is not None and recent_tokens is not None:
        recent = RecentBlocks(RecentStore(recent_tokens, blocks.address), blocks)
    attention = OffloadedAttention(
        layout,
        memory.bounds_address,
        units,
        memory.pool_tiles,
        selection,
        max_tiles=int(sizes.resident_bytes / _ROOM) // max(layout.unit_bytes),
        recent=recent,
    )
    logger.info(
        "K/V beyond memory: %s in memory%s, and a file of %s in %s",
        format_memory(sizes.resident_bytes + sizes.fixed_bytes),
        f", {sizes.fixed_parts} included" if sizes.fixed_bytes else "",
        format_memory(sizes.pool_bytes),
        folder,
    )
    last = memory if blocks is None else ClosedBehind(memory.close, blocks)
    return OffloadedKV(kv, attention, last, units, selection)


def _block_memory(config: EngineConfig, recent: TiledKVLayout, kv: KVManager) -> BlockMemory:
    num_bytes = kv.range_tokens * config.max_num_seqs * recent.token_bytes
    with reserving(num_bytes, "max_num_seqs and max_model_len"):
        return BlockMemory(recent.tile_bytes, config.max_num_seqs, kv.range_tokens)


def _folder(config: EngineConfig) -> Path:
    if config.kv_offload_dir is not None:
        return Path(config.kv_offload_dir).expanduser()
    return user_cache() or Path(tempfile.gettempdir())


def _make(folder: Path, *, is_named: bool) -> None:
    """Makes the folder, if it is not there. One that the user has named is made in a folder that
    is there, so that a mistake in a path is noticed."""
    if folder.is_dir():
        return
    if is_named:
        folder_of(folder)
    folder.mkdir(mode=0o700, parents=not is_named, exist_ok=True)
    logger.info("made the directory %s", folder)


def folder_of(named: Path) -> Path:
    """Returns the folder that the user has named, or that in which it is made. ConfigError."""
    if named.is_dir():
        return named
    if not named.parent.is_dir():
        raise ConfigError(f"kv_offload_dir {named}: there is no directory {named.parent}")
    if named.exists():
        raise ConfigError(f"kv_offload_dir {named} is no directory")
    return named.parent


@contextlib.contextmanager
def _opening(folder: Path, num_bytes: int) -> Iterator[None]:
    """Turns errors of the file of num_bytes in a folder into a ConfigError."""
    try:
        yield
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(f"kv_offload_dir {folder} is no directory") from error
    except DiskDirectoryError as error:
        raise ConfigError(f"kv_offload_dir: {error}") from error
    except OSError as error:
        if error.errno == errno.ENOENT and folder.is_dir():  # such as /proc
            raise ConfigError(f"kv_offload_dir {folder}: no file can be made there") from error
        asked = ""
        if error.errno in (errno.ENOSPC, errno.EFBIG):
            asked = f" for {NAME} and kv_cache_bytes, {format_memory(num_bytes)} together"
        raise ConfigError(f"kv_offload_dir {folder}: {reason(error)}{asked}") from error
