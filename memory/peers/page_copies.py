"""Copies of pages that sequences of other engines use now, so that these sequences can go on if
their engine dies.

They are in memory of their own, whose bound never touches the pages of this engine. A sequence that
has ended, or whose engine is gone, leaves its copies for a while, since it may have been continued;
they are dropped first, each sequence's last page before the ones that it depends on. If all copies
are of running sequences, no more are taken. Reading takes no lock: a copy counts if it was there
all the time.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from memory.prefix.peer_stats import CopyStats

KEPT_S = 60.0
"""How long the copies of a sequence that has ended are kept."""
_HELD_PER_SLOT = 4  # sequences that share a page, on average
_MAX_DECLINED = 1024

StreamId = tuple[str, int]
"""A sequence of another engine: the engine's address, and its number there."""


@dataclass(slots=True, eq=False)
class _Copy:
    slot: int
    streams: set[StreamId] = field(default_factory=set)
    is_there: bool = False


class PageCopies:
    """Any thread may call the methods."""

    def __init__(
        self,
        page_bytes: int,
        max_bytes: int,
        *,
        kept_s: float = KEPT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """max_bytes: room for at least one page. Memory is taken as copies come."""
        self._page_bytes = page_bytes
        self._num_slots = max_bytes // page_bytes
        assert self._num_slots, "no room for a page"
        self._kept_s = kept_s
        self._clock = clock
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, self._num_slots * page_bytes, flags=flags)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._lock = threading.Lock()
        self._copies: dict[bytes, _Copy] = {}
        self._free = list(range(self._num_slots - 1, -1, -1))
        self._left: OrderedDict[bytes, float] = OrderedDict()  # of no sequence, and since when
        self._streams: dict[StreamId, list[bytes]] = {}
        self._num_held = 0  # pages of sequences; one that n sequences share counts n times
        self._declined: OrderedDict[StreamId, None] = OrderedDict()  # sequences without room
        self._stats = CopyStats()

    # ---- what is copied here

    def place(self, stream: StreamId, name: bytes) -> int | None:
        """Takes note that a sequence has this page. Returns the address where it is to be put, of
        which `filled` then tells; None if it is here or there is no room."""
        with self._lock:
            copy = self._copies.get(name)
            if stream in self._declined or (copy is not None and stream in copy.streams):
                return None
            has_room = self._num_held < _HELD_PER_SLOT * self._num_slots
            if not has_room or (copy is None and not self._free and not self._evict()):
                self._decline(stream)
                return None
            is_new = copy is None
            if copy is None:
                copy = self._copies[name] = _Copy(self._free.pop())
            self._left.pop(name, None)
            copy.streams.add(stream)
            self._streams.setdefault(stream, []).append(name)
            self._num_held += 1
            return self._address(copy) if is_new else None

    def filled(self, name: bytes, *, is_there: bool) -> None:
        """Says whether the page has come to the address that `place` returned."""
        with self._lock:
            copy = self._copies[name]
            if is_there:
                copy.is_there = True
                self._stats.copied += 1
                if not copy.streams:
                    self._left[name] = self._clock()
            else:  # what depends on it would be worth nothing
                for stream in list(copy.streams):
                    self._decline(stream)
                    self._streams[stream].remove(name)
                    if not self._streams[stream]:
                        del self._streams[stream]
                    self._num_held -= 1
                self._drop(name)

    def end(self, stream: StreamId) -> None:
        """Leaves the copies of a sequence for others."""
        with self._lock:
            self._end(stream)

    def end_all(self, peer: str) -> None:
        """Leaves the copies of all sequences of an engine that is gone."""
        with self._lock:
            for stream in [one for one in self._streams if one[0] == peer]:
                self._end(stream)
            for stream in [one for one in self._declined if one[0] == peer]:
                del self._declined[stream]

    def expire(self) -> None:
        """Drops copies whose sequences ended, or whose peer left, more than kept_s seconds ago."""
        until_s = self._clock() - self._kept_s
        with self._lock:
            while self._left and next(iter(self._left.values())) <= until_s:
                self._drop(self._left.popitem(last=False)[0])

    # ---- what is read

    def contains(self, name: bytes) -> bool:
        copy = self._copies.get(name)
        return copy is not None and copy.is_there

    def read(self, name: bytes, address: int) -> bool:
        """Copies a page to an address. Returns False if it is not here."""
        copy = self._copies.get(name)
        if copy is None or not copy.is_there:
            return False
        ctypes.memmove(address, self._address(copy), self._page_bytes)
        is_right = self._copies.get(name) is copy
        self._stats.used += is_right
        return is_right

    def stats(self) -> CopyStats:
        with self._lock:
            num_pages = len(self._copies)
            return CopyStats(
                num_pages,
                num_pages * self._page_bytes,
                self._stats.copied,
                self._stats.used,
                self._stats.declined,
            )

    # ---- with the lock

    def _address(self, copy: _Copy) -> int:
        return self._base + copy.slot * self._page_bytes

    def _end(self, stream: StreamId) -> None:
        self._declined.pop(stream, None)
        now_s = self._clock()
        for name in reversed(self._streams.pop(stream, ())):  # the last page is dropped first
            self._num_held -= 1
            copy = self._copies[name]
            copy.streams.discard(stream)
            if not copy.streams and copy.is_there:
                self._left[name] = now_s

    def _decline(self, stream: StreamId) -> None:
        if stream not in self._declined:
            self._stats.declined += 1
            self._declined[stream] = None
            if len(self._declined) > _MAX_DECLINED:
                self._declined.popitem(last=False)

    def _evict(self) -> bool:
        if not self._left:
            return False
        self._drop(self._left.popitem(last=False)[0])
        return True

    def _drop(self, name: bytes) -> None:
        """Removes a page and returns its memory to the system."""
        copy = self._copies.pop(name)
        self._memory.madvise(mmap.MADV_DONTNEED, copy.slot * self._page_bytes, self._page_bytes)
        self._free.append(copy.slot)

    def check_integrity(self) -> None:
        """Raises AssertionError for a broken invariant."""
        with self._lock:
            slots = [copy.slot for copy in self._copies.values()] + self._free
            assert sorted(slots) == list(range(self._num_slots))
            held = [(stream, name) for stream, names in self._streams.items() for name in names]
            assert len(held) == len(set(held)) == self._num_held
            assert all(stream in self._copies[name].streams for stream, name in held)
            assert sum(len(copy.streams) for copy in self._copies.values()) == len(held)
            idle = [n for n, copy in self._copies.items() if copy.is_there and not copy.streams]
            assert sorted(idle) == sorted(self._left)
