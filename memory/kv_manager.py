"""Sequences' ranges and the pages mapped into them: the scheduler's only view of memory.

Integers only. A *range* is max_model_len token places of contiguous virtual memory; its pages
are mapped as the sequence grows (`grow`) and stay mapped when it ends (`close`) until another
needs them or `trim` is called. Growing only records what must change; `commit` edits the
address space, at the step boundary, before anything may touch the new positions.

+--------------------------------------------------------------------------------------+
| invariants: a page is free or in as many ranges as it has references; after commit the |
| pages of a range, and no others, are mapped in it, in order; the first `granted` belong|
| to its sequence (none in an idle range), the rest are spare: anyone who grows may take |
| them from the end.                                                                     |
+--------------------------------------------------------------------------------------+
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import lcm

from memory.allocator import PageAllocator
from memory.vmm import VirtualMemory

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Range:
    """One range. granted: pages its sequence may use; capacity: tokens that fit in those.

    mapped: pages the address space shows since the last commit; the first `valid` of them are
    still the right ones. promised: pages it was opened for and has not been granted yet.
    """

    index: int
    pages: list[int] = field(default_factory=list)
    granted: int = 0
    capacity: int = 0
    mapped: int = 0
    valid: int = 0
    promised: int = 0
    is_open: bool = False

    @property
    def num_spare(self) -> int:
        return len(self.pages) - self.granted


class KVManager:
    """Ranges, pages and the edits that are due at the next commit."""

    def __init__(
        self,
        memory: VirtualMemory,
        *,
        num_pages: int,
        num_ranges: int,
        max_model_len: int,
        token_bytes: int,
        tile_tokens: int = 1,
    ) -> None:
        """tile_tokens: tokens that are stored interleaved and need their memory together."""
        self.page_bytes = memory.page_bytes
        self.token_bytes = token_bytes
        self.max_model_len = max_model_len
        self._tile_tokens = tile_tokens
        self._tile_bytes = token_bytes * tile_tokens
        # A range starts on a page and holds a whole number of tiles, so that a tile's address
        # is simply (range start + position) // tile_tokens * tile_bytes.
        unit = lcm(self.page_bytes, self._tile_bytes)
        self.range_bytes = -(-self._bytes_for(max_model_len) // unit) * unit
        self.range_tokens = self.range_bytes // token_bytes
        self.allocator = PageAllocator(num_pages)
        self.ranges = [Range(i) for i in range(num_ranges)]
        self._idle = set(range(num_ranges))
        self._spare = 0
        self._promised = 0
        self._memory = memory
        self._dirty: set[int] = set()

    @property
    def total_bytes(self) -> int:
        """Virtual bytes of all ranges: what must be reserved."""
        return self.range_bytes * len(self.ranges)

    @property
    def num_pages(self) -> int:
        return self.allocator.num_pages

    @property
    def num_available(self) -> int:
        """Pages that can be had: free, or spare in some range."""
        return self.allocator.num_free + self._spare

    @property
    def num_in_use(self) -> int:
        """Pages granted to sequences."""
        return self.num_pages - self.num_available

    @property
    def num_mapped(self) -> int:
        """Pages in any range, spare ones included."""
        return self.num_pages - self.allocator.num_free

    def _bytes_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._tile_tokens) * self._tile_bytes

    def _tokens_in(self, num_pages: int) -> int:
        return num_pages * self.page_bytes // self._tile_bytes * self._tile_tokens

    def pages_for(self, num_tokens: int) -> int:
        return -(-self._bytes_for(num_tokens) // self.page_bytes)

    def can_fit(self, num_tokens: int, spare_pages: int = 0) -> bool:
        """Whether a new range could be opened and grown to that many tokens, and leave some.

        Pages promised to ranges that still grow into their prompt are not counted as free.
        """
        unpromised = self.num_available - self._promised - spare_pages
        return bool(self._idle) and self.pages_for(num_tokens) <= unpromised

    def start_of(self, index: int) -> int:
        """Where the range begins, in tokens from the start of the reservation."""
        return index * self.range_tokens

    def open(self, num_tokens: int) -> Range:
        """A range that num_tokens are promised to; `grow` maps them as they are needed.

        Best fit: the idle range with the fewest mapped pages that suffice, else the fullest.
        The caller has checked can_fit.
        """
        need = self.pages_for(num_tokens)
        sizes = {i: len(self.ranges[i].pages) for i in self._idle}
        enough = [i for i, size in sizes.items() if size >= need]
        index = min(enough, key=sizes.__getitem__) if enough else max(sizes, key=sizes.__getitem__)
        found = self.ranges[index]
        self._idle.discard(index)
        found.is_open = True
        self._promise(found, need)
        return found

    def _promise(self, target: Range, num_pages: int) -> None:
        self._promised += num_pages - target.promised
        target.promised = num_pages

    def grow(self, target: Range, num_tokens: int) -> bool:
        """Grant the range pages for num_tokens in all; False (and no change) if there are none."""
        if num_tokens <= target.capacity:
            return True
        assert num_tokens <= self.max_model_len, f"{num_tokens} > {self.max_model_len}"
        missing = self.pages_for(num_tokens) - target.granted
        if missing > self.num_available:
            return False
        own = min(missing, target.num_spare)
        self._grant(target, own)
        while missing - own > self.allocator.num_free:
            self._reclaim(missing - own - self.allocator.num_free)
        for _ in range(missing - own):
            target.pages.append(self.allocator.take(target.pages[-1] if target.pages else None))
            self._spare += 1
        self._grant(target, missing - own)
        self._promise(target, max(0, target.promised - missing))
        if missing > own:
            self._dirty.add(target.index)
        return True

    def _grant(self, target: Range, num_pages: int) -> None:
        """Spare pages of the range become its sequence's (or, negative, the reverse)."""
        target.granted += num_pages
        target.capacity = self._tokens_in(target.granted)
        self._spare -= num_pages

    def close(self, target: Range) -> None:
        """The sequence is gone. Its pages stay mapped, spare for the next one."""
        assert target.is_open, f"range {target.index} is not open"
        target.is_open = False
        self._promise(target, 0)
        self._grant(target, -target.granted)
        self._idle.add(target.index)

    def _reclaim(self, num_pages: int) -> None:
        """Take spare pages from the end of one range: an idle one if any has some."""
        victim = max(self.ranges, key=lambda r: (not r.is_open and r.num_spare > 0, r.num_spare))
        self._shrink(victim, max(victim.granted, len(victim.pages) - num_pages))

    def _shrink(self, victim: Range, keep: int) -> list[int]:
        """Take the pages after the first `keep`; returns those that nobody else holds."""
        freed = [page for page in victim.pages[keep:] if self.allocator.give_back(page)]
        self._spare -= len(victim.pages) - keep
        del victim.pages[keep:]
        victim.valid = min(victim.valid, keep)
        self._dirty.add(victim.index)
        return freed

    def commit(self, targets: Iterable[Range] | None = None) -> None:
        """Edit the address space so that it shows what was decided since the last commit.

        Only the given ranges are mapped (all, if None), so that one whose mapping fails with an
        OSError does not stop the others; it stays due. Unmapping goes first: a page may have
        moved from one range to another.
        """
        if not self._dirty:
            return
        for index in self._dirty:
            self._unmap_stale(self.ranges[index])
        wanted = self._dirty if targets is None else {item.index for item in targets}
        for index in sorted(wanted & self._dirty):
            self._map_new(self.ranges[index])
        self._dirty = {i for i in self._dirty if not self._is_settled(self.ranges[i])}

    @staticmethod
    def _is_settled(item: Range) -> bool:
        return item.mapped == item.valid == len(item.pages)

    def _unmap_stale(self, item: Range) -> None:
        if item.valid == item.mapped:
            return
        start = item.index * self.range_bytes + item.valid * self.page_bytes
        try:
            self._memory.unmap(start, item.mapped - item.valid)
        except OSError as error:
            # Nobody reads beyond the valid pages, and mapping replaces what is there.
            logger.warning("unmapping %d pages failed: %s", item.mapped - item.valid, error)
            return
        item.mapped = item.valid

    def _map_new(self, item: Range) -> None:
        """One call per run of consecutive pages."""
        while item.valid < len(item.pages):
            first = item.pages[item.valid]
            length = 1
            end = len(item.pages) - item.valid
            while length < end and item.pages[item.valid + length] == first + length:
                length += 1
            offset = item.index * self.range_bytes + item.valid * self.page_bytes
            self._memory.map(offset, first, length)
            item.valid += length
            item.mapped = max(item.mapped, item.valid)

    def trim(self) -> None:
        """Unmap all spare pages and give their memory back to the system."""
        freed: list[int] = []
        for item in self.ranges:
            if item.num_spare:
                freed.extend(self._shrink(item, item.granted))
        try:
            self.commit()
            for first, length in _runs(sorted(freed)):
                self._memory.release(first, length)
        except OSError as error:  # the pages are free all the same; only the system waits
            logger.warning("giving memory back failed: %s", error)

    def check_integrity(self) -> None:
        """AssertionError tells which invariant does not hold. For tests and idle moments."""
        owners: dict[int, int] = {}
        for item in self.ranges:
            assert item.is_open != (item.index in self._idle), f"range {item.index}"
            assert 0 <= item.granted <= len(item.pages), f"range {item.index}"
            assert item.is_open or not (item.granted or item.promised), f"range {item.index}"
            assert item.capacity == self._tokens_in(item.granted)
            assert item.index in self._dirty or self._is_settled(item), f"range {item.index}"
            for page in item.pages:
                owners[page] = owners.get(page, 0) + 1
        spare = sum(item.num_spare for item in self.ranges)
        assert spare == self._spare, f"{spare} spare pages, counted {self._spare}"
        promised = sum(item.promised for item in self.ranges)
        assert promised == self._promised, f"{promised} promised, counted {self._promised}"
        self.allocator.check_integrity(owners)


def _runs(pages: list[int]) -> Iterable[tuple[int, int]]:
    """(first, length) of the runs of consecutive numbers in a sorted list."""
    first = 0
    for i in range(1, len(pages) + 1):
        if i == len(pages) or pages[i] != pages[i - 1] + 1:
            yield pages[first], i - first
            first = i
