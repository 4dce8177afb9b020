"""Lanes: messages at fixed places in registered memory, beside an endpoint.

A lane joins a CUDA stream to a peer's host. Both ends agree beforehand where each message lies in
the other's memory and at which address a 64-bit number follows it. The stream writes and waits with
no host in between; the host polls. There is no checksum and no flow control: who uses the lane
knows when a place may be written again, and must not take a message before its number is there.
Each end's outgoing memory mirrors the other's window, so one offset names a place at both ends.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from transport.base import Endpoint
from transport.gpu import Gpu, HostWord, Source, StreamReceiver, StreamSender, Target


class HostLane(Protocol):
    """The end of a host. One thread uses it."""

    terms: Mapping[str, object]
    """How the peer addresses this end (JSON)."""
    window: memoryview
    """What the peer writes."""
    outgoing: memoryview
    """What `write` copies to the peer, at the same offsets."""

    def number(self, at: int) -> int:
        """Returns the number at this offset of the window. What was written before it is there."""

    def write(self, at: int, num_bytes: int, number_at: int, number: int) -> None:
        """Copies outgoing bytes to the peer, and then the number to number_at. They may change
        when the peer has the number. Raises TransportError."""

    def close(self) -> None:
        """Ends the lane and frees its memory."""


class StreamOffer(Protocol):
    """A stream's end that waits for its peer."""

    terms: Mapping[str, object]

    def connect(self, theirs: object) -> StreamLane:
        """Connects to the peer by its terms. Raises TransportError, also for impossible terms."""

    def close(self) -> None:
        """Frees what was made."""


class DeviceMemory(NamedTuple):
    """Whole pages of device memory."""

    address: int
    num_bytes: int


class LaneOpener(Protocol):
    """Opens lanes of one stream."""

    def offer(
        self, endpoint: Endpoint, window: DeviceMemory, source: DeviceMemory, num_messages: int
    ) -> StreamOffer:
        """num_messages: the most that are sent without a report. Raises GpuUnavailableError with
        the reason if there can be no lane beside this endpoint, and TransportError."""

    def enter(self) -> None:
        """Lets the calling thread use the device. Raises TransportError."""

    def close(self) -> None:
        """Frees what all lanes use; they are closed. Raises TransportError."""


class StreamEnd(NamedTuple):
    """What a StreamLane is made of. source and window: device addresses; source_key: for sends of
    this end; peer_key, peer_address: of the peer's window. num_reports returns the number of new
    completions of reporting sends. free: what is called last."""

    sender: StreamSender
    receiver: StreamReceiver
    progress: HostWord
    source: int
    source_key: int
    window: int
    peer_key: int
    peer_address: int
    num_reports: Callable[[], int]
    free: Callable[[], None]


class StreamLane:
    """The end of a stream. One thread uses it, apart from `release` and `progress`."""

    def __init__(self, gpu: Gpu, stream: Any, release_stream: Any, end: StreamEnd) -> None:
        """release_stream: a stream without any other work."""
        self._gpu, self._stream, self._release_stream = gpu, stream, release_stream
        self._end = end
        self._num_sent = 0  # since the last report
        self._reports: deque[int] = deque()

    def send(
        self, at: int, num_bytes: int, number_at: int, number: int, *, reports: bool = False
    ) -> None:
        """Makes the stream copy source bytes to the peer, and then the number. reports: frees the
        room of these and earlier sends when they are complete. Raises TransportError."""
        end = self._end
        source = Source(end.source_key, end.source + at, num_bytes)
        peer = end.peer_address
        target = Target(end.peer_key, peer + at, peer + number_at)
        end.sender.send(self._stream, source, target, number, reports=reports)
        self._num_sent += 1
        if reports:
            self._reports.append(self._num_sent)
            self._num_sent = 0

    def collect(self) -> None:
        """Frees the room of sends that are complete. Raises TransportError if one has failed."""
        for _ in range(self._end.num_reports()):
            self._end.sender.done(self._reports.popleft())

    def wait(self, number_at: int, number: int) -> None:
        """Makes the stream wait until the peer has written this number, or a later one."""
        self._end.receiver.wait(self._stream, self._end.window + number_at, number)

    def release(self, number_at: int, number: int) -> None:
        """Ends a wait for this number, or for one before it. The peer may still overwrite it with
        an earlier number, so repeat it until `progress` shows that the stream has passed."""
        self._end.receiver.release(self._release_stream, self._end.window + number_at, number)

    def mark(self, number: int) -> None:
        """Makes the stream set `progress` when it gets here."""
        self._end.progress.write(self._stream, number)

    @property
    def progress(self) -> int:
        return self._end.progress.value

    def close(self) -> None:
        """The stream must have passed all sends and waits. Raises TransportError, after which the
        peer may still write the window."""
        with contextlib.ExitStack() as undo:  # in reverse: no step depends on the one before it
            undo.callback(self._end.free)
            undo.callback(self._end.progress.close)
            undo.callback(self._end.sender.close)
            # A release is a write of another stream, and the memory is used for other things next.
            self._gpu.call("cuStreamSynchronize", self._release_stream)
