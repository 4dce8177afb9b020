"""inproc://name: both ends in one process, through the same rings on anonymous memory."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping

from transport import control
from transport._windows import Link, Memory, SharedChannel
from transport.base import Peer, RefusedError, TransportError
from transport.endpoint import ChannelEndpoint
from transport.listener_base import ListenerBase

_listeners: dict[str, InprocListener] = {}
_lock = threading.Lock()


class InprocTransport:
    @staticmethod
    def connect(
        url: str, *, key: bytes, info: Mapping[str, object], window_bytes: int, timeout_s: float
    ) -> ChannelEndpoint:
        """Connects at once: within one process there is nothing to authenticate."""
        control.check_window(window_bytes)
        said = _copy(info)
        with _lock:
            listener = _listeners.get(_name(url))
        if listener is None:
            raise TransportError(f"{url}: there is no listener")
        return listener.join(said, window_bytes)

    @staticmethod
    def listen(
        url: str, *, key: bytes, info: Mapping[str, object], window_bytes: int, max_peers: int
    ) -> InprocListener:
        control.check_window(window_bytes)
        listener = InprocListener(url, _copy(info), window_bytes, max_peers)
        with _lock:
            if _name(url) in _listeners:
                raise TransportError(f"{url}: there is a listener already")
            _listeners[_name(url)] = listener
        return listener


class InprocListener(ListenerBase):
    def __init__(
        self, url: str, info: Mapping[str, object], window_bytes: int, max_peers: int
    ) -> None:
        super().__init__(url, window_bytes, max_peers)
        self._info = info

    def join(self, info: Mapping[str, object], window_bytes: int) -> ChannelEndpoint:
        """Returns the connecting end, and queues the other one for accept()."""
        with self._lock:
            if self._is_closed:
                raise TransportError(f"{self.url}: there is no listener")
            if self._num_peers() >= self._max_peers:
                self._num_refused += 1
                raise RefusedError(f"the peer refuses: it has {self._max_peers} peers already")
            theirs, ours = Memory.anonymous(window_bytes), Memory.anonymous(self.window_bytes)
            one, other = Link.pair()
            accepted = ChannelEndpoint(SharedChannel(ours, theirs, one), Peer(self.url, info))
            self._peers.add(accepted)
            self._ready.put(accepted)
        return ChannelEndpoint(SharedChannel(theirs, ours, other), Peer(self.url, self._info))

    def close(self) -> None:
        if not self._begin_close():
            return
        with _lock:
            _listeners.pop(_name(self.url), None)
        self._end_ready()


def _name(url: str) -> str:
    return url.removeprefix("inproc://")


def _copy(info: Mapping[str, object]) -> dict[str, object]:
    """Returns the information as it would arrive over a network."""
    copied: dict[str, object] = json.loads(control.encode(info))
    return copied
