"""When a link to a peer copies pages of the sequences that run there: in a share of its time.

The link asks the peer for the names of new pages, and pulls a few pages at a time while it has no
other work. After each of these no pages are pulled for a while, so that copying takes at most SHARE
of the time here and there, and what waits for a pull is delayed by a few pages at most. Questions
are short and are not put off by such a rest: a follower that asks too late loses its sequences.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from memory.peers.jobs import NewsJob, PullJob
from memory.peers.page_copies import PageCopies
from memory.peers.wire import MAX_NEWS
from memory.prefix.sequence_names import ENDED, FOLLOWER_S

SHARE = 0.05
NEWS_S = 0.1  # between two questions
_BATCH_PAGES = 4
_MAX_PENDING = 4096  # names; a peer is asked for no more while so many wait


class Copying:
    """The work for one peer. Its link's thread calls the methods."""

    def __init__(
        self, peer: str, copies: PageCopies, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._peer = peer
        self._copies = copies
        self._clock = clock
        self._pending: deque[tuple[int, bytes]] = deque()
        self._resumes_s = 0.0
        self._asks_s = 0.0
        self._is_following = False

    def due_in_s(self) -> float:
        """Returns the seconds until there is work."""
        due_s = self._resumes_s if self._pending else self._asks_s
        if len(self._pending) < _MAX_PENDING:
            due_s = min(due_s, self._asks_s)
        return max(0.0, due_s - self._clock())

    def next_job(self) -> NewsJob | PullJob | None:
        """Returns the work that is due, if any."""
        now_s = self._clock()
        if now_s >= self._asks_s and len(self._pending) < _MAX_PENDING:
            self._asks_s = now_s + NEWS_S
            self._is_following = True
            most = min(MAX_NEWS, _MAX_PENDING - len(self._pending))
            return NewsJob(most, self._pending.extend)
        if now_s < self._resumes_s:
            return None
        pages: list[tuple[bytes, int]] = []
        while self._pending and len(pages) < _BATCH_PAGES:
            number, name = self._pending.popleft()
            if name == ENDED:
                self._copies.end((self._peer, number))
                continue
            address = self._copies.place((self._peer, number), name)
            if address is not None:
                pages.append((name, address))
        return self._pull(pages) if pages else None

    def _pull(self, pages: list[tuple[bytes, int]]) -> PullJob:
        futures: list[Future[bool]] = []
        for name, _ in pages:
            future: Future[bool] = Future()
            future.set_running_or_notify_cancel()
            future.add_done_callback(partial(self._end_pull, name))
            futures.append(future)
        return PullJob(pages, futures)

    def _end_pull(self, name: bytes, future: Future[bool]) -> None:
        self._copies.filled(name, is_there=future.result())

    def took(self, job: NewsJob | PullJob, seconds: float) -> None:
        """Rests after work that took so many seconds. Slow questions are asked less often, so that
        they leave half of the share to pages, but in time for the peer."""
        now_s = self._clock()
        self._resumes_s = max(self._resumes_s, now_s) + seconds * (1.0 / SHARE - 1.0)
        if isinstance(job, NewsJob):
            pause_s = min(2.0 * seconds / SHARE, 0.5 * FOLLOWER_S)
            self._asks_s = max(self._asks_s, now_s + pause_s)

    def lose(self) -> None:
        """Takes note that the connection ended: the peer's sequences may go on elsewhere."""
        if self._is_following:
            self._is_following = False
            self._pending.clear()
            self._copies.end_all(self._peer)
