"""K/V memory with one pool of pages: which sequence holds which pages, in integers only.

A *range* is contiguous virtual memory for max_model_len tokens. It is divided into *page slots*,
and physical pages are mapped into its slots as its sequence grows. So the K/V of position p lies at
range start + p (start is counted in tokens), and there is no block table.

`open` gives a sequence a range, `grow` gives the range pages, `close` releases them. These three
only change the accounting; `commit` edits the address space at the step boundary, before a kernel
touches the new positions, and `map_ahead` lets a thread do most of that earlier. `insert_prefix`
offers computed pages to the prefix cache. `match` finds them there for the next sequence that
begins with the same tokens, and `open` puts them into its range: sharing copies nothing.

A range has a part for each group of layers (layer_groups.py); most models have one group. Pages
behind a group's sliding window are released while the sequence runs.

+--------------------------------------------------------------------------------------+
| Invariants. A page is free, or it has one reference for each range that holds it,    |
| one if the prefix cache has it, one while it is still to be copied, one while the    |
| page store reads or writes it, and one while it is lent. After a commit, the slots   |
| of an open range map its pages. A sequence writes only to pages that neither another |
| range nor the prefix cache holds.                                                    |
+--------------------------------------------------------------------------------------+
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence

from memory.idle_ranges import IdleRanges
from memory.lent_pages import LentPages
from memory.pages.address_space import AddressSpace, check_ranges
from memory.pages.allocator import PageAllocator, runs_of
from memory.pages.kv_range import UNMAPPED, PrefixHit, Range, RangePart
from memory.pages.layer_groups import LayerGroup, PageLayout
from memory.pages.virtual_memory import VirtualMemory
from memory.prefix.cache import PrefixCache
from memory.prefix.finder import PrefixFinder
from memory.range_mapper import RangeMapper

logger = logging.getLogger(__name__)

# Linux allows a process 65,530 mappings; the rest of the process needs some of them.
MAX_MAPPINGS = 48_000


class KVManager:
    """Implements `KVMemory` and `KVPartition` (kv_memory.py), which describe its methods."""

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
        """Lays out the ranges; the caller must then reserve `total_bytes` in `memory`.

        groups: the layer groups; default: one group without a window, made from token_bytes and
            tile_tokens.
        max_rows: the most tokens of a sequence that one step computes.
        in_background: a thread maps pages ahead of need.
        first_start: where the first range begins, in tokens; partitions follow one another in the
            token numbering.
        max_mappings: no range is opened beyond this many mappings.
        most_mappings: the mappings that the system allows, an upper limit for max_mappings.
        """
        groups = groups or (LayerGroup(token_bytes, tile_tokens),)
        self.page_bytes = memory.page_bytes
        self.max_model_len = max_model_len
        rows = max_rows or max_model_len
        self.layout = layout = PageLayout(groups, memory.page_bytes, max_model_len, rows)
        self.token_bytes, self.range_tokens = layout.token_bytes, layout.range_tokens
        self.page_end, self.pages_for = layout.page_end, layout.pages_for
        self.allocator = PageAllocator(num_pages)
        self.prefixes = PrefixCache(self.allocator, self.pages_for(max_model_len))
        self._finder = PrefixFinder(layout, self.prefixes)
        self.match = self._finder.match
        self.num_shared_pages = self._finder.num_shared_pages
        self.state_interval = next((g.tile_tokens for g in groups if g.is_state), None)
        self.ranges = _make_ranges(layout, num_ranges, first_start)
        numbers = range(len(layout.groups))
        self.space = AddressSpace(
            memory,
            offsets=[self._offset(number, i) for number in numbers for i in range(num_ranges)],
            max_mappings=min(max_mappings, most_mappings),
            in_background=in_background,
        )
        self._memory = memory
        self._most_mappings = most_mappings
        self.on_close: Callable[[Range], None] = lambda target: None
        self._idle = IdleRanges(self.ranges, layout, self.space)
        self._promised = 0  # pages promised to open ranges, the sum of Range.promised_pages
        self._num_held = 0  # pages in ranges; one that n ranges share counts n times
        self._mapper = RangeMapper(
            self.ranges, self._idle, self.space, memory, self.allocator, self.prefixes
        )
        self.commit = self._mapper.commit
        unmap = self._mapper.unmap_pages
        self.lent = LentPages(self.allocator, self.prefixes, memory, unmap)

    # ---- the reservation: all ranges of the first layer group, then those of the next one

    @property
    def total_bytes(self) -> int:
        """Virtual bytes of all ranges."""
        return self.group_offset(len(self.layout.groups))

    def group_offset(self, number: int) -> int:
        """Returns the byte offset of a group's ranges in the reservation, or the reservation's
        size if `number` is the number of groups."""
        before = sum([group.token_bytes for group in self.layout.groups[:number]])
        return self.range_tokens * len(self.ranges) * before

    def _offset(self, number: int, index: int) -> int:
        """Returns the byte offset of a range's part for the group `number`."""
        size = self.range_tokens * self.layout.groups[number].token_bytes
        return self.group_offset(number) + index * size

    def spans(self, target: Range) -> list[tuple[int, int]]:
        """Returns the (first, end) byte offsets of the range's parts in the reservation."""
        return [
            (self._offset(number, target.index), self._offset(number, target.index + 1))
            for number in range(len(self.layout.groups))
        ]

    # ---- sizes

    @property
    def partitions(self) -> list[KVManager]:
        return [self]

    @property
    def num_pages(self) -> int:
        return self.allocator.num_pages

    @property
    def num_available(self) -> int:
        return self.allocator.num_free + self.prefixes.num_evictable

    @property
    def num_unpromised(self) -> int:
        """Free pages minus those promised to open ranges; may be negative, because promises also
        count on evictable pages."""
        return self.allocator.num_free - self._promised

    @property
    def num_cached(self) -> int:
        return self.prefixes.num_evictable

    @property
    def num_in_use(self) -> int:
        return self.num_pages - self.num_available - self.num_lent

    @property
    def num_lent(self) -> int:
        return len(self.lent)

    @property
    def num_mapped(self) -> int:
        return self.num_pages - self.allocator.num_free + self.allocator.num_warm

    def index_tables(self) -> list[Collection[object]]:
        return list(self.prefixes.index.tables)

    @property
    def num_saved(self) -> int:
        return max(0, self._num_held - self.num_in_use)

    @property
    def max_sequence_pages(self) -> int:
        return self.num_pages

    @property
    def num_idle(self) -> int:
        """The ranges that are not open."""
        return len(self._idle)

    def fits_alone(self, num_tokens: int) -> bool:
        return self.pages_for(num_tokens) <= self.num_pages

    def can_fit_pages(self, num_pages: int) -> bool:
        """Returns whether so many pages are neither in use nor promised, and can be mapped."""
        return num_pages <= self.num_available - self._promised and self._mapper.has_room(None)

    def shares_memory(self, one: Range, other: Range) -> bool:
        return True

    def can_fit(self, num_tokens: int, spare_pages: int = 0, hit: PrefixHit | None = None) -> bool:
        need = self.pages_for(num_tokens)
        if hit is not None:
            # A page that must be copied and that only the cache holds cannot be evicted until it is
            # copied.
            references = self.allocator.num_references
            need -= self.num_shared_pages(hit)
            for part in hit.parts:
                need += sum([references(page) == 1 for page in part.copied])
        need += self._promised + spare_pages
        if not self._idle or not self._mapper.has_room(hit):
            return False
        self.lent.ask(need - self.num_available)
        return need <= self.num_available

    def ranges_to_close(self, num_tokens: int, candidates: Sequence[Range]) -> list[Range] | None:
        num_pages = sum([len(target.pages) + target.promised_pages for target in candidates])
        fits = self.pages_for(num_tokens) <= self.num_available - self._promised + num_pages
        return list(candidates) if fits else None

    # ---- prefix cache

    def num_cached_tokens(self, keys: Sequence[bytes], most: int | None = None) -> int:
        most = self.range_tokens if most is None else most
        return self._finder.num_tokens(keys, most, self.prefixes.index.has_key)

    def map_seconds(self, hit: PrefixHit) -> float:
        return self.space.stats.seconds_for(hit.num_calls)

    def fetch(
        self,
        keys: Sequence[bytes],
        compute_s: Callable[[int, int], float] = lambda num_tokens, num_cached: 0.0,
    ) -> bool:
        return self._finder.fetch(keys, self.num_available - self._promised, compute_s)

    def insert_prefix(self, target: Range, keys: Sequence[bytes], num_computed: int) -> None:
        self._finder.insert(target, keys, num_computed)
        if self.state_interval is not None:  # the record before this one is not read any more
            for part in [part for part in target.parts if part.group.is_state]:
                self._release_behind(part, part.group.first_slot(num_computed))
            self._update_promise(target)

    # ---- open, grow, close

    def open(self, num_tokens: int, hit: PrefixHit | None = None) -> Range:
        target = self._idle.take(num_tokens, hit)
        target.is_open = True
        target.promised_tokens = num_tokens
        if hit is not None:
            self._insert_hit(target, hit)
        self._update_promise(target)
        return target

    def _insert_hit(self, target: Range, hit: PrefixHit) -> None:
        """Puts the hit's pages into the first slots of a new range. All of them are held before a
        free page is taken, so that taking it evicts none of them."""
        for part, found in zip(target.parts, hit.parts, strict=True):
            for page in (*found.shared, *found.copied):
                self.prefixes.hold(page)
            part.num_released = part.num_mapped = found.first
            part.pages.extend([UNMAPPED] * found.first + found.shared)
            part.num_offered = part.num_cached = len(part.pages)
        for part, found in zip(target.parts, hit.parts, strict=True):
            for source in found.copied:
                part.copies.append((source, len(part.pages)))
                part.pages.append(self._mapper.take_page(part))
        self._num_held += len(target.pages)
        parts = zip(target.parts, hit.parts, strict=True)
        is_mapped = all(self.space.maps(part.index, it.shared, it.first) for part, it in parts)
        target.num_due_mappings = 0 if is_mapped else hit.num_calls
        self._note_growth(target)

    def _update_promise(self, target: Range) -> None:
        """Sets the pages promised to a range to those that its promised tokens still need."""
        promised = 0
        if target.is_open and target.capacity < target.promised_tokens:
            held = sum([len(part.pages) - part.num_released for part in target.parts])
            promised = max(0, self.pages_for(target.promised_tokens) - held)
        self._promised += promised - target.promised_pages
        target.promised_pages = promised

    def grow(self, target: Range, num_tokens: int, num_computed: int = 0) -> bool:
        if num_tokens <= target.capacity:
            return True
        assert num_tokens <= self.max_model_len, f"{num_tokens} > {self.max_model_len}"
        missing: list[int] = []
        for part in target.parts:
            if part.group.window is not None:
                self._release_behind(part, part.group.first_slot(num_computed))
            missing.append(max(0, part.slots_for(num_tokens) - len(part.pages)))
        self.lent.ask(sum(missing) - self.num_available)
        has_room = sum(missing) <= self.num_available
        if has_room:
            self.space.collect()
            for part, count in zip(target.parts, missing, strict=True):
                self._mapper.extend(part, count)
                self._num_held += count
            self._note_growth(target)
        if target.promised_pages or target.capacity < target.promised_tokens:
            self._update_promise(target)
        return has_room

    def _note_growth(self, target: Range) -> None:
        target.capacity = min([part.capacity for part in target.parts])
        self._mapper.due.add(target.index)

    def _release_behind(self, part: RangePart, first: int) -> None:
        """Releases the pages of the slots before `first`. The slots may stay mapped to them, since
        no kernel reads there."""
        assert first <= part.num_mapped, f"slot {first} of {part.num_mapped} was never mapped"
        self._num_held -= max(0, first - part.num_released)
        for slot in range(part.num_released, first):
            self.prefixes.release(part.pages[slot])
            part.pages[slot] = UNMAPPED
        part.num_released = max(part.num_released, first)

    def close(self, target: Range) -> None:
        # The slots stay mapped to the pages until other pages are mapped there.
        assert target.is_open, f"range {target.index} is not open"
        self.on_close(target)
        target.is_open = False
        target.capacity = target.promised_tokens = target.num_due_mappings = 0
        self._update_promise(target)
        for part in target.parts:
            self._num_held -= len(part.pages) - part.num_released
            if part.group.is_state:  # the next turn begins here, or this one goes on
                self._finder.use(part.newest)
            elif part.group.window is not None:
                self.prefixes.use(part.held)
            for page in (*part.held, *(source for source, _ in part.copies)):
                self.prefixes.release(page)
            part.clear()
        self._mapper.due.discard(target.index)
        self._idle.put_back(target)

    def lend(self, count: int, num_kept: int) -> None:
        """Lends up to `count` pages that are not promised, and leaves num_kept of these."""
        count = min(count, self.num_available - self._promised - num_kept)
        if count > 0:
            self.space.settle()  # its thread may be giving memory to free pages
            self.lent.lend(count)

    # ---- the address space

    @property
    def maps_ahead(self) -> bool:
        return self.space.maps_ahead

    def map_ahead(self, wanted: Iterable[tuple[Range, int]]) -> None:
        longest = self.max_model_len
        needs = [(item, min(count, longest)) for item, count in wanted if count > item.capacity]
        self._mapper.map_ahead(needs, longest)

    def trim(self) -> None:
        self.space.settle()
        self.prefixes.poll()
        self._mapper.unmap_unneeded()
        for first, length in runs_of(self.allocator.cool()):
            try:
                self._memory.release(first, length)
            except OSError as error:  # the pages stay free; the system gets the memory later
                logger.warning("giving memory back failed: %s", error)

    def reset(self, num_pages: int, max_mappings: int = MAX_MAPPINGS) -> None:
        assert len(self._idle) == len(self.ranges), "ranges are open"
        while self.prefixes.num_evictable:
            self.prefixes.evict()
        self.space.reset()
        self.space.max_mappings = min(max_mappings, self._most_mappings)
        self.allocator.reset(num_pages)

    def close_all(self, timeout_s: float = 30.0) -> None:
        try:
            self.prefixes.close(timeout_s)
            self.trim()
        finally:
            self.space.close()

    def check_integrity(self) -> None:
        owners = check_ranges(self.ranges, self._idle, self._mapper.due, self.space)
        promised = sum(item.promised_pages for item in self.ranges)
        assert promised == self._promised, f"{promised} promised, counted {self._promised}"
        held = sum(len(item.pages) for item in self.ranges)
        assert held == self._num_held, f"{held} held, counted {self._num_held}"
        for page in self.lent.pages:
            owners[page] = owners.get(page, 0) + 1
        self.prefixes.check_integrity(owners)
        self.allocator.check_integrity(owners)


def _make_ranges(layout: PageLayout, num_ranges: int, first_start: int) -> list[Range]:
    """Returns closed ranges that follow one another from first_start on, in tokens."""
    groups = list(enumerate(layout.groups))
    return [
        Range(
            i,
            [RangePart(group, number * num_ranges + i) for number, group in groups],
            first_start + i * layout.range_tokens,
        )
        for i in range(num_ranges)
    ]
