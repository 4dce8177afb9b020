"""shm:///path/of/socket: two processes of one machine, each with a window in a sealed memfd that
the other one maps. The socket's file is its owner's only (0600); the key is asked for all the same.
A listener may share a descriptor of further memory, which each peer gets with the window.
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
from transport.base import HasDescriptor, Peer, RefusedError, TransportError
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
            return _connected(session, theirs, url, window_bytes)
        except BaseException:
            sock.close()
            raise

    @staticmethod
    def listen(
        url: str,
        *,
        key: bytes,
        info: Mapping[str, object],
        window_bytes: int,
        max_peers: int,
        shared: HasDescriptor | None = None,
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
            sock, url, shared, key=key, info=info, window_bytes=window_bytes, max_peers=max_peers
        )


class ShmListener(SocketListener):
    name = "shm"

    def __init__(
        self, sock: socket.socket, url: str, shared: HasDescriptor | None, **settings: Any
    ) -> None:
        self._path = _path(url)
        self._shared = shared
        self._inode = os.stat(self._path).st_ino
        super().__init__(sock, url, **settings)

    def _establish(
        self, session: control.Session, theirs: Mapping[str, Any], address: str
    ) -> ChannelEndpoint:
        session.send(self._own_hello())
        more = [] if self._shared is None else [self._shared.fileno()]
        own = _send_window(session, self.window_bytes, more)
        fds = _receive_fds(session, 1)
        return _endpoint(session, theirs, address, own, fds)

    def _clean_up(self) -> None:
        try:
            if os.stat(self._path).st_ino == self._inode:  # it is ours, not a successor's
                os.unlink(self._path)
        except FileNotFoundError:
            pass


def _connected(
    session: control.Session, theirs: Mapping[str, Any], url: str, window_bytes: int
) -> ChannelEndpoint:
    own = _send_window(session, window_bytes, [])
    window, *shared = _receive_fds(session, 2)
    try:
        endpoint = _endpoint(session, theirs, url, own, [window])
    except BaseException:
        _close_all(shared)
        raise
    endpoint.shared_fds = shared
    return endpoint


def _endpoint(
    session: control.Session, theirs: Mapping[str, Any], address: str, own: Memory, fds: list[int]
) -> ChannelEndpoint:
    """fds: that of the peer's window, which is closed."""
    try:
        peers = Memory.of_fd(theirs["window_bytes"], fds[0])
    except ValueError as error:
        raise RefusedError(str(error)) from error
    finally:
        _close_all(fds)
    link = Link.of_socket(session.detach())
    link.watch()
    return ChannelEndpoint(SharedChannel(own, peers, link), Peer(address, theirs["info"]))


def _send_window(session: control.Session, window_bytes: int, more: list[int]) -> Memory:
    """Sends the descriptor of a new window, and further ones, and returns the window."""
    fd = create_window_fd(window_bytes)
    try:
        own = Memory.of_fd(window_bytes, fd)
        _send_fds(session, [fd, *more])
    finally:
        os.close(fd)
    return own


def _send_fds(session: control.Session, fds: list[int]) -> None:
    session.sock.settimeout(max(session.deadline - time.monotonic(), 1e-3))
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
    try:
        session.sock.sendmsg([b"w"], [rights])
    except OSError as error:
        raise control.connection_error("the peer", error) from error


def _receive_fds(session: control.Session, at_most: int) -> list[int]:
    """Returns the descriptor of the peer's window, and those that it sends with it."""
    session.sock.settimeout(max(session.deadline - time.monotonic(), 1e-3))
    try:
        byte, fds, _, _ = socket.recv_fds(session.sock, 1, 8)
    except OSError as error:
        raise control.connection_error("the peer", error) from error
    if byte == b"w" and 0 < len(fds) <= at_most:
        return fds
    _close_all(fds)
    raise RefusedError("the peer sent no window")


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


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
