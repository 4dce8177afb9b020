"""Setting up a connection: tokens, windows, the socket's file, and what remains of them."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import stat

import pytest

import transport
from tests.support.transport.transport_listeners import (
    all_from,
    assert_a_peer_connects,
    connect,
    listen_at,
    listener,
    wait_for_refusals,
)
from tests.support.transport.transport_peer import authenticated, open_socket
from tests.support.transport.transport_rig import KEY, PATIENCE_S, WINDOW_BYTES, wait_until
from transport import _windows, control
from transport.base import PeerLostError, TransportError

__all__ = ["listener"]


def test_a_data_connection_needs_its_token_and_works_once(tmp_path):
    with_tcp = listen_at("tcp://127.0.0.1:0")
    for token in (b"t" * control.TOKEN_BYTES, b"", b"short"):
        with open_socket(with_tcp.url) as sock:
            sock.sendall(control.DATA_MAGIC + token)
            with contextlib.suppress(OSError):  # the listener may have closed it already
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
    """A peer that could shrink its window could end this process with SIGBUS."""
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
    # recv may have left one descriptor behind
    assert len(os.listdir("/proc/self/fd")) <= num_fds + 1
    listener.close()


def test_the_socket_is_private_and_is_removed_with_the_listener(tmp_path):
    path = tmp_path / "s"
    before = os.umask(0)
    try:
        listener = listen_at(f"shm://{path}")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(TransportError, match="is a listener already"):
        listen_at(f"shm://{path}")
    listener.close()
    assert not path.exists()


def test_a_dead_listeners_socket_is_replaced_but_no_other_file(tmp_path):
    path = tmp_path / "s"
    dead = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    dead.bind(str(path))
    dead.close()
    listener = listen_at(f"shm://{path}")
    assert_a_peer_connects(listener)
    listener.close()
    path.write_text("precious")
    with pytest.raises(TransportError, match="no socket"):
        listen_at(f"shm://{path}")
    assert path.read_text() == "precious"


def test_invalid_urls_and_settings_are_named():
    for url in ("udp://1.2.3.4:5", "", "/path"):
        with pytest.raises(ValueError, match=r"no transport|begins with its"):
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
def test_a_url_without_a_listener(url):
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


@pytest.mark.row("M12")
def test_a_thousand_connections_in_turn_leak_nothing(tmp_path):
    urls = [f"shm://{tmp_path}/s", "tcp://127.0.0.1:0", "inproc://leaks"]
    listeners = [listen_at(url) for url in urls]

    def cycle(listener):
        one = connect(listener)
        other = listener.accept(PATIENCE_S)
        one.close()
        other.close()

    for made in listeners:
        for _ in range(20):
            cycle(made)
    gc.collect()
    before, resident = num_open(), resident_bytes()
    for made in listeners:
        for _ in range(334):
            cycle(made)
    gc.collect()
    wait_until(lambda: num_open() <= before)  # the last handshake's thread ends
    assert resident_bytes() - resident < 8 << 20
    assert [made.num_refused for made in listeners] == [0, 0, 0]
    for made in listeners:
        made.close()


def test_a_peers_text_stays_on_one_line_of_the_log():
    text = control.printable("no\n\x1b[2Jroom" + "x" * 300, 20)
    assert text == "no??[2Jroomxxxxxxxxx"


class Shared:
    """Memory with a descriptor."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("shared")
        os.write(self._fd, b"content")

    def fileno(self) -> int:
        return self._fd


def test_each_peer_gets_what_a_listener_shares_once(tmp_path):
    shared = Shared()
    listener = transport.listen(f"shm://{tmp_path}/s", key=KEY, shared=shared)
    ends = []
    for _ in range(2):
        ours = transport.connect(listener.url, key=KEY)
        theirs = listener.accept(PATIENCE_S)
        fd = transport.take_shared(ours)
        assert os.pread(fd, 9, 0) == b"content" and os.path.sameopenfile(fd, shared.fileno())
        os.close(fd)
        assert transport.take_shared(ours) is None and transport.take_shared(theirs) is None
        ends += [ours, theirs]
    for end in ends:
        end.close()
    listener.close()
    assert os.pread(shared.fileno(), 9, 0) == b"content"  # it is its owner's to close
    os.close(shared.fileno())


def test_one_that_connects_shares_nothing(tmp_path):
    """A listener keeps no descriptors of those that connect."""
    listener = listen_at(f"shm://{tmp_path}/s")
    session = authenticated(listener.url)
    control.exchange_hellos(session, control.hello("shm", {}, WINDOW_BYTES))
    fds = [_windows.create_window_fd(WINDOW_BYTES), os.memfd_create("more")]
    inodes = [os.fstat(fd).st_ino for fd in fds]
    socket.send_fds(session.sock, [b"w"], fds)
    for fd in fds:
        os.close(fd)
    assert all_from(session.sock) == b"w"
    session.sock.close()
    wait_for_refusals(listener, 1)
    gc.collect()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            assert os.stat(f"/proc/self/fd/{fd}").st_ino not in inodes
    listener.close()
