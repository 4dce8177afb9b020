"""shm:///path/of/socket: two processes of one machine, each with a window in a sealed memfd that
the other one maps. The socket's file is its owner's only (0600); the key is asked for all the same.
"""

from __future__ import annotations

import array
import os
import socket
import stat
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from transport import control
from transport._windows import Link, Memory, SharedChannel, create_window_fd
from transport.base import Peer, RefusedError, TransportError
from transport.endpoint import ChannelEndpoint
from transport.listener import SocketListener

_MAX_PATH_BYTES = 107


class ShmTransport:
    @staticmethod
    def connect(
        url: str, *, key: bytes, info: Mapping[str, object], window_bytes: int, timeout_s: float
    ) -> ChannelEndpoint:
        path = _path(url)
        control.check_key(key)
        control.check_window(window_bytes)
        ours = control.hello("shm", info, window_bytes)
        deadline = time.monotonic() + timeout_s
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            try:
                sock.connect(path)
            except OSError as error:
                raise control.connection_error(url, error) from error
            session = control.authenticate_to(sock, key, deadline)
            theirs = control.exchange_hellos(session, ours)
            return _endpoint(session, theirs, url, window_bytes)
        except BaseException:
            sock.close()
            raise

    @staticmethod
    def listen(
        url: str, *, key: bytes, info: Mapping[str, object], window_bytes: int, max_peers: int
    ) -> ShmListener:
        path = _path(url)
        control.check_key(key)
        control.check_window(window_bytes)
        control.hello("shm", info, window_bytes)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            os.fchmod(
                sock.fileno(), 0o600
            )  # bind creates the file with these permissions, so it is never open to others
            _remove_stale(path)
            sock.bind(path)
            sock.listen(64)
        except OSError as error:
            sock.close()
            raise control.connection_error(url, error) from error
        except TransportError:
            sock.close()
            raise
        return ShmListener(
            sock, url, key=key, info=info, window_bytes=window_bytes, max_peers=max_peers
        )


class ShmListener(SocketListener):
    name = "shm"

    def __init__(self, sock: socket.socket, url: str, **settings: Any) -> None:
        self._path = _path(url)
        self._inode = os.stat(self._path).st_ino
        super().__init__(sock, url, **settings)

    def _establish(
        self, session: control.Session, theirs: Mapping[str, Any], address: str
    ) -> ChannelEndpoint:
        session.send(self._own_hello())
        return _endpoint(session, theirs, address, self.window_bytes)

    def _clean_up(self) -> None:
        try:
            if os.stat(self._path).st_ino == self._inode:  # it is ours, not a successor's
                os.unlink(self._path)
        except FileNotFoundError:
            pass


def _endpoint(
    session: control.Session, theirs: Mapping[str, Any], address: str, window_bytes: int
) -> ChannelEndpoint:
    """Exchanges the windows' descriptors, ours first."""
    fd = create_window_fd(window_bytes)
    try:
        own = Memory.of_fd(window_bytes, fd)
        _send_fd(session, fd)
    finally:
        os.close(fd)
    fd = _receive_fd(session)
    try:
        peers = Memory.of_fd(theirs["window_bytes"], fd)
    except ValueError as error:
        raise RefusedError(str(error)) from error
    finally:
        os.close(fd)
    link = Link.of_socket(session.detach())
    link.watch()
    return ChannelEndpoint(SharedChannel(own, peers, link), Peer(address, theirs["info"]))


def _send_fd(session: control.Session, fd: int) -> None:
    session.sock.settimeout(max(session.deadline - time.monotonic(), 1e-3))
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))
    try:
        session.sock.sendmsg([b"w"], [rights])
    except OSError as error:
        raise control.connection_error("the peer", error) from error


def _receive_fd(session: control.Session) -> int:
    session.sock.settimeout(max(session.deadline - time.monotonic(), 1e-3))
    try:
        byte, fds, _, _ = socket.recv_fds(session.sock, 1, 8)
    except OSError as error:
        raise control.connection_error("the peer", error) from error
    if byte == b"w" and len(fds) == 1:
        return fds[0]
    for fd in fds:
        os.close(fd)
    raise RefusedError("the peer sent no window")


def _path(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc or not parts.path.startswith("/"):
        raise ValueError(f"{url}: an absolute path is needed, as in shm:///run/node.sock")
    if len(os.fsencode(parts.path)) > _MAX_PATH_BYTES:
        raise ValueError(f"{url}: the path is longer than {_MAX_PATH_BYTES} bytes")
    return parts.path


def _remove_stale(path: str) -> None:
    """Removes a socket's file that has no listener any more."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise TransportError(f"{path} exists and is no socket")
    except FileNotFoundError:
        return
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        probe.settimeout(1.0)
        probe.connect(path)
    except ConnectionRefusedError:
        os.unlink(path)
    except OSError as error:
        raise control.connection_error(path, error) from error
    else:
        raise TransportError(f"{path}: there is a listener already")
    finally:
        probe.close()
