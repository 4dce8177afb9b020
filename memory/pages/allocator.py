"""The pool of physical pages, in integers only.

A page is free or has one or more owners: ranges, the prefix cache, transfers. Free pages that were
used before are taken first, the one that was free longest before the others. So the memory in use
stays small, and a page that a range stays mapped to after its sequence has ended is left alone for
as long as possible, because the next sequence in that range then needs no system call for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class PageAllocator:
    """Reference-counted pages 0..num_pages-1. Operations take O(1) per page.

    A free page is warm if it has physical memory, and cold otherwise.
    """

    def __init__(self, num_pages: int) -> None:
        self.reset(num_pages)

    def reset(self, num_pages: int) -> None:
        """Starts anew with num_pages free, cold pages."""
        self.num_pages = num_pages
        self._refs = [0] * num_pages
        self._warm: OrderedDict[int, None] = OrderedDict()  # longest free first
        self._num_cold = num_pages
        # A stack of cold pages. Pages that were taken by number stay on it and are skipped.
        # _listed says which pages are on the stack.
        self._cold = list(range(num_pages - 1, -1, -1))
        self._is_cold = bytearray(b"\x01") * num_pages
        self._deferred: set[int] = set()
        self._listed = bytearray(b"\x01") * num_pages

    @property
    def num_free(self) -> int:
        return len(self._warm) + self._num_cold

    @property
    def num_warm(self) -> int:
        """Free pages that still have physical memory."""
        return len(self._warm)

    def num_references(self, page: int) -> int:
        return self._refs[page]

    def is_free(self, page: int) -> bool:
        return self._refs[page] == 0

    def take(self, preferred: int | None = None, after: int | None = None) -> int:
        """Takes a free page: `preferred` if it is free, or the page that follows `after` if it is
        free and warm (the two are one mapping), or the warm page that was free longest, or a cold
        one. The caller has checked num_free."""
        assert self.num_free > 0, "no free page"
        page = self._choose(preferred, after)
        self._claim(page)
        return page

    def extend(self, pages: list[int], mapped: Sequence[int], count: int) -> None:
        """Appends `count` free pages. Each slot gets the page that is mapped there (-1: none) if it
        is free, and otherwise one as `take` chooses it. The caller has checked num_free."""
        refs, num_mapped = self._refs, len(mapped)
        for slot in range(len(pages), len(pages) + count):
            page = mapped[slot] if slot < num_mapped else -1
            if page < 0 or refs[page]:
                page = self._choose(None, pages[-1] if pages else None)
            self._claim(page)
            pages.append(page)

    def _claim(self, page: int) -> None:
        """Gives a free page its first owner."""
        self._refs[page] = 1
        if self._is_cold[page]:
            self._is_cold[page] = 0
            self._num_cold -= 1
        else:
            del self._warm[page]

    def _choose(self, preferred: int | None, after: int | None) -> int:
        if preferred is not None and self._refs[preferred] == 0:
            return preferred
        if after is not None and after + 1 < self.num_pages and self._refs[after + 1] == 0:
            page = after + 1
            if page not in self._deferred and not (self._warm and self._is_cold[page]):
                return page
        if self._warm:
            return next(iter(self._warm))
        while True:
            page = self._cold.pop()
            self._listed[page] = 0
            if self._is_cold[page]:
                return page

    def defer(self, pages: Iterable[int]) -> None:
        """Sets the free pages that `take` gives last, unless they are preferred. They replace those
        of the previous call."""
        self._deferred = set(pages)
        for page in self._deferred:
            if page in self._warm:
                self._warm.move_to_end(page)

    def share(self, page: int) -> None:
        """Adds an owner to a page in use."""
        assert self._refs[page] > 0, f"page {page} is free"
        self._refs[page] += 1

    def give_back(self, page: int) -> bool:
        """Removes an owner. Returns whether the page is free now."""
        assert self._refs[page] > 0, f"page {page} is free already"
        self._refs[page] -= 1
        if self._refs[page]:
            return False
        self._warm[page] = None
        return True

    def cool(self) -> list[int]:
        """Makes all free pages cold. Returns those that were warm, in ascending order; the caller
        releases their memory."""
        pages = sorted(self._warm)
        self._warm.clear()
        for page in pages:
            self._is_cold[page] = 1
            if not self._listed[page]:
                self._cold.append(page)
                self._listed[page] = 1
        self._num_cold += len(pages)
        return pages

    def check_integrity(self, owners: dict[int, int]) -> None:
        """Raises AssertionError for a broken invariant. owners: page -> number of owners."""
        num_cold = 0
        for page, refs in enumerate(self._refs):
            held = owners.get(page, 0)
            assert refs == held, f"page {page}: {refs} references, {held} owners"
            is_cold = bool(self._is_cold[page])
            assert not (is_cold and refs), f"page {page} is in use and has no memory"
            assert (page in self._warm) == (not refs and not is_cold), f"page {page} is lost"
            assert not is_cold or self._listed[page], f"page {page} is lost"
            num_cold += is_cold
        assert num_cold == self._num_cold, f"{num_cold} cold pages, counted {self._num_cold}"


def runs_of(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Returns (first, length) of each run of consecutive numbers: one system call maps, unmaps or
    releases a run of pages."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and number == sum(found[-1]):
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((number, 1))
    return found
