"""Serves pages by name to peers, each in a thread of its own.

A peer has proved that it knows the shared key, but what it sends is not trusted: a message that is
none of ours, more names than a sequence has, or more than anybody needs in a while end the
connection, and the peer's address is barred for a time. A peer that does not take pages is left.
One peer's pages are read at a time, and a bounded number of them, so peers take little memory and
at most one processor.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import replace

from memory.peers.page_source import BUFFER_PAGES, PageBuffer, PageSource
from memory.peers.wire import (
    ID_CHARS,
    MAX_NAMES,
    Flag,
    Kind,
    PageChecksums,
    PeerProtocolError,
    difference,
    header,
    pack_news,
    read_header,
    read_names,
    read_news_request,
)
from memory.prefix.peer_stats import ServeStats
from memory.prefix.sequence_names import SequenceNames
from transport.base import Endpoint, Listener, Segment, TransportError
from transport.messages import post_bytes, view_of

logger = logging.getLogger(__name__)

POST_S = 2.0  # a peer that does not take a page for so long is left
BARRED_S = 30.0
NAMES_PER_S = 50_000  # that a peer may ask about in the long run
_NAMES_OF_NEWS = 64  # that a question for news counts as
_MAX_BARRED = 1024
_WAIT_S = 0.1


class NameBudget:
    """The names that a peer may still ask about."""

    def __init__(self) -> None:
        self._left = 4.0 * MAX_NAMES
        self._at_s = time.monotonic()

    def take(self, count: int) -> None:
        """Raises PeerProtocolError if these are too many."""
        now_s = time.monotonic()
        self._left = min(4.0 * MAX_NAMES, self._left + NAMES_PER_S * (now_s - self._at_s))
        self._at_s = now_s
        self._left -= count
        if self._left < 0:
            raise PeerProtocolError(f"more than {NAMES_PER_S} names a second")


class PageServer:
    """Serves until `close`."""

    def __init__(
        self,
        listener: Listener,
        identity: Mapping[str, str],
        source: PageSource,
        checksums: PageChecksums,
        page_bytes: int,
        names: SequenceNames | None = None,
    ) -> None:
        """The server closes the listener. names: those of this engine's sequences."""
        self.url = listener.url
        self._listener = listener
        self._identity = identity
        self._source = source
        self._checksums = checksums
        self._page_bytes = page_bytes
        self._names = names
        self._stats = ServeStats()
        self._turn = threading.Lock()  # of reading pages
        self._lock = threading.Lock()  # guards the following
        self._barred: dict[str, float] = {}  # until when, by address
        self._threads: set[threading.Thread] = set()
        self._is_closing = False
        self._is_quiet = True
        self._acceptor = threading.Thread(
            target=self._accept, name="mergestep-serve-kv", daemon=True
        )
        self._acceptor.start()

    def snapshot(self) -> ServeStats:
        """Returns the counters; refused connections include those without the key."""
        refused = self._stats.refused + self._listener.num_refused
        return replace(self._stats, refused=refused)

    def close(self, timeout_s: float) -> bool:
        """Leaves all peers. Returns False if pages may still be read after the time."""
        end_s = time.monotonic() + timeout_s
        self._is_closing = True
        self._listener.close()
        self._acceptor.join(max(0.0, end_s - time.monotonic()))
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        return self._is_quiet and not any(thread.is_alive() for thread in threads)

    # ---- connections

    def _accept(self) -> None:
        while not self._is_closing:
            endpoint = self._listener.accept(_WAIT_S)
            if endpoint is None:
                continue
            reason = difference(self._identity, endpoint.peer.info)
            if reason is None and self._is_barred(_host(endpoint)):
                reason = "it is barred for what it sent before"
            if reason is not None:
                self._refuse(endpoint, reason)
                endpoint.close()
                continue
            thread = threading.Thread(
                target=self._serve, args=(endpoint,), name="mergestep-serve-kv", daemon=True
            )
            with self._lock:
                self._threads.add(thread)
            thread.start()

    def _is_barred(self, host: str) -> bool:
        with self._lock:
            return time.monotonic() < self._barred.get(host, 0.0)

    def _refuse(self, endpoint: Endpoint, reason: str) -> None:
        self._stats.refused += 1
        logger.warning("kv_listen: the peer at %s is refused: %s", endpoint.peer.address, reason)

    def _bar(self, endpoint: Endpoint, reason: str) -> None:
        now_s = time.monotonic()
        self._refuse(endpoint, reason)
        with self._lock:
            self._barred = {host: at for host, at in self._barred.items() if at > now_s}
            if len(self._barred) < _MAX_BARRED:
                self._barred[_host(endpoint)] = now_s + BARRED_S

    # ---- one peer

    def _serve(self, endpoint: Endpoint) -> None:
        follower = object()  # what this connection is to the names
        try:
            self._answer_all(endpoint, follower)
        except PeerProtocolError as error:
            self._bar(endpoint, str(error))
        except (TransportError, OSError) as error:
            if not endpoint.is_lost:
                self._refuse(endpoint, str(error))
        except Exception:
            logger.exception("kv_listen: serving the peer at %s failed", endpoint.peer.address)
        finally:
            endpoint.close()
            if self._names is not None:
                self._names.leave(follower)
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _answer_all(self, endpoint: Endpoint, follower: object) -> None:
        budget, buffer = NameBudget(), None
        while not self._is_closing:
            frame = endpoint.poll(_WAIT_S)
            if frame is None:
                continue
            try:
                message = view_of(frame)
                if read_header(message)[0] == Kind.NEWS:
                    budget.take(_NAMES_OF_NEWS)
                    self._tell_news(endpoint, follower, *read_news_request(message))
                    continue
                kind, number, names = read_names(message)
            finally:
                endpoint.release(frame)
            budget.take(len(names))
            if kind is Kind.ASK:
                flags = bytes([self._flag(name) for name in names])
                post_bytes(endpoint, header(Kind.HAVE, number, len(names)) + flags, POST_S)
                continue
            buffer = buffer or PageBuffer(self._page_bytes)
            for first in range(0, len(names), BUFFER_PAGES):
                if self._is_closing:
                    return
                batch = names[first : first + BUFFER_PAGES]
                if not self._post_pages(endpoint, number, first, batch, buffer):
                    return

    def _flag(self, name: bytes) -> Flag:
        if self._source.contains(name):
            return Flag.THERE
        is_coming = self._names is not None and self._names.is_expected(name)
        return Flag.COMING if is_coming else Flag.ABSENT

    def _tell_news(self, endpoint: Endpoint, follower: object, number: int, most: int) -> None:
        engine = str(endpoint.peer.info.get("engine", ""))[:ID_CHARS]
        news = [] if self._names is None else self._names.news(follower, most, engine)
        post_bytes(endpoint, pack_news(number, news), POST_S)

    def _post_pages(
        self, endpoint: Endpoint, number: int, first: int, names: list[bytes], buffer: PageBuffer
    ) -> bool:
        """Posts some of a request's pages. Returns False if the store below hangs, which may still
        write to the buffer."""
        with self._turn:
            found = self._source.read(names, buffer)
            if found is None:
                self._is_quiet = False
                return False
            checksums = [
                self._checksums.of(name, buffer.view(slot)) if is_there else b""
                for slot, (name, is_there) in enumerate(zip(names, found, strict=True))
            ]
        for slot, checksum in enumerate(checksums):
            head = header(Kind.PAGE, number, first + slot) + checksum
            segments = [_segment(head)]
            if checksum:
                segments.append(
                    Segment(buffer.address(slot), 1, self._page_bytes, self._page_bytes)
                )
            endpoint.post(segments, POST_S)
            self._stats.served += bool(checksum)
            self._stats.missing += not checksum
        return True


def _segment(data: bytes) -> Segment:
    """Returns the bytes as a segment; the caller keeps them until they are posted."""
    address = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value
    assert address is not None
    return Segment(address, 1, len(data), len(data))


def _host(endpoint: Endpoint) -> str:
    """Returns the peer's address without its port."""
    return endpoint.peer.address.rpartition(":")[0] or endpoint.peer.address
