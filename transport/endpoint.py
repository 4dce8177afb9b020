"""The Endpoint of inproc, shm and tcp: the Python side of a channel of transport/csrc."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence

from transport._windows import Channel
from transport.base import Frame, Peer, Segment

_SLICE_S = 0.5  # a signal's Python handler runs between two slices


class ChannelEndpoint:
    def __init__(self, channel: Channel, peer: Peer) -> None:
        self.peer = peer
        self.max_message_bytes = channel.max_message_bytes
        self.shared_fds: list[int] = []  # of memory that the peer shares, until they are taken
        self._channel = channel
        if len(os.sched_getaffinity(0)) == 1:
            channel.spin_s = 0.0  # the peer cannot run while this thread spins

    @property
    def spin_s(self) -> float:
        """The time that a wait spins before it sleeps."""
        return self._channel.spin_s

    @spin_s.setter
    def spin_s(self, spin_s: float) -> None:
        self._channel.spin_s = spin_s

    def post(self, segments: Sequence[Segment], timeout_s: float = 10.0) -> int:
        return self._channel.post(segments, timeout_s)

    def poll(self, timeout_s: float = 0.0) -> Frame | None:
        if timeout_s <= _SLICE_S:
            found = self._channel.poll(timeout_s)
            return found and Frame._make(found)
        deadline = time.monotonic() + timeout_s
        found = self._channel.poll(_SLICE_S)
        while found is None and (left := deadline - time.monotonic()) > 0:
            found = self._channel.poll(min(left, _SLICE_S))
        return found and Frame._make(found)

    def release(self, frame: Frame) -> None:
        self._channel.release(frame.number)

    @property
    def silence_s(self) -> float:
        return self._channel.silence_s

    @property
    def is_lost(self) -> bool:
        return self._channel.is_lost

    def close(self) -> None:
        self._channel.close()
        with contextlib.suppress(IndexError):  # another thread may take it
            while True:
                os.close(self.shared_fds.pop())
