"""The bytes that leases use, and the memory of a lease: pages of the lender's own pool.

The accounting belongs to the lender's loop. A session's thread asks it for pages with a job, some
ahead of need, and waits for it at most TAKE_S.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable

from memory.kv_manager import KVManager
from memory.pages.virtual_memory import VirtualMemory

logger = logging.getLogger(__name__)

TAKE_S = 1.0  # the longest wait of a session for pages
KEPT_SHARE = 8
"""One page in so many is not lent."""
_AHEAD_SHARE = 32  # one page of those that may be lent in so many is taken ahead of need,
_AHEAD_BYTES = 16 << 20  # but no more: the loop gives their memory back to the system
_MAPPED_BYTES = 16 << 20  # that a session maps before it looks whether its lease has ended
_WATCH_S = 0.02


class LentBytes:
    """The bytes that leases use, backed by lent pages. Any thread calls it, except where noted."""

    def __init__(
        self,
        kv: KVManager,
        most_bytes: int,
        run_in_loop: Callable[[Callable[[], None]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """kv: the lender's pages. most_bytes: bounds what is lent. run_in_loop: runs a job in the
        thread that owns kv."""
        self.most_bytes = most_bytes
        self.used = 0
        """Never more than the lent pages hold."""
        self.kept_pages = max(1, kv.num_pages // KEPT_SHARE)
        self._kv = kv
        self._run_in_loop = run_in_loop
        self._clock = clock
        self._changed = threading.Condition()
        self._wanted = 0  # that sessions wait for
        self._num_lent = 0  # pages
        self._is_asked = False
        self._num_begun = self._last_settled = 0  # runs of `settle`
        self._ahead = max(1, self._pages(min(most_bytes // _AHEAD_SHARE, _AHEAD_BYTES)))

    def _pages(self, num_bytes: int) -> int:
        return -(-num_bytes // self._kv.page_bytes)

    def room(self) -> int:
        """Returns the bytes that may be lent in all at present."""
        kv = self._kv
        pages = kv.num_unpromised + kv.num_cached + self._num_lent - self.kept_pages
        return max(0, min(self.most_bytes, pages * kv.page_bytes))

    @property
    def is_short(self) -> bool:
        """Whether the lender has so little left that it should ask for pages."""
        left = self._kv.num_unpromised + self._kv.num_cached
        return self._num_lent > 0 and left < (self.kept_pages + 1) // 2

    def take(self, num_bytes: int, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Takes bytes for a lease; returns False if the lender has no pages for them, or is_over
        says that the lease has ended."""
        deadline = self._clock() + TAKE_S
        with self._changed:
            self._wanted += num_bytes
            asked = self._num_begun
            try:
                while self.used + num_bytes > self._num_lent * self._kv.page_bytes:
                    is_refused = self._last_settled > asked  # the loop has no more pages
                    if is_refused or is_over() or self._clock() >= deadline:
                        return False
                    self._ask()
                    self._changed.wait(_WATCH_S)
                self.used += num_bytes
            finally:
                self._wanted -= num_bytes
            if self._pages(self.used) + self._ahead // 2 > self._num_lent:
                self._ask()
        return True

    def give_back(self, num_bytes: int) -> None:
        """Returns bytes whose memory is free."""
        with self._changed:
            self.used -= num_bytes
            assert self.used >= 0, f"{self.used} bytes are lent"
            self._ask()
            self._changed.notify_all()

    def _ask(self) -> None:
        if not self._is_asked:
            self._is_asked = True
            self._run_in_loop(self.settle)

    def settle(self) -> None:
        """Lends or takes back pages for what is used, and some ahead. In the loop only."""
        with self._changed:
            self._is_asked = False
            self._num_begun = number = self._num_begun + 1
            needed = self._pages(self.used + self._wanted)
            target = min(needed + self._ahead * (needed > 0), self._pages(self.most_bytes))
            count = len(self._kv.lent) - target
            if count > 2 * self._ahead or (not needed and count > 0):
                self._take_back(count)
        if count < 0:
            try:
                self._kv.lend(-count, self.kept_pages)
            except OSError as error:
                logger.warning("no page is lent: %s", error)
        with self._changed:
            self._num_lent = len(self._kv.lent)
            self._last_settled = number
            self._changed.notify_all()

    def take_back_unused(self) -> int:
        """Takes back the pages that no lease uses; returns their number. In the loop only."""
        with self._changed:
            count = len(self._kv.lent) - self._pages(self.used)
            self._take_back(count)
        return count

    def _take_back(self, count: int) -> None:
        self._num_lent -= count
        self._kv.lent.take_back(count)

    def wake(self) -> None:
        """Makes `take` look whether its lease has ended."""
        with self._changed:
            self._changed.notify_all()


class LentMemory:
    """A VirtualMemory whose pages get their bytes from a LentBytes, when they are first mapped."""

    maps_during_kernels = True

    def __init__(
        self, memory: VirtualMemory, num_pages: int, lent: LentBytes, is_over: Callable[[], bool]
    ) -> None:
        self.page_bytes = memory.page_bytes
        self._memory, self._lent, self._is_over = memory, lent, is_over
        self._has_memory = bytearray(num_pages)

    def reserve(self, size_bytes: int) -> int:
        return self._memory.reserve(size_bytes)

    def prepare(self, first_page: int, num_pages: int) -> None:
        """Does nothing: `map` gives pages their memory."""

    def map(self, offset: int, first_page: int, num_pages: int) -> None:
        self._take(first_page, num_pages)
        most = max(1, _MAPPED_BYTES // self.page_bytes)
        for done in range(0, num_pages, most):
            if done and self._is_over():
                raise _no_pages()
            count = min(most, num_pages - done)
            self._memory.map(offset + done * self.page_bytes, first_page + done, count)

    def copy_page(self, source: int, target: int) -> None:
        self._take(source, 1)
        self._take(target, 1)
        self._memory.copy_page(source, target)

    def unmap(self, offset: int, num_pages: int) -> None:
        self._memory.unmap(offset, num_pages)

    def _take(self, first: int, count: int) -> None:
        new = self._has_memory[first : first + count].count(0)
        if new and not self._lent.take(new * self.page_bytes, self._is_over):
            raise _no_pages()
        self._has_memory[first : first + count] = b"\x01" * count

    def release(self, first_page: int, num_pages: int) -> None:
        self._memory.release(first_page, num_pages)
        held = self._has_memory[first_page : first_page + num_pages].count(1)
        self._has_memory[first_page : first_page + num_pages] = bytes(num_pages)
        self._lent.give_back(held * self.page_bytes)

    def close(self) -> None:
        self._memory.close()
        held = self._has_memory.count(1)
        self._has_memory = bytearray(len(self._has_memory))
        if held:
            self._lent.give_back(held * self.page_bytes)


def _no_pages() -> OSError:
    return OSError(errno.ENOMEM, "the lender needs its pages itself")
