"""K/V memory whose sequences grow over several holders, in integers only.

Tokens [i * L, (i + 1) * L) of a sequence are its segment i. This machine, holder 0, has the first
segment and whatever layers with windows keep; the others go round holders 1, 2, ..., without those
that are lost. A segment on a holder is a range of its own there, which is opened when the sequence
is known to reach it, so a sequence that ends within its first segment costs nothing more than
without holders.

The scheduler sees the pages of this machine. Whether the holders have room is checked besides, when
a sequence is admitted and when it grows. Only first segments are in the prefix cache.

With takes_whole a sequence for which this machine has no room begins on a holder: its first segment
is there too, and this machine gives it addresses but no page. Then the scheduler sees the holders'
pages as well, counted in tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from memory.kv_manager import KVManager
from memory.kv_memory import PrefixState
from memory.pages.kv_range import PrefixHit, Range

LOST = -1
"""Stands for holders that are lost, where a segment would be."""
_GROWTH_SHARE = 8  # one page in so many stays for the sequences that began here


class SegmentedKV:
    """Implements KVMemory. Holder i of the nodes, which count from 0, is holder i + 1 here."""

    def __init__(
        self,
        own: KVManager,
        holders: Sequence[KVManager],
        segment_tokens: int,
        max_model_len: int,
        most_segments: int | None = None,
        *,
        takes_whole: bool = False,
    ) -> None:
        """own: this machine's memory, of layouts whose layers without windows keep segment_tokens
        tokens (LayerGroup.max_tokens). holders: their ranges have segment_tokens tokens.
        most_segments: of one sequence on one holder; by default as many as all holders need.
        takes_whole: sequences may begin on a holder; no layer has a window then."""
        assert holders, "without holders, KVManager is enough"
        num_segments = -(-max_model_len // segment_tokens) - 1
        self._most_segments = most_segments or max(1, -(-num_segments // len(holders)))
        self.own = own
        self.partitions = list(holders)
        self.max_model_len = max_model_len
        self.segment_tokens = self._length = segment_tokens
        # By the start of a sequence's range: (holder, range) of its segments on holders, in order.
        self._long: dict[int, list[tuple[int, Range]]] = {}
        self._takes_whole = takes_whole
        self.begun_away: set[int] = set()
        """The starts of the ranges of sequences that began on a holder."""
        self._num_open = 0
        self._emptied: set[int] = set()  # lenders where a range was closed
        self._short_of: dict[int, int] = {}  # the holder that had too few pages, by that start
        self.page_bytes, self.token_bytes, self.layout = own.page_bytes, own.token_bytes, own.layout
        self.page_end, self.state_interval = own.page_end, own.state_interval
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
        first = 0 if start in self.begun_away else 1
        holder, target = self._long[start][segment - first]
        return holder, target.index

    def has_part_on(self, target: Range, holders: Collection[int]) -> bool:
        """Returns whether the range's sequence has a segment on one of these holders."""
        return any(holder in holders for holder, _ in self._segments_of(target))

    def _lengths(self, num_tokens: int, first: int = 1) -> list[int]:
        """Returns the tokens in segments `first`, `first` + 1, ... of a sequence."""
        whole, rest = divmod(num_tokens, self._length)
        return [self._length] * (whole - first) + [rest] * (rest > 0 and whole >= first)

    def _needs(
        self, num_tokens: int, away: int | None = None
    ) -> tuple[Counter[int], Counter[int]] | None:
        """Returns the pages and the ranges that a new sequence needs on each holder, or None if it
        needs holders that are lost. away: the holder where it begins."""
        pages: Counter[int] = Counter()
        ranges: Counter[int] = Counter()
        if away is not None:
            pages[away] += self.partitions[away].pages_for(min(num_tokens, self._length))
            ranges[away] += 1
        for segment, length in enumerate(self._lengths(num_tokens), 1):
            holder = self._place(ranges, segment)
            if holder is None:
                return None
            pages[holder] += self.partitions[holder].pages_for(length)
        return pages, ranges

    def _clipped(self, num_tokens: int) -> int:
        return min(num_tokens, self.own.max_model_len)

    def _away_for(self, num_tokens: int) -> int | None:
        """Returns the holder with the most room of those where such a sequence can begin."""
        if not self._takes_whole or not self.own.num_idle:
            return None
        numbers = range(len(self.partitions))
        for holder in sorted(numbers, key=lambda i: -self.partitions[i].num_available):
            if self.partitions[holder].num_pages and self._fits_there(num_tokens, holder):
                return holder
        return None

    # ---- sizes

    def pages_for(self, num_tokens: int) -> int:
        count = self.own.pages_for(min(num_tokens, self._length))
        if self._takes_whole and num_tokens > self._length:
            count += -(-(num_tokens - self._length) // self._page_tokens)
        return count

    @property
    def _page_tokens(self) -> int:
        return self.layout.groups[0].tokens_in(1)

    def _with_holders(self, own: int, count_of: Callable[[KVManager], int]) -> int:
        """Adds the holders' pages to a number of own ones, as pages of as many tokens."""
        if not self._takes_whole:
            return own
        tokens = [count_of(it) * it.layout.groups[0].tokens_in(1) for it in self.partitions]
        return own + sum(tokens) // self._page_tokens

    @property
    def num_pages(self) -> int:
        return self._with_holders(self.own.num_pages, lambda it: it.num_pages)

    @property
    def num_available(self) -> int:
        return self._with_holders(self.own.num_available, lambda it: it.num_available)

    @property
    def num_cached(self) -> int:
        return self.own.num_cached

    @property
    def num_in_use(self) -> int:
        return self._with_holders(self.own.num_in_use, lambda it: it.num_in_use)

    @property
    def num_lent(self) -> int:
        return self.own.num_lent

    @property
    def num_borrowed_bytes(self) -> int:
        """The bytes of K/V on holders."""
        return sum([it.num_in_use * it.page_bytes for it in self.partitions])

    @property
    def num_mapped(self) -> int:
        return self.own.num_mapped

    @property
    def num_saved(self) -> int:
        return self.own.num_saved

    @property
    def max_sequence_pages(self) -> int:
        return self.own.num_pages

    def fits_alone(self, num_tokens: int) -> bool:
        needs = self._needs(num_tokens)
        if needs is None or not self.own.fits_alone(self._clipped(num_tokens)):
            return False
        pages, ranges = needs
        return all(
            count <= self.partitions[i].num_pages and ranges[i] <= len(self.partitions[i].ranges)
            for i, count in pages.items()
        )

    def shares_memory(self, one: Range, other: Range) -> bool:
        """other: a range that could not grow. Only pages of the same holder help it then."""
        holder = self._short_of.get(other.start)
        if holder is None:
            return one is other or one.start not in self.begun_away
        return one is other or self.has_part_on(one, (holder,))

    def can_fit(self, num_tokens: int, spare_pages: int = 0, hit: PrefixHit | None = None) -> bool:
        if self._fits_here(num_tokens, spare_pages, hit):
            return True
        return hit is None and self._away_for(num_tokens) is not None

    def _fits_here(self, num_tokens: int, spare_pages: int, hit: PrefixHit | None) -> bool:
        """Returns whether a new sequence can begin in this machine's memory."""
        if not self.own.can_fit(self._clipped(num_tokens), spare_pages, hit):
            return False
        if num_tokens <= self._length:
            return True
        return self._fits_there(num_tokens)

    def _fits_there(self, num_tokens: int, away: int | None = None) -> bool:
        """Returns whether holders have room for what a new sequence needs of them."""
        needs = self._needs(num_tokens, away)
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
        own = self.own.ranges_to_close(self._clipped(num_tokens), candidates)
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
            fits = memory.can_fit_pages(pages[holder] - gained)
            if not fits or ranges[holder] > memory.num_idle + len(leaving):
                return None
        return list(candidates)

    def _segments_of(self, target: Range) -> list[tuple[int, Range]]:
        return self._long.get(target.start, [])

    # ---- prefix cache

    def match(self, keys: Sequence[bytes], max_tokens: int) -> PrefixHit | None:
        hit = self.own.match(keys, min(max_tokens, self._length))
        needed = max_tokens + 1
        if hit is None or not self._takes_whole or self._fits_here(needed, self._num_open, hit):
            return hit
        # to compute the prefix again is better than to wait
        return hit if self._away_for(needed) is None else None

    def num_cached_tokens(self, keys: Sequence[bytes]) -> int:
        return min(self.own.num_cached_tokens(keys), self._length)

    def fetch(
        self,
        keys: Sequence[bytes],
        compute_s: Callable[[int, int], float] = lambda num_tokens, num_cached: 0.0,
    ) -> bool:
        return False  # holders have no page store

    def insert_prefix(self, target: Range, keys: Sequence[bytes], num_computed: int) -> None:
        if target.start not in self.begun_away:
            self.own.insert_prefix(target, keys, min(num_computed, self._length))

    # ---- ranges

    def open(self, num_tokens: int, hit: PrefixHit | None = None) -> Range:
        used: Counter[int] = Counter()
        away = None if hit is not None else self._chosen_holder(num_tokens)
        target = self.own.open(self._clipped(num_tokens) if away is None else 0, hit)
        self._num_open += 1
        lengths = self._lengths(num_tokens)
        if away is not None:
            self.begun_away.add(target.start)
            used[away] += 1
            self._add_segment(target, away, min(num_tokens, self._length))
        for segment, length in enumerate(lengths, 1):
            holder = self._place(used, segment)
            assert holder is not None, "the caller has checked can_fit"
            self._add_segment(target, holder, length)
        self._set_capacity(target)
        return target

    def _chosen_holder(self, num_tokens: int) -> int | None:
        """Returns the holder where a new sequence begins, None: here. Sequences that began here
        keep some pages to grow, if a holder has room."""
        if not self._takes_whole:
            return None
        kept = max(self._num_open, self.own.num_pages // _GROWTH_SHARE)
        return None if self._fits_here(num_tokens, kept, None) else self._away_for(num_tokens)

    def _add_segment(self, target: Range, holder: int, num_tokens: int) -> None:
        found = self._long.setdefault(target.start, [])
        found.append((holder, self.partitions[holder].open(num_tokens)))

    def grow(self, target: Range, num_tokens: int, num_computed: int = 0) -> bool:
        self._short_of.pop(target.start, None)
        if num_tokens > target.capacity:
            fits = target.start in self.begun_away or self.own.grow(
                target, self._clipped(num_tokens), num_computed
            )
            fits = fits and self._grow_segments(target, num_tokens)
            self._set_capacity(target)
            return fits
        return True

    def _grow_segments(self, target: Range, num_tokens: int) -> bool:
        first = 0 if target.start in self.begun_away else 1
        for number, length in enumerate(self._lengths(num_tokens, first)):
            segments = self._segments_of(target)
            if number >= len(segments):
                used = Counter([holder for holder, _ in segments])
                next_one = self._place(used, first + number)
                if next_one is None:
                    self._short_of[target.start] = LOST
                    return False
                if not self._has_room(next_one, self.partitions[next_one].pages_for(length), 1):
                    self._short_of[target.start] = next_one
                    return False
                self._add_segment(target, next_one, length)
                segments = self._segments_of(target)
            holder, part = segments[number]
            if not self.partitions[holder].grow(part, length):
                self._short_of[target.start] = holder
                return False
        return True

    def _set_capacity(self, target: Range) -> None:
        """Sets the tokens that fit into the range's pages and those of its segments, which the
        accounting of this machine does not know."""
        own, capacity = self.max_model_len, 0
        if target.start not in self.begun_away:
            own = min([part.capacity for part in target.parts])
            capacity = self._length
        for _, part in self._segments_of(target):
            capacity += min(part.capacity, self._length)
            if part.capacity < self._length:
                break
        target.capacity = min(own, capacity)

    def close(self, target: Range) -> None:
        self._short_of.pop(target.start, None)
        for holder, part in self._long.pop(target.start, []):
            self.partitions[holder].close(part)
            if self._takes_whole:
                self._emptied.add(holder)
        self.begun_away.discard(target.start)
        self._num_open -= 1
        self.own.close(target)

    # ---- mapping

    @property
    def maps_ahead(self) -> bool:
        return self.own.maps_ahead

    def map_ahead(self, wanted: Iterable[tuple[Range, int]]) -> None:
        most, away = self.own.max_model_len, self.begun_away
        self.own.map_ahead([(x, n) for x, n in wanted if n <= most and x.start not in away])

    def commit(self, targets: Iterable[Range] | None = None) -> None:
        wanted = None if targets is None else list(targets)
        while self._emptied:  # a lender gets memory back as soon as nothing is there
            memory = self.partitions[self._emptied.pop()]
            if memory.num_idle == len(memory.ranges):
                memory.trim()
        self.own.commit(wanted)
        for holder, memory in enumerate(self.partitions):
            if wanted is None:
                memory.commit()
            else:
                parts = [part for it in wanted for part in self._segments_of(it)]
                memory.commit([part for owner, part in parts if owner == holder])

    def trim(self) -> None:
        self.own.trim()
        for memory in self.partitions:
            memory.trim()

    def close_all(self, timeout_s: float = 30.0) -> None:
        for memory in self.partitions:
            memory.close_all(timeout_s)
        self.own.close_all(timeout_s)

    def check_integrity(self) -> None:
        self.own.check_integrity()
        for memory in self.partitions:
            memory.check_integrity()
        opened = Counter(holder for it in self._long.values() for holder, _ in it)
        for holder, memory in enumerate(self.partitions):
            num_open = len(memory.ranges) - memory.num_idle
            assert opened[holder] == num_open, f"{opened[holder]} segments, {num_open} ranges"
