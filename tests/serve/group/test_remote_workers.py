"""The engine takes ranks that prove the key, whatever else speaks to its port."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest

from serve.errors import ConfigError, MergestepError
from serve.group import remote_workers, siblings
from serve.group.membership import Membership
from serve.group.remote_workers import RemoteWorkers
from serve.group.siblings import SiblingListener
from tests.support.transport.transport_rig import KEY, PATIENCE_S
from transport import connect
from transport.base import Endpoint, TransportError
from transport.tcp import address_of

WINDOW_BYTES = 1 << 16


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def workers(undo) -> RemoteWorkers:
    made = RemoteWorkers(Membership(0, 3, "tcp://127.0.0.1:0", 0, 1), KEY)
    undo.callback(made.close)
    return made


def joined(undo: ExitStack, workers: RemoteWorkers, rank: object, **info: object) -> Endpoint:
    url = workers._listener.url
    said = {"rank": rank, "size": 3, "listen": f"tcp://10.0.0.{rank}:0", **info}
    endpoint = connect(url, key=KEY, info=said, window_bytes=WINDOW_BYTES)
    undo.callback(endpoint.close)
    return endpoint


def test_ranks_come_in_any_order(undo, workers):
    for rank in (2, 1):
        joined(undo, workers, rank)
    links = workers.start([1, 2])
    assert [link.rank for link in links] == [1, 2]
    assert workers.stage_url(2) == "tcp://10.0.0.2:0"


def test_strangers_get_nothing_and_block_no_rank(undo, workers):
    address = address_of(workers._listener.url)
    silent, loud = (undo.enter_context(socket.create_connection(address)) for _ in range(2))
    loud.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    with pytest.raises(TransportError):
        connect(workers._listener.url, key=b"another key of 16 bytes", window_bytes=WINDOW_BYTES)
    joined(undo, workers, 1)
    began_s = time.monotonic()
    (link,) = workers.start([1])
    assert link.rank == 1 and time.monotonic() - began_s < PATIENCE_S
    loud.settimeout(PATIENCE_S)
    with suppress(ConnectionResetError):
        assert loud.recv(100) == b""  # closed without a word
    silent.setblocking(False)
    with pytest.raises(BlockingIOError):
        silent.recv(1)


@pytest.mark.parametrize(
    ("rank", "info"), [(1, {"size": 2}), (1, {"listen": 7}), (2, {}), ("1", {}), (None, {})]
)
def test_a_rank_that_is_not_due_is_closed(undo, workers, rank, info):
    wrong = joined(undo, workers, rank, **info)
    joined(undo, workers, 1)
    (link,) = workers.start([1])
    assert link.rank == 1 and not link.is_lost
    end_s = time.monotonic() + PATIENCE_S
    while not wrong.is_lost and time.monotonic() < end_s:
        time.sleep(0.005)
    assert wrong.is_lost


def test_a_rank_that_dies_while_others_are_waited_for_may_come_again(undo, workers):
    first = joined(undo, workers, 1)
    seen = threading.Event()

    def check() -> None:
        seen.set()

    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(workers.start, [1, 2], check)
        assert seen.wait(PATIENCE_S)
        first.close()
        time.sleep(0.15)  # so that the engine has taken it before it is lost
        joined(undo, workers, 1)
        joined(undo, workers, 2)
        links = started.result(PATIENCE_S)
    assert [link.rank for link in links] == [1, 2]
    assert not any(link.is_lost for link in links)


def test_missing_ranks_are_named(undo, workers, monkeypatch):
    monkeypatch.setattr(remote_workers, "CONNECT_S", 0.2)
    joined(undo, workers, 1)
    with pytest.raises(MergestepError, match="ranks 2 did not connect within 0 s"):
        workers.start([1, 2])


def test_an_address_that_is_taken(workers):
    url = workers._listener.url
    with pytest.raises(ConfigError, match=r"group_url: listening at tcp://127.0.0.1:.* failed"):
        RemoteWorkers(Membership(0, 2, url, 0, 1), KEY)


# ---- siblings


@pytest.fixture
def listener(undo) -> SiblingListener:
    made = SiblingListener("tcp://127.0.0.1:0", KEY, WINDOW_BYTES)
    undo.callback(made.close)
    return made


def sibling(undo: ExitStack, listener: SiblingListener, **info: object) -> Endpoint:
    endpoint = connect(listener.url, key=KEY, info=info, window_bytes=WINDOW_BYTES)
    undo.callback(endpoint.close)
    return endpoint


def test_siblings_of_this_epoch_are_accepted(undo, listener):
    sibling(undo, listener, epoch=1, tensor=0)  # of an earlier epoch
    sibling(undo, listener, epoch=2, tensor=3)  # of no rank before this one
    sibling(undo, listener)
    for tensor in (1, 0):
        sibling(undo, listener, epoch=2, tensor=tensor)
    found = listener.accept(2, range(2))
    assert sorted(found) == [0, 1]
    assert all(each.peer.info == {"epoch": 2, "tensor": rank} for rank, each in found.items())
    for endpoint in found.values():
        endpoint.close()


def test_a_later_epoch_ends_the_wait_and_is_kept(undo, listener):
    sibling(undo, listener, epoch=3, tensor=0)
    with pytest.raises(TransportError, match="epoch 3 has begun, after 2"):
        listener.accept(2, range(1))
    (found,) = listener.accept(3, range(1)).values()
    assert not found.is_lost
    found.close()


def test_missing_siblings_are_named(undo, listener, monkeypatch):
    monkeypatch.setattr(siblings, "_ACCEPT_S", 0.1)
    sibling(undo, listener, epoch=1, tensor=0)
    with pytest.raises(TransportError, match=r"tensor ranks \[1\] did not connect"):
        listener.accept(1, range(2))
