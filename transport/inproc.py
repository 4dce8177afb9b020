"""inproc://name: both ends in one process, through the same rings on anonymous memory."""

from __future__ import annotations

import json
import queue
import threading
import weakref
from collections.abc import Mapping

from transport import control
from transport._windows import Link, Memory, SharedChannel
from transport.base import Peer, RefusedError, TransportError
from transport.endpoint import ChannelEndpoint

_listeners: dict[str, InprocListener] = {}
_lock = threading.Lock()


class InprocTransport:
    @staticmethod
    def connect(
        url: str, *, key: bytes, info: Mapping[str, object], window_bytes: int, timeout_s: float
    ) -> ChannelEndpoint:
        """There is nobody to authenticate, and nothing takes time."""
        control.check_window(window_bytes)
        said = _copy(info)
        with _lock:
            listener = _listeners.get(_name(url))
        if listener is None:
            raise TransportError(f"{url}: nobody listens there")
        return listener.join(said, window_bytes)

    @staticmethod
    def listen(
        url: str, *, key: bytes, info: Mapping[str, object], window_bytes: int, max_peers: int
    ) -> InprocListener:
        control.check_window(window_bytes)
        listener = InprocListener(url, _copy(info), window_bytes, max_peers)
        with _lock:
            if _name(url) in _listeners:
                raise TransportError(f"{url}: somebody listens there")
            _listeners[_name(url)] = listener
        return listener


class InprocListener:
    def __init__(
        self, url: str, info: Mapping[str, object], window_bytes: int, max_peers: int
    ) -> None:
        self.url = url
        self._info = info
        self._window_bytes = window_bytes
        self._max_peers = max_peers
        self._ready: queue.SimpleQueue[ChannelEndpoint | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of all below
        self._peers: weakref.WeakSet[ChannelEndpoint] = weakref.WeakSet()
        self._num_refused = 0
        self._is_closed = False

    def join(self, info: Mapping[str, object], window_bytes: int) -> ChannelEndpoint:
        """The end of who connects."""
        with self._lock:
            if self._is_closed:
                raise TransportError(f"{self.url}: nobody listens there")
            if sum(not peer.is_lost for peer in self._peers) >= self._max_peers:
                self._num_refused += 1
                raise RefusedError(f"the peer refuses: it has {self._max_peers} peers already")
            theirs, ours = Memory.anonymous(window_bytes), Memory.anonymous(self._window_bytes)
            one, other = Link.pair()
            accepted = ChannelEndpoint(SharedChannel(ours, theirs, one), Peer(self.url, info))
            self._peers.add(accepted)
            self._ready.put(accepted)
        return ChannelEndpoint(SharedChannel(theirs, ours, other), Peer(self.url, self._info))

    def accept(self, timeout_s: float | None = None) -> ChannelEndpoint | None:
        try:
            endpoint = self._ready.get(timeout_s is None or timeout_s > 0, timeout_s)
        except queue.Empty:
            return None
        if endpoint is None:
            self._ready.put(None)  # for the next call, or another thread
        return endpoint

    @property
    def num_refused(self) -> int:
        return self._num_refused

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        with _lock:
            _listeners.pop(_name(self.url), None)
        while not self._ready.empty():
            endpoint = self._ready.get()
            if endpoint is not None:
                endpoint.close()
        self._ready.put(None)


def _name(url: str) -> str:
    return url.removeprefix("inproc://")


def _copy(info: Mapping[str, object]) -> dict[str, object]:
    """As it would arrive."""
    copied: dict[str, object] = json.loads(control.encode(info))
    return copied
