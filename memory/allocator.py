"""The pool of physical pages, as integers: take, give back, count, check.

A page is free or has one or more owners (`share` adds one: the seam for prefix sharing).
Pages with consecutive numbers that land at consecutive addresses merge into one mapping, so
`take` continues after a given page whenever that neighbour is free.
"""

from __future__ import annotations


class PageAllocator:
    """Reference-counted pages 0..num_pages-1."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_free = num_pages
        self._refs = [0] * num_pages
        # A stack of candidates: it may hold pages taken meanwhile by their number, which are
        # skipped when met. _listed says which pages are on the stack.
        self._stack = list(range(num_pages - 1, -1, -1))
        self._listed = bytearray(b"\x01") * num_pages

    def take(self, after: int | None = None) -> int:
        """A free page, the one following `after` if possible. The caller has checked num_free."""
        assert self.num_free > 0, "no free page"
        page = -1 if after is None else after + 1
        if not (0 <= page < self.num_pages and self._refs[page] == 0):
            page = self._pop()
        self._refs[page] = 1
        self.num_free -= 1
        return page

    def _pop(self) -> int:
        while True:
            page = self._stack.pop()
            self._listed[page] = 0
            if self._refs[page] == 0:
                return page

    def share(self, page: int) -> None:
        """One more owner of a page in use."""
        assert self._refs[page] > 0, f"page {page} is free"
        self._refs[page] += 1

    def give_back(self, page: int) -> bool:
        """One owner less; True when the page is free now."""
        assert self._refs[page] > 0, f"page {page} is free already"
        self._refs[page] -= 1
        if self._refs[page]:
            return False
        self.num_free += 1
        if not self._listed[page]:
            self._stack.append(page)
            self._listed[page] = 1
        return True

    def check_integrity(self, owners: dict[int, int]) -> None:
        """owners: page -> how many ranges hold it. AssertionError tells what is off."""
        for page, refs in enumerate(self._refs):
            held = owners.get(page, 0)
            assert refs == held, f"page {page}: {refs} references, {held} owners"
            assert refs or self._listed[page], f"free page {page} is lost"
        free = sum(refs == 0 for refs in self._refs)
        assert free == self.num_free, f"{free} free pages, counted {self.num_free}"
