"""Listeners to which unauthenticated peers connect."""

from __future__ import annotations

import socket

import pytest

import transport
from tests.support.transport.transport_rig import KEY, PATIENCE_S, WINDOW_BYTES, wait_until


def listen_at(url: str, **settings):
    return transport.listen(url, key=KEY, window_bytes=WINDOW_BYTES, **settings)


@pytest.fixture(params=["shm", "tcp"])
def listener(request, tmp_path):
    made = listen_at("tcp://127.0.0.1:0" if request.param == "tcp" else f"shm://{tmp_path}/s")
    yield made
    made.close()


def connect(listener, key: bytes = KEY):
    return transport.connect(listener.url, key=key, window_bytes=WINDOW_BYTES)


def assert_a_peer_connects(listener) -> None:
    one = connect(listener)
    other = listener.accept(PATIENCE_S)
    assert other is not None
    one.close()
    other.close()


def wait_for_refusals(listener, count: int) -> None:
    wait_until(lambda: listener.num_refused >= count)
    assert listener.num_refused == count
    assert listener.accept(0.0) is None


def all_from(sock: socket.socket) -> bytes:
    """Returns what the peer sends until it closes."""
    parts = []
    try:
        while part := sock.recv(4096):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)
