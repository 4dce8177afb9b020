"""Listening sockets: which connections are accepted, and how many at a time.

One thread accepts; each connection is set up by a thread of its own within HANDSHAKE_S. Until a
peer has proved that it knows the key, it holds one of MAX_UNAUTHENTICATED places and gets no
answer.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from transport import control
from transport.base import RefusedError, TransportError
from transport.endpoint import ChannelEndpoint
from transport.listener_base import ListenerBase

logger = logging.getLogger(__name__)

MAX_UNAUTHENTICATED = 16
_LOG_EVERY_S = 5.0


class SocketListener(ListenerBase, ABC):
    """Accepts on `sock`; a subclass makes endpoints of authenticated sessions."""

    name: str
    """The transport's, as in urls."""

    def __init__(
        self,
        sock: socket.socket,
        url: str,
        *,
        key: bytes,
        info: Mapping[str, object],
        window_bytes: int,
        max_peers: int,
    ) -> None:
        super().__init__(url, window_bytes, max_peers)
        self._sock = sock
        self._key = key
        self._hello = control.hello(self.name, info, window_bytes)
        # The lock protects these, too.
        self._unauthenticated: list[socket.socket] = []  # oldest first
        self._num_coming = 0  # authenticated, not yet among the peers
        self._num_logged, self._logged_at = 0, -_LOG_EVERY_S
        self._thread = threading.Thread(target=self._accept_all, name=f"accept {url}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if not self._begin_close():
            return
        self._sock.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._sock.close()
        self._clean_up()
        self._end_ready()

    # ---- for subclasses

    @abstractmethod
    def _establish(
        self, session: control.Session, theirs: Mapping[str, Any], address: str
    ) -> ChannelEndpoint:
        """Makes the endpoint: the rest of the set-up after both hellos fit."""

    def _why_not(self, session: control.Session, theirs: Mapping[str, Any]) -> str | None:
        """Returns why this transport refuses a peer, or None."""
        return None

    def _data_connection(self, sock: socket.socket, deadline: float) -> None:
        """Takes over a connection that declared itself a data connection."""
        raise RefusedError("a data connection where there are none")

    def _clean_up(self) -> None:
        """Frees what is left after the socket is closed."""
        return

    def _own_hello(self) -> dict[str, object]:
        return dict(self._hello)

    # ---- setting up

    def _accept_all(self) -> None:
        while not self._is_closed:
            try:
                sock, address = self._sock.accept()
            except OSError as error:
                if not self._is_closed:  # no descriptors are left: wait until some are free
                    self._refuse(f"accept: {error}")
                    time.sleep(0.05)
                continue
            self._make_room(sock)
            shown = f"{address[0]}:{address[1]}" if isinstance(address, tuple) else self.url
            try:
                threading.Thread(
                    target=self._set_up, args=(sock, shown), name="handshake", daemon=True
                ).start()
            except RuntimeError as error:  # no thread can be started
                self._forget(sock)
                sock.close()
                self._refuse(str(error))

    def _make_room(self, sock: socket.socket) -> None:
        """Closes the oldest connection that is not authenticated if all places are taken, so that
        silent connections cannot keep peers out."""
        oldest = None
        with self._lock:
            if len(self._unauthenticated) >= MAX_UNAUTHENTICATED:
                oldest = self._unauthenticated.pop(0)
            self._unauthenticated.append(sock)
        if oldest is not None:
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # its thread notices and refuses it

    def _forget(self, sock: socket.socket) -> None:
        with self._lock:
            if sock in self._unauthenticated:
                self._unauthenticated.remove(sock)

    def _set_up(self, sock: socket.socket, address: str) -> None:
        deadline = time.monotonic() + control.HANDSHAKE_S
        session = None
        try:
            try:
                magic = control.receive_exactly(sock, len(control.MAGIC), deadline)
                if magic == control.DATA_MAGIC:
                    self._data_connection(sock, deadline)
                    return
                if magic != control.MAGIC:
                    raise RefusedError("no peer of ours")
                session = control.authenticate_from(sock, self._key, deadline)
                session.deadline = time.monotonic() + control.HANDSHAKE_S
            finally:
                self._forget(sock)
            self._admit(session, address)
        except (TransportError, OSError, ValueError) as error:
            sock.close()
            self._refuse(f"{address}: {error}")

    def _admit(self, session: control.Session, address: str) -> None:
        theirs = session.receive()
        reason = control.why_not(theirs, self.name) or self._why_not(session, theirs)
        with self._lock:
            num_peers = self._num_peers() + self._num_coming
            if self._is_closed:
                reason = "it is closing"
            elif num_peers >= self._max_peers:
                reason = f"it has {self._max_peers} peers already"
            self._num_coming += 1
        try:
            if reason is not None:
                session.send({"refused": reason})
                raise RefusedError(reason)
            endpoint = self._establish(session, theirs, address)
            with self._lock:
                self._peers.add(endpoint)
        finally:
            with self._lock:
                self._num_coming -= 1
        self._ready.put(endpoint)
        if self._is_closed:
            self._end_ready()

    def _refuse(self, reason: str) -> None:
        now = time.monotonic()
        with self._lock:
            self._num_refused += 1
            if now - self._logged_at < _LOG_EVERY_S:
                return
            num_more = self._num_refused - self._num_logged - 1
            self._num_logged, self._logged_at = self._num_refused, now
        logger.warning("%s refused %s (and %d more before)", self.url, reason, num_more)
