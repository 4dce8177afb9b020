"""A page store that pulls pages from peers, over an optional store of this machine.

Peers are asked about names before a sequence is computed (`ask`), in parallel and with a deadline;
what they have is remembered for a moment. Pages are never written to peers: they are pulled by
whoever wants them. Any failure is a miss and a counter.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from memory.peers.jobs import AskJob, PullJob
from memory.peers.page_copies import PageCopies
from memory.peers.page_server import PageServer
from memory.peers.peer_link import PeerLink
from memory.peers.wire import MAX_NAMES
from memory.prefix.page_store import PageStore
from memory.prefix.peer_stats import PeersStats, PullStats, ServeStats
from memory.prefix.store_stats import StoreStats

KNOWN_S = 5.0  # how long it is remembered what a peer has
COMING_S = 1.0  # how long it is remembered what a peer is computing
_MAX_KNOWN = 65_536  # names
MAX_NAMED = 16
"""The most peers that requests name."""
NAMED_SCHEME = "tcp://"
ANY_PEER = "tcp://*"
"""Among the addresses of peers it stands for those that requests name."""
_CLOSE_SHARE = 0.3  # of the time of `close`, for the peers


class PeerStore:
    """Implements `PageStore`. Requests come from the computing thread."""

    def __init__(
        self,
        links: Sequence[PeerLink],
        below: PageStore | None = None,
        server: PageServer | None = None,
        *,
        make_link: Callable[[str], PeerLink] | None = None,
        engine_id: str = "",
        max_requests: int = 1024,
        clock: Callable[[], float] = time.monotonic,
        copies: PageCopies | None = None,
    ) -> None:
        """The store closes the links, the server and the store below. make_link: connects to peers
        that requests name; None: there are none but `links`. copies: what the links have copied."""
        self._links = list(links)
        self._make_link = make_link
        self._forgotten = PullStats()  # of named peers
        self._named: OrderedDict[str, PeerLink] = OrderedDict()  # the one named last is the last
        self._below = below
        self._server = server
        self._engine_id = engine_id
        self._max_requests = max_requests
        self._clock = clock
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, tuple[PeerLink, float]] = OrderedDict()
        self._coming: OrderedDict[bytes, tuple[PeerLink, float]] = OrderedDict()
        self._copies = copies
        self._copier = None if copies is None else ThreadPoolExecutor(1, "mergestep-copies")
        self._last_asked: bytes | None = None  # the last name of a question that is not used yet
        self._num_pulling = 0
        self._is_closed = False

    def use_peer(self, url: str) -> None:
        """Connects to a peer that a request names, if the settings allow it and it is not one of
        the peers. Of many, those that are not there are forgotten; further ones are ignored. Any
        thread may call it."""
        if self._make_link is None or not url.startswith(NAMED_SCHEME):
            return
        with self._lock:
            if self._is_closed or any(link.url == url for link in self._links):
                return
            if url in self._named:
                self._named.move_to_end(url)
                return
            if len(self._named) >= MAX_NAMED:
                idle = [u for u, it in self._named.items() if not (it.is_ready or it.is_starting)]
                if not idle:
                    return
                forgotten = self._named.pop(idle[0])
                self._forgotten.add(forgotten.stats)
                forgotten.close(0.0)
            self._named[url] = self._make_link(url)

    def _all_links(self) -> list[PeerLink]:
        with self._lock:
            return [*self._links, *self._named.values()]

    # ---- which pages there are

    def ask(self, keys: Sequence[bytes]) -> Future[bool] | None:
        """Asks all peers that are there about the pages that the store below lacks. None if this
        was the last question, so that its answer is used now, or there is nothing to ask."""
        names = [key for key in keys if not self._is_below(key)][:MAX_NAMES]
        links = [link for link in self._all_links() if link.is_ready or link.is_starting]
        if not names or not links:
            return None
        if names[-1] == self._last_asked:
            self._last_asked = None
            return None
        self._last_asked = names[-1]
        future: Future[bool] = Future()
        future.set_running_or_notify_cancel()
        left = [len(links)]
        for link in links:
            link.submit(AskJob(names, partial(self._note, link, left, future)))
        return future

    def _note(
        self,
        link: PeerLink,
        left: list[int],
        future: Future[bool],
        names: list[bytes],
        coming: list[bytes],
    ) -> None:
        """Remembers what a peer has; the last peer's answer ends the question."""
        known = link, self._clock()
        with self._lock:
            for table, found in ((self._known, names), (self._coming, coming)):
                for name in found:
                    table[name] = known
                    table.move_to_end(name)
                    if len(table) > _MAX_KNOWN:
                        table.popitem(last=False)
            left[0] -= 1
            is_last = not left[0]
        if is_last:
            future.set_result(True)

    def _peer_with(self, key: bytes) -> PeerLink | None:
        link, at_s = self._known.get(key, (None, 0.0))
        if link is None or not link.is_ready or at_s + KNOWN_S < self._clock():
            return None
        return link

    def is_coming(self, key: bytes) -> bool:
        """Returns whether a peer was computing this page when it was asked a moment ago."""
        link, at_s = self._coming.get(key, (None, 0.0))
        return link is not None and link.is_ready and self._clock() < at_s + COMING_S

    def contains(self, key: bytes) -> bool:
        return self._is_below(key) or self._peer_with(key) is not None

    def _is_below(self, key: bytes) -> bool:
        return self._is_copied(key) or (self._below is not None and self._below.contains(key))

    def _is_copied(self, key: bytes) -> bool:
        return self._copies is not None and self._copies.contains(key)

    # ---- transfers

    def load_many(self, pages: Sequence[tuple[bytes, int]]) -> list[Future[bool]]:
        """Loads what the store below has, and pulls the rest from the peers that have it."""
        below: list[int] = []
        copied: list[int] = []
        pulls: dict[PeerLink | None, list[int]] = {}
        for index, (key, _) in enumerate(pages):
            if self._is_copied(key):
                copied.append(index)
            elif self._below is not None and self._below.contains(key):
                below.append(index)
            else:
                pulls.setdefault(self._peer_with(key), []).append(index)
        futures: list[Future[bool]] = [Future() for _ in pages]
        if below:
            assert self._below is not None
            loads = self._below.load_many([pages[index] for index in below])
            for index, load in zip(below, loads, strict=True):
                futures[index] = load
        for index in (*copied, *(index for indices in pulls.values() for index in indices)):
            self._begin_pull(futures[index])
        if copied:
            assert self._copier is not None
            job = PullJob([pages[i] for i in copied], [futures[i] for i in copied])
            self._copier.submit(self._read_copies, job)
        for link, indices in pulls.items():
            job = PullJob([pages[i] for i in indices], [futures[i] for i in indices])
            if link is None:
                job.fail()
            else:
                link.submit(job)
        return futures

    def _read_copies(self, job: PullJob) -> None:
        assert self._copies is not None
        for (name, address), future in zip(job.pages, job.futures, strict=True):
            future.set_result(self._copies.read(name, address))

    def _begin_pull(self, future: Future[bool]) -> None:
        future.set_running_or_notify_cancel()  # so that it cannot be cancelled
        with self._lock:
            self._num_pulling += 1
        future.add_done_callback(self._end_pull)

    def _end_pull(self, _: Future[bool]) -> None:
        with self._lock:
            self._num_pulling -= 1

    @property
    def room(self) -> int:
        room = max(0, self._max_requests - self._num_pulling)
        return room if self._below is None else min(room, self._below.room)

    def store_many(self, pages: Sequence[tuple[bytes, int]]) -> list[Future[bool]]:
        """Writes pages to the store below; without one, `use` has said that there is no room."""
        assert self._below is not None or not pages, "there is no store below"
        return [] if self._below is None else self._below.store_many(pages)

    def use(self, keys: Sequence[bytes]) -> int:
        return 0 if self._below is None else self._below.use(keys)

    def discard(self, key: bytes) -> bool:
        with self._lock:
            self._known.pop(key, None)
        return self._below is not None and self._below.discard(key)

    # ---- counters and the end

    def stats(self) -> StoreStats:
        found = StoreStats() if self._below is None else self._below.stats()
        pulls = {link.url: link.snapshot() for link in self._links}
        if self._make_link is not None:
            pulls[ANY_PEER] = self._named_stats()
        serves = ServeStats() if self._server is None else self._server.snapshot()
        url = None if self._server is None else self._server.url
        copies = None if self._copies is None else self._copies.stats()
        return replace(found, peers=PeersStats(pulls, serves, self._engine_id, url, copies))

    def _named_stats(self) -> PullStats:
        with self._lock:
            found = replace(self._forgotten)
            for link in self._named.values():
                found.add(link.snapshot())
        return found

    def close(self, timeout_s: float) -> bool:
        end_s = time.monotonic() + timeout_s
        peers_end_s = time.monotonic() + _CLOSE_SHARE * timeout_s
        is_quiet = self._server is None or self._server.close(_CLOSE_SHARE * timeout_s)
        with self._lock:
            self._is_closed = True
        for link in self._all_links():
            is_quiet &= link.close(max(0.0, peers_end_s - time.monotonic()))
        if self._copier is not None:
            self._copier.shutdown()  # it only copies memory
        if self._below is not None:
            is_quiet &= self._below.close(max(0.0, end_s - time.monotonic()))
        return is_quiet
