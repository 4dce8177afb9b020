"""Records which page is mapped at each page slot of the ranges, and maps and unmaps pages.

This is separate from the accounting (`memory.kv_manager`): a range may stay mapped to pages that
it does not hold any more. No kernel reads there, and if the next sequence in the range gets the
same pages again, nothing has to be mapped. Slots are mapped at the step boundary (`map`), or by a
thread ahead of need (`map_ahead`; vAttention, arXiv 2405.04437, section 6), so that a step waits
for no system call.

Linux limits the mappings of a process (vm.max_map_count, 65,530 by default). Consecutive pages at
consecutive slots are one mapping. `num_mappings` counts them, and stale ones are unmapped near the
limit.
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
from memory.pages.virtual_memory import VirtualMemory

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class MappingStats:
    """Counts of mapping calls. num_calls: calls at step boundaries, which took `seconds` in all.
    num_ahead: calls of the thread. num_waits: how often a step waited for the thread."""

    num_calls: int = 0
    seconds: float = 0.0
    num_ahead: int = 0
    num_waits: int = 0

    def seconds_for(self, num_calls: int) -> float:
        """Returns the estimated seconds for so many calls, 0 before the first call."""
        return num_calls * self.seconds / max(1, self.num_calls)


class AddressSpace:
    """The page slots of range parts, which begin at these byte offsets of the reservation.

    `index` is a part's number, `slot` the number of a page slot in the part.
    """

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
        """Returns the pages mapped at the slots, from the first one on; UNMAPPED where none is."""
        return self._mapped[index]

    def num_mapped(self, indices: Iterable[int]) -> list[int]:
        """Returns the number of slots up to the last mapped one, for each of these parts."""
        mapped = self._mapped
        return [len(mapped[index]) for index in indices]

    def has_room(self, num_more: int, idle: Iterable[int]) -> bool:
        """Returns whether so many more mappings are allowed, if those of idle ranges are
        removed."""
        excess = self.num_mappings + num_more - self.max_mappings
        return excess <= 0 or excess <= sum(map(self._num_runs.__getitem__, idle))

    def maps(self, index: int, pages: Sequence[int], slot: int = 0) -> bool:
        """Returns whether the slots from `slot` on are mapped to these pages."""
        mapped = self._mapped[index]
        if not pages:
            return True
        is_begun = slot < len(mapped) and mapped[slot] == pages[0]
        return is_begun and mapped[slot : slot + len(pages)] == pages

    def map(self, index: int, pages: Sequence[int], first: int = 0) -> None:
        """Maps pages[i] at slot i, from slot `first` on, where another page or none is mapped.

        It takes one system call per run of consecutive pages. After an OSError what was mapped
        stays mapped, and the call can be repeated.
        """
        self.collect()
        mapped = self._mapped[index]
        if mapped[first : len(pages)] == pages[first:]:
            return
        self.settle()
        began = time.perf_counter()
        try:
            for slot, length in _differing(mapped, pages, first):
                self._map(index, slot, pages[slot], length)
        finally:
            self.stats.seconds += time.perf_counter() - began

    def _map(self, index: int, slot: int, first_page: int, length: int) -> None:
        offset = self._offset(index, slot)
        try:
            self._memory.map(offset, first_page, length)
        except OSError:  # part of the run may be mapped, and the old pages may be unmapped
            with contextlib.suppress(OSError):
                self._memory.unmap(offset, length)
            num_stale = min(length, len(self._mapped[index]) - slot)
            self._record(index, slot, [UNMAPPED] * max(0, num_stale))
            raise
        self._record(index, slot, range(first_page, first_page + length))
        self.stats.num_calls += 1

    def _offset(self, index: int, slot: int) -> int:
        return self._offsets[index] + slot * self._memory.page_bytes

    def _record(self, index: int, slot: int, pages: Iterable[int]) -> None:
        """Records that these pages are mapped at the slots from `slot` on."""
        mapped = self._mapped[index]
        new = list(pages)
        if slot == len(mapped):  # the usual case: the range grows at its end
            runs = _num_runs(new)
            if mapped and new and new[0] == mapped[-1] + 1 and mapped[-1] != UNMAPPED:
                runs -= 1
            mapped += new
            self._count(index, self._num_runs[index] + runs)
            return
        if slot > len(mapped):
            mapped += [UNMAPPED] * (slot - len(mapped))
        # The number of runs changes within the slots and at both of their ends.
        first, end = max(0, slot - 1), slot + len(new) + 1
        before = _num_runs(mapped[first:end])
        mapped[slot : slot + len(new)] = new
        runs = _num_runs(mapped[first:end]) - before
        while mapped and mapped[-1] == UNMAPPED:
            mapped.pop()
        self._count(index, self._num_runs[index] + runs)

    def _count(self, index: int, num_runs: int) -> None:
        self.num_mappings += num_runs - self._num_runs[index]
        self._num_runs[index] = num_runs

    # ---- mapping ahead

    def map_ahead(self, wanted: Iterable[tuple[int, int, Sequence[int]]]) -> None:
        """Lets the thread map (index, slot, pages) runs. They count as mapped after `collect`.

        One call takes many runs, because waking the thread costs more than the mapping. The thread
        must not be busy and its jobs must be collected, since two jobs for one slot would leave a
        wrong record.
        """
        if self._worker is None:
            return
        assert not self._worker.is_busy and not self._worker.done, "collect first"
        jobs = [
            self._job(index, slot + start, pages[start], length)
            for index, slot, pages in wanted
            for start, length in list(_differing(self._mapped[index], pages, 0, slot))
        ]
        if not jobs:
            return
        try:
            self._worker.put(jobs)
        except RuntimeError as error:  # the system cannot start a thread
            logger.warning("pages are no longer mapped ahead: %s", error)
            self._worker = None
            self._restore(jobs)

    def _job(self, index: int, slot: int, first_page: int, length: int) -> MapJob:
        stale: list[int] = []
        if self._memory.maps_during_kernels:  # otherwise the thread only prepares the pages
            stale = self._mapped[index][slot : slot + length]
        if stale:  # about to be replaced: it does not count as mapped any more
            self._record(index, slot, [UNMAPPED] * len(stale))
        return MapJob(index, slot, self._offset(index, slot), first_page, length, stale)

    def _restore(self, jobs: Iterable[MapJob]) -> None:
        """Records again what jobs that were not begun have left as it was."""
        for job in jobs:
            if job.stale:
                self._record(job.index, job.slot, job.stale)

    @property
    def maps_ahead(self) -> bool:
        """Whether there is a thread that maps ahead."""
        return self._worker is not None

    @property
    def is_busy(self) -> bool:
        """Whether the thread has jobs left."""
        return self._worker is not None and self._worker.is_busy

    def settle(self) -> None:
        """Stops the thread's work and collects it. Jobs that have not begun are dropped."""
        if self._worker is None:
            return
        has_waited, dropped = self._worker.settle()
        self.stats.num_waits += has_waited
        self._restore(dropped)
        self.collect()

    def collect(self) -> None:
        """Records what the thread has mapped so far."""
        if self._worker is None:
            return
        while self._worker.done:
            job = self._worker.done.popleft()
            self._record(job.index, job.slot, range(job.first_page, job.first_page + job.length))
            self.stats.num_ahead += 1

    # ---- unmapping

    def unmap(self, index: int, first: int = 0, end: int | None = None) -> None:
        """Unmaps the slots from `first` up to `end`, which is excluded."""
        self.settle()
        mapped = self._mapped[index]
        end = len(mapped) if end is None else min(end, len(mapped))
        slots = [i for i in range(first, end) if mapped[i] != UNMAPPED]
        for slot, length in runs_of(slots):
            self._memory.unmap(self._offset(index, slot), length)
            self._record(index, slot, [UNMAPPED] * length)

    def try_unmap(self, index: int, first: int = 0, end: int | None = None) -> bool:
        """Like `unmap`, but logs an OSError. Used where no kernel reads; a later `map` replaces the
        pages. Returns whether it succeeded."""
        try:
            self.unmap(index, first, end)
        except OSError as error:
            logger.warning("unmapping failed: %s", error)
            return False
        return True

    def reset(self) -> None:
        """Records that nothing is mapped, because the memory was replaced."""
        self.settle()
        self._mapped = [[] for _ in self._offsets]
        self._num_runs = [0] * len(self._offsets)
        self.num_mappings = 0

    def close(self) -> None:
        """Ends the thread."""
        self.settle()
        if self._worker is not None:
            self._worker.stop()
            self._worker = None


def _differing(
    mapped: Sequence[int], pages: Sequence[int], first: int, slot: int = 0
) -> Iterable[tuple[int, int]]:
    """Yields (start, length) of the runs of consecutive pages in pages[first:] that are not yet
    mapped at the slots start + slot and following."""
    start = first
    end = len(pages)
    num_mapped = len(mapped)
    while start < end:
        at = start + slot
        if at < num_mapped and mapped[at] == pages[start]:
            start += 1
            continue
        length = 1
        while (
            start + length < end
            and pages[start + length] == pages[start] + length
            and not (at + length < num_mapped and mapped[at + length] == pages[start + length])
        ):
            length += 1
        yield start, length
        start += length


def _num_runs(pages: Sequence[int]) -> int:
    """Returns how many mappings Linux needs for pages at consecutive slots."""
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
        most = min(p.capacity for p in item.parts)
        has_more = any(p.group.layers.max_tokens is not None for p in item.parts)  # in other memory
        is_elsewhere = has_more and (item.capacity < most or not item.pages)
        assert item.capacity == most or is_elsewhere, f"range {item.index}"
        for part in item.parts:
            _check_part(part, space, owners)
        is_dirty = not all(part.is_committed for part in item.parts)
        assert is_dirty == (item.index in dirty), f"range {item.index}"
    return owners


def _check_part(part: RangePart, space: AddressSpace, owners: dict[int, int]) -> None:
    """Adds the pages that the part holds to `owners`."""
    first, valid = part.num_released, part.num_mapped
    assert part.pages[:first] == [UNMAPPED] * first, f"slots of part {part.index}"
    assert space.maps(part.index, part.pages[first:valid], first), f"slots of part {part.index}"
    for page in (*part.held, *(source for source, _ in part.copies)):
        owners[page] = owners.get(page, 0) + 1
    for page in part.pages[max(part.num_offered, first) :]:
        assert owners[page] == 1, f"page {page} is written and shared"
