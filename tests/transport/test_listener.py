"""A listener whose system has run out of something, or that others keep busy, still listens."""

from __future__ import annotations

import errno
import socket
import threading
import time

import pytest

import transport
from tests.support.transport.transport_peer import open_socket
from tests.support.transport.transport_rig import KEY, PATIENCE_S, WINDOW_BYTES, wait_until
from transport import control
from transport.listener import MAX_STRANGERS


@pytest.fixture(params=["shm", "tcp"])
def listener(request, tmp_path, monkeypatch):
    """Nobody's time for the handshake is up during a test."""
    monkeypatch.setattr(control, "HANDSHAKE_S", PATIENCE_S)
    url = "tcp://127.0.0.1:0" if request.param == "tcp" else f"shm://{tmp_path}/s"
    made = transport.listen(url, key=KEY, window_bytes=WINDOW_BYTES)
    yield made
    made.close()


def assert_a_peer_gets_in(listener) -> None:
    one = transport.connect(listener.url, key=KEY, window_bytes=WINDOW_BYTES)
    other = listener.accept(PATIENCE_S)
    assert other is not None
    one.close()
    other.close()


def is_closed(sock: socket.socket) -> bool:
    """Whether the listener has closed it; it has said nothing."""
    sock.setblocking(False)
    try:
        assert sock.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    return True


def no_threads_for(name, monkeypatch):
    """As when the system has no thread left, for those of this name."""
    start = threading.Thread.start

    def fail(thread):
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail)


def test_without_a_thread_a_connection_is_refused_and_the_next_one_is_not(listener, monkeypatch):
    """Nor does it hold a place: who has begun the handshake before is not put out by many."""
    early = open_socket(listener.url)
    wait_until(lambda: listener._strangers)
    with monkeypatch.context() as patch:
        no_threads_for("handshake", patch)
        for number in range(1, MAX_STRANGERS + 2):
            with open_socket(listener.url) as sock:
                assert sock.recv(1) == b"", "it was not closed"
            wait_until(lambda n=number: listener.num_refused == n)
        assert len(listener._strangers) == 1
    session = control.authenticate_to(early, KEY, time.monotonic() + PATIENCE_S)
    assert_a_peer_gets_in(listener)
    session.sock.close()


class NoDescriptors:
    """A listening socket whose next connections cannot be taken."""

    def __init__(self, sock: socket.socket, num_failures: int) -> None:
        self._sock = sock
        self.num_left = num_failures

    def accept(self):
        if self.num_left:
            self.num_left -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self._sock.accept()

    def __getattr__(self, name: str):
        return getattr(self._sock, name)


def test_without_a_descriptor_it_tries_again_and_takes_its_time(listener, caplog):
    listener._sock = NoDescriptors(listener._sock, 4)
    began = time.monotonic()
    assert_a_peer_gets_in(listener)  # accepted already, or else after the failures
    wait_until(lambda: listener.num_refused == 4)
    assert_a_peer_gets_in(listener)
    assert time.monotonic() - began > 0.15, "it tried again and again without a pause"
    assert listener.num_refused == 4
    assert [line for line in caplog.messages if "Too many open files" in line]


@pytest.mark.row("M1")
def test_who_is_silent_makes_room_and_only_as_much_as_is_needed(listener):
    silent = [open_socket(listener.url) for _ in range(MAX_STRANGERS)]
    wait_until(lambda: len(listener._strangers) == MAX_STRANGERS)
    assert_a_peer_gets_in(listener)
    wait_until(lambda: listener.num_refused == 1)
    assert [is_closed(sock) for sock in silent] == [True] + [False] * (MAX_STRANGERS - 1)
    for sock in silent:
        sock.close()
    wait_until(lambda: listener.num_refused == MAX_STRANGERS)
