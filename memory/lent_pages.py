"""Pages of this machine's K/V memory that others use for a while, in integers only.

A lent page is neither free nor in a range: its memory belongs to a borrower, so it counts in the
lender's budget. It is of lower rank than a sequence's page: `KVManager` calls `on_short` before
anything of its own would wait or be preempted for lack of a page.
"""

from __future__ import annotations

from collections.abc import Callable, Container

from memory.pages.allocator import PageAllocator, runs_of
from memory.pages.virtual_memory import VirtualMemory
from memory.prefix.cache import PrefixCache


class LentPages:
    """The lent pages of one pool. Only the thread that owns the accounting calls it, apart from
    `len`."""

    def __init__(
        self,
        allocator: PageAllocator,
        prefixes: PrefixCache,
        memory: VirtualMemory,
        unmap: Callable[[Container[int]], None],
    ) -> None:
        """unmap: unmaps pages from the slots of ranges that do not hold them any more."""
        self.pages: list[int] = []
        self.on_short: Callable[[int], None] = lambda count: None
        """Called with a number of pages that sequences lack; takes lent ones back."""
        self._allocator, self._prefixes, self._memory = allocator, prefixes, memory
        self._unmap = unmap

    def __len__(self) -> int:
        return len(self.pages)

    def lend(self, count: int) -> None:
        """Lends `count` more pages: free ones first, then evicted ones. The caller has checked that
        they are available and that no thread maps pages. Raises OSError if the system does not take
        their memory back; then none is lent."""
        taken: list[int] = []
        for _ in range(count):
            if not self._allocator.num_free:
                self._prefixes.evict()
            taken.append(self._allocator.take())
        self._unmap(set(taken))
        try:
            for first, length in runs_of(sorted(taken)):
                self._memory.release(first, length)
        except OSError:
            for page in taken:
                self._allocator.give_back(page)
            raise
        self.pages += taken

    def take_back(self, count: int) -> None:
        """Makes `count` lent pages free, those that were lent last."""
        assert count <= len(self.pages), f"{count} of {len(self.pages)} lent pages"
        for _ in range(count):
            self._allocator.give_back(self.pages.pop())

    def ask(self, num_short: int) -> None:
        """Asks for so many pages, unless fewer are lent, which would not help."""
        if 0 < num_short <= len(self.pages):
            self.on_short(num_short)
