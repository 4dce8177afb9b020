"""Packs a checkpoint into its file without having more than a product of it in memory.

What was packed is written at once. The layers that are returned lie over addresses without memory:
the model that is built of them shows that all is there, and cannot compute.
"""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from ops.backend import NO_FUSION, Fusion, LinearOp
from ops.cpu.native_stored import Buffer, restore, stored
from ops.linear import SideBySide
from serve.errors import ConfigError, reason
from serve.loading.streaming.units import untouched
from serve.models.loaded_tensors import LoadedTensors
from serve.models.packed_cache import folder as folders
from serve.models.packed_cache.identity import Identity
from serve.models.packed_cache.layout import (
    CHUNK_BYTES,
    DATA_START,
    PAGE,
    Entry,
    Index,
    header,
)
from serve.models.packed_cache.sources import NotedTensors
from serve.models.packed_cache.writer import (
    SYNCED_BYTES,
    Placing,
    can_keep,
    checksum_of,
    round_up,
    sync_folder,
    write_at,
)
from serve.models.parts import Part
from serve.models.tensors import TensorSource
from serve.units import format_memory

logger = logging.getLogger(__name__)

_ADDRESSES = 64 << 30  # more than any layer has


class _Chunks:
    """Writes the data in whole chunks, whose checksums it notes."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._staging = ctypes.create_string_buffer(CHUNK_BYTES)
        self._start = self._at = DATA_START
        self._synced = DATA_START
        self.checksums: list[int] = []

    def put(self, start: int, buffer: Buffer) -> None:
        """Adds the bytes at this offset of the file, behind all that came before."""
        self._pad(start)
        done = 0
        while done < buffer.num_bytes:
            count = min(buffer.num_bytes - done, self._start + CHUNK_BYTES - self._at)
            ctypes.memmove(self._address(), buffer.address + done, count)
            done += count
            self._move(count)

    def end(self, data_end: int) -> None:
        self._pad(data_end)
        if self._at > self._start:
            self._flush()
        self._sync()

    def _address(self) -> int:
        return ctypes.addressof(self._staging) + self._at - self._start

    def _pad(self, to: int) -> None:
        while self._at < to:
            count = min(to, self._start + CHUNK_BYTES) - self._at
            ctypes.memset(self._address(), 0, count)
            self._move(count)

    def _move(self, count: int) -> None:
        self._at += count
        if self._at == self._start + CHUNK_BYTES:
            self._flush()

    def _flush(self) -> None:
        content = memoryview(self._staging)[: self._at - self._start]
        self.checksums.append(checksum_of(content))
        write_at(self._fd, content, self._start)
        self._start = self._at
        if self._at - self._synced >= SYNCED_BYTES:
            self._sync()

    def _sync(self) -> None:
        """Waits for the disk, and gives the pages of the cache back."""
        os.fdatasync(self._fd)
        count = self._at - self._synced
        os.posix_fadvise(self._fd, self._synced, count, os.POSIX_FADV_DONTNEED)
        self._synced = self._at


class PackingTensors(NotedTensors):
    """Loads, writes what it gave, and gives layers without memory in its place."""

    def __init__(self, loaded: LoadedTensors, fd: int) -> None:
        super().__init__(loaded)
        self._placing, self._chunks = Placing(), _Chunks(fd)
        self._entries: list[Entry] = []
        self._nowhere = untouched(_ADDRESSES)

    def product(
        self,
        parts: Sequence[Part],
        num_in: int,
        *,
        has_bias: bool = False,
        fusion: Fusion = NO_FUSION,
        scale: float = 1.0,
        is_head: bool = False,
    ) -> LinearOp:
        op = super().product(
            parts, num_in, has_bias=has_bias, fusion=fusion, scale=scale, is_head=is_head
        )
        if type(op) is SideBySide:
            inner = Fusion(fusion.norm)
            ops = [self._without_memory(each, inner) for each in op.ops]
            return SideBySide(self._loaded.backend, ops, fusion)
        return self._without_memory(op, fusion)

    def table(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        is_looked_up: bool = True,
        columns: slice | None = None,
    ) -> Tensor:
        made = super().table(name, shape, is_looked_up=is_looked_up, columns=columns)
        if not is_looked_up:
            return made
        return self._nowhere[: made.nbytes].view(made.dtype).view(made.shape)

    def pack(self, weight: Tensor) -> LinearOp:
        return self._without_memory(super().pack(weight), NO_FUSION)

    def _without_memory(self, op: LinearOp, fusion: Fusion) -> LinearOp:
        found = stored(op)
        if found is None:
            return op
        kind, buffers = found
        return restore(kind, [self._nowhere[: each.num_bytes] for each in buffers], fusion)

    def _note(self, call: str, parts: Sequence[LinearOp | Tensor]) -> None:
        if not all(map(can_keep, parts)):
            raise ConfigError(
                "weight_memory_bytes: this checkpoint has weights that are not packed as the"
                f" native kernels have them ({call}), so that they cannot be read from a file"
            )
        self._entries.append(Entry(call, tuple(map(self._placing.part, parts))))
        for start, buffer in self._placing.pieces:
            self._chunks.put(start, buffer)
        self._placing.pieces.clear()
        self._placing.kept.clear()

    def end(self) -> Index:
        """Writes what is left, and returns the index."""
        data_end = round_up(self._placing.end, PAGE)
        self._chunks.end(data_end)
        return Index(data_end, self._entries, self._chunks.checksums)


def pack_to_file(
    candidates: list[Path],
    identity: Identity,
    loaded: LoadedTensors,
    build: Callable[[TensorSource], object],
    num_bytes: int,
    max_bytes: int,
) -> Path:
    """Packs a checkpoint into a file and returns its path. num_bytes: about as many as the file
    will have; max_bytes: of all files of a folder. ConfigError if there is no room."""
    began = time.monotonic()
    try:
        folder = folders.writable(candidates)
        path = folder / identity.file_name
        with folders.locked(folder):
            if path.exists():  # another process has packed it meanwhile
                return path
            folders.make_room(folder, identity, num_bytes, max_bytes)
            logger.info("packed weights: writing about %s once", format_memory(num_bytes))
            _write(path, identity, loaded, build, num_bytes)
    except folders.NoRoom as error:
        raise ConfigError(f"packed_cache: weights beyond memory need a file: {error}") from error
    except OSError as error:
        raise ConfigError(
            f"packed_cache: the weights cannot be written to {folder}: {reason(error)}"
        ) from error
    logger.info("packed weights: kept in %s, in %.1f s", path, time.monotonic() - began)
    return path


def _write(
    path: Path,
    identity: Identity,
    loaded: LoadedTensors,
    build: Callable[[TensorSource], object],
    num_bytes: int,
) -> None:
    unfinished = path.with_suffix(folders.UNFINISHED)
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(unfinished, flags, 0o600)
    try:
        os.posix_fallocate(fd, 0, num_bytes)  # a full disk is noticed here
        source = PackingTensors(loaded, fd)
        build(source)
        index = source.end()
        content = index.to_bytes()
        write_at(fd, memoryview(content), index.data_end)
        os.ftruncate(fd, index.data_end + len(content))
        os.fsync(fd)
        write_at(fd, memoryview(header(identity.content, index.data_end, content)), 0)
        os.fsync(fd)
        unfinished.rename(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    sync_folder(path.parent)
