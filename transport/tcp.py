"""tcp://host:port: windows emulated on a stream. The data has a connection of its own, which
belongs to an authenticated session by a number that the server gives out once. It is encrypted
where the peer is on another machine (encryption.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from transport import control
from transport._windows import Link, SocketChannel
from transport.base import Peer, RefusedError, TransportTimeoutError
from transport.encryption import (
    KeyExchange,
    check_is_possible,
    disagreement,
    is_loopback,
    is_on,
)
from transport.endpoint import ChannelEndpoint
from transport.listener import SocketListener

# Longer than LOST_AFTER_S: an end that hears nothing gets no acknowledgement either, and must live
# long enough to reset the connection, which is how the peer learns of it.
_USER_TIMEOUT_MS = 2000
# Bytes in flight then fit into the caches: twice as fast on loopback as the kernel's own choice (up
# to 4 MiB), and enough for 20 Gbit/s at 100 us (the kernel doubles it).
_SEND_BUFFER_BYTES = 256 << 10


class TcpTransport:
    @staticmethod
    def connect(
        url: str,
        *,
        key: bytes,
        info: Mapping[str, object],
        window_bytes: int,
        timeout_s: float,
        encryption: str,
    ) -> ChannelEndpoint:
        host, port = address_of(url)
        control.check_key(key)
        control.check_window(window_bytes)
        ours = control.hello("tcp", info, window_bytes)
        deadline = time.monotonic() + timeout_s
        with contextlib.ExitStack() as undo:
            sock = undo.enter_context(connected_to(host, port, url, deadline))
            exchange = KeyExchange() if is_on(encryption, sock) else None
            if exchange is not None:
                ours |= exchange.hello()
            session = control.authenticate_to(sock, key, deadline)
            theirs = control.exchange_hellos(session, ours)
            if reason := disagreement(theirs, exchange is not None, is_client=True):
                raise RefusedError(reason)
            secrets = None
            if exchange is not None:
                secrets = exchange.secrets(session, theirs, is_client=True)
            # The same machine, where a name has several.
            there = session.sock.getpeername()
            data = undo.enter_context(connected_to(there[0], there[1], url, deadline))
            try:
                token = bytes.fromhex(theirs["token"])
            except (KeyError, TypeError, ValueError) as error:
                raise RefusedError("the peer gave no token") from error
            control.send_all(data, control.DATA_MAGIC + token, deadline)
            session.receive()  # it has both
            return _endpoint(session, data, theirs, url, window_bytes, secrets)

    @staticmethod
    def listen(
        url: str,
        *,
        key: bytes,
        info: Mapping[str, object],
        window_bytes: int,
        max_peers: int,
        encryption: str,
    ) -> TcpListener:
        host, port = address_of(url)
        control.check_key(key)
        control.check_window(window_bytes)
        control.hello("tcp", info, window_bytes)
        sock, where = server_at(host, port, url)
        try:
            if encryption == "on" or (
                encryption == "auto" and not is_loopback(sock.getsockname()[0])
            ):
                check_is_possible()
        except BaseException:
            sock.close()
            raise
        return TcpListener(
            sock,
            f"tcp://{where}",
            encryption,
            key=key,
            info=info,
            window_bytes=window_bytes,
            max_peers=max_peers,
        )


class _Expected:
    """A data connection that a session expects."""

    def __init__(self) -> None:
        self.has_come = threading.Event()
        self.sock: socket.socket | None = None


class TcpListener(SocketListener):
    name = "tcp"

    def __init__(self, sock: socket.socket, url: str, encryption: str, **settings: Any) -> None:
        self._encryption = encryption
        self._expected: dict[bytes, _Expected] = {}  # by the token's digest
        self._expected_lock = threading.Lock()
        super().__init__(sock, url, **settings)

    def _why_not(self, session: control.Session, theirs: Mapping[str, Any]) -> str | None:
        return disagreement(theirs, is_on(self._encryption, session.sock), is_client=False)

    def _establish(
        self, session: control.Session, theirs: Mapping[str, Any], address: str
    ) -> ChannelEndpoint:
        token = os.urandom(control.TOKEN_BYTES)
        digest, expected = _digest(token), _Expected()
        with self._expected_lock:
            self._expected[digest] = expected
        said, secrets = {**self._own_hello(), "token": token.hex()}, None
        exchange = KeyExchange() if is_on(self._encryption, session.sock) else None
        try:
            if exchange is None:
                session.send(said)
            else:
                session.send(said | exchange.hello())
                secrets = exchange.secrets(session, theirs, is_client=False)
            expected.has_come.wait(session.deadline - time.monotonic())
        finally:
            with self._expected_lock:
                self._expected.pop(digest, None)
        if expected.sock is None:
            raise TransportTimeoutError("no data connection came")
        with contextlib.closing(expected.sock) as data:
            session.send({"ready": True})
            return _endpoint(session, data, theirs, address, self.window_bytes, secrets)

    def _data_connection(self, sock: socket.socket, deadline: float) -> None:
        token = control.receive_exactly(sock, control.TOKEN_BYTES, deadline)
        with self._expected_lock:
            expected = self._expected.pop(_digest(token), None)
            if expected is None:
                raise RefusedError("a data connection that no session expects")
            expected.sock = sock
        expected.has_come.set()


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _endpoint(
    session: control.Session,
    data: socket.socket,
    theirs: Mapping[str, Any],
    address: str,
    window_bytes: int,
    secrets: tuple[bytes, bytes] | None,
) -> ChannelEndpoint:
    set_options(session.sock)
    # The data connection has no such limit: a busy peer reads nothing for a while and is not lost.
    data.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    data.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    data.setblocking(False)
    link = Link.of_socket(session.detach())
    link.watch()
    channel = SocketChannel(data.fileno(), window_bytes, theirs["window_bytes"], link, secrets)
    data.detach()  # the channel has it
    return ChannelEndpoint(channel, Peer(address, theirs["info"]))


def set_options(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)


def connected_to(host: str, port: int, url: str, deadline: float) -> socket.socket:
    try:
        return socket.create_connection((host, port), max(deadline - time.monotonic(), 1e-3))
    except OSError as error:
        raise control.connection_error(url, error) from error


def server_at(host: str, port: int, url: str) -> tuple[socket.socket, str]:
    """Returns a listening socket, and its host:port as urls have it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise control.connection_error(url, error) from error
    shown = f"[{host}]" if ":" in host else host
    return sock, f"{shown}:{sock.getsockname()[1]}"


def address_of(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{url}: {error}") from error
    if not parts.hostname or port is None or parts.path not in ("", "/"):
        raise ValueError(f"{url}: a host and a port are needed, as in tcp://10.0.0.2:7070")
    return parts.hostname, port
