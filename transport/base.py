"""The contract of every transport: a memory window and a sequence number.

An endpoint is one end of a connection of two. Each end owns a *window*: registered memory that
only the peer writes. A message is copied into the peer's window, and after it a descriptor with
its sequence number, in one post; the receiver polls for the number that is due. Many messages may
be in flight, as far as the window has room. They arrive in order, whole, and with the bytes that
were sent (CRC32C in the descriptor), or the connection ends with a TransportError.

Set-up and liveness do not pass through the windows: an authenticated control connection carries
them, and heartbeats on it tell a peer that is stopped or cut off from one that is only slow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

HEARTBEAT_S = 0.25
"""The time from one heartbeat to the next."""
LOST_AFTER_S = 1.25
"""Silence on the control connection after which the peer counts as lost."""
DEFAULT_WINDOW_BYTES = 16 << 20


class TransportError(Exception):
    """A connection could not be made, or has ended. Nothing more is sent or received on it."""


class PeerLostError(TransportError):
    """The peer closed the connection, died, or was silent for LOST_AFTER_S."""


class CorruptMessageError(TransportError):
    """Bytes in the window differ from those that were sent, or a sequence number is wrong."""


class RefusedError(TransportError):
    """The peer does not accept us, or we do not accept it: key, version, limits."""


class TransportTimeoutError(TransportError):
    """An operation took longer than allowed."""


class Segment(NamedTuple):
    """Memory to send: num_rows pieces of row_bytes each, stride_bytes apart, from `address` on."""

    address: int
    num_rows: int
    row_bytes: int
    stride_bytes: int


class Frame(NamedTuple):
    """A message that still lies in our window, at `address`, until it is released."""

    address: int
    num_bytes: int
    number: int


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a connection. info (small, JSON) is how it described itself."""

    address: str
    info: Mapping[str, object]


class Endpoint(Protocol):
    """One end of a connection. One thread at a time uses it, except for close and is_lost."""

    peer: Peer
    max_message_bytes: int
    """The most bytes of one message to the peer, which is a part of its window."""

    def post(self, segments: Sequence[Segment], timeout_s: float = 10.0) -> int:
        """Sends the segments' bytes, one after the other, as one message; returns its number (1, 2,
        ...).

        Their memory may be reused as soon as this returns. Waits for room in the peer's window.
        Raises TransportTimeoutError, PeerLostError, and ValueError for a message larger than
        max_message_bytes.
        """

    def poll(self, timeout_s: float = 0.0) -> Frame | None:
        """Returns the next message, or None if none arrives within the time. It spins first, then
        sleeps, and does not hold the GIL while it waits.

        Raises PeerLostError after the last message that had arrived, and CorruptMessageError.
        """

    def release(self, frame: Frame) -> None:
        """Gives the frame's memory back to the peer. Frames may be released in any order, each
        once."""

    @property
    def silence_s(self) -> float:
        """The time since the peer's last message or heartbeat."""

    @property
    def is_lost(self) -> bool:
        """Whether the peer is known to be lost, or this end is closed. Any thread may read it."""

    def close(self) -> None:
        """Ends the connection and frees both windows. Any thread may call it, more than once; a
        thread that waits in poll or post then gets PeerLostError."""


class HasDescriptor(Protocol):
    """Memory or a file with a descriptor, which stays open as long as the object is used."""

    def fileno(self) -> int: ...


class Listener(Protocol):
    """Accepts connections of peers."""

    url: str
    """The url that `connect` takes; it has the chosen port where port 0 was asked for."""

    def accept(self, timeout_s: float | None = None) -> Endpoint | None:
        """Returns the next authenticated peer, or None after the time or close.

        Peers that fail the set-up are refused and counted; they are not returned.
        """

    @property
    def num_refused(self) -> int:
        """The number of connections that ended before they became an endpoint."""

    def close(self) -> None:
        """Accepts no more peers; accepted endpoints stay. Any thread may call it, repeatedly."""
