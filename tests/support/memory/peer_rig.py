"""Pages of made-up bytes, an engine's side that serves them, and one that pulls them."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from itertools import count

import transport
from memory.peers.page_copies import PageCopies
from memory.peers.page_server import PageServer
from memory.peers.page_source import PageSource
from memory.peers.peer_link import PeerLink
from memory.peers.peer_store import PeerStore
from memory.peers.wire import NAMES_WINDOW_BYTES, PageChecksums
from memory.prefix.index import PrefixIndex
from memory.prefix.page_store import PageStore
from memory.prefix.peer_stats import PullStats
from memory.prefix.sequence_names import SequenceNames
from memory.tiers.direct_io import address_of
from transport.base import Endpoint, Listener, TransportError
from transport.messages import view_of

PAGE = 8192
KEY = b"a key of the tests"
SECRET = b"s" * 32
IDENTITY = {"protocol": "1", "checkpoint": "abc", "precision": "int8, K/V int8"}
_numbers = count()


def name_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def content_of(number: int) -> bytes:
    return bytes([(number * 7 + 3 * i + 1) % 251 for i in range(251)]) * 33


class Pages:
    """Memory for some pages."""

    def __init__(self, num_pages: int) -> None:
        self.memory = mmap.mmap(-1, num_pages * PAGE)
        self._base = address_of(self.memory)

    def address(self, page: int) -> int:
        return self._base + page * PAGE

    def write(self, page: int, content: bytes) -> None:
        ctypes.memmove(self.address(page), content[:PAGE], PAGE)

    def read(self, page: int) -> bytes:
        return ctypes.string_at(self.address(page), PAGE)


def a_url(scheme: str = "inproc") -> str:
    return "tcp://127.0.0.1:0" if scheme == "tcp" else f"inproc://peer-{next(_numbers)}"


def listen(url: str, info: Mapping[str, object] | None = None) -> Listener:
    return transport.listen(
        url, key=KEY, info=IDENTITY if info is None else info, window_bytes=NAMES_WINDOW_BYTES
    )


def connect(url: str, info: Mapping[str, object] | None = None) -> Endpoint:
    return transport.connect(url, key=KEY, info=IDENTITY if info is None else info)


class Holder:
    """An engine that serves its first num_pages pages, in memory."""

    def __init__(
        self,
        num_pages: int = 16,
        scheme: str = "inproc",
        below: PageStore | None = None,
        identity: Mapping[str, str] = IDENTITY,
        copies: PageCopies | None = None,
    ) -> None:
        # each page ends after as many tokens as its number says, and sequences run from the start
        self.names = SequenceNames(lambda page: page + 1, min_age_s=0.0)
        self.index, self.pages = PrefixIndex(), Pages(max(1, num_pages))
        for number in range(num_pages):
            self.pages.write(number, content_of(number))
            self.index.insert(name_of(number), None, number)
        self.server = PageServer(
            listen(a_url(scheme), identity),
            identity,
            PageSource(self.index, self.pages.address, below, copies),
            PageChecksums(SECRET),
            PAGE,
            self.names,
        )


class Puller:
    """An engine that pulls from peers."""

    def __init__(
        self,
        *urls: str,
        below: PageStore | None = None,
        copies: PageCopies | None = None,
        **settings: object,
    ) -> None:
        self.pages = Pages(64)
        settings["copies"] = copies
        self.links = [
            PeerLink(url, connect, IDENTITY, PageChecksums(SECRET), PAGE, **settings)  # type: ignore[arg-type]
            for url in urls
        ]
        self.store = PeerStore(self.links, below, copies=copies)

    def wait_until_ready(self) -> None:
        wait_for(lambda: all(link.is_ready for link in self.links))

    def ask(self, *numbers: int) -> list[int]:
        """Asks about pages; returns those that can be loaded."""
        future = self.store.ask([name_of(number) for number in numbers])
        if future is not None:
            future.result(5.0)
        return [number for number in numbers if self.store.contains(name_of(number))]

    def load(self, *numbers: int) -> list[bool]:
        wanted = [(name_of(number), self.pages.address(number)) for number in numbers]
        return [future.result(10.0) for future in self.store.load_many(wanted)]

    def stats(self, link: int = 0) -> PullStats:
        return self.links[link].snapshot()


def wait_for(condition: Callable[[], object], seconds: float = 5.0) -> None:
    end_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s, "it does not come"
        time.sleep(0.005)


class RawPeer(ABC):
    """A peer that answers each message as a test says."""

    def __init__(self) -> None:
        self._listener = listen(a_url())
        self.url = self._listener.url
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while (endpoint := self._listener.accept()) is not None:
            try:
                while True:
                    frame = endpoint.poll(1.0)
                    if frame is not None:
                        message = bytes(view_of(frame))
                        endpoint.release(frame)
                        self._answer(endpoint, message)
            except TransportError:
                endpoint.close()

    @abstractmethod
    def _answer(self, endpoint: Endpoint, message: bytes) -> None: ...

    def close(self, _: float = 0.0) -> None:
        self._listener.close()
