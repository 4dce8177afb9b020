"""Packed weights that are in this process's memory, as the bytes that a file of them has.

They are the pages of a file, or the layers that loading made; either way the bytes at an offset are
the same, so that who gets them needs to know no other format than that of the file.
"""

from __future__ import annotations

import bisect
import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from ops.cpu.native_stored import Buffer
from serve.models.packed_cache.layout import DATA_START, Index
from serve.models.packed_cache.writer import Contents

if TYPE_CHECKING:
    from serve.models.packed_cache.shared_memory import SharedMemory

_ZEROS = ctypes.create_string_buffer(4096)  # what lies between pieces


@dataclass(frozen=True, slots=True)
class Found:
    """Packed weights of a file or a peer. data: uint8 by their offsets in a file. shared: the
    memory that they are, if other processes can have it, too."""

    index: Index
    data: Tensor
    shared: SharedMemory | None = None


class PackedBytes:
    """The data of a file, which stay as they are; the object keeps them alive. is_complete: whether
    loading needs nothing else of the checkpoint. data_end: the end of the data. shared: as of
    Found."""

    def __init__(self, source: Contents | Found, shared: SharedMemory | None = None) -> None:
        self._source = source
        self.shared = shared
        self._lock = threading.Lock()
        if isinstance(source, Contents):
            self._index: Index | None = None
            entries, self.data_end = source.entries, source.data_end
            self._pieces = source.pieces
        else:
            self._index, data, self.shared = source.index, source.data, source.shared
            entries, self.data_end = self._index.entries, self._index.data_end
            address = data.data_ptr() + DATA_START
            self._pieces = [(DATA_START, Buffer(address, self.data_end - DATA_START))]
        self.is_complete = all(entry.parts for entry in entries)
        self._starts = [start for start, _ in self._pieces]

    def index(self, poll: Callable[[], object] = object) -> Index:
        """Returns the index of the file. The first call may read all data for their checksums, and
        calls poll before each chunk, which may raise."""
        with self._lock:
            if self._index is None:
                assert isinstance(self._source, Contents)
                entries, checksums = self._source.entries, self._source.checksums(poll)
                self._index = Index(self.data_end, entries, checksums)
            return self._index

    def buffers(self, start: int, num_bytes: int) -> list[Buffer]:
        """Returns where the bytes from this offset on are, in their order."""
        found: list[Buffer] = []
        at, end = start, start + num_bytes
        number = max(0, bisect.bisect_right(self._starts, start) - 1)
        for first, (address, length) in self._pieces[number:]:
            if first >= end:
                break
            if first > at:
                found += _zeros(first - at)
                at = first
            stop = min(first + length, end)
            if stop > at:
                found.append(Buffer(address + at - first, stop - at))
                at = stop
        return found + _zeros(end - at)


def _zeros(num_bytes: int) -> list[Buffer]:
    address, most = ctypes.addressof(_ZEROS), len(_ZEROS)
    return [Buffer(address, min(most, num_bytes - at)) for at in range(0, num_bytes, most)]
