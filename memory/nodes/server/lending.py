"""A replica that lends K/V memory: a memory node over pages of its own pool (Infinite-LLM,
arXiv 2401.02669).

A lease is the session of a borrower. It is granted pages at first, which cost the lender nothing;
the lender gives up pages of its own, free ones and then cached ones, as the borrower fills them.
So own and lent memory together never exceed the budget. The lender takes them back when its own
sequences need them: it asks the borrower to leave while it has some pages left itself (DRAIN), and
ends the session if one of its sequences needs a page at once. The borrower computes its K/V again.

The accounting belongs to the lender's loop. A session's thread asks it for pages with a job, some
ahead of need, and waits for it at most TAKE_S.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable

from memory.kv_manager import KVManager
from memory.nodes.attach import AttachRequest
from memory.nodes.server.connection import Connection
from memory.nodes.server.node import MemoryNode
from memory.nodes.wire import Kind, pack_json
from memory.pages.linux_vmm import LinuxMemory
from memory.pages.virtual_memory import VirtualMemory
from ops.backend import Backend
from ops.cpu import native_library
from transport.base import TransportError
from transport.messages import post_bytes

logger = logging.getLogger(__name__)

TAKE_S = 1.0  # the longest wait of a session for pages
RECALL_S = 0.4  # from asking a borrower to leave to the end of its session
_END_S = 0.5  # the longest wait of the lender's loop for a session's memory
_DRAIN_S = 0.05  # the longest wait of the lender's loop until the borrower is told why
_WATCH_S = 0.02
_REST_S = 2.0  # after a call-back nothing is granted for this time
_KEPT_SHARE = 8  # one page in so many is not lent
_AHEAD_SHARE = 32  # one page of those that may be lent in so many is taken ahead of need
_NICENESS = 10  # attention for others leaves the processor to the lender's own


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
        self.kept_pages = max(1, kv.num_pages // _KEPT_SHARE)
        self._kv = kv
        self._run_in_loop = run_in_loop
        self._clock = clock
        self._changed = threading.Condition()
        self._wanted = 0  # that sessions wait for
        self._num_lent = 0  # pages
        self._is_asked = False
        self._num_begun = self._last_settled = 0  # runs of `settle`
        self._ahead = max(1, self._pages(most_bytes) // _AHEAD_SHARE)

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

    def wait_below(self, num_bytes: int, timeout_s: float) -> bool:
        """Waits until less than num_bytes are used; returns whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: self.used < num_bytes, timeout_s)


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
        self._memory.map(offset, first_page, num_pages)

    def copy_page(self, source: int, target: int) -> None:
        self._take(source, 1)
        self._take(target, 1)
        self._memory.copy_page(source, target)

    def unmap(self, offset: int, num_pages: int) -> None:
        self._memory.unmap(offset, num_pages)

    def _take(self, first: int, count: int) -> None:
        new = self._has_memory[first : first + count].count(0)
        if new and not self._lent.take(new * self.page_bytes, self._is_over):
            raise OSError(errno.ENOMEM, "the lender needs its pages itself")
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


class LendingNode(MemoryNode):
    """Serves borrowers over a replica's own pages."""

    def __init__(
        self,
        kv: KVManager,
        most_bytes: int,
        backend: Backend,
        run_in_loop: Callable[[Callable[[], None]], None],
    ) -> None:
        super().__init__(most_bytes, backend)
        self.lent = LentBytes(kv, most_bytes, run_in_loop)
        self._rests_until = 0.0
        self._stopped = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="mergestep-lending", daemon=True)
        self.num_recalled = 0
        kv.lent.on_short = self._give_back_now
        self._watcher.start()

    def close(self) -> None:
        self._stopped.set()
        super().close()
        self._watcher.join()

    # ---- as a memory node

    def _room(self) -> int:
        room = self.lent.room()
        is_resting = time.monotonic() < self._rests_until
        return 0 if is_resting or room < self.lent.most_bytes // _KEPT_SHARE else room

    def _memory(self, connection: Connection, page_bytes: int, num_pages: int) -> VirtualMemory:
        memory = LinuxMemory(page_bytes, num_pages)
        return LentMemory(memory, num_pages, self.lent, lambda: connection.is_leaving)

    def _run(self, connection: Connection) -> None:
        native_library.leave_team()  # never occupies the threads of the lender's own steps
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        except (OSError, AttributeError) as error:
            logger.info("attention for others has the usual priority: %s", error)
        while self._run_once(connection, _WATCH_S):
            pass

    def _failed(self, connection: Connection, error: Exception) -> None:
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            self._post_drain(connection)
            self._rests_until = time.monotonic() + _REST_S
        super()._failed(connection, error)

    def _grant(self, connection: Connection, request: AttachRequest) -> AttachRequest | None:
        granted = super()._grant(connection, request)
        connection.began_s = time.monotonic()
        return granted

    # ---- calling back

    def _leases(self) -> list[Connection]:
        """Returns the connections with a session, the newest first."""
        with self._lock:
            found = [c for c in self._connections if c.session is not None]
        return sorted(found, key=lambda connection: -connection.began_s)

    def _watch(self) -> None:
        asked: dict[Connection, float] = {}
        while not self._stopped.wait(_WATCH_S):
            now_s = time.monotonic()
            leases = self._leases()
            asked = {lease: at for lease, at in asked.items() if lease in leases}
            if self.lent.is_short and not asked and leases:
                self._recall(leases[0])
                asked[leases[0]] = now_s
            for lease, at in asked.items():
                if now_s >= at + RECALL_S:
                    lease.endpoint.close()

    def _recall(self, lease: Connection) -> None:
        """Asks a borrower to leave."""
        logger.info("engine %s: its lease is called back", lease.engine[:16])
        lease.is_leaving = True  # its thread posts DRAIN
        self.num_recalled += 1
        self._rests_until = time.monotonic() + _REST_S

    def _give_back_now(self, count: int) -> None:
        """Ends leases until `count` pages are free. Called in the lender's loop."""
        count -= self.lent.take_back_unused()
        for lease in self._leases() if count > 0 else ():
            if not lease.is_leaving:
                self._recall(lease)
            until_s = time.monotonic() + _DRAIN_S
            while not lease.has_sent_drain and time.monotonic() < until_s:
                time.sleep(_DRAIN_S / 50)
            used = self.lent.used
            lease.endpoint.close()
            if used and not self.lent.wait_below(used, _END_S):
                logger.warning("engine %s: its lease does not end", lease.engine[:16])
            count -= self.lent.take_back_unused()
            if count <= 0 or not self.lent.used:
                return

    @staticmethod
    def _post_drain(connection: Connection) -> None:
        connection.is_leaving = connection.has_sent_drain = True
        try:
            post_bytes(connection.endpoint, pack_json(Kind.DRAIN, connection.epoch, {}))
        except TransportError as error:
            logger.info("engine at %s: %s", connection.endpoint.peer.address, error)
