"""Who may connect: strangers are refused, counted, learn nothing, and harm nobody."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import stat
import threading
import time

import pytest

import transport
from tests.transport_peer import authenticated, open_socket
from tests.transport_rig import KEY, PATIENCE_S, WINDOW_BYTES, wait_until
from transport import _windows, control
from transport.base import PeerLostError, RefusedError, TransportError
from transport.listener import MAX_STRANGERS


def listen_at(url: str, **settings):
    return transport.listen(url, key=KEY, window_bytes=WINDOW_BYTES, **settings)


@pytest.fixture(params=["shm", "tcp"])
def listener(request, tmp_path):
    made = listen_at("tcp://127.0.0.1:0" if request.param == "tcp" else f"shm://{tmp_path}/s")
    yield made
    made.close()


def connect(listener, key: bytes = KEY):
    return transport.connect(listener.url, key=key, window_bytes=WINDOW_BYTES)


def assert_a_peer_gets_in(listener) -> None:
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
    """What it says until it closes."""
    parts = []
    try:
        while part := sock.recv(4096):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


@pytest.mark.parametrize(
    "said",
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
def test_what_is_no_handshake_is_closed_without_a_word(listener, said):
    with open_socket(listener.url) as sock:
        sock.sendall(said)
        assert all_from(sock) == b""
    wait_for_refusals(listener, 1)
    assert_a_peer_gets_in(listener)


def test_a_hundred_strangers_who_say_little(listener, caplog):
    """Silence, half a handshake, and a byte now and then: none outlasts the deadline, and who has
    been silent for longest makes room for others. Threads, and lines in the log, stay few."""
    num_threads = threading.active_count()
    began = time.monotonic()
    *silent, slow, half = [open_socket(listener.url) for _ in range(100)]
    half.sendall(control.MAGIC + b"x")
    wait_for_refusals(listener, 100 - MAX_STRANGERS)
    assert threading.active_count() <= num_threads + MAX_STRANGERS + 2  # some just end
    assert_a_peer_gets_in(listener)
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
    assert_a_peer_gets_in(listener)


def test_another_key(listener):
    with pytest.raises(RefusedError, match="key"):
        connect(listener, b"not the key that they have here.")
    wait_for_refusals(listener, 1)
    assert_a_peer_gets_in(listener)


def test_a_stranger_learns_a_nonce_and_nothing_else(listener):
    with open_socket(listener.url) as sock:
        sock.sendall(control.MAGIC + b"n" * 32 + b"no proof".ljust(32))
        said = all_from(sock)
    assert len(said) == len(control.MAGIC) + 32 and said.startswith(control.MAGIC)


class Recorder:
    """A socket that remembers what was sent on it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.sent = b""

    def sendall(self, data: bytes) -> None:
        self.sent += data
        self._sock.sendall(data)

    def __getattr__(self, name: str):
        return getattr(self._sock, name)


def test_a_recorded_handshake_does_not_work_again(listener):
    recorder = Recorder(open_socket(listener.url))
    session = control.authenticate_to(recorder, KEY, time.monotonic() + PATIENCE_S)
    session.send(control.hello(listener.name, {}, WINDOW_BYTES))
    assert session.receive()["version"] == control.PROTOCOL_VERSION
    recorder.close()
    with open_socket(listener.url) as sock:
        sock.sendall(recorder.sent)
        assert len(all_from(sock)) == len(control.MAGIC) + 32
    wait_until(lambda: listener.num_refused >= 1)  # and the first one, when its time is up


def serve_once(tmp_path, behave) -> str:
    """The url of who answers the first connection with behave(sock)."""
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
    """Lets everybody in, to hear what they say."""
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
    """A server that has only the client's own proof to show."""

    def behave(sock):
        deadline = time.monotonic() + PATIENCE_S
        control.receive_exactly(sock, len(control.MAGIC) + 32, deadline)
        sock.sendall(control.MAGIC + b"s" * 32)
        sock.sendall(control.receive_exactly(sock, 32, deadline))

    with pytest.raises(RefusedError, match="does not know our key"):
        transport.connect(serve_once(tmp_path, behave), key=KEY)


def test_versions_must_be_the_same(listener, tmp_path):
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
def test_a_hello_that_cannot_be_is_refused(listener, change):
    session = authenticated(listener.url)
    session.send(control.hello(listener.name, {}, WINDOW_BYTES) | change)
    assert "refused" in session.receive()
    session.sock.close()
    wait_for_refusals(listener, 1)


def sealed(session, body: bytes, length: int | None = None) -> bytes:
    """As Session.send would, without its checks."""
    length = len(body) if length is None else length
    return length.to_bytes(2, "big") + body + session._mac(b"client", 1, body)


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
        lambda s: sealed(s, json.dumps(control.hello("tcp", {}, 4096)).encode())[:-1] + b"x",
        lambda s: sealed(s, b"{}").replace(b"{}", b"{]"),
    ],
    ids=["empty", "long", "longest", "text", "list", "utf8", "deep", "inf", "mac", "changed"],
)
def test_control_messages_are_checked_before_they_are_believed(listener, message):
    session = authenticated(listener.url)
    with contextlib.suppress(OSError):  # closed already, with a part unread
        session.sock.sendall(message(session))
        session.sock.shutdown(socket.SHUT_WR)
    said = all_from(session.sock)
    assert b"refused" in said if b"e999" in message(session) else said == b""
    session.sock.close()
    wait_for_refusals(listener, 1)
    assert_a_peer_gets_in(listener)


def sessions() -> tuple[control.Session, control.Session]:
    one, other = socket.socketpair()
    deadline = time.monotonic() + PATIENCE_S
    return (
        control.Session(one, b"session key", deadline, is_client=True),
        control.Session(other, b"session key", deadline, is_client=False),
    )


def test_a_control_message_is_believed_once_and_from_the_other_side():
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
    server.sock.sendall(sent)  # back to who said it
    with pytest.raises(RefusedError, match="did not send"):
        client.receive()
    client.sock.close()
    server.sock.close()


def test_a_data_connection_needs_the_token_that_was_given_and_works_once(tmp_path):
    with_tcp = listen_at("tcp://127.0.0.1:0")
    for token in (b"t" * control.TOKEN_BYTES, b"", b"short"):
        with open_socket(with_tcp.url) as sock:
            sock.sendall(control.DATA_MAGIC + token)
            with contextlib.suppress(OSError):  # closed already
                sock.shutdown(socket.SHUT_WR)
            assert all_from(sock) == b""
    wait_for_refusals(with_tcp, 3)
    session = authenticated(with_tcp.url)
    token = bytes.fromhex(
        control.exchange_hellos(session, control.hello("tcp", {}, WINDOW_BYTES))["token"]
    )
    with open_socket(with_tcp.url) as wrong:
        wrong.sendall(control.DATA_MAGIC + b"t" * control.TOKEN_BYTES)
        assert all_from(wrong) == b""
    with open_socket(with_tcp.url) as data, open_socket(with_tcp.url) as again:
        data.sendall(control.DATA_MAGIC + token)
        assert session.receive() == {"ready": True}
        again.sendall(control.DATA_MAGIC + token)
        assert all_from(again) == b""
        assert with_tcp.accept(PATIENCE_S) is not None
    wait_for_refusals(with_tcp, 5)
    session.sock.close()
    with_tcp.close()


def test_a_session_without_its_data_connection_ends(tmp_path):
    with_tcp = listen_at("tcp://127.0.0.1:0")
    session = authenticated(with_tcp.url)
    control.exchange_hellos(session, control.hello("tcp", {}, WINDOW_BYTES))
    assert all_from(session.sock) == b""
    wait_for_refusals(with_tcp, 1)
    session.sock.close()
    with_tcp.close()


def unsealed() -> int:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, WINDOW_BYTES + _windows.PAYLOAD_AT)
    return fd


@pytest.mark.parametrize(
    "make_fd",
    [
        unsealed,
        lambda: _windows.create_window_fd(WINDOW_BYTES - 4096),
        lambda: os.open("/dev/null", os.O_RDWR),
        None,
    ],
    ids=["unsealed", "small", "no memory", "none"],
)
def test_only_a_sealed_window_of_the_right_size_is_mapped(tmp_path, make_fd):
    """Who could shrink it could end us with SIGBUS."""
    listener = listen_at(f"shm://{tmp_path}/s")
    num_fds = len(os.listdir("/proc/self/fd"))
    session = authenticated(listener.url)
    control.exchange_hellos(session, control.hello("shm", {}, WINDOW_BYTES))
    if make_fd is None:
        session.sock.sendall(b"w")
    else:
        fd = make_fd()
        socket.send_fds(session.sock, [b"w"], [fd])
        os.close(fd)
    assert all_from(session.sock) == b"w"  # its own window, and then the end
    session.sock.close()
    wait_for_refusals(listener, 1)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= num_fds + 1  # the one that recv left behind
    listener.close()


def test_the_socket_is_its_owners_and_goes_with_the_listener(tmp_path):
    path = tmp_path / "s"
    before = os.umask(0)
    try:
        listener = listen_at(f"shm://{path}")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(TransportError, match="listens"):
        listen_at(f"shm://{path}")
    listener.close()
    assert not path.exists()


def test_a_dead_listeners_socket_is_replaced_but_no_other_file(tmp_path):
    path = tmp_path / "s"
    dead = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    dead.bind(str(path))
    dead.close()
    listener = listen_at(f"shm://{path}")
    assert_a_peer_gets_in(listener)
    listener.close()
    path.write_text("precious")
    with pytest.raises(TransportError, match="no socket"):
        listen_at(f"shm://{path}")
    assert path.read_text() == "precious"


def test_mistakes_are_named():
    for url in ("udp://1.2.3.4:5", "", "/path"):
        with pytest.raises(ValueError, match="no transport"):
            transport.connect(url, key=KEY)
    for url in ("tcp://host", "tcp://:80", "tcp://h:99999", "tcp://h:1/x", "shm://relative/p"):
        with pytest.raises(ValueError, match="://"):
            transport.listen(url, key=KEY)
    with pytest.raises(ValueError, match="107"):
        transport.listen(f"shm:///{'x' * 107}", key=KEY)
    with pytest.raises(ValueError, match="16"):
        transport.listen("tcp://127.0.0.1:0", key=b"short")
    with pytest.raises(ValueError, match="4096"):
        transport.connect("tcp://127.0.0.1:1", key=KEY, window_bytes=5000)
    with pytest.raises(ValueError, match="4096"):
        transport.connect("tcp://127.0.0.1:1", key=KEY, info={"x": "y" * 4096})


@pytest.mark.parametrize("url", ["inproc://nobody", "shm:///nowhere/s", "tcp://127.0.0.1:1"])
def test_nobody_there(url):
    with pytest.raises(TransportError, match="://"):
        transport.connect(url, key=KEY)


def test_an_unaccepted_peer_is_lost_when_the_listener_closes(listener):
    one = connect(listener)
    listener.close()
    with pytest.raises(PeerLostError):
        one.poll(PATIENCE_S)
    one.close()


def num_open() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_thousand_connections_one_after_the_other_leave_nothing(tmp_path):
    urls = [f"shm://{tmp_path}/s", "tcp://127.0.0.1:0", "inproc://leaks"]
    listeners = [listen_at(url) for url in urls]

    def cycle(listener):
        one = connect(listener)
        other = listener.accept(PATIENCE_S)
        one.close()
        other.close()

    for listener in listeners:
        for _ in range(20):
            cycle(listener)
    gc.collect()
    before, resident = num_open(), resident_bytes()
    for listener in listeners:
        for _ in range(334):
            cycle(listener)
    gc.collect()
    wait_until(lambda: num_open() <= before)  # the last handshake's thread ends
    assert resident_bytes() - resident < 8 << 20
    assert [listener.num_refused for listener in listeners] == [0, 0, 0]
    for listener in listeners:
        listener.close()


def test_a_peers_words_stay_on_a_line_of_the_log():
    said = control.printable("no\n\x1b[2Jroom" + "x" * 300, 20)
    assert said == "no??[2Jroomxxxxxxxxx"
