"""K/V memory whose sequences grow over several holders, in integers only.

Tokens [i * L, (i + 1) * L) of a sequence are its segment i. This machine, holder 0, has the first
segment and whatever layers with windows keep; the others go round holders 1, 2, ..., without those
that are lost. A segment on a holder is a range of its own there, which is opened when the sequence
is known to reach it, so a sequence that ends within its first segment costs nothing more than
without holders.

The scheduler sees the pages of this machine. Whether the holders have room is checked besides, when
a sequence is admitted and when it grows. Only first segments are in the prefix cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from memory.kv_manager import KVManager
from memory.kv_memory import PrefixState
from memory.pages.kv_range import PrefixHit, Range

LOST = -1
"""Stands for holders that are lost, where a segment would be."""


@dataclass(slots=True)
class _Long:
    """The segments of a sequence on holders: (holder, range) of segments 1, 2, ..."""

    segments: list[tuple[int, Range]] = field(default_factory=list)


class SegmentedKV:
    """Implements KVMemory. Holder i of the nodes, which count from 0, is holder i + 1 here."""

    def __init__(
        self,
        own: KVManager,
        holders: Sequence[KVManager],
        segment_tokens: int,
        max_model_len: int,
        most_segments: int | None = None,
    ) -> None:
        """own: this machine's memory, of layouts whose layers without windows keep segment_tokens
        tokens (LayerGroup.max_tokens). holders: their ranges have segment_tokens tokens.
        most_segments: of one sequence on one holder; by default as many as all holders need."""
        assert holders, "without holders, KVManager is enough"
        num_segments = -(-max_model_len // segment_tokens) - 1
        self._most_segments = most_segments or max(1, -(-num_segments // len(holders)))
        self._own = own
        self.partitions = list(holders)
        self.max_model_len = max_model_len
        self.segment_tokens = self._length = segment_tokens
        self._long: dict[int, _Long] = {}  # by the start of the sequence's range
        self._short_of: dict[int, int] = {}  # the holder that had too few pages, by that start
        self.page_bytes, self.token_bytes, self.layout = own.page_bytes, own.token_bytes, own.layout
        self.page_end, self.pages_for = own.page_end, own.pages_for
        self.prefixes: PrefixState = own.prefixes
        self.index_tables: Callable[[], list[Collection[object]]] = own.index_tables
        self.num_shared_pages, self.map_seconds = own.num_shared_pages, own.map_seconds

    # ---- segments

    def _place(self, used: Counter[int], segment: int) -> int | None:
        """Returns the holder of a new segment and notes it in `used`, the sequence's segments on
        each holder; None if no holder may take it."""
        count = len(self.partitions)
        for turn in range(segment - 1, segment - 1 + count):
            holder = turn % count
            if self.partitions[holder].num_pages and used[holder] < self._most_segments:
                used[holder] += 1
                return holder
        return None

    def locate(self, start: int, segment: int) -> tuple[int, int]:
        """Returns a segment's holder, and the index of its range there."""
        holder, target = self._long[start].segments[segment - 1]
        return holder, target.index

    def has_part_on(self, target: Range, holders: Collection[int]) -> bool:
        """Returns whether the range's sequence has a segment on one of these holders."""
        found = self._long.get(target.start)
        return found is not None and any(holder in holders for holder, _ in found.segments)

    def _lengths(self, num_tokens: int) -> list[int]:
        """Returns the tokens in segments 1, 2, ... of a sequence."""
        whole, rest = divmod(num_tokens, self._length)
        return [self._length] * (whole - 1) + [rest] * (rest > 0 and whole > 0)

    def _needs(self, num_tokens: int) -> tuple[Counter[int], Counter[int]] | None:
        """Returns the pages and the ranges that a new sequence needs on each holder, or None if it
        needs holders that are lost."""
        pages: Counter[int] = Counter()
        ranges: Counter[int] = Counter()
        for segment, length in enumerate(self._lengths(num_tokens), 1):
            holder = self._place(ranges, segment)
            if holder is None:
                return None
            pages[holder] += self.partitions[holder].pages_for(length)
        return pages, ranges

    def _clipped(self, num_tokens: int) -> int:
        return min(num_tokens, self._own.max_model_len)

    # ---- sizes

    @property
    def num_pages(self) -> int:
        return self._own.num_pages

    @property
    def num_available(self) -> int:
        return self._own.num_available

    @property
    def num_cached(self) -> int:
        return self._own.num_cached

    @property
    def num_in_use(self) -> int:
        return self._own.num_in_use

    @property
    def num_mapped(self) -> int:
        return self._own.num_mapped

    @property
    def num_saved(self) -> int:
        return self._own.num_saved

    @property
    def max_sequence_pages(self) -> int:
        return self._own.num_pages

    def fits_alone(self, num_tokens: int) -> bool:
        needs = self._needs(num_tokens)
        if needs is None or not self._own.fits_alone(self._clipped(num_tokens)):
            return False
        pages, ranges = needs
        return all(
            count <= self.partitions[i].num_pages and ranges[i] <= len(self.partitions[i].ranges)
            for i, count in pages.items()
        )

    def shares_memory(self, one: Range, other: Range) -> bool:
        """other: a range that could not grow. Only pages of the same holder help it then."""
        holder = self._short_of.get(other.start)
        return holder is None or one is other or self.has_part_on(one, (holder,))

    def can_fit(self, num_tokens: int, spare_pages: int = 0, hit: PrefixHit | None = None) -> bool:
        if not self._own.can_fit(self._clipped(num_tokens), spare_pages, hit):
            return False
        if num_tokens <= self._length:
            return True
        needs = self._needs(num_tokens)
        if needs is None:
            return False
        pages, ranges = needs
        return all(self._has_room(i, pages[i], ranges[i]) for i in pages)

    def _has_room(self, holder: int, num_pages: int, num_ranges: int) -> bool:
        """Returns whether a holder has so many pages that are not promised, and idle ranges."""
        memory = self.partitions[holder]
        return num_ranges <= memory.num_idle and memory.can_fit_pages(num_pages)

    def ranges_to_close(self, num_tokens: int, candidates: Sequence[Range]) -> list[Range] | None:
        needs = self._needs(num_tokens)
        own = self._own.ranges_to_close(self._clipped(num_tokens), candidates)
        if needs is None or own is None:
            return None
        pages, ranges = needs
        for holder in pages:
            memory = self.partitions[holder]
            leaving = [
                target
                for it in candidates
                for owner, target in self._segments_of(it)
                if owner == holder
            ]
            gained = sum([len(target.pages) + target.promised_pages for target in leaving])
            if ranges[holder] > memory.num_idle + len(leaving):
                return None
            if not memory.can_fit_pages(pages[holder] - gained):
                return None
        return list(candidates)

    def _segments_of(self, target: Range) -> list[tuple[int, Range]]:
        found = self._long.get(target.start)
        return [] if found is None else found.segments

    # ---- prefix cache

    def match(self, keys: Sequence[bytes], max_tokens: int) -> PrefixHit | None:
        return self._own.match(keys, min(max_tokens, self._length))

    def num_cached_tokens(self, keys: Sequence[bytes]) -> int:
        return min(self._own.num_cached_tokens(keys), self._length)

    def fetch(
        self,
        keys: Sequence[bytes],
        compute_s: Callable[[int, int], float] = lambda num_tokens, num_cached: 0.0,
    ) -> bool:
        return False  # holders have no page store

    def insert_prefix(self, target: Range, keys: Sequence[bytes], num_computed: int) -> None:
        self._own.insert_prefix(target, keys, min(num_computed, self._length))

    # ---- ranges

    def open(self, num_tokens: int, hit: PrefixHit | None = None) -> Range:
        target = self._own.open(self._clipped(num_tokens), hit)
        lengths = self._lengths(num_tokens)
        used: Counter[int] = Counter()
        for segment, length in enumerate(lengths, 1):
            holder = self._place(used, segment)
            assert holder is not None, "the caller has checked can_fit"
            self._add_segment(target, holder, length)
        self._set_capacity(target)
        return target

    def _add_segment(self, target: Range, holder: int, num_tokens: int) -> None:
        found = self._long.setdefault(target.start, _Long())
        found.segments.append((holder, self.partitions[holder].open(num_tokens)))

    def grow(self, target: Range, num_tokens: int, num_computed: int = 0) -> bool:
        self._short_of.pop(target.start, None)
        if num_tokens > target.capacity:
            fits = self._own.grow(target, self._clipped(num_tokens), num_computed)
            fits = fits and self._grow_segments(target, num_tokens)
            self._set_capacity(target)
            return fits
        return True

    def _grow_segments(self, target: Range, num_tokens: int) -> bool:
        lengths = self._lengths(num_tokens)
        if not lengths:
            return True
        for number, length in enumerate(lengths, 1):
            segments = self._segments_of(target)
            if number > len(segments):
                next_one = self._place(Counter([holder for holder, _ in segments]), number)
                if next_one is None:
                    self._short_of[target.start] = LOST
                    return False
                if not self._has_room(next_one, self.partitions[next_one].pages_for(length), 1):
                    self._short_of[target.start] = next_one
                    return False
                self._add_segment(target, next_one, length)
                segments = self._segments_of(target)
            holder, part = segments[number - 1]
            if not self.partitions[holder].grow(part, length):
                self._short_of[target.start] = holder
                return False
        return True

    def _set_capacity(self, target: Range) -> None:
        """Sets the tokens that fit into the range's pages and those of its segments, which the
        accounting of this machine does not know."""
        own = min([part.group.capacity(len(part.pages)) for part in target.parts])
        capacity = self._length
        for _, part in self._segments_of(target):
            capacity += min(part.capacity, self._length)
            if part.capacity < self._length:
                break
        target.capacity = min(own, capacity)

    def close(self, target: Range) -> None:
        self._short_of.pop(target.start, None)
        found = self._long.pop(target.start, _Long())
        for holder, part in found.segments:
            self.partitions[holder].close(part)
        self._own.close(target)

    # ---- mapping

    @property
    def maps_ahead(self) -> bool:
        return self._own.maps_ahead

    def map_ahead(self, wanted: Iterable[tuple[Range, int]]) -> None:
        limit = self._own.max_model_len
        self._own.map_ahead([(target, count) for target, count in wanted if count <= limit])

    def commit(self, targets: Iterable[Range] | None = None) -> None:
        wanted = None if targets is None else list(targets)
        self._own.commit(wanted)
        for holder, memory in enumerate(self.partitions):
            if wanted is None:
                memory.commit()
            else:
                parts = [part for it in wanted for part in self._segments_of(it)]
                memory.commit([part for owner, part in parts if owner == holder])

    def trim(self) -> None:
        self._own.trim()
        for memory in self.partitions:
            memory.trim()

    def close_all(self, timeout_s: float = 30.0) -> None:
        for memory in self.partitions:
            memory.close_all(timeout_s)
        self._own.close_all(timeout_s)

    def check_integrity(self) -> None:
        self._own.check_integrity()
        for memory in self.partitions:
            memory.check_integrity()
        opened = Counter(holder for it in self._long.values() for holder, _ in it.segments)
        for holder, memory in enumerate(self.partitions):
            num_open = len(memory.ranges) - memory.num_idle
            assert opened[holder] == num_open, f"{opened[holder]} segments, {num_open} ranges"
