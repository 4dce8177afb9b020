"""Reads a file of packed weights once: compares it with its checksums, fills what is resident, and
notes the checksums of the pieces that will be read again and again."""

from __future__ import annotations

import ctypes
import mmap
import os
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import NamedTuple

from memory.tiers.direct_io import address_of
from ops.cpu import native_library
from serve.loading.streaming.units import Piece
from serve.models.packed_cache.layout import CHUNK_BYTES, DamagedCache, Index, Span, chunks_of

_THREADS = 2


class Copy(NamedTuple):
    """Bytes of the file that are resident, and where."""

    start: int
    num_bytes: int
    address: int


def read_once(
    fd: int, index: Index, copies: Iterable[Copy], pieces: Iterable[Piece]
) -> dict[tuple[int, int], int]:
    """Returns the checksums of the pieces. fd: perhaps one of direct I/O. DamagedCache, OSError."""
    reading = _Reading(fd, sorted(copies), sorted(set(pieces)))
    chunks = list(zip(chunks_of(index.data_end), index.checksums, strict=True))
    found: dict[tuple[int, int], int] = {}
    with ThreadPoolExecutor(_THREADS) as threads:
        for part in threads.map(reading.read, chunks):
            found.update(part)
    reading.close()
    return found


class _Reading:
    def __init__(self, fd: int, copies: Sequence[Copy], pieces: Sequence[Piece]) -> None:
        self._fd, self._copies, self._pieces = fd, copies, pieces
        self._longest = max((copy.num_bytes for copy in copies), default=0)
        self._buffers: SimpleQueue[mmap.mmap] = SimpleQueue()
        for _ in range(_THREADS):
            self._buffers.put(mmap.mmap(-1, CHUNK_BYTES))

    def close(self) -> None:
        """Frees the buffers, unless an address of theirs is still in use."""
        self._buffers = SimpleQueue()

    def read(self, item: tuple[Span, int]) -> dict[tuple[int, int], int]:
        chunk, checksum = item
        buffer = self._buffers.get()
        try:
            return self._read(buffer, chunk, checksum)
        finally:
            self._buffers.put(buffer)

    def _read(self, buffer: mmap.mmap, chunk: Span, want: int) -> dict[tuple[int, int], int]:
        done, view = 0, memoryview(buffer)[: chunk.num_bytes]
        while done < chunk.num_bytes:
            count = os.preadv(self._fd, [view[done:]], chunk.start + done)
            if count == 0:
                raise DamagedCache("it is cut off")
            done += count
        address, checksum = address_of(buffer), native_library.library().checksum
        if checksum(address, chunk.num_bytes) != want:
            raise DamagedCache(f"its bytes from {chunk.start} on are damaged")
        end, found = chunk.start + chunk.num_bytes, {}
        for piece in self._pieces[bisect_left(self._pieces, (chunk.start,)) :]:
            if piece.start >= end:
                break
            at = address + piece.start - chunk.start
            found[piece.start, piece.num_bytes] = checksum(at, piece.num_bytes)
        first = bisect_left(self._copies, (chunk.start - self._longest,))
        for copy in self._copies[first:]:
            if copy.start >= end:
                break
            begin = max(copy.start, chunk.start)
            stop = min(copy.start + copy.num_bytes, end)
            if stop > begin:
                to, at = copy.address + begin - copy.start, address + begin - chunk.start
                ctypes.memmove(to, at, stop - begin)
        return found
