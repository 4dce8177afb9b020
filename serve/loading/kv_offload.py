"""K/V of running sequences beyond memory (kv_offload_bytes): what it cannot be used with, its
sizes, and its parts.

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

from memory.attention.grouped import group_layers
from memory.attention.offloaded import OffloadedAttention, OffloadedKVLayout
from memory.attention.seam import AttentionLayer
from memory.kv_manager import KVManager
from memory.offload.frames import Frames
from memory.offload.offloaded_memory import OffloadedMemory
from memory.offload.residency import Residency
from memory.offload.scratch_file import open_file
from memory.pages.layer_groups import LayerGroup
from memory.policies.selection import Selection
from memory.tiers.disk_directory import DiskDirectoryError, check_parent
from ops.cpu import native_library
from serve.config import EngineConfig
from serve.errors import ConfigError, reason
from serve.loading.kv_layouts import open_selection
from serve.loading.kv_sizing import KVSizes, reserving, size_kv
from serve.loading.precision import Precision
from serve.machine import has_idle_core, local_kv_bytes, total_memory
from serve.models import ModelSpec
from serve.regular_file import user_cache
from serve.units import format_memory

logger = logging.getLogger(__name__)

NAME = "kv_offload_bytes"
# The least K/V in memory, in layers of the longest sequence: a step may read a whole layer.
_ROOM = 1.25


@dataclass(frozen=True, slots=True)
class OffloadedKV:
    """The parts of an engine whose K/V is partly on the disk. Close memory last."""

    kv: KVManager
    attention: OffloadedAttention
    memory: OffloadedMemory
    units: Residency
    selection: Selection | None


@dataclass(frozen=True, slots=True)
class OffloadSizes:
    """pages: of memory and the file together. resident_bytes: the most K/V in memory, beside the
    bounds. bounds_page_bytes: the bounds of a page, all of which are in memory."""

    pages: KVSizes
    resident_bytes: int
    bounds_page_bytes: int

    @property
    def pool_bytes(self) -> int:
        return self.pages.page_bytes * self.pages.num_pages

    @property
    def bounds_bytes(self) -> int:
        return self.bounds_page_bytes * self.pages.num_pages


def check_offload(config: EngineConfig, precision: Precision, spec: ModelSpec) -> None:
    """Raises ConfigError for what kv_offload_bytes cannot be used with. Call it before the weights
    are read."""
    if config.kv_offload_bytes is None:
        if config.kv_offload_dir is not None:
            raise ConfigError(f"kv_offload_dir needs {NAME}")
        return
    if precision.backend != "cpu" or not native_library.is_available():
        raise ConfigError(f"{NAME} needs the native kernels of the cpu back end")
    if precision.kv != "int8":
        raise ConfigError(f"{NAME} needs kv_dtype int8, not {precision.kv}")
    if config.policy is not None and config.policy.evicts:
        raise ConfigError(f"kv_policy {config.policy.name} cannot be used with {NAME}")
    if spec.state_layers:
        raise ConfigError(f"{NAME} cannot be used with {spec.model_type}, whose layers have states")
    max_len = config.max_model_len or spec.max_model_len
    if max_len > config.kvp_segment_tokens:
        raise ConfigError(f"{NAME} needs a kvp_segment_tokens of at least max_model_len {max_len}")
    _check_layers(spec.model_type, spec.attention_layers, max_len)


def _check_layers(model_type: str, layers: Sequence[AttentionLayer], max_len: int) -> None:
    problem = None
    if any(layer.value_dim is not None for layer in layers):
        problem = "latent K/V"
    elif any(layer.shares is not None for layer in layers):
        problem = "K/V shared by layers"
    elif any(layer.is_late for layer in layers):
        problem = "a head that drafts"
    elif len(group_layers(layers, max_len)) > 1 or group_layers(layers, max_len)[0][0] is not None:
        problem = "windows or chunks"
    if problem is not None:
        raise ConfigError(f"{NAME} cannot be used with {model_type}, which has {problem}")


def size_offload(
    config: EngineConfig, spec: ModelSpec, layout: OffloadedKVLayout, *, is_trial: bool = False
) -> OffloadSizes:
    """Returns the sizes of K/V in memory and in the file, and pads the bounds of the layout.
    ConfigError names the setting. is_trial: nothing is logged."""
    assert config.kv_offload_bytes is not None
    memory_bytes = config.kv_cache_bytes or local_kv_bytes()
    if memory_bytes > total_memory():
        raise ConfigError(
            f"kv_cache_bytes: {format_memory(memory_bytes)} asked for, but this machine or its"
            f" cgroup has {format_memory(total_memory())}"
        )
    tile = layout.tile_bytes
    if config.kv_page_bytes is not None and config.kv_page_bytes % tile:
        raise ConfigError(
            f"kv_page_bytes {config.kv_page_bytes} cannot be used with {NAME}: for this model it"
            f" must be a multiple of {tile}"
        )
    group = LayerGroup(layout.token_bytes, layout.tile_tokens)
    sizes = size_kv(
        replace(config, kv_cache_bytes=None),
        spec,
        [group],
        free_bytes=memory_bytes + config.kv_offload_bytes,
        setting=f"kv_cache_bytes and {NAME}, together",
        is_trial=is_trial,
    )
    assert sizes.groups[0].token_bytes == layout.token_bytes, "tiles need no padding"
    tiles_per_page = sizes.page_bytes // tile
    layout.pad_bounds(tiles_per_page)
    bounds_page_bytes = layout.bounds_tile_bytes * tiles_per_page
    pool_bytes = sizes.page_bytes * sizes.num_pages
    asked = memory_bytes + config.kv_offload_bytes
    if asked - pool_bytes >= sizes.page_bytes and not is_trial:
        logger.info(
            "kv_cache_bytes and %s are %s, of which %s could be used by max_num_seqs sequences of"
            " max_model_len; no more is taken",
            NAME,
            format_memory(asked),
            format_memory(pool_bytes),
        )
    resident = min(pool_bytes, memory_bytes - bounds_page_bytes * sizes.num_pages)
    longest = -(-sizes.max_model_len // layout.tile_tokens) * max(layout.unit_bytes)
    if resident < _ROOM * longest:
        need = int(_ROOM * longest) + bounds_page_bytes * sizes.num_pages
        raise ConfigError(
            f"kv_cache_bytes {memory_bytes} is too little for {NAME} {config.kv_offload_bytes}:"
            f" a layer of {sizes.max_model_len} tokens and the bounds of all keys take"
            f" {format_memory(need)}; raise it, or lower {NAME} or max_model_len"
        )
    return OffloadSizes(sizes, resident, bounds_page_bytes)


def offloaded_layout(
    config: EngineConfig, layers: Sequence[AttentionLayer], selection: Selection | None
) -> OffloadedKVLayout:
    return OffloadedKVLayout(layers, config.kv_group, has_bounds=selection is not None)


def open_offloaded(
    config: EngineConfig,
    spec: ModelSpec,
    precision: Precision,
    layers: Sequence[AttentionLayer],
) -> OffloadedKV:
    """Makes K/V in memory and in a file. ConfigError names the setting."""
    selection = open_selection(config, precision, layers)
    layout = offloaded_layout(config, layers, selection)
    sizes = size_offload(config, spec, layout)
    pages = sizes.pages
    folder = _folder(config)
    with _opening(folder):
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
        with _opening(folder):
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
        undo.pop_all()
    attention = OffloadedAttention(
        layout,
        memory.bounds_address,
        units,
        memory.pool_tiles,
        selection,
        max_tiles=int(sizes.resident_bytes / _ROOM) // max(layout.unit_bytes),
    )
    logger.info(
        "K/V beyond memory: %s in memory%s, and a file of %s in %s",
        format_memory(sizes.resident_bytes + sizes.bounds_bytes),
        f", of which bounds take {format_memory(sizes.bounds_bytes)}" if sizes.bounds_bytes else "",
        format_memory(sizes.pool_bytes),
        folder,
    )
    return OffloadedKV(kv, attention, memory, units, selection)


def _folder(config: EngineConfig) -> Path:
    if config.kv_offload_dir is not None:
        return Path(config.kv_offload_dir).expanduser()
    return user_cache() or Path(tempfile.gettempdir())


def _make(folder: Path, *, is_named: bool) -> None:
    """Makes the folder, if it is not there. One that the user has named is made in a folder that
    is there, so that a mistake in a path is noticed."""
    if folder.is_dir():
        return
    if is_named and not folder.parent.is_dir():
        raise ConfigError(f"kv_offload_dir {folder}: there is no directory {folder.parent}")
    folder.mkdir(mode=0o700, parents=not is_named, exist_ok=True)
    logger.info("made the directory %s", folder)


@contextlib.contextmanager
def _opening(folder: Path) -> Iterator[None]:
    """Turns errors of the file in a folder into a ConfigError."""
    try:
        yield
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(f"kv_offload_dir {folder} is no directory") from error
    except DiskDirectoryError as error:
        raise ConfigError(f"kv_offload_dir: {error}") from error
    except OSError as error:
        asked = f" for {NAME} and kv_cache_bytes" if error.errno == errno.ENOSPC else ""
        raise ConfigError(f"kv_offload_dir {folder}: {reason(error)}{asked}") from error
