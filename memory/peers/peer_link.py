"""The connection to one peer, and the thread that asks it and pulls pages.

A request that fails, is late or is answered with something else ends the connection; the pages are
misses, and the sequence is computed. Then there is a pause, each twice as long as the one before.
A peer that sent something wrong rests for the longest one.
"""

from __future__ import annotations

import ctypes
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from memory.peers import jobs
from memory.peers.copying import Copying
from memory.peers.jobs import AskJob, Job, NewsJob, PullJob
from memory.peers.page_copies import PageCopies
from memory.peers.wire import (
    HEADER_BYTES,
    PAGE_HEADER_BYTES,
    Flag,
    Kind,
    PageChecksums,
    PeerProtocolError,
    difference,
    header,
    pack_names,
    read_answer,
    read_news,
)
from memory.prefix.peer_stats import PullStats
from transport.base import Endpoint, Frame, TransportError, TransportTimeoutError
from transport.messages import post_bytes, view_of

logger = logging.getLogger(__name__)

PAGE_S = 1.0  # the longest wait for the next page
PULL_S = 5.0  # the longest that all pages of a request take
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_IDLE_S = 0.25  # between two looks at an idle connection
_SLICE_S = 0.1  # a wait looks so often whether the link is being closed

Connect = Callable[[str], Endpoint]


class PeerLink:
    """One peer. The methods may be called by any thread."""

    def __init__(
        self,
        url: str,
        connect: Connect,
        identity: Mapping[str, str],
        checksums: PageChecksums,
        page_bytes: int,
        engine_id: str = "",
        pauses: tuple[float, float] = (_FIRST_PAUSE_S, _LONGEST_PAUSE_S),
        copies: PageCopies | None = None,
    ) -> None:
        """engine_id: ours, so that an engine that is among its own peers leaves itself alone.
        pauses: the first and the longest, in seconds. copies: gets pages of the peer's running
        sequences in idle moments."""
        self.url = url
        self.stats = PullStats()
        self._connect = connect
        self._identity = identity
        self._checksums = checksums
        self._page_bytes = page_bytes
        self._engine_id = engine_id
        self._first_pause_s, self._longest_pause_s = pauses
        self._pause_s = 0.0
        self._resumes_s = 0.0
        self._number = 0
        self._endpoint: Endpoint | None = None
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._copies = copies
        self._copying = None if copies is None else Copying(url, copies)
        self._is_closing = False
        self._is_starting = True
        self._thread = threading.Thread(target=self._run, name="mergestep-pull", daemon=True)
        self._thread.start()

    @property
    def is_starting(self) -> bool:
        """Whether the first attempt to connect has not ended."""
        return self._is_starting and not self._is_closing

    @property
    def is_ready(self) -> bool:
        endpoint = self._endpoint
        return endpoint is not None and not endpoint.is_lost and not self._is_closing

    def submit(self, job: Job) -> None:
        """Queues a job; it ends even if the peer does not answer."""
        if not (self.is_ready or self.is_starting):
            job.fail()
            return
        self._jobs.put(job)
        if self._is_closing:
            self._fail_all()

    def snapshot(self) -> PullStats:
        return replace(self.stats, is_connected=self.is_ready)

    def close(self, timeout_s: float) -> bool:
        """Ends the connection and the thread. Returns False if the thread has not ended in time."""
        self._is_closing = True  # only the thread closes the endpoint, whose window it may read
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ---- the thread

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._keep_connected()
                self._is_starting = False
                copying = self._copying if self._endpoint is not None else None
                idle_s = _IDLE_S if copying is None else min(_IDLE_S, copying.due_in_s())
                try:
                    job = self._jobs.get(timeout=idle_s)
                except queue.Empty:
                    if self._copies is not None:  # they expire without a peer, too
                        self._copies.expire()
                    if copying is not None:
                        self._copy(copying)
                    continue
                if job is not None:
                    self._do(job)
        finally:
            self._is_closing = True
            if self._endpoint is not None:
                self._endpoint.close()
            self._fail_all()

    def _keep_connected(self) -> None:
        if self._endpoint is not None:
            if not self._endpoint.is_lost:
                return
            self._end("the connection ended", is_refused=False)
        if self._is_closing or time.monotonic() < self._resumes_s:
            return
        try:
            endpoint = self._connect(self.url)
        except (TransportError, OSError) as error:
            self._end(str(error), is_refused=False)
            return
        if endpoint.peer.info.get("engine") == self._engine_id:
            endpoint.close()
            self._resumes_s = math.inf
            return
        reason = difference(self._identity, endpoint.peer.info)
        if reason is not None:
            endpoint.close()
            self._end(reason, is_refused=True)
            return
        logger.info("K/V is pulled from %s", self.url)
        self._endpoint = endpoint

    def _copy(self, copying: Copying) -> None:
        """Does the next part of copying, if it is due."""
        job, began_s = copying.next_job(), time.monotonic()
        if job is not None:
            self._do(job)
            copying.took(job, time.monotonic() - began_s)

    def _do(self, job: Job) -> None:
        endpoint = self._endpoint
        try:
            if endpoint is None or endpoint.is_lost:
                return
            self._number += 1
            if isinstance(job, AskJob):
                self._ask(endpoint, job)
            elif isinstance(job, NewsJob):
                self._ask_for_news(endpoint, job)
            else:
                self._pull(endpoint, job)
            self._pause_s = 0.0
        except PeerProtocolError as error:
            self._end(str(error), is_refused=True)
        except (TransportError, OSError, ValueError) as error:
            self._end(str(error), is_refused=False)
        finally:
            job.fail()  # as far as it has not ended

    def _ask(self, endpoint: Endpoint, job: AskJob) -> None:
        if time.monotonic() > job.until_s:
            return
        self.stats.asked += len(job.names)
        post_bytes(endpoint, pack_names(Kind.ASK, self._number, job.names), jobs.ASK_S)
        frame = self._next(endpoint, max(0.0, job.until_s - time.monotonic()))
        try:
            message = view_of(frame)
            read_answer(message, Kind.HAVE, self._number, len(job.names))
            if frame.num_bytes != HEADER_BYTES + len(job.names):
                raise PeerProtocolError(f"an answer of {frame.num_bytes} bytes")
            flags = bytes(message[HEADER_BYTES:])
        finally:
            endpoint.release(frame)
        pairs = list(zip(job.names, flags, strict=True))
        has = [name for name, flag in pairs if flag == Flag.THERE]
        self.stats.found += len(has)
        job.answer(has, [name for name, flag in pairs if flag == Flag.COMING])

    def _ask_for_news(self, endpoint: Endpoint, job: NewsJob) -> None:
        post_bytes(endpoint, header(Kind.NEWS, self._number, job.most), jobs.ASK_S)
        frame = self._next(endpoint, PAGE_S)
        try:
            news = read_news(view_of(frame), self._number, job.most)
        finally:
            endpoint.release(frame)
        job.on_news(news)

    def _pull(self, endpoint: Endpoint, job: PullJob) -> None:
        began_s = time.monotonic()
        names = [name for name, _ in job.pages]
        post_bytes(endpoint, pack_names(Kind.GET, self._number, names), jobs.ASK_S)
        try:
            for index, (name, address) in enumerate(job.pages):
                left_s = began_s + PULL_S - time.monotonic()
                frame = self._next(endpoint, max(0.0, min(PAGE_S, left_s)))
                is_there = self._take(endpoint, frame, index, name, address)
                self.stats.pulled += is_there
                self.stats.missing += not is_there
                job.futures[index].set_result(is_there)
        finally:
            self.stats.seconds += time.monotonic() - began_s

    def _take(
        self, endpoint: Endpoint, frame: Frame, index: int, name: bytes, address: int
    ) -> bool:
        """Copies a page to its place. It is checked there, since the peer may still change what
        lies in the window. Returns False if the peer does not have it."""
        try:
            message = view_of(frame)
            read_answer(message, Kind.PAGE, self._number, index)
            if frame.num_bytes == HEADER_BYTES:
                return False
            if frame.num_bytes != PAGE_HEADER_BYTES + self._page_bytes:
                raise PeerProtocolError(f"a page of {frame.num_bytes - PAGE_HEADER_BYTES} bytes")
            checksum = bytes(message[HEADER_BYTES:PAGE_HEADER_BYTES])
            ctypes.memmove(address, frame.address + PAGE_HEADER_BYTES, self._page_bytes)
        finally:
            endpoint.release(frame)
        if not self._checksums.is_right(name, page_view(address, self._page_bytes), checksum):
            raise PeerProtocolError("a page that does not have its checksum")
        return True

    def _next(self, endpoint: Endpoint, timeout_s: float) -> Frame:
        until_s = time.monotonic() + timeout_s
        while not self._is_closing:
            left_s = max(0.0, until_s - time.monotonic())
            frame = endpoint.poll(min(left_s, _SLICE_S))
            if frame is not None:
                return frame
            if left_s <= _SLICE_S:
                raise TransportTimeoutError("no answer in time")
        raise TransportTimeoutError("it is closing")

    def _end(self, reason: str, *, is_refused: bool) -> None:
        """Ends the connection, if there is one, and pauses."""
        if self._endpoint is not None:
            self._endpoint.close()
            self.stats.lost += not is_refused
        self._endpoint = None
        if self._copying is not None:
            self._copying.lose()
        self.stats.refused += is_refused
        is_first = not self._pause_s
        self._pause_s = min(max(self._first_pause_s, 2 * self._pause_s), self._longest_pause_s)
        if is_refused:
            self._pause_s = self._longest_pause_s
        self._resumes_s = time.monotonic() + self._pause_s
        level = logging.WARNING if is_first or is_refused else logging.DEBUG
        if not self._is_closing:
            what = "is refused" if is_refused else "is not there"
            logger.log(level, "kv_peers: %s %s: %s", self.url, what, reason)

    def _fail_all(self) -> None:
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return
            if job is not None:
                job.fail()


def page_view(address: int, page_bytes: int) -> memoryview:
    return memoryview((ctypes.c_char * page_bytes).from_address(address)).cast("B")
