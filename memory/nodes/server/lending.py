"""A replica that lends K/V memory: a memory node over pages of its own pool (Infinite-LLM,
arXiv 2401.02669).

A lease is the session of a borrower. It is granted pages at first, which cost the lender nothing;
the lender gives up pages of its own, free ones and then cached ones, as the borrower fills them.
So own and lent memory together never exceed the budget. The lender takes them back when its own
sequences need them: it asks the borrower to leave while it has some pages left itself (DRAIN), and
ends the session if one of its sequences needs a page at once. The borrower computes its K/V again.

The thread that ends a lease frees its memory. Before that, it waits for the lease's own thread to
end the task of a kernel that it computes, about a millisecond, or a message that it posts
(lease.py).
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from memory.kv_manager import KVManager
from memory.nodes.attach import AttachRequest
from memory.nodes.server.connection import Connection
from memory.nodes.server.lease import Lease, LeaseEndedError, Turn
from memory.nodes.server.lent_bytes import KEPT_SHARE, LentBytes, LentMemory
from memory.nodes.server.node import MemoryNode
from memory.nodes.server.node_loop import NodeLoop
from memory.nodes.wire import Kind, pack_json
from memory.pages.linux_vmm import LinuxMemory
from memory.pages.virtual_memory import VirtualMemory
from ops.backend import Backend
from ops.cpu import native_library
from transport.base import Endpoint, Frame, TransportError
from transport.messages import post_bytes

logger = logging.getLogger(__name__)

RECALL_S = 0.4  # from asking a borrower to leave to the end of its session
END_S = 0.4  # the longest wait of the lender's loop for the memory of leases
_DRAIN_S = 0.05  # the longest wait for room for the message that tells a borrower why
_WATCH_S = 0.02
_REST_S = 2.0  # after a call-back nothing is granted for this time


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
        self._host = native_library.library().Host()
        self._gives_way = native_library.num_threads() >= len(os.sched_getaffinity(0))
        self._rests_until = 0.0
        self._stopped = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="mergestep-lending", daemon=True)
        self.num_recalled = 0
        kv.lent.on_short = self._give_back_now
        self._watcher.start()

    def close(self) -> None:
        self._stopped.set()
        for lease in self._leases():
            lease.turn.guest.end()
        super().close()
        self._watcher.join()

    def note_step(self, has_prompt: bool) -> None:
        """The lender begins a step, or with has_prompt False perhaps none. While it computes a
        prompt, leases rest, unless there are processors that its steps do not use. In the loop
        only."""
        if has_prompt and self._gives_way:
            self._host.begin()
        else:
            self._host.end()

    # ---- as a memory node

    def _connection(self, endpoint: Endpoint) -> Connection:
        return Lease(endpoint, turn=Turn(self._computing, self._host))

    def _turn(self, connection: Connection) -> AbstractContextManager[object]:
        return _lease(connection).turn

    def _room(self) -> int:
        room = self.lent.room()
        is_resting = time.monotonic() < self._rests_until
        return 0 if is_resting or room < self.lent.most_bytes // KEPT_SHARE else room

    def _memory(self, connection: Connection, page_bytes: int, num_pages: int) -> VirtualMemory:
        memory = LinuxMemory(page_bytes, num_pages)
        return LentMemory(memory, num_pages, self.lent, lambda: connection.is_leaving)

    def _run(self, connection: Connection) -> None:
        guest = _lease(connection).turn.guest
        guest.enter()  # never occupies the threads of the lender's own steps
        try:
            while self._run_once(connection, _WATCH_S):
                pass
        finally:
            guest.leave()

    def _handle(self, connection: Connection, loop: NodeLoop, frame: Frame | None) -> None:
        with _lease(connection).handling:
            if connection.has_ended:
                raise LeaseEndedError("the lease was called back")
            try:
                super()._handle(connection, loop, frame)
            except LeaseEndedError:
                self._post_drain(connection)
                raise

    def _end(self, connection: Connection) -> None:
        with _lease(connection).handling:
            self._end_held(_lease(connection))

    def _end_held(self, lease: Lease) -> None:
        """Ends a lease. The caller holds its `handling`, so no kernel reads its memory."""
        super()._end(lease)

    def _close_session(self, connection: Connection) -> None:
        if connection.session is not None:
            connection.session.close()

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

    def _leases(self) -> list[Lease]:
        """Returns the leases that have a session, the newest first."""
        with self._lock:
            found = [_lease(c) for c in self._connections if c.loop is not None]
        return sorted(found, key=lambda lease: -lease.began_s)

    def _watch(self) -> None:
        asked: dict[Lease, float] = {}
        while not self._stopped.wait(_WATCH_S):
            now_s = time.monotonic()
            leases = self._leases()
            asked = {lease: at for lease, at in asked.items() if lease in leases}
            if self.lent.is_short and not asked and leases:
                self._recall(leases[0])
                asked[leases[0]] = now_s
            for lease, at in asked.items():
                if now_s >= at + RECALL_S:
                    self._take_from(lease, now_s + END_S)

    def _recall(self, lease: Lease) -> None:
        """Asks a borrower to leave."""
        logger.info("engine %s: its lease is called back", lease.engine[:16])
        lease.is_leaving = True  # its thread posts DRAIN
        self.lent.wake()
        self.num_recalled += 1
        self._rests_until = time.monotonic() + _REST_S

    def _give_back_now(self, count: int) -> None:
        """Ends leases until `count` pages are free. Called in the lender's loop."""
        count -= self.lent.take_back_unused()
        until_s = time.monotonic() + END_S
        for lease in self._leases() if count > 0 else ():
            if not lease.is_leaving:
                self._recall(lease)
            self._take_from(lease, until_s)
            count -= self.lent.take_back_unused()
            if count <= 0:
                return

    def _take_from(self, lease: Lease, until_s: float) -> bool:
        """Ends a lease and frees its memory in the calling thread; returns False if the lease's
        thread has not stopped to use it by then."""
        lease.turn.guest.end()
        self.lent.wake()
        left_s = max(0.0, until_s - time.monotonic())
        is_held = lease.handling.acquire(timeout=left_s / 2)
        if not is_held:  # it may wait for room for an answer
            lease.endpoint.close()
            is_held = lease.handling.acquire(timeout=left_s / 2)
        if not is_held:
            logger.warning("engine %s: its lease does not end", lease.engine[:16])
            return False
        try:
            if not lease.has_ended:
                self._post_drain(lease)
                self._end_held(lease)
        finally:
            lease.handling.release()
        return True

    @staticmethod
    def _post_drain(connection: Connection) -> None:
        if connection.has_sent_drain:
            return
        connection.is_leaving = connection.has_sent_drain = True
        try:
            post_bytes(connection.endpoint, pack_json(Kind.DRAIN, connection.epoch, {}), _DRAIN_S)
        except TransportError as error:
            logger.info("engine at %s: %s", connection.endpoint.peer.address, error)


def _lease(connection: Connection) -> Lease:
    assert isinstance(connection, Lease), "a lender's connections are leases"
    return connection
