"""Unauthenticated peers are refused and counted, learn nothing, and do not harm other peers."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time

import pytest

import transport
from tests.support.transport.transport_listeners import (
    all_from,
    assert_a_peer_connects,
    connect,
    listener,
    wait_for_refusals,
)
from tests.support.transport.transport_peer import authenticated, open_socket
from tests.support.transport.transport_rig import KEY, PATIENCE_S, WINDOW_BYTES, wait_until
from transport import control
from transport.base import RefusedError, TransportError
from transport.listener import MAX_UNAUTHENTICATED

__all__ = ["listener"]


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: node\r\n\r\n",
        bytes.fromhex("16030100c8010000c40303") + bytes(range(200)),  # a TLS hello
        b"\x80\x04\x95\x10" + bytes(20),  # a pickle
        b"\x00" * 5000,
        b"\xff" * 8,
        control.MAGIC[:-1] + b"0" + b"n" * 32,
    ],
    ids=["http", "tls", "pickle", "zeros", "ones", "old magic"],
)
@pytest.mark.row("M3")
def test_an_invalid_handshake_is_closed_without_a_reply(listener, data):
    with open_socket(listener.url) as sock:
        sock.sendall(data)
        assert all_from(sock) == b""
    wait_for_refusals(listener, 1)
    assert_a_peer_connects(listener)


@pytest.mark.timing
@pytest.mark.row("M1", "M12")
def test_a_hundred_slow_or_silent_unauthenticated_peers(listener, caplog):
    """They send nothing, half a handshake, or a byte now and then. None outlasts the deadline,
    and the longest silent one makes room for others. Threads and log lines stay few."""
    num_threads = threading.active_count()
    began = time.monotonic()
    *silent, slow, half = [open_socket(listener.url) for _ in range(100)]
    half.sendall(control.MAGIC + b"x")
    wait_for_refusals(listener, 100 - MAX_UNAUTHENTICATED)
    # some threads are about to end
    assert threading.active_count() <= num_threads + MAX_UNAUTHENTICATED + 2
    assert_a_peer_connects(listener)
    with contextlib.suppress(ConnectionError):
        for byte in control.MAGIC + b"n" * 1000:
            slow.sendall(bytes([byte]))
            time.sleep(0.05)
    wait_for_refusals(listener, 100)
    assert control.HANDSHAKE_S - 0.2 < time.monotonic() - began < PATIENCE_S / 2
    for sock in (half, *silent):
        assert all_from(sock) == b""
    for sock in (slow, half, *silent):
        sock.close()
    assert 1 <= sum("refused" in line.getMessage() for line in caplog.records) <= 2
    assert_a_peer_connects(listener)


@pytest.mark.row("M2")
def test_a_wrong_key_is_refused(listener):
    with pytest.raises(RefusedError, match="key"):
        connect(listener, b"not the key that they have here.")
    wait_for_refusals(listener, 1)
    assert_a_peer_connects(listener)


def test_an_unauthenticated_peer_gets_a_nonce_and_nothing_else(listener):
    with open_socket(listener.url) as sock:
        sock.sendall(control.MAGIC + b"n" * 32 + b"no proof".ljust(32))
        data = all_from(sock)
    assert len(data) == len(control.MAGIC) + 32 and data.startswith(control.MAGIC)


class Recorder:
    """A socket that records what is sent on it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.sent = b""

    def sendall(self, data: bytes) -> None:
        self.sent += data
        self._sock.sendall(data)

    def __getattr__(self, name: str):
        return getattr(self._sock, name)


@pytest.mark.row("M2")
def test_a_recorded_handshake_does_not_work_again(listener):
    recorder = Recorder(open_socket(listener.url))
    session = control.authenticate_to(recorder, KEY, time.monotonic() + PATIENCE_S)
    session.send(control.hello(listener.name, {}, WINDOW_BYTES))
    assert session.receive()["version"] == control.PROTOCOL_VERSION
    recorder.close()
    with open_socket(listener.url) as sock:
        sock.sendall(recorder.sent)
        assert len(all_from(sock)) == len(control.MAGIC) + 32
    wait_until(lambda: listener.num_refused >= 1)  # the first one is refused at its time limit


def serve_once(tmp_path, behave) -> str:
    """Returns the URL of a server that answers the first connection with behave(sock)."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(str(tmp_path / "fake"))
    server.listen()

    def run():
        sock, _ = server.accept()
        with sock, server:
            sock.settimeout(PATIENCE_S)
            with contextlib.suppress(TransportError, OSError):
                behave(sock)

    threading.Thread(target=run, daemon=True).start()
    return f"shm://{tmp_path}/fake"


def echo(sock):
    while data := sock.recv(4096):
        sock.sendall(data)


def without_the_key(sock):
    """Completes the handshake without a proof, to get the client's messages."""
    control.receive_exactly(sock, len(control.MAGIC) + 32, time.monotonic() + PATIENCE_S)
    sock.sendall(control.MAGIC + b"s" * 32)
    control.receive_exactly(sock, 32, time.monotonic() + PATIENCE_S)
    sock.sendall(b"p" * 32)
    assert sock.recv(1) == b""


@pytest.mark.parametrize(
    ("behave", "reason"),
    [
        (echo, "does not speak our protocol"),
        (without_the_key, "does not know our key"),
        (lambda sock: None, "ended the handshake"),
    ],
    ids=["echo", "without", "closes"],
)
def test_a_server_without_the_key_is_refused(tmp_path, behave, reason):
    with pytest.raises(RefusedError, match=reason):
        transport.connect(serve_once(tmp_path, behave), key=KEY)


def test_a_proof_is_bound_to_its_side(tmp_path):
    """The server has only the client's own proof to show."""

    def behave(sock):
        deadline = time.monotonic() + PATIENCE_S
        control.receive_exactly(sock, len(control.MAGIC) + 32, deadline)
        sock.sendall(control.MAGIC + b"s" * 32)
        sock.sendall(control.receive_exactly(sock, 32, deadline))

    with pytest.raises(RefusedError, match="does not know our key"):
        transport.connect(serve_once(tmp_path, behave), key=KEY)


@pytest.mark.row("M2")
def test_versions_must_be_equal(listener, tmp_path):
    session = authenticated(listener.url)
    session.send(control.hello(listener.name, {}, WINDOW_BYTES) | {"version": 99})
    refused = session.receive()["refused"]
    assert "99" in refused and str(control.PROTOCOL_VERSION) in refused
    session.sock.close()
    wait_for_refusals(listener, 1)

    def behave(sock):
        deadline = time.monotonic() + PATIENCE_S
        control.receive_exactly(sock, len(control.MAGIC), deadline)
        other = control.authenticate_from(sock, KEY, deadline)
        other.receive()
        other.send(control.hello("shm", {}, WINDOW_BYTES) | {"version": 98})

    with pytest.raises(RefusedError, match=f"98 and {control.PROTOCOL_VERSION}"):
        transport.connect(serve_once(tmp_path, behave), key=KEY)


@pytest.mark.parametrize(
    "change",
    [
        {"version": "1"},
        {"version": None},
        {"transport": "carrier pigeon"},
        {"window_bytes": -1},
        {"window_bytes": 0},
        {"window_bytes": 2**63},
        {"window_bytes": 5000},
        {"window_bytes": 1e6},
        {"window_bytes": True},
        {"info": None},
        {"info": []},
    ],
    ids=str,
)
def test_an_impossible_hello_is_refused(listener, change):
    session = authenticated(listener.url)
    session.send(control.hello(listener.name, {}, WINDOW_BYTES) | change)
    assert "refused" in session.receive()
    session.sock.close()
    wait_for_refusals(listener, 1)


def sealed(session, body: bytes, length: int | None = None) -> bytes:
    """Seals a body as Session.send does, without its checks."""
    length = len(body) if length is None else length
    return length.to_bytes(2, "big") + body + session._mac(b"client", 1, body)


def with_other_end(message: bytes) -> bytes:
    return message[:-1] + bytes([message[-1] ^ 1])


@pytest.mark.parametrize(
    "message",
    [
        lambda s: sealed(s, b""),
        lambda s: sealed(s, json.dumps(control.hello("tcp", {}, 4096)).encode().ljust(4097)),
        lambda s: sealed(s, b"{}", 65535),
        lambda s: sealed(s, b"no json"),
        lambda s: sealed(s, b"[]"),
        lambda s: sealed(s, b"\xff\xfe"),
        lambda s: sealed(s, b"[" * 4096),
        lambda s: sealed(s, b'{"version":1e999}'),
        lambda s: with_other_end(sealed(s, json.dumps(control.hello("tcp", {}, 4096)).encode())),
        lambda s: sealed(s, b"{}").replace(b"{}", b"{]"),
    ],
    ids=["empty", "long", "longest", "text", "list", "utf8", "deep", "inf", "mac", "changed"],
)
def test_invalid_control_messages_end_the_connection(listener, message):
    session = authenticated(listener.url)
    with contextlib.suppress(OSError):  # the listener may have closed it, with a part unread
        session.sock.sendall(message(session))
        session.sock.shutdown(socket.SHUT_WR)
    data = all_from(session.sock)
    assert b"refused" in data if b"e999" in message(session) else data == b""
    session.sock.close()
    wait_for_refusals(listener, 1)
    assert_a_peer_connects(listener)


def sessions() -> tuple[control.Session, control.Session]:
    one, other = socket.socketpair()
    deadline = time.monotonic() + PATIENCE_S
    return (
        control.Session(one, b"session key", deadline, is_client=True),
        control.Session(other, b"session key", deadline, is_client=False),
    )


def test_a_control_message_is_accepted_once_and_from_the_other_side():
    client, server = sessions()
    client.send({"n": 1})
    sent = server.sock.recv(4096)
    for replayed in (b"", sent):  # as the first message, and again as the second
        client.sock.sendall(sent)
        if not replayed:
            assert server.receive() == {"n": 1}
        else:
            with pytest.raises(RefusedError, match="did not send"):
                server.receive()
    server.sock.sendall(sent)  # back to its sender
    with pytest.raises(RefusedError, match="did not send"):
        client.receive()
    client.sock.close()
    server.sock.close()
