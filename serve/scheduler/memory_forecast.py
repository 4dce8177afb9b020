"""The peak of K/V memory in one forecast of the running sequences. Integers only."""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heappop, heappush
from itertools import accumulate, count
from math import ceil
from operator import add, mul

from memory.kv_memory import KVMemory
from serve.scheduler.sequence import Sequence

ForecastEntry = tuple[int, int, int]
"""(end, start, key): see MemoryForecast."""


def entry_of(
    sequence: Sequence, length: int, first: int, key: int, slope: float = 1.0
) -> ForecastEntry:
    """Returns the entry of a sequence that gets its next token in step `first` and ends with
    `length` output tokens; the K/V of the last one is never written. slope: its tokens a step; 0
    where K/V is dropped: the entry has the most tokens that it holds until then, a token that only
    some layers hold for their part."""
    remaining = length - sequence.num_output_tokens
    if sequence.drops is not None:
        end = sequence.num_tokens + remaining - 1
        return first + remaining - 1, sequence.drops.most_held(end), key
    if slope == 1.0:
        return first + remaining - 1, sequence.num_tokens - first, key
    end = first + max(1, ceil(remaining / slope)) - 1
    return end, round(sequence.num_tokens + remaining - 1 - slope * end), key


class MemoryForecast:
    """A forecast of when each running sequence ends, and so of the memory that all need.

    An entry (end, start, key): the sequence has start + t tokens at step t, up to and including
    t = end. The peak is at the end of a sequence: sorted by end, the i sequences that end last
    need the sum of their starts plus i times the end of the first of them (LightLLM's "future
    required memory"). An entry stays valid while its sequence grows by one token a step, or by its
    slope: the sequence then has start + slope * t tokens.
    """

    __slots__ = ("entries", "slopes")

    def __init__(self) -> None:
        self.entries: list[ForecastEntry] = []
        self.slopes: dict[int, float] = {}  # by key, of the entries that have another one than 1

    def add(self, entry: ForecastEntry, slope: float = 1.0) -> None:
        """Adds an entry. slope: 1 where windows bound the tokens."""
        insort(self.entries, entry)
        if slope != 1.0:
            self.slopes[entry[2]] = slope

    def remove(self, entry: ForecastEntry) -> None:
        del self.entries[bisect_left(self.entries, entry)]
        if self.slopes:
            self.slopes.pop(entry[2], None)

    def overdue(self, step: int) -> list[ForecastEntry]:
        """Returns the entries that should have ended before `step`."""
        return self.entries[: bisect_left(self.entries, (step,))]

    def peak_pages(self, kv: KVMemory, capacity: int) -> int:
        """Returns the pages at the peak, exact if that decides whether they exceed `capacity`.

        The peak is estimated in tokens plus half a page for each group of each sequence; pages are
        counted only if rounding could decide. It takes 20 us for 256 sequences, 50 us with
        counting.
        """
        groups = kv.layout.groups
        if kv.layout.is_bounded:
            pages, at = self._peak_with_windows(kv)
        elif self.slopes:
            pages, at = self._peak_with_slopes(kv)
        else:
            pages, at = self._peak(kv)
        if not at or abs(pages - capacity) > at * len(groups):
            return pages
        alive = self.entries[-at:]
        last = alive[0][0]
        if self.slopes:
            slope, starts = self.slopes.get, [(start, key) for _, start, key in alive]
            return sum([kv.layout.pages_at(int(at + slope(key, 1.0) * last)) for at, key in starts])
        return sum([kv.layout.pages_at(start + last) for _, start, _ in alive])

    def _peak(self, kv: KVMemory) -> tuple[int, int]:
        """Returns the pages at the peak, and the number of sequences alive then."""
        half_page = len(kv.layout.groups) * kv.page_bytes // kv.token_bytes // 2
        last_first = self.entries[::-1]
        totals = accumulate([start for _, start, _ in last_first])
        ends = [end + half_page for end, _, _ in last_first]
        needs = list(map(add, totals, map(mul, ends, count(1))))
        most = max(needs, default=0)
        return most * kv.token_bytes // kv.page_bytes, needs.index(most) + 1 if needs else 0

    def _peak_with_slopes(self, kv: KVMemory) -> tuple[int, int]:
        """Returns the same for sequences that get several tokens a step."""
        half_page = len(kv.layout.groups) * kv.page_bytes // kv.token_bytes // 2
        most, most_at = 0, 0
        total, slopes = 0, 0.0  # of the sequences that are alive
        for number, (end, start, key) in enumerate(reversed(self.entries), 1):
            total, slopes = total + start, slopes + self.slopes.get(key, 1.0)
            need = int(total + end * slopes) + number * half_page
            if need > most or not most_at:
                most, most_at = need, number
        return most * kv.token_bytes // kv.page_bytes, most_at

    def _peak_with_windows(self, kv: KVMemory) -> tuple[int, int]:
        """Returns the same for layers with sliding windows, which bound a sequence's tokens.

        From the last end backwards, sequences that filled their window at one end are below the
        bound at an earlier one: they leave the heap of full ones, the smallest start first.
        """
        ends = [end for end, _, _ in reversed(self.entries)]
        need = [0] * len(ends)
        for group in kv.layout.groups:
            most = group.max_decode_pages * kv.page_bytes // group.token_bytes
            if group.is_state:
                most = group.tile_tokens + 1
            full: list[int] = []  # a heap of the starts of sequences that need `most`
            total = count = 0  # of the other sequences: the sum of their starts, and their number
            for number, (end, start, _) in enumerate(reversed(self.entries)):
                heappush(full, start)
                while full and full[0] + end < most:
                    total += heappop(full)
                    count += 1
                if group.is_state:  # a sequence has a whole record, and then two
                    records = count * group.slots_for(1) + len(full) * group.max_decode_pages
                    need[number] += records * kv.page_bytes
                    continue
                tokens = total + count * end + len(full) * most
                need[number] += tokens * group.token_bytes
        half_pages = kv.page_bytes * len(kv.layout.groups) // 2
        need = [bytes_ + number * half_pages for number, bytes_ in enumerate(need, 1)]
        at = max(range(len(need)), key=need.__getitem__, default=-1)
        return (need[at] // kv.page_bytes, at + 1) if at >= 0 else (0, 0)
