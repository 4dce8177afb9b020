"""A pair of transport endpoints in one thread; a message of one end arrives at the other at once.

Through it the engine uses its own memory as a memory node when no other node is left.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence

from transport.base import Frame, Peer, PeerLostError, Segment


class DirectEndpoint:
    """One end of the pair. Messages are copied."""

    def __init__(self) -> None:
        self.peer = Peer("this process", {})
        self.max_message_bytes = 1 << 40
        self.on_arrival: Callable[[], object] = lambda: None
        """Called in the sender's thread when a message arrives or the peer closes."""
        self._other: DirectEndpoint | None = None
        self._inbox: deque[bytearray] = deque()
        self._held: dict[int, bytearray] = {}
        self._num_posted = self._num_taken = 0
        self._is_closed = False

    def post(self, segments: Sequence[Segment], timeout_s: float = 10.0) -> int:
        other = self._other
        if other is None or self.is_lost:
            raise PeerLostError("closed")
        message = bytearray(sum([s.num_rows * s.row_bytes for s in segments]))
        start = ctypes.addressof(ctypes.c_char.from_buffer(message)) if message else 0
        for segment in segments:
            for row in range(segment.num_rows):
                source = segment.address + row * segment.stride_bytes
                ctypes.memmove(start, source, segment.row_bytes)
                start += segment.row_bytes
        other._inbox.append(message)
        self._num_posted += 1
        other.on_arrival()
        return self._num_posted

    def poll(self, timeout_s: float = 0.0) -> Frame | None:
        if not self._inbox:
            if self.is_lost:
                raise PeerLostError("closed")
            return None
        message = self._inbox.popleft()
        self._num_taken += 1
        self._held[self._num_taken] = message
        address = ctypes.addressof(ctypes.c_char.from_buffer(message)) if message else 0
        return Frame(address, len(message), self._num_taken)

    def release(self, frame: Frame) -> None:
        self._held.pop(frame.number, None)

    @property
    def silence_s(self) -> float:
        return 0.0

    @property
    def is_lost(self) -> bool:
        return self._is_closed or self._other is None or self._other._is_closed

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._held.clear()
            if self._other is not None:
                self._other.on_arrival()  # the peer notices that this end is closed


def direct_pair() -> tuple[DirectEndpoint, DirectEndpoint]:
    ends = DirectEndpoint(), DirectEndpoint()
    ends[0]._other, ends[1]._other = ends[1], ends[0]
    return ends
