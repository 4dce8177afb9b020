"""What the ranges show: which page is mapped at which place, and the edits that change it.

Apart from the books (`memory.kv_manager`): a range may go on showing pages that it does not own
any more. Nobody looks there, and when the next sequence in the range gets the same pages again,
nothing has to be mapped. Edits are made at the step boundary (`show`), except that places beyond
the end of a range may be mapped ahead of need by a thread of their own (`ahead`; vAttention,
arXiv 2405.04437, section 6): a step then waits for no system call.

Linux limits the mappings of a process (vm.max_map_count, 65,530 by default). Consecutive pages
at consecutive places are one mapping; `num_mappings` counts them, and stale ones are unmapped
when they come near the limit.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from memory.pages.allocator import runs_of
from memory.pages.kv_range import UNMAPPED, Range, RangePart
from memory.pages.map_worker import MapJob, MapWorker
from memory.pages.vmm import VirtualMemory

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class MappingStats:
    """num_calls at step boundaries took seconds; num_ahead were made by the thread."""

    num_calls: int = 0
    seconds: float = 0.0
    num_ahead: int = 0
    num_waits: int = 0

    def seconds_for(self, num_calls: int) -> float:
        """What so many calls take; 0 before the first one."""
        return num_calls * self.seconds / max(1, self.num_calls)


class AddressSpace:
    """The places of ranges that begin at `offsets` (bytes) of the reservation."""

    def __init__(
        self,
        memory: VirtualMemory,
        *,
        offsets: Sequence[int],
        max_mappings: int,
        in_background: bool = True,
    ) -> None:
        self.stats = MappingStats()
        self.max_mappings = max_mappings
        self.num_mappings = 0
        self._memory = memory
        self._offsets = offsets
        self._mapped: list[list[int]] = [[] for _ in offsets]
        self._num_runs = [0] * len(offsets)
        self._worker = MapWorker(memory) if in_background else None

    def mapped(self, index: int) -> Sequence[int]:
        """Pages at the places of a range from its first one on; -1 where nothing is mapped."""
        return self._mapped[index]

    def num_mapped(self, indices: Iterable[int]) -> list[int]:
        """How many places each of these ranges shows."""
        mapped = self._mapped
        return [len(mapped[index]) for index in indices]

    def has_room(self, num_more: int, idle: Iterable[int]) -> bool:
        """For so many more mappings, if those of idle ranges give way."""
        excess = self.num_mappings + num_more - self.max_mappings
        return excess <= 0 or excess <= sum(map(self._num_runs.__getitem__, idle))

    def maps(self, index: int, pages: Sequence[int], place: int = 0) -> bool:
        """Whether these pages are at a range's places from `place` on."""
        mapped = self._mapped[index]
        if not pages:
            return True
        is_begun = place < len(mapped) and mapped[place] == pages[0]
        return is_begun and mapped[place : place + len(pages)] == pages

    def map(self, index: int, pages: Sequence[int], first: int = 0) -> None:
        """Map what differs in the first len(pages) places, from `first` on; the rest stays.

        One call per run of consecutive pages. OSError: what was mapped until then is kept, the
        call can be repeated.
        """
        self.collect()
        mapped = self._mapped[index]
        if mapped[first : len(pages)] == pages[first:]:
            return
        self.settle()
        began = time.perf_counter()
        try:
            for place, length in _differing(mapped, pages, first):
                self._map(index, place, pages[place], length)
        finally:
            self.stats.seconds += time.perf_counter() - began

    def _map(self, index: int, place: int, first_page: int, length: int) -> None:
        offset = self._offset(index, place)
        try:
            self._memory.map(offset, first_page, length)
        except OSError:  # part of it may be there, and what was there may be gone
            with contextlib.suppress(OSError):
                self._memory.unmap(offset, length)
            num_stale = min(length, len(self._mapped[index]) - place)
            self._record(index, place, [UNMAPPED] * max(0, num_stale))
            raise
        self._record(index, place, range(first_page, first_page + length))
        self.stats.num_calls += 1

    def _offset(self, index: int, place: int) -> int:
        return self._offsets[index] + place * self._memory.page_bytes

    def _record(self, index: int, place: int, pages: Iterable[int]) -> None:
        """These pages are at these places now."""
        mapped = self._mapped[index]
        new = list(pages)
        if place == len(mapped):  # the usual case: the range grows at its end
            runs = _num_runs(new)
            if mapped and new and new[0] == mapped[-1] + 1 and mapped[-1] != UNMAPPED:
                runs -= 1
            mapped += new
            self._count(index, self._num_runs[index] + runs)
            return
        if place > len(mapped):
            mapped += [UNMAPPED] * (place - len(mapped))
        # Runs change where something else is mapped, and where that meets what follows.
        first, end = max(0, place - 1), place + len(new) + 1
        before = _num_runs(mapped[first:end])
        mapped[place : place + len(new)] = new
        runs = _num_runs(mapped[first:end]) - before
        while mapped and mapped[-1] == UNMAPPED:
            mapped.pop()
        self._count(index, self._num_runs[index] + runs)

    def _count(self, index: int, num_runs: int) -> None:
        self.num_mappings += num_runs - self._num_runs[index]
        self._num_runs[index] = num_runs

    # ---- mapping ahead

    def map_ahead(self, wanted: Iterable[tuple[int, int, Sequence[int]]]) -> None:
        """(range, place, pages): let these pages appear there soon. Nobody may look at those
        places before `collect` has said that they do. One call for many: waking the thread, and
        what it takes from the interpreter, costs more than the mapping. Only when the thread is
        not busy and everything is collected: two jobs for one place would lie about it."""
        if self._worker is None:
            return
        assert not self._worker.is_busy and not self._worker.done, "collect first"
        jobs = [
            self._job(index, place + start, pages[start], length)
            for index, place, pages in wanted
            for start, length in list(_differing(self._mapped[index], pages, 0, place))
        ]
        if not jobs:
            return
        try:
            self._worker.put(jobs)
        except RuntimeError as error:  # the system has no thread left
            logger.warning("nothing is mapped ahead any more: %s", error)
            self._worker = None
            self._restore(jobs)

    def _job(self, index: int, place: int, first_page: int, length: int) -> MapJob:
        stale: list[int] = []
        if self._memory.maps_during_kernels:  # else the thread only prepares the pages
            stale = self._mapped[index][place : place + length]
        if stale:  # about to go: nobody may count on it any more
            self._record(index, place, [UNMAPPED] * len(stale))
        return MapJob(index, place, self._offset(index, place), first_page, length, stale)

    def _restore(self, jobs: Iterable[MapJob]) -> None:
        """They were not begun: what was there still is."""
        for job in jobs:
            if job.stale:
                self._record(job.index, job.place, job.stale)

    @property
    def maps_ahead(self) -> bool:
        """There is a thread for it."""
        return self._worker is not None

    @property
    def is_busy(self) -> bool:
        """The thread still has something to map."""
        return self._worker is not None and self._worker.is_busy

    def settle(self) -> None:
        """From now on the thread changes nothing; take in what it has mapped."""
        if self._worker is None:
            return
        has_waited, dropped = self._worker.settle()
        self.stats.num_waits += has_waited
        self._restore(dropped)
        self.collect()

    def collect(self) -> None:
        """Take in what the thread has mapped so far."""
        if self._worker is None:
            return
        while self._worker.done:
            job = self._worker.done.popleft()
            self._record(job.index, job.place, range(job.first_page, job.first_page + job.length))
            self.stats.num_ahead += 1

    # ---- unmapping

    def unmap(self, index: int, first: int = 0, end: int | None = None) -> None:
        """Unmap what the range shows from place `first` to before `end`."""
        self.settle()
        mapped = self._mapped[index]
        end = len(mapped) if end is None else min(end, len(mapped))
        mapped = [i for i in range(first, end) if mapped[i] != UNMAPPED]
        for place, length in runs_of(mapped):
            self._memory.unmap(self._offset(index, place), length)
            self._record(index, place, [UNMAPPED] * length)

    def try_unmap(self, index: int, first: int = 0, end: int | None = None) -> bool:
        """As `cut`, where nobody looks, and mapping replaces what is there: an error is logged."""
        try:
            self.unmap(index, first, end)
        except OSError as error:
            logger.warning("unmapping failed: %s", error)
            return False
        return True

    def reset(self) -> None:
        """The memory is another one: nothing is mapped."""
        self.settle()
        self._mapped = [[] for _ in self._offsets]
        self._num_runs = [0] * len(self._offsets)
        self.num_mappings = 0

    def close(self) -> None:
        """End the thread."""
        self.settle()
        if self._worker is not None:
            self._worker.stop()
            self._worker = None


def _differing(
    mapped: Sequence[int], pages: Sequence[int], first: int, place: int = 0
) -> Iterable[tuple[int, int]]:
    """(start, length) in `pages`, from `first` on, of runs of consecutive pages that are not
    mapped at start + place yet."""
    start = first
    end = len(pages)
    known = len(mapped)
    while start < end:
        at = start + place
        if at < known and mapped[at] == pages[start]:
            start += 1
            continue
        length = 1
        while (
            start + length < end
            and pages[start + length] == pages[start] + length
            and not (at + length < known and mapped[at + length] == pages[start + length])
        ):
            length += 1
        yield start, length
        start += length


def _num_runs(pages: Sequence[int]) -> int:
    """Mappings that the kernel needs for pages at consecutive places."""
    runs = 0
    previous = UNMAPPED
    for page in pages:
        if page != UNMAPPED and (previous == UNMAPPED or page != previous + 1):
            runs += 1
        previous = page
    return runs


def check_ranges(
    ranges: Iterable[Range], idle: Container[int], dirty: Container[int], space: AddressSpace
) -> dict[int, int]:
    """Returns how many holders each page has. Raises AssertionError for a broken invariant.

    dirty: indices of the ranges with edits due at the next commit.
    """
    owners: dict[int, int] = {}
    for item in ranges:
        assert item.is_open != (item.index in idle), f"range {item.index}"
        assert item.is_open or not (item.pages or item.promised_pages), f"range {item.index}"
        assert item.capacity == min(p.group.tokens_in(len(p.pages)) for p in item.parts)
        for part in item.parts:
            _check_part(part, space, owners)
        is_dirty = not all(part.is_committed for part in item.parts)
        assert is_dirty == (item.index in dirty), f"range {item.index}"
    return owners


def _check_part(part: RangePart, space: AddressSpace, owners: dict[int, int]) -> None:
    """Adds the pages that the part holds to `owners`."""
    first, valid = part.num_released, part.num_mapped
    assert part.pages[:first] == [UNMAPPED] * first, f"places of {part.index}"
    assert space.maps(part.index, part.pages[first:valid], first), f"places of {part.index}"
    for page in (*part.held, *(source for source, _ in part.copies)):
        owners[page] = owners.get(page, 0) + 1
    for page in part.pages[max(part.num_offered, first) :]:
        assert owners[page] == 1, f"page {page} is written"
