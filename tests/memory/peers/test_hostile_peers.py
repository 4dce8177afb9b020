"""Peers that send what they should not: refused and counted, and nobody is harmed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

import transport
from memory.peers import jobs, page_server, peer_link
from memory.peers.peer_link import PeerLink
from memory.peers.peer_store import MAX_NAMED, PeerStore
from memory.peers.wire import (
    HEADER_BYTES,
    MAX_NAMES,
    Kind,
    PageChecksums,
    header,
    pack_names,
    read_names,
)
from tests.support.memory.peer_rig import (
    IDENTITY,
    PAGE,
    SECRET,
    Holder,
    Puller,
    RawPeer,
    connect,
    content_of,
    name_of,
    wait_for,
)
from transport.base import Endpoint, TransportError
from transport.messages import post_bytes

CHECKSUMS = PageChecksums(SECRET)
Answer = Callable[[int, bytes], bytes | None]


def page_message(number: int, index: int, name: bytes, page: bytes) -> bytes:
    return header(Kind.PAGE, number, index) + CHECKSUMS.of(name, memoryview(page)) + page


class HostilePeer(RawPeer):
    """Says that it has every page, and answers the first page of a request as a test says."""

    def __init__(self, page: Answer, have: Answer | None = None) -> None:
        self._page, self._have = page, have
        super().__init__()

    def _answer(self, endpoint: Endpoint, message: bytes) -> None:
        kind, number, names = read_names(memoryview(message))
        if kind is Kind.GET:
            answer = self._page(number, names[0])
        elif self._have is not None:
            answer = self._have(number, names[0])
        else:
            answer = header(Kind.HAVE, number, len(names)) + b"\1" * len(names)
        if answer is not None:
            post_bytes(endpoint, answer)


WRONG = content_of(2)[:PAGE]
RIGHT = content_of(1)[:PAGE]
PAGES: dict[str, Answer] = {
    "another page, which has its own checksum": lambda number, name: page_message(
        number, 0, name_of(2), WRONG
    ),
    "another page with the checksum of the right one": lambda number, name: (
        header(Kind.PAGE, number, 0) + CHECKSUMS.of(name, memoryview(RIGHT)) + WRONG
    ),
    "a page under another secret": lambda number, name: (
        header(Kind.PAGE, number, 0) + PageChecksums(b"x" * 32).of(name, memoryview(RIGHT)) + RIGHT
    ),
    "half a page": lambda number, name: page_message(number, 0, name, RIGHT[: PAGE // 2]),
    "a page and a half": lambda number, name: page_message(number, 0, name, RIGHT + RIGHT[:4096]),
    "a page of another request": lambda number, name: page_message(number + 1, 0, name, RIGHT),
    "a page that is not due": lambda number, name: page_message(number, 5, name, RIGHT),
    "an answer of another kind": lambda number, name: header(Kind.HAVE, number, 0),
    "a few bytes": lambda number, name: b"abc",
}


@pytest.mark.parametrize("what", PAGES)
def test_a_wrong_page_is_refused_and_counted(what):
    peer = HostilePeer(PAGES[what])
    puller = Puller(peer.url)
    puller.wait_until_ready()
    try:
        assert puller.ask(1, 3) == [1, 3]
        assert puller.load(1, 3) == [False, False]
        wait_for(lambda: puller.stats().refused == 1)
        assert puller.stats().pulled == 0
        assert puller.ask(7) == [], "it rests"
    finally:
        peer.close()
        puller.store.close(5.0)


HAVES: dict[str, Answer] = {
    "too few": lambda number, name: header(Kind.HAVE, number, 2) + b"\1",
    "too many": lambda number, name: header(Kind.HAVE, number, 2) + b"\1" * 500,
    "another count": lambda number, name: header(Kind.HAVE, number, 500) + b"\1" * 500,
}


@pytest.mark.parametrize("what", HAVES)
def test_a_wrong_list_of_pages_is_refused(what):
    peer = HostilePeer(PAGES["a few bytes"], HAVES[what])
    puller = Puller(peer.url)
    puller.wait_until_ready()
    try:
        assert puller.ask(1, 3) == []
        wait_for(lambda: puller.stats().refused == 1)
    finally:
        peer.close()
        puller.store.close(5.0)


def test_the_right_page_is_taken():
    """What the tests of wrong pages rest on."""
    peer = HostilePeer(lambda number, name: page_message(number, 0, name, RIGHT))
    puller = Puller(peer.url)
    puller.wait_until_ready()
    assert puller.ask(1) == [1]
    assert puller.load(1) == [True]
    assert puller.pages.read(1) == RIGHT
    peer.close()
    puller.store.close(5.0)


def test_silence_ends_a_question_and_a_pull(monkeypatch):
    monkeypatch.setattr(peer_link, "PAGE_S", 0.2)
    silent = HostilePeer(lambda number, name: None)
    mute = HostilePeer(lambda number, name: None, lambda number, name: None)
    good = Holder(4)
    puller = Puller(silent.url, mute.url, good.server.url)
    puller.wait_until_ready()
    began_s = time.monotonic()
    assert puller.ask(1, 9) == [1, 9]
    assert time.monotonic() - began_s < jobs.ASK_S + 1.0
    assert puller.load(9) == [False]
    assert time.monotonic() - began_s < jobs.ASK_S + 2.0
    wait_for(lambda: [puller.stats(i).lost for i in range(3)] == [1, 1, 0])
    assert puller.stats(2).is_connected
    for each in (silent, mute):
        each.close()
    assert puller.store.close(5.0)
    good.server.close(5.0)


# ---- peers that pull


MESSAGES = {
    "too many names": header(Kind.ASK, 1, MAX_NAMES + 1) + b"n" * 16 * (MAX_NAMES + 1),
    "names that do not come": header(Kind.GET, 1, 100) + b"n" * 16,
    "no name": header(Kind.ASK, 1, 0),
    "more than its names": pack_names(Kind.ASK, 1, [b"n" * 16]) + b"more",
    "an answer": header(Kind.PAGE, 1, 1) + b"n" * 16,
    "part of a header": header(Kind.ASK, 1, 1)[: HEADER_BYTES - 1],
    "noise": bytes(range(256)),
}


@pytest.mark.parametrize("what", MESSAGES)
def test_a_wrong_request_ends_the_connection_and_bars_the_peer(what):
    holder = Holder(4)
    endpoint = connect(holder.server.url)
    post_bytes(endpoint, MESSAGES[what])
    wait_for(lambda: endpoint.is_lost)
    wait_for(lambda: holder.server.snapshot().refused == 1)
    again = connect(holder.server.url)
    wait_for(lambda: again.is_lost)
    assert holder.server.snapshot().refused == 2
    assert holder.server.close(5.0)


def test_endless_names_are_refused():
    holder = Holder(4)
    endpoint = connect(holder.server.url)
    names = [name_of(number) for number in range(MAX_NAMES)]
    answers: list[int] = []

    def ask_on() -> None:
        while len(answers) < 100:
            post_bytes(endpoint, pack_names(Kind.ASK, len(answers), names))
            frame = endpoint.poll(2.0)
            assert frame is not None
            endpoint.release(frame)
            answers.append(1)

    with pytest.raises(TransportError):
        ask_on()
    assert 4 <= len(answers) < 100
    wait_for(lambda: holder.server.snapshot().refused == 1)
    holder.server.close(5.0)


def test_a_peer_that_does_not_take_its_pages_is_left_and_others_get_theirs(monkeypatch):
    monkeypatch.setattr(page_server, "POST_S", 0.3)
    holder = Holder(16)
    greedy = transport.connect(
        holder.server.url, key=b"a key of the tests", info=IDENTITY, window_bytes=64 << 10
    )
    names = [name_of(number % 16) for number in range(4096)]
    post_bytes(greedy, pack_names(Kind.GET, 1, names))
    puller = Puller(holder.server.url)
    puller.wait_until_ready()
    assert puller.ask(1, 2) == [1, 2]
    assert puller.load(1, 2) == [True, True]
    wait_for(lambda: greedy.is_lost)
    wait_for(lambda: holder.server.snapshot().refused == 1)
    assert puller.store.close(5.0)
    assert holder.server.close(5.0)


def test_a_peer_with_another_key_gets_nothing():
    holder = Holder(4, scheme="tcp")
    with pytest.raises(TransportError):
        transport.connect(holder.server.url, key=b"a key of strangers", info=IDENTITY)
    wait_for(lambda: holder.server.snapshot().refused == 1)
    assert holder.server.snapshot().served == 0
    holder.server.close(5.0)


def test_a_peer_of_another_model_gets_nothing():
    holder = Holder(4)
    endpoint = connect(holder.server.url, IDENTITY | {"checkpoint": "xyz"})
    wait_for(lambda: endpoint.is_lost)
    assert holder.server.snapshot().refused == 1
    holder.server.close(5.0)


def test_requests_that_name_endless_peers_take_a_bounded_number_of_connections():
    good = Holder(4, scheme="tcp")
    made: list[str] = []

    def make_link(url: str) -> PeerLink:
        made.append(url)
        return PeerLink(url, connect, IDENTITY, CHECKSUMS, PAGE)

    store = PeerStore([], make_link=make_link)
    store.use_peer(good.server.url)
    wait_for(lambda: store.stats().peers.pulls["tcp://*"].is_connected)
    before = threading.active_count()
    for port in range(1, 200):
        store.use_peer(f"tcp://127.0.0.1:{port}")
        if port % 20 == 0:
            time.sleep(0.05)  # so that some attempts have ended
    store.use_peer("inproc://somewhere")
    assert "inproc://somewhere" not in made
    assert len(made) > MAX_NAMED, "those that are not there are forgotten"
    wait_for(lambda: threading.active_count() <= before + MAX_NAMED)
    pulls = store.stats().peers.pulls
    assert list(pulls) == ["tcp://*"] and pulls["tcp://*"].is_connected
    future = store.ask([name_of(1)])
    assert future is not None and future.result(5.0)
    assert store.contains(name_of(1)), "the good one is still there"
    assert store.close(5.0)
    store.use_peer("tcp://127.0.0.1:1")
    assert len(store.stats().peers.pulls) == 1
    good.server.close(5.0)
