"""Chooses pages for the slots of ranges and maps them, at the step boundary or ahead of it.

A page that its slot still maps needs no system call, and consecutive pages need one call in all.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from memory.idle_ranges import IdleRanges
from memory.pages.address_space import AddressSpace
from memory.pages.allocator import PageAllocator
from memory.pages.kv_range import PrefixHit, Range, RangePart
from memory.pages.virtual_memory import VirtualMemory
from memory.prefix.cache import PrefixCache

_EAGER_TOKENS = 256  # mapped ahead in an idle range for the next sequence: a first chunk
_UNMAP_SLOTS = 64  # behind a window, unmapped in one call


class RangeMapper:
    """Maps pages into the ranges of one pool. due: the indices of ranges that have grown since
    they were mapped."""

    def __init__(
        self,
        ranges: Sequence[Range],
        idle: IdleRanges,
        space: AddressSpace,
        memory: VirtualMemory,
        allocator: PageAllocator,
        prefixes: PrefixCache,
    ) -> None:
        self.due: set[int] = set()
        self._ranges = ranges
        self._idle = idle
        self._space = space
        self._memory = memory
        self._allocator = allocator
        self._prefixes = prefixes

    # ---- pages

    def take_page(self, part: RangePart, more: Sequence[int] = ()) -> int:
        """Takes a free page for the slot after the part's pages and `more`; if possible, the page
        that the slot maps. The caller has checked that a page is available."""
        if not self._allocator.num_free:
            self._prefixes.evict()
        mapped = self._space.mapped(part.index)
        slot = len(part.pages) + len(more)
        preferred = mapped[slot] if slot < len(mapped) and mapped[slot] >= 0 else None
        before = more or part.pages
        return self._allocator.take(preferred, before[-1] if before else None)

    def extend(self, part: RangePart, count: int) -> None:
        """Gives the part `count` more pages. The caller has checked that they are available."""
        while self._allocator.num_free < count:
            self._prefixes.evict()
        self._allocator.extend(part.pages, self._space.mapped(part.index), count)

    # ---- mapping

    @property
    def _num_due(self) -> int:
        return sum([self._ranges[index].num_due_mappings for index in self.due])

    def has_room(self, hit: PrefixHit | None) -> bool:
        """Returns whether the hit can be mapped within the limit of mappings, besides the mappings
        that are due. Mappings of idle ranges can be removed for it."""
        num_calls = hit.num_calls if hit is not None else 0
        is_any_open = len(self._idle) < len(self._ranges)
        num_more = self._num_due + num_calls
        return not is_any_open or self._space.has_room(num_more, self._idle.part_indices)

    def commit(self, targets: Iterable[Range] | None = None) -> None:
        """Maps the pages that ranges were given since the last commit, and makes due copies.

        targets: map these ranges only, so that a range that fails with an OSError does not stop
        the others. Such a range stays due.
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
            source, slot = part.copies[-1]
            self._memory.copy_page(source, part.pages[slot])
            part.copies.pop()
            self._prefixes.release(source)
        part.num_mapped = len(part.pages)
        if part.num_released - part.num_unmapped >= _UNMAP_SLOTS:
            self._unmap_released(part)

    def map_ahead(self, needs: list[tuple[Range, int]], max_tokens: int) -> None:
        """Lets the thread map what the ranges need for so many tokens, and the first pages of an
        idle range. The pages are taken only to choose them: they are free again on return, and the
        allocator gives them to other slots last."""
        if self._space.is_busy:
            return
        self._space.collect()  # after is_busy: now no job is in progress
        if self._idle:
            eager = min(_EAGER_TOKENS, max_tokens)
            needs = [*needs, (self._idle.best(eager), eager)]
        jobs = [
            self._pages_ahead(part, part.slots_for(num_tokens))
            for target, num_tokens in needs
            for part in target.parts
        ]
        taken = [page for _, _, pages in jobs for page in pages]
        try:
            self._space.map_ahead(jobs)
        finally:
            for page in taken:
                self._allocator.give_back(page)
        self._allocator.defer(taken)

    def _pages_ahead(self, part: RangePart, num_slots: int) -> tuple[int, int, list[int]]:
        """Takes the pages that the part would get next. Returns (part index, slot, pages)."""
        pages: list[int] = []
        while len(part.pages) + len(pages) < num_slots and (
            self._allocator.num_free or self._prefixes.num_evictable
        ):
            pages.append(self.take_page(part, pages))
        return part.index, len(part.pages), pages

    # ---- unmapping

    def _unmap_idle(self) -> None:
        """Removes mappings of idle ranges, because there are too many mappings in all."""
        self._idle.unmap(self._space.max_mappings * 3 // 4 - self._num_due)

    def _unmap_released(self, part: RangePart) -> None:
        if self._space.try_unmap(part.index, part.num_unmapped, part.num_released):
            part.num_unmapped = part.num_released

    def unmap_pages(self, pages: Container[int]) -> None:
        """Unmaps pages that no sequence holds from the slots that still map them."""
        for part in [part for item in self._ranges for part in item.parts]:
            mapped = self._space.mapped(part.index)
            for slot in [slot for slot, page in enumerate(mapped) if page in pages]:
                self._space.try_unmap(part.index, slot, slot + 1)

    def unmap_unneeded(self) -> None:
        """Unmaps the slots of all ranges that their sequences do not need."""
        for part in [part for item in self._ranges for part in item.parts]:
            if len(self._space.mapped(part.index)) > part.num_mapped:
                self._space.try_unmap(part.index, part.num_mapped)
            if part.num_released > part.num_unmapped:
                self._unmap_released(part)
