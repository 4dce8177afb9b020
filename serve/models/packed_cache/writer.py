"""Writes a file of packed weights from the layers and tensors that a loaded model has.

The file is complete and on the disk before it gets its name. Until then, it has another ending, and
a process that is killed leaves a file that the next writer deletes.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from ops.backend import LinearOp
from ops.cpu.native_library import library
from ops.cpu.native_stored import Buffer, stored
from serve.models.packed_cache.folder import UNFINISHED
from serve.models.packed_cache.identity import Identity
from serve.models.packed_cache.layout import (
    CHUNK_BYTES,
    DATA_START,
    DTYPES,
    LINE,
    PAGE,
    Entry,
    Index,
    LayerEntry,
    Span,
    TensorEntry,
    chunks_of,
    header,
)

SYNCED_BYTES = 64 << 20  # written before the disk is waited for, which bounds dirty memory
# layers of this size begin a page, so that direct I/O reads those of one kind to the same places
_MIN_PAGE_BYTES = 16 << 10


class Made(NamedTuple):
    """What one call of a TensorSource gave: its layers, or a tensor; none is kept of it."""

    call: str
    parts: tuple[LinearOp | Tensor, ...]


class Placing:
    """Gives the parts their places in the data, one after the other. end: of what was placed.
    kept: the layers and tensors whose memory the pieces are."""

    def __init__(self) -> None:
        self.kept: list[LinearOp | Tensor] = []
        self.pieces: list[tuple[int, Buffer]] = []
        self.end = DATA_START

    def part(self, part: LinearOp | Tensor) -> LayerEntry | TensorEntry:
        if isinstance(part, Tensor):
            part = part.detach().contiguous()
            self.kept.append(part)
            data = self._place(Buffer(part.data_ptr(), part.nbytes))
            return TensorEntry(str(part.dtype).removeprefix("torch."), tuple(part.shape), data)
        self.kept.append(part)
        found = stored(part)
        assert found is not None, "can_keep was asked"
        kind, buffers = found
        if sum(each.num_bytes for each in buffers) >= _MIN_PAGE_BYTES:
            self.end = round_up(self.end, PAGE)
        return LayerEntry(kind, tuple(map(self._place, buffers)))

    def _place(self, buffer: Buffer) -> Span:
        start, num_bytes = self.end, buffer.num_bytes
        if num_bytes:
            self.pieces.append((start, buffer))
        self.end = round_up(start + num_bytes, LINE)
        return Span(start, num_bytes)


class Contents:
    """The data of a file and its entries. The layers and tensors must stay as they are."""

    def __init__(self, made: Iterable[Made]) -> None:
        placing = Placing()
        self.entries = [Entry(call, tuple(map(placing.part, parts))) for call, parts in made]
        self._kept, self.pieces = placing.kept, placing.pieces
        self.data_end = round_up(placing.end, PAGE)

    def write(self, fd: int) -> list[int]:
        """Writes all data and returns the checksums of its chunks. OSError."""
        checksums, synced = [], DATA_START
        for chunk, content in self._chunks():
            checksums.append(checksum_of(content))
            write_at(fd, content, chunk.start)
            end = chunk.start + chunk.num_bytes
            if end - synced >= SYNCED_BYTES:
                os.fdatasync(fd)
                synced = end
        return checksums

    def checksums(self, poll: Callable[[], object] = object) -> list[int]:
        """Returns the checksums that a file of the data would have. poll: is called before each
        chunk, and may raise."""
        checksums = []
        for _, content in self._chunks():
            poll()
            checksums.append(checksum_of(content))
        return checksums

    def _chunks(self) -> Iterator[tuple[Span, memoryview]]:
        """Yields the chunks with their bytes, which are valid until the next one."""
        staging = ctypes.create_string_buffer(CHUNK_BYTES)
        base, first = ctypes.addressof(staging), 0
        for chunk in chunks_of(self.data_end):
            end = chunk.start + chunk.num_bytes
            ctypes.memset(base, 0, chunk.num_bytes)
            for number in range(first, len(self.pieces)):
                start, (address, num_bytes) = self.pieces[number]
                if start >= end:
                    break
                begin, stop = max(start, chunk.start), min(start + num_bytes, end)
                ctypes.memmove(base + begin - chunk.start, address + begin - start, stop - begin)
                first += start + num_bytes <= end
            yield chunk, memoryview(staging)[: chunk.num_bytes]


def can_keep(part: LinearOp | Tensor) -> bool:
    if isinstance(part, Tensor):
        return str(part.dtype).removeprefix("torch.") in DTYPES
    return stored(part) is not None


def write_file(folder: Path, identity: Identity, contents: Contents) -> Path:
    """Writes a file and returns its path. The caller has the folder's lock. OSError."""
    path = folder / identity.file_name
    unfinished = path.with_suffix(UNFINISHED)
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(unfinished, flags, 0o600)
    try:
        os.posix_fallocate(fd, 0, contents.data_end)  # a full disk is noticed here
        index = Index(contents.data_end, contents.entries, contents.write(fd)).to_bytes()
        write_at(fd, memoryview(index), contents.data_end)
        os.fsync(fd)
        write_at(fd, memoryview(header(identity.content, contents.data_end, index)), 0)
        os.fsync(fd)
        unfinished.rename(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    sync_folder(folder)
    return path


def checksum_of(content: memoryview) -> int:
    address = ctypes.addressof(ctypes.c_char.from_buffer(content))
    checksum: int = library().checksum(address, len(content))
    return checksum


def write_at(fd: int, data: memoryview, at: int) -> None:
    while data:
        done = os.pwrite(fd, data, at)
        data, at = data[done:], at + done


def sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def round_up(number: int, to: int) -> int:
    return -(-number // to) * to
