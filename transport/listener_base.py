"""The common part of all listeners: peers that wait to be accepted, and connected ones."""

from __future__ import annotations

import queue
import threading
import weakref

from transport.endpoint import ChannelEndpoint


class ListenerBase:
    """The part of the Listener protocol (transport/base.py) that is the same for all transports."""

    def __init__(self, url: str, window_bytes: int, max_peers: int) -> None:
        self.url = url
        self.window_bytes = window_bytes
        self._max_peers = max_peers
        self._ready: queue.SimpleQueue[ChannelEndpoint | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # protects the attributes below
        self._peers: weakref.WeakSet[ChannelEndpoint] = weakref.WeakSet()
        self._num_refused = 0
        self._is_closed = False

    def accept(self, timeout_s: float | None = None) -> ChannelEndpoint | None:
        try:
            endpoint = self._ready.get(timeout_s is None or timeout_s > 0, timeout_s)
        except queue.Empty:
            return None
        if endpoint is None:
            self._ready.put(None)  # the next call, or another thread, must see it too
        return endpoint

    @property
    def num_refused(self) -> int:
        return self._num_refused

    # ---- for subclasses

    def _num_peers(self) -> int:
        """Returns how many peers are connected. The caller holds the lock."""
        return sum(not peer.is_lost for peer in self._peers)

    def _begin_close(self) -> bool:
        """Marks the listener closed; returns whether it was open until now."""
        with self._lock:
            was_open, self._is_closed = not self._is_closed, True
        return was_open

    def _end_ready(self) -> None:
        """Closes the peers that were not accepted, and wakes the threads that wait in accept()."""
        while True:
            try:
                endpoint = self._ready.get_nowait()
            except queue.Empty:
                break
            if endpoint is not None:
                endpoint.close()
        self._ready.put(None)
