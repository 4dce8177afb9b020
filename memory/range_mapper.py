"""The edits of the address space that ranges are due: made at the step boundary, all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from memory.idle_ranges import IdleRanges
from memory.pages.address_space import AddressSpace
from memory.pages.kv_range import PrefixHit, Range, RangePart
from memory.pages.vmm import VirtualMemory

_UNMAP_PLACES = 64  # behind a window, in one call


class RangeMapper:
    """due: indices of ranges that have grown since they were mapped."""

    def __init__(
        self,
        ranges: Sequence[Range],
        idle: IdleRanges,
        space: AddressSpace,
        memory: VirtualMemory,
        release: Callable[[int], None],
    ) -> None:
        """release: of a page that has been copied."""
        self.due: set[int] = set()
        self._ranges = ranges
        self._idle = idle
        self._space = space
        self._memory = memory
        self._release = release

    @property
    def _num_due(self) -> int:
        return sum([self._ranges[index].num_due_mappings for index in self.due])

    def has_room(self, hit: PrefixHit | None) -> bool:
        """For a hit's mappings beside those that are due; those of idle ranges give way."""
        num_calls = hit.num_calls if hit is not None else 0
        is_anyone_open = len(self._idle) < len(self._ranges)
        num_more = self._num_due + num_calls
        return not is_anyone_open or self._space.has_room(num_more, self._idle.places)

    def commit(self, targets: Iterable[Range] | None = None) -> None:
        """Edit the address space so that it shows what was decided since the last commit.

        Only the given ranges are mapped (all, if None), so that one whose mapping fails with an
        OSError does not stop the others; it stays due.
        """
        if not self.due:
            return
        if not self._space.has_room(self._num_due, ()):
            self._unmap_idle()
        wanted = self.due if targets is None else {item.index for item in targets}
        for index in sorted(wanted & self.due):
            for part in self._ranges[index].parts:
                self._commit_part(part)
            self._ranges[index].num_due_mappings = 0
            self.due.discard(index)
        if self._space.num_mappings > self._space.max_mappings:
            self._unmap_idle()

    def _commit_part(self, part: RangePart) -> None:
        self._space.map(part.index, part.pages, part.num_mapped)
        while part.copies:
            source, place = part.copies[-1]
            self._memory.copy_page(source, part.pages[place])
            part.copies.pop()
            self._release(source)
        part.num_mapped = len(part.pages)
        if part.num_released - part.num_unmapped >= _UNMAP_PLACES:
            self._unmap_passed(part)

    def _unmap_idle(self) -> None:
        """Stale mappings give way when there are too many in all."""
        self._idle.unmap(self._space.max_mappings * 3 // 4 - self._num_due)

    def _unmap_passed(self, part: RangePart) -> None:
        if self._space.try_unmap(part.index, part.num_unmapped, part.num_released):
            part.num_unmapped = part.num_released

    def unmap_unneeded(self) -> None:
        """Of all ranges, what lies beyond or behind what their sequences need."""
        for part in [part for item in self._ranges for part in item.parts]:
            if len(self._space.mapped(part.index)) > part.num_mapped:
                self._space.try_unmap(part.index, part.num_mapped)
            if part.num_released > part.num_unmapped:
                self._unmap_passed(part)
