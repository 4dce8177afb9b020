"""A listener still listens when its system is out of resources or other peers keep it busy."""

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
from transport.listener import MAX_UNAUTHENTICATED


@pytest.fixture(params=["shm", "tcp"])
def listener(request, tmp_path, monkeypatch):
    """The handshake's time limit does not pass during a test."""
    monkeypatch.setattr(control, "HANDSHAKE_S", PATIENCE_S)
    url = "tcp://127.0.0.1:0" if request.param == "tcp" else f"shm://{tmp_path}/s"
    made = transport.listen(url, key=KEY, window_bytes=WINDOW_BYTES)
    yield made
    made.close()


def assert_a_peer_connects(listener) -> None:
    one = transport.connect(listener.url, key=KEY, window_bytes=WINDOW_BYTES)
    other = listener.accept(PATIENCE_S)
    assert other is not None
    one.close()
    other.close()


def is_closed(sock: socket.socket) -> bool:
    """Whether the listener has closed the connection, on which it has sent nothing."""
    sock.setblocking(False)
    try:
        assert sock.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    return True


def no_threads_for(name, monkeypatch):
    """Makes starting threads of this name fail, as when the system has no thread left."""
    start = threading.Thread.start

    def fail(thread):
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail)


def test_without_a_thread_a_connection_is_refused_and_the_next_one_is_not(listener, monkeypatch):
    """A refused connection takes no place, so that an earlier handshake in progress is not
    displaced."""
    early = open_socket(listener.url)
    wait_until(lambda: listener._unauthenticated)
    with monkeypatch.context() as patch:
        no_threads_for("handshake", patch)
        for number in range(1, MAX_UNAUTHENTICATED + 2):
            with open_socket(listener.url) as sock:
                assert sock.recv(1) == b"", "the connection is open"
            wait_until(lambda n=number: listener.num_refused == n)
        assert len(listener._unauthenticated) == 1
    session = control.authenticate_to(early, KEY, time.monotonic() + PATIENCE_S)
    assert_a_peer_connects(listener)
    session.sock.close()


class NoDescriptors:
    """A listening socket whose next connections cannot be accepted."""

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


def test_without_a_descriptor_the_listener_retries_with_pauses(listener, caplog):
    listener._sock = NoDescriptors(listener._sock, 4)
    began = time.monotonic()
    assert_a_peer_connects(listener)  # accepted already, or after the failures
    wait_until(lambda: listener.num_refused == 4)
    assert_a_peer_connects(listener)
    assert time.monotonic() - began > 0.15, "it retried without a pause"
    assert listener.num_refused == 4
    assert [line for line in caplog.messages if "Too many open files" in line]


@pytest.mark.row("M1")
def test_only_the_oldest_silent_connection_makes_room(listener):
    silent = [open_socket(listener.url) for _ in range(MAX_UNAUTHENTICATED)]
    wait_until(lambda: len(listener._unauthenticated) == MAX_UNAUTHENTICATED)
    assert_a_peer_connects(listener)
    wait_until(lambda: listener.num_refused == 1)
    assert [is_closed(sock) for sock in silent] == [True] + [False] * (MAX_UNAUTHENTICATED - 1)
    for sock in silent:
        sock.close()
    wait_until(lambda: listener.num_refused == MAX_UNAUTHENTICATED)
