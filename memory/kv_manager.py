"""Sequences' ranges and the pages mapped into them: the scheduler's only view of memory.

Integers only. A *range* is max_model_len token places of contiguous virtual memory that gets
pages as its sequence grows (`grow`). Growing only changes the books; `commit` edits the address
space, at the step boundary, before anything may touch the new positions. `map_ahead` lets a
thread map what the next steps will need. Pages whose tokens are computed can be remembered
(`remember`) and mapped into other ranges that begin with the same tokens (`match`, `open`):
prefix sharing without a copy. A range has a part for each group of layers (layer_groups.py);
most models have one group. Pages that are behind the window of their group are given back.

+--------------------------------------------------------------------------------------+
| invariants: a page is free, or has as many references as ranges hold it, plus one if the|
| prefix cache knows it, one while a copy of it is due, one while the disk writes or reads|
| it; after commit the first len(pages) places of a range show its pages; a sequence      |
| writes only pages that no other range and not the cache holds.                          |
+--------------------------------------------------------------------------------------+
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from memory.idle_ranges import IdleRanges
from memory.pages.address_space import AddressSpace, check_ranges
from memory.pages.allocator import PageAllocator, runs_of
from memory.pages.kv_range import UNMAPPED, PrefixHit, Range, RangePart
from memory.pages.layer_groups import LayerGroup, PageLayout
from memory.pages.vmm import VirtualMemory
from memory.prefix.cache import PrefixCache
from memory.prefix.finder import PrefixFinder
from memory.range_mapper import RangeMapper

logger = logging.getLogger(__name__)

# Linux allows 65,530 mappings in a process, and others need some too.
MAX_MAPPINGS = 48_000
_EAGER_TOKENS = 256  # mapped in an idle range for whoever comes next: a first chunk


class KVManager:
    """Ranges, pages and the edits that are due at the next commit."""

    def __init__(
        self,
        memory: VirtualMemory,
        *,
        num_pages: int,
        num_ranges: int,
        max_model_len: int,
        token_bytes: int = 0,
        tile_tokens: int = 1,
        groups: Sequence[LayerGroup] = (),
        max_rows: int | None = None,
        in_background: bool = True,
        first_start: int = 0,
        max_mappings: int = MAX_MAPPINGS,
        most_mappings: int = MAX_MAPPINGS,
    ) -> None:
        """groups: of layers; by default one without a window, of these token_bytes in tiles of
        tile_tokens. max_rows: tokens that one step computes of a sequence, at most.
        in_background: map ahead of need in a thread. first_start: where the ranges begin, in
        tokens, if others are before them. max_mappings: with which ranges may be opened.
        most_mappings: that the system has, whatever max_mappings says."""
        groups = groups or (LayerGroup(token_bytes, tile_tokens),)
        self.page_bytes = memory.page_bytes
        self.max_model_len = max_model_len
        max_rows = max_rows or max_model_len
        self.layout = PageLayout(groups, memory.page_bytes, max_model_len, max_rows)
        self.token_bytes = self.layout.token_bytes
        self.range_tokens = self.layout.range_tokens
        self.page_end = self.layout.page_end
        self.pages_for = self.layout.pages_for
        self.allocator = PageAllocator(num_pages)
        self.prefixes = PrefixCache(self.allocator, self.pages_for(max_model_len))
        self._finder = PrefixFinder(self.layout, self.prefixes)
        self.match = self._finder.match
        self.num_shared_pages = self._finder.num_shared_pages
        numbered = list(enumerate(self.layout.groups))
        self.ranges = [
            Range(
                i,
                [RangePart(group, number * num_ranges + i) for number, group in numbered],
                first_start + i * self.range_tokens,
            )
            for i in range(num_ranges)
        ]
        self.space = AddressSpace(
            memory,
            offsets=[self._first(number, i) for number, _ in numbered for i in range(num_ranges)],
            max_mappings=min(max_mappings, most_mappings),
            in_background=in_background,
        )
        self._memory = memory
        self._most_mappings = most_mappings
        self.on_close: Callable[[Range], None] = lambda target: None
        self._idle = IdleRanges(self.ranges, self.layout, self.space)
        self._promised = 0
        self._num_held = 0  # by ranges; a page as often as ranges hold it
        self._mapper = RangeMapper(
            self.ranges, self._idle, self.space, memory, self.prefixes.release
        )
        self.commit = self._mapper.commit

    # ---- sizes

    @property
    def total_bytes(self) -> int:
        """Virtual bytes of all ranges: what must be reserved."""
        return self.group_offset(len(self.layout.groups))

    def group_offset(self, number: int) -> int:
        """Where a group's ranges begin in the reservation; for the last number + 1, its end."""
        before = sum([group.token_bytes for group in self.layout.groups[:number]])
        return self.range_tokens * len(self.ranges) * before

    def _first(self, number: int, index: int) -> int:
        """Where a range begins in a group, in bytes of the reservation."""
        size = self.range_tokens * self.layout.groups[number].token_bytes
        return self.group_offset(number) + index * size

    def spans(self, target: Range) -> list[tuple[int, int]]:
        """(first, end) bytes of the reservation that are the range's, in each group."""
        return [
            (self._first(number, target.index), self._first(number, target.index + 1))
            for number in range(len(self.layout.groups))
        ]

    @property
    def partitions(self) -> list[KVManager]:
        return [self]

    @property
    def maps_ahead(self) -> bool:
        return self.space.maps_ahead

    @property
    def num_pages(self) -> int:
        return self.allocator.num_pages

    @property
    def num_available(self) -> int:
        """Pages that can be had: free, or held by the prefix cache alone."""
        return self.allocator.num_free + self.prefixes.num_evictable

    @property
    def num_unpromised(self) -> int:
        """Free pages that are promised to nobody."""
        return self.allocator.num_free - self._promised

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

    @property
    def max_sequence_pages(self) -> int:
        """That one sequence may have."""
        return self.num_pages

    def shares_memory(self, one: Range, other: Range) -> bool:
        """Whether what one range gives back can be had by the other."""
        return True

    def can_fit(self, num_tokens: int, spare_pages: int = 0, hit: PrefixHit | None = None) -> bool:
        """Whether a new range could be opened and grown to that many tokens, and leave some. Pages
        promised to ranges that still grow into their prompt are not counted as free."""
        need = self.pages_for(num_tokens)
        if hit is not None:
            references = self.allocator.num_references
            need -= self.num_shared_pages(hit)
            for part in hit.parts:
                need += sum([references(page) == 1 for page in part.copied])
        unpromised = self.num_available - self._promised - spare_pages
        return bool(self._idle) and need <= unpromised and self._mapper.has_room(hit)

    def ranges_to_close(self, num_tokens: int, leaving: Sequence[Range]) -> list[Range] | None:
        """Of ranges that could be closed, those that have to do with room for so many tokens;
        None where there would be none even without them all."""
        num_pages = sum([len(target.pages) + target.promised_pages for target in leaving])
        fits = self.pages_for(num_tokens) <= self.num_available - self._promised + num_pages
        return list(leaving) if fits else None

    @property
    def num_saved(self) -> int:
        """Pages that sequences would hold more if they shared none; a little less during I/O."""
        return max(0, self._num_held - self.num_in_use)

    def map_seconds(self, hit: PrefixHit) -> float:
        """What mapping it takes, as mapping went so far."""
        return self.space.stats.seconds_for(hit.num_calls)

    # ---- prefix cache

    def num_cached_tokens(self, keys: Sequence[bytes]) -> int:
        """Of a sequence with these page keys, tokens that memory knows. From any thread."""
        return self._finder.num_tokens(keys, self.range_tokens, self.prefixes.index.has_key)

    def fetch(
        self,
        keys: Sequence[bytes],
        compute_s: Callable[[int, int], float] = lambda num_tokens, num_known: 0.0,
    ) -> bool:
        """Begin to bring back from the store what memory has forgotten of a sequence with these
        page keys, into pages that nobody is promised, unless computing it takes less time (as
        PrefixFinder.fetch has it); whether something is on its way."""
        return self._finder.fetch(keys, self.num_available - self._promised, compute_s)

    def insert_prefix(self, target: Range, keys: Sequence[bytes], num_computed: int) -> None:
        """Let the prefix cache know the range's pages that are complete by now. keys: of its
        pages, as far as they are known."""
        self._finder.insert(target, keys, num_computed)

    # ---- pages of ranges

    def open(self, num_tokens: int, hit: PrefixHit | None = None) -> Range:
        """A range that num_tokens are promised to; `grow` maps them as they are needed. With a
        hit, its tokens are there at once. The caller has checked can_fit."""
        found = self._idle.take(num_tokens, hit)
        found.is_open = True
        found.promised_tokens = num_tokens
        if hit is not None:
            self._begin_with(found, hit)
        self._promise(found)
        return found

    def _begin_with(self, target: Range, hit: PrefixHit) -> None:
        for part, found in zip(target.parts, hit.parts, strict=True):
            for page in (*found.shared, *found.copied):
                self.prefixes.hold(page)
            part.num_released = part.num_mapped = found.first
            part.pages.extend([UNMAPPED] * found.first + found.shared)
            part.num_offered = part.num_cached = len(part.pages)
        for part, found in zip(target.parts, hit.parts, strict=True):
            for source in found.copied:
                part.copies.append((source, len(part.pages)))
                part.pages.append(self._take(part))
        self._num_held += len(target.pages)
        target.num_due_mappings = 0 if self._shows(target, hit) else hit.num_calls
        self._has_grown(target)

    def _shows(self, target: Range, hit: PrefixHit) -> bool:
        parts = zip(target.parts, hit.parts, strict=True)
        return all(self.space.maps(part.index, found.shared, found.first) for part, found in parts)

    def _promise(self, target: Range) -> None:
        promised = 0
        if target.is_open and target.capacity < target.promised_tokens:
            held = sum([len(part.pages) - part.num_released for part in target.parts])
            promised = max(0, self.pages_for(target.promised_tokens) - held)
        self._promised += promised - target.promised_pages
        target.promised_pages = promised

    def _take(self, part: RangePart, more: Sequence[int] = ()) -> int:
        """A free page for its next place (after `more`), the one shown there if possible."""
        if not self.allocator.num_free:
            self.prefixes.evict()
        shown = self.space.mapped(part.index)
        place = len(part.pages) + len(more)
        there = shown[place] if place < len(shown) and shown[place] >= 0 else None
        before = more or part.pages
        return self.allocator.take(there, before[-1] if before else None)

    def _extend(self, part: RangePart, count: int) -> None:
        """Pages for its next places."""
        self._num_held += count
        while self.allocator.num_free < count:
            self.prefixes.evict()
        self.allocator.extend(part.pages, self.space.mapped(part.index), count)

    def grow(self, target: Range, num_tokens: int, num_computed: int = 0) -> bool:
        """Grant the range pages for num_tokens in all; False (and no page) if there are none. Once
        num_computed tokens are computed, pages that no later token reaches are given back."""
        if num_tokens <= target.capacity:
            return True
        assert num_tokens <= self.max_model_len, f"{num_tokens} > {self.max_model_len}"
        missing: list[int] = []
        for part in target.parts:
            if part.group.window is not None:
                self._pass(part, part.group.first_slot(num_computed))
            missing.append(max(0, part.group.slots_for(num_tokens) - len(part.pages)))
        has_room = sum(missing) <= self.num_available
        if has_room:
            self.space.collect()
            for part, count in zip(target.parts, missing, strict=True):
                self._extend(part, count)
            self._has_grown(target)
        if target.promised_pages or target.capacity < target.promised_tokens:
            self._promise(target)
        return has_room

    def _has_grown(self, target: Range) -> None:
        target.capacity = min([part.group.tokens_in(len(part.pages)) for part in target.parts])
        self._mapper.due.add(target.index)

    def _pass(self, part: RangePart, first: int) -> None:
        """Give back pages before place `first`. The places may go on showing them; nobody looks."""
        assert first <= part.num_mapped, f"place {first} of {part.num_mapped} was never mapped"
        self._num_held -= max(0, first - part.num_released)
        for place in range(part.num_released, first):
            self.prefixes.release(part.pages[place])
            part.pages[place] = UNMAPPED
        part.num_released = max(part.num_released, first)

    def close(self, target: Range) -> None:
        """The sequence is gone. Its places go on showing its pages until others are due there."""
        assert target.is_open, f"range {target.index} is not open"
        self.on_close(target)
        target.is_open = False
        target.capacity = target.promised_tokens = target.num_due_mappings = 0
        self._promise(target)
        for part in target.parts:
            self._num_held -= len(part.pages) - part.num_released
            if part.group.window is not None:
                self.prefixes.use(part.held)
            for page in (*part.held, *(source for source, _ in part.copies)):
                self.prefixes.release(page)
            part.clear()
        self._mapper.due.discard(target.index)
        self._idle.put_back(target)

    # ---- the address space

    def map_ahead(self, wanted: Iterable[tuple[Range, int]]) -> None:
        """Let the thread map what the ranges need for that many tokens, and a little for the
        next one to come. Nothing is granted: whoever is in need may still take those pages."""
        if self.space.is_busy:
            return
        self.space.collect()  # after that question: now nothing is on its way
        longest = self.max_model_len
        needs = [(item, min(number, longest)) for item, number in wanted if number > item.capacity]
        if self._idle:
            eager = min(_EAGER_TOKENS, longest)
            needs.append((self._idle.best(eager), eager))
        places = [
            self._ahead_of(part, part.group.slots_for(num_tokens))
            for target, num_tokens in needs
            for part in target.parts
        ]
        ahead = [page for _, _, pages in places for page in pages]
        try:
            self.space.map_ahead(places)
        finally:
            for page in ahead:
                self.allocator.give_back(page)
        self.allocator.defer(ahead)

    def _ahead_of(self, part: RangePart, num_places: int) -> tuple[int, int, list[int]]:
        """(index, place, pages) that it would get next. The pages are taken."""
        pages: list[int] = []
        while len(part.pages) + len(pages) < num_places and self.num_available:
            pages.append(self._take(part, pages))
        return part.index, len(part.pages), pages

    def trim(self) -> None:
        """Unmap what no sequence needs and give free pages' memory back to the system."""
        self.space.settle()
        self.prefixes.poll()
        self._mapper.unmap_unneeded()
        for first, length in runs_of(self.allocator.cool()):
            try:
                self._memory.release(first, length)
            except OSError as error:  # the pages are free all the same; only the system waits
                logger.warning("giving memory back failed: %s", error)

    def reset(self, num_pages: int, max_mappings: int = MAX_MAPPINGS) -> None:
        """All K/V is lost, and there are so many pages and mappings now. No range is open."""
        assert len(self._idle) == len(self.ranges), "ranges are open"
        while self.prefixes.num_evictable:
            self.prefixes.evict()
        self.space.reset()
        self.space.max_mappings = min(max_mappings, self._most_mappings)
        self.allocator.reset(num_pages)

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
        owners = check_ranges(self.ranges, self._idle, self._mapper.due, self.space)
        promised = sum(item.promised_pages for item in self.ranges)
        assert promised == self._promised, f"{promised} promised, counted {self._promised}"
        held = sum(len(item.pages) for item in self.ranges)
        assert held == self._num_held, f"{held} held, counted {self._num_held}"
        self.prefixes.check_integrity(owners)
        self.allocator.check_integrity(owners)
