"""Pulls the data of packed weights from one or several peers at once.

A thread for each peer asks for one chunk after the other and copies it to its place; another thread
compares checksums behind them. A chunk that is wrong, late or short is asked for again, of the same
peer after a pause, or of another one. A peer that fails too often is left.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from ops.cpu import native_library
from serve.models.packed_cache.layout import Index, Span, chunks_of
from serve.models.packed_cache.region import huge_pages
from serve.models.packed_cache.shared_memory import NotShared, SharedMemory, try_arena
from serve.weight_peers.link import WeightLink
from serve.weight_peers.urgency import give_way
from serve.weight_peers.wire import Area, Header, Kind
from transport.base import TransportError

logger = logging.getLogger(__name__)

MAX_FAILURES = 4
"""Of a peer, with pauses between them that grow; then it is left."""
_PAUSE_S = 0.25
_DEPTH = 2  # requests that a peer has, so that it never waits for one
_WAIT_S = 0.05
_POPULATE_WRITE = 23  # of madvise, since Linux 5.14
_madvise = ctypes.CDLL(None).madvise  # lets other threads run


class PullFailed(Exception):
    """No peer is left before all chunks are there; the message says why."""


class Pull:
    """The chunks of one set of packed weights, on their way into new memory."""

    def __init__(self, index: Index, is_shared: bool = False) -> None:
        """is_shared: into memory that others can have, too, if there is such memory."""
        end = index.data_end
        self._arena = try_arena(end) if is_shared else None
        self.data = huge_pages(end) if self._arena is None else self._arena.data[:end]
        self.num_bytes = sum(chunk.num_bytes for chunk in chunks_of(index.data_end))
        self.done_bytes = 0  # with the right checksum
        self.num_repeated = 0  # chunks that were asked for again
        self._checksums = index.checksums
        self._chunks = chunks_of(index.data_end)
        self._changed = threading.Condition()  # guards the following
        self._todo = deque(range(len(self._chunks)))
        self._num_left = len(self._chunks)
        self._num_peers = 0
        self._reasons: dict[str, str] = {}
        self._is_stopped = False

    def share(self) -> SharedMemory | None:
        """Returns the memory for others, when all is there; None if there is none."""
        arena, self._arena = self._arena, None
        if arena is None:
            return None
        try:
            arena.grow(len(self.data))
            return arena.seal()
        except (NotShared, OSError) as error:
            logger.info("weights_listen: replicas on this machine get copies: %s", error)
            arena.close()
            return None

    def run(self, links: Sequence[WeightLink], poll: Callable[[], object]) -> Tensor:
        """Returns the data, uint8 by their offsets in a file, when all are there. poll: is called
        meanwhile, and may raise. PullFailed. The links are connected, and closed afterwards."""
        self._num_peers = len(links)
        checker = ThreadPoolExecutor(
            1, thread_name_prefix="mergestep-check-weights", initializer=give_way
        )
        threads = [
            threading.Thread(
                target=self._pull, args=(link, checker), name="mergestep-pull-weights", daemon=True
            )
            for link in links
        ]
        threads.append(
            threading.Thread(target=self._make_memory, name="mergestep-pull-memory", daemon=True)
        )
        try:
            for thread in threads:
                thread.start()
            while self._is_open():
                poll()
        finally:
            with self._changed:
                self._is_stopped = True
                self._changed.notify_all()
            for thread in threads:
                thread.join()
            checker.shutdown()
            for link in links:
                link.close()
        if self._num_left:
            raise PullFailed("; ".join(f"{url}: {why}" for url, why in self._reasons.items()))
        return self.data

    def _is_open(self) -> bool:
        """Waits a moment; returns whether chunks are missing that may still come."""
        with self._changed:
            self._changed.wait_for(self._has_ended, _WAIT_S)
            return not self._has_ended()

    def _has_ended(self) -> bool:
        return self._num_left == 0 or self._num_peers == 0

    def _make_memory(self) -> None:
        """Has the kernel make the memory ahead of the bytes: that of a guest may have to be fetched
        from its host first, which takes as long as a fast link."""
        give_way()
        for chunk in self._chunks:
            if self._is_over() or not self._makes(chunk):
                return

    def _makes(self, chunk: Span) -> bool:
        """Has the memory of a chunk made, and returns whether there is some."""
        if self._arena is None:
            place = ctypes.c_void_p(self.data.data_ptr() + chunk.start)
            return not _madvise(place, ctypes.c_size_t(chunk.num_bytes), _POPULATE_WRITE)
        try:
            self._arena.grow(chunk.start + chunk.num_bytes)
        except NotShared:
            return False
        return True

    # ---- a peer's thread

    def _pull(self, link: WeightLink, checker: ThreadPoolExecutor) -> None:
        pending: deque[tuple[int, int]] = deque()  # chunk, request
        try:
            self._pull_from(link, pending, checker)
        except Exception as error:  # an error of this code must not let the others wait for ever
            self._reasons[link.url] = f"{type(error).__name__}: {error}"
            logger.exception("weights_from: %s", link.url)
        finally:
            self._give_back([number for number, _ in pending])
            with self._changed:
                self._num_peers -= 1
                self._changed.notify_all()

    def _pull_from(
        self, link: WeightLink, pending: deque[tuple[int, int]], checker: ThreadPoolExecutor
    ) -> None:
        """Returns when all chunks are there, or the peer has failed too often."""
        failures = 0

        def failed(why: str) -> None:
            nonlocal failures
            with self._changed:  # the checker's thread calls it, too
                failures += 1
                self._reasons[link.url] = why
            logger.warning("weights_from: %s: %s", link.url, why)

        def check(number: int) -> None:
            try:
                why = None if self._is_right(number) else "has another checksum"
            except Exception as error:
                why = f"was not compared: {error!r}"
            if why is not None:
                failed(f"chunk {number} {why}")
                self._give_back([number])

        while failures < MAX_FAILURES and not self._is_over():
            try:
                self._step(link, pending, lambda number: checker.submit(check, number))
            except TransportError as error:
                if self._is_over():
                    return
                failed(str(error) or type(error).__name__)
                self._give_back([number for number, _ in pending])
                pending.clear()
                while failures < MAX_FAILURES and not self._is_over():
                    if self._reconnect(link, failures):
                        break
                    failures += 1

    def _step(
        self, link: WeightLink, pending: deque[tuple[int, int]], arrived: Callable[[int], object]
    ) -> None:
        """Asks for chunks and takes one."""
        while len(pending) < _DEPTH and (number := self._take(len(pending))) is not None:
            start, num_bytes = self._place(number)
            try:
                request = link.ask(Area.DATA, start, num_bytes)
            except BaseException:
                self._give_back([number])
                raise
            pending.append((number, request))
        if not pending:  # other peers have the rest, or it is being checked
            with self._changed:
                self._changed.wait(_WAIT_S)
            return
        number, request = pending[0]
        start, num_bytes = self._place(number)
        due = Header(Kind.PART, Area.DATA, request, start, num_bytes)
        link.receive(due, self.data.data_ptr() + start, self._raise_if_stopped)
        pending.popleft()
        arrived(number)

    def _reconnect(self, link: WeightLink, failures: int) -> bool:
        end_s = time.monotonic() + _PAUSE_S * 2**failures
        with self._changed:
            self._changed.wait_for(self._is_over, max(0.0, end_s - time.monotonic()))
        try:
            link.connect()
        except TransportError as error:
            self._reasons[link.url] = str(error)
            return False
        return True

    def _raise_if_stopped(self) -> None:
        if self._is_stopped:
            raise TransportError("the pull is stopped")

    def _is_right(self, number: int) -> bool:
        """Compares a chunk, and counts it if it is right."""
        start, num_bytes = self._place(number)
        address = self.data.data_ptr() + start
        if native_library.library().checksum(address, num_bytes) != self._checksums[number]:
            return False
        with self._changed:
            self._num_left -= 1
            self.done_bytes += num_bytes
            self._changed.notify_all()
        return True

    def _place(self, number: int) -> tuple[int, int]:
        chunk = self._chunks[number]
        return chunk.start, chunk.num_bytes

    def _take(self, num_pending: int) -> int | None:
        """Returns the next chunk; the last ones are for peers that have none."""
        with self._changed:
            is_short = num_pending > 0 and len(self._todo) < self._num_peers
            if not self._todo or is_short or self._is_stopped:
                return None
            return self._todo.popleft()

    def _give_back(self, numbers: list[int]) -> None:
        with self._changed:
            self._todo.extendleft(reversed(numbers))
            self.num_repeated += len(numbers)
            self._changed.notify_all()

    def _is_over(self) -> bool:
        return self._is_stopped or self._num_left == 0
