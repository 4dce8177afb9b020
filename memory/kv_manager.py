"""Sequences' ranges and the pages mapped into them: the scheduler's only view of memory.

Integers only. A *range* is max_model_len token places of contiguous virtual memory that gets
pages as its sequence grows (`grow`). Growing only changes the books; `commit` edits the address
space, at the step boundary, before anything may touch the new positions. `look_ahead` lets a
thread map what the next steps will need. Pages whose tokens are computed can be remembered
(`remember`) and mapped into other ranges that begin with the same tokens (`match`, `open`):
prefix sharing without a copy.

+--------------------------------------------------------------------------------------+
| invariants: a page is free, or has as many references as ranges hold it, plus one if the|
| prefix cache knows it, one while a copy of it is due, one while the disk writes or reads|
| it; after commit the first len(pages) places of a range show its pages; a sequence      |
| writes only pages that no other range and not the cache holds.                          |
+--------------------------------------------------------------------------------------+
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import lcm

from memory.address_space import AddressSpace, runs_of
from memory.allocator import PageAllocator
from memory.prefix_cache import PrefixCache
from memory.vmm import VirtualMemory

logger = logging.getLogger(__name__)

# Linux allows 65,530 mappings in a process, and others need some too.
MAX_MAPPINGS = 48_000
# What is mapped in an idle range for whoever comes next: a first chunk.
_EAGER_TOKENS = 256


@dataclass(slots=True)
class Range:
    """One range. capacity: tokens that fit in its pages; promised: pages it was opened for and
    has not been granted yet; valid: leading pages that the address space is known to show.

    copies: (source page, place) that are due at the next commit. num_known: leading pages that
    have been offered to the prefix cache.
    """

    index: int
    pages: list[int] = field(default_factory=list)
    capacity: int = 0
    valid: int = 0
    promised: int = 0
    is_open: bool = False
    copies: list[tuple[int, int]] = field(default_factory=list)
    num_known: int = 0


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """num_tokens whose K/V is at hand: `shared` pages to map, then `copied` ones to copy, because
    the sequence's next tokens are written into them."""

    num_tokens: int
    shared: list[int]
    copied: list[int]


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
        in_background: bool = True,
    ) -> None:
        """tile_tokens: tokens that are stored interleaved and need their memory together.
        in_background: map ahead of need in a thread."""
        self.page_bytes = memory.page_bytes
        self.token_bytes = token_bytes
        self.max_model_len = max_model_len
        self.tile_tokens = tile_tokens
        self._tile_bytes = token_bytes * tile_tokens
        # A range starts on a page and holds a whole number of tiles, so that a tile's address
        # is simply (range start + position) // tile_tokens * tile_bytes.
        unit = lcm(self.page_bytes, self._tile_bytes)
        self.range_bytes = -(-self._bytes_for(max_model_len) // unit) * unit
        self.range_tokens = self.range_bytes // token_bytes
        self.allocator = PageAllocator(num_pages)
        self.prefixes = PrefixCache(self.allocator)
        self.ranges = [Range(i) for i in range(num_ranges)]
        self.space = AddressSpace(
            memory,
            num_ranges=num_ranges,
            range_pages=self.range_bytes // self.page_bytes,
            max_mappings=MAX_MAPPINGS,
            in_background=in_background,
        )
        self._memory = memory
        self._idle = set(range(num_ranges))
        self._promised = 0
        self._dirty: set[int] = set()

    # ---- sizes

    @property
    def total_bytes(self) -> int:
        """Virtual bytes of all ranges: what must be reserved."""
        return self.range_bytes * len(self.ranges)

    @property
    def num_pages(self) -> int:
        return self.allocator.num_pages

    @property
    def num_available(self) -> int:
        """Pages that can be had: free, or held by the prefix cache alone."""
        return self.allocator.num_free + self.prefixes.num_evictable

    @property
    def num_cached(self) -> int:
        """Pages that only the prefix cache holds."""
        return self.prefixes.num_evictable

    @property
    def num_in_use(self) -> int:
        """Pages of sequences, and those on their way to or from the disk."""
        return self.num_pages - self.num_available

    @property
    def num_mapped(self) -> int:
        """Pages with memory behind them."""
        return self.num_pages - self.allocator.num_free + self.allocator.num_warm

    def _bytes_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.tile_tokens) * self._tile_bytes

    def _tokens_in(self, num_pages: int) -> int:
        return num_pages * self.page_bytes // self._tile_bytes * self.tile_tokens

    def pages_for(self, num_tokens: int) -> int:
        return -(-self._bytes_for(num_tokens) // self.page_bytes)

    def page_end(self, page: int) -> int:
        """Tokens from the range's start on that give the page its whole content."""
        return -(-(page + 1) * self.page_bytes // self._tile_bytes) * self.tile_tokens

    def start_of(self, index: int) -> int:
        """Where the range begins, in tokens from the start of the reservation."""
        return index * self.range_tokens

    def can_fit(self, num_tokens: int, spare_pages: int = 0, hit: PrefixHit | None = None) -> bool:
        """Whether a new range could be opened and grown to that many tokens, and leave some.

        Pages promised to ranges that still grow into their prompt are not counted as free.
        """
        need = self.pages_for(num_tokens)
        if hit is not None:  # what others hold already costs nothing
            need -= sum(self.allocator.num_references(page) > 1 for page in hit.shared)
            need += sum(self.allocator.num_references(page) == 1 for page in hit.copied)
        unpromised = self.num_available - self._promised - spare_pages
        return bool(self._idle) and need <= unpromised and not self._has_too_many_mappings()

    def _has_too_many_mappings(self) -> bool:
        is_anyone_open = len(self._idle) < len(self.ranges)
        return is_anyone_open and self.space.num_mappings > self.space.max_mappings

    # ---- prefix cache

    def match(self, keys: Sequence[bytes], max_tokens: int) -> PrefixHit | None:
        """The longest cached beginning of a sequence with these page keys, at most max_tokens
        (something must be left to compute)."""
        pages = self.prefixes.index.match(keys)
        num_tokens = min(self._tokens_in(len(pages)), max_tokens)
        if num_tokens <= 0:
            return None
        self.prefixes.index.touch(keys[len(pages) - 1])
        first_written = num_tokens // self.tile_tokens * self._tile_bytes // self.page_bytes
        end = self.pages_for(num_tokens)
        return PrefixHit(num_tokens, pages[:first_written], pages[first_written:end])

    def fetch(self, keys: Sequence[bytes]) -> bool:
        """Begin to bring back from the store what memory has forgotten of a sequence with these
        page keys, into pages that nobody is promised; whether something is on its way."""
        return self.prefixes.fetch(keys, self.num_available - self._promised)

    def remember(self, target: Range, keys: Sequence[bytes], num_computed: int) -> None:
        """Let the prefix cache know the range's pages that are complete by now.

        keys: of its pages, as far as they are known.
        """
        place = target.num_known
        while place < len(keys) and self.page_end(place) <= num_computed:
            parent = keys[place - 1] if place else None
            self.prefixes.remember(keys[place], parent, target.pages[place])
            place += 1
        target.num_known = place

    # ---- pages of ranges

    def open(self, num_tokens: int, hit: PrefixHit | None = None) -> Range:
        """A range that num_tokens are promised to; `grow` maps them as they are needed.

        With a hit, its tokens are there at once. The range is the idle one that shows the hit's
        pages already, else the best fit: the fewest mapped pages that suffice, else the fullest.
        The caller has checked can_fit.
        """
        need = self.pages_for(num_tokens)
        found = self.ranges[self._choose(need, hit.shared if hit else [])]
        self._idle.discard(found.index)
        found.is_open = True
        if hit is not None:
            for page in (*hit.shared, *hit.copied):
                self.prefixes.hold(page)
            found.pages.extend(hit.shared)
            found.num_known = len(hit.shared)
            for source in hit.copied:
                found.copies.append((source, len(found.pages)))
                found.pages.append(self._take(found))
            found.capacity = self._tokens_in(len(found.pages))
            self._dirty.add(found.index)
        self._promise(found, max(0, need - len(found.pages)))
        return found

    def _choose(self, need: int, shared: Sequence[int]) -> int:
        sizes: dict[int, int] = {}
        last = len(shared) - 1
        for index in self._idle:
            shown = self.space.shown(index)
            sizes[index] = size = len(shown)
            # Many may show the beginning: where the last page is another one, no list is compared.
            is_like = 0 <= last < size and shown[last] == shared[last]
            if is_like and self.space.shows(index, shared):
                return index
        enough = [index for index, size in sizes.items() if size >= need]
        return min(enough, key=sizes.__getitem__) if enough else max(sizes, key=sizes.__getitem__)

    def _promise(self, target: Range, num_pages: int) -> None:
        self._promised += num_pages - target.promised
        target.promised = num_pages

    def _take(self, target: Range) -> int:
        """A free page for the range's next place, the one that is shown there if possible."""
        if not self.allocator.num_free:
            self.prefixes.evict()
        place = len(target.pages)
        shown = self.space.shown(target.index)
        there = shown[place] if place < len(shown) and shown[place] >= 0 else None
        return self.allocator.take(there, target.pages[-1] if target.pages else None)

    def grow(self, target: Range, num_tokens: int) -> bool:
        """Grant the range pages for num_tokens in all; False (and no change) if there are none."""
        if num_tokens <= target.capacity:
            return True
        assert num_tokens <= self.max_model_len, f"{num_tokens} > {self.max_model_len}"
        missing = self.pages_for(num_tokens) - len(target.pages)
        if missing > self.num_available:
            return False
        self.space.collect()
        for _ in range(missing):
            target.pages.append(self._take(target))
        target.capacity = self._tokens_in(len(target.pages))
        self._promise(target, max(0, target.promised - missing))
        self._dirty.add(target.index)
        return True

    def close(self, target: Range) -> None:
        """The sequence is gone. Its places go on showing its pages until others are due there."""
        assert target.is_open, f"range {target.index} is not open"
        target.is_open = False
        self._promise(target, 0)
        for page in (*target.pages, *(source for source, _ in target.copies)):
            self.prefixes.let_go(page)
        target.pages.clear()
        target.copies.clear()
        target.capacity = target.valid = target.num_known = 0
        self._dirty.discard(target.index)
        self._idle.add(target.index)

    # ---- the address space

    def commit(self, targets: Iterable[Range] | None = None) -> None:
        """Edit the address space so that it shows what was decided since the last commit.

        Only the given ranges are mapped (all, if None), so that one whose mapping fails with an
        OSError does not stop the others; it stays due.
        """
        if not self._dirty:
            return
        wanted = self._dirty if targets is None else {item.index for item in targets}
        for index in sorted(wanted & self._dirty):
            item = self.ranges[index]
            self.space.show(index, item.pages, item.valid)
            while item.copies:
                source, place = item.copies[-1]
                self._memory.copy_page(source, item.pages[place])
                item.copies.pop()
                self.prefixes.let_go(source)
            item.valid = len(item.pages)
            self._dirty.discard(index)
        if self.space.num_mappings > self.space.max_mappings:
            self._unmap_idle()

    def _unmap_idle(self) -> None:
        """Stale mappings give way when there are too many in all."""
        stale = sorted(self._idle, key=lambda i: -len(self.space.shown(i)))
        for index in stale:
            if self.space.num_mappings < self.space.max_mappings * 3 // 4:
                return
            self._cut(index)

    def _cut(self, index: int) -> None:
        try:
            self.space.cut(index, self.ranges[index].valid)
        except OSError as error:  # nobody looks there, and mapping replaces what is there
            logger.warning("unmapping failed: %s", error)

    def look_ahead(self, wanted: Iterable[tuple[Range, int]]) -> None:
        """Let the thread map what the ranges need for that many tokens, and a little for the
        next one to come. Nothing is granted: whoever is in need may still take those pages."""
        if self.space.is_busy:
            return
        self.space.collect()  # after that question: now nothing is on its way
        places: list[tuple[int, int, list[int]]] = []
        for target, num_tokens in wanted:
            num_tokens = min(num_tokens, self.max_model_len)
            if num_tokens > target.capacity:
                places.append(self._ahead_of(target, self.pages_for(num_tokens)))
        if self._idle:
            need = self.pages_for(min(_EAGER_TOKENS, self.max_model_len))
            places.append(self._ahead_of(self.ranges[self._choose(need, [])], need))
        ahead = [page for _, _, pages in places for page in pages]
        try:
            self.space.ahead(places)
        finally:
            for page in ahead:
                self.allocator.give_back(page)
        self.allocator.keep(ahead)

    def _ahead_of(self, target: Range, num_pages: int) -> tuple[int, int, list[int]]:
        """(range, place, pages) that it would get next. The pages are taken."""
        shown = self.space.shown(target.index)
        first = len(target.pages)
        pages: list[int] = []
        for place in range(first, num_pages):
            if not self.num_available:
                break
            if not self.allocator.num_free:
                self.prefixes.evict()
            there = shown[place] if place < len(shown) and shown[place] >= 0 else None
            before = pages or target.pages
            pages.append(self.allocator.take(there, before[-1] if before else None))
        return target.index, first, pages

    def trim(self) -> None:
        """Unmap what no sequence needs and give free pages' memory back to the system."""
        self.space.settle()
        self.prefixes.poll()
        for item in self.ranges:
            if len(self.space.shown(item.index)) > item.valid:
                self._cut(item.index)
        for first, length in runs_of(self.allocator.cool()):
            try:
                self._memory.release(first, length)
            except OSError as error:  # the pages are free all the same; only the system waits
                logger.warning("giving memory back failed: %s", error)

    def close_all(self, timeout_s: float = 30.0) -> None:
        """Forget the prefixes, give all memory back, end the threads. The disk has so long to
        take what it has not yet."""
        try:
            self.prefixes.close(timeout_s)
            self.trim()
        finally:
            self.space.close()

    def check_integrity(self) -> None:
        """AssertionError tells which invariant does not hold. For tests and idle moments."""
        owners: dict[int, int] = {}
        for item in self.ranges:
            assert item.is_open != (item.index in self._idle), f"range {item.index}"
            assert item.is_open or not (item.pages or item.promised), f"range {item.index}"
            assert item.capacity == self._tokens_in(len(item.pages))
            is_settled = item.valid == len(item.pages) and not item.copies
            assert is_settled != (item.index in self._dirty), f"range {item.index}"
            assert self.space.shows(item.index, item.pages[: item.valid]), f"range {item.index}"
            for page in (*item.pages, *(source for source, _ in item.copies)):
                owners[page] = owners.get(page, 0) + 1
            for place in range(item.num_known, len(item.pages)):
                assert owners[item.pages[place]] == 1, f"page {item.pages[place]} is written"
        promised = sum(item.promised for item in self.ranges)
        assert promised == self._promised, f"{promised} promised, counted {self._promised}"
        self.prefixes.check_integrity(owners)
        self.allocator.check_integrity(owners)
