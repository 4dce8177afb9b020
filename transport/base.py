"""What every transport offers: a memory window and a sequence number (DESIGN 3.7).

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
"""From one heartbeat to the next."""
LOST_AFTER_S = 1.25
"""Silence on the control connection after which the peer counts as lost."""
DEFAULT_WINDOW_BYTES = 16 << 20


class TransportError(Exception):
    """A connection could not be made, or has ended. Nothing more is sent or received on it."""


class PeerLostError(TransportError):
    """The peer closed, died, or was not heard of for LOST_AFTER_S."""


class CorruptMessageError(TransportError):
    """Bytes in the window are not those that were sent, or numbers are not the next ones."""


class RefusedError(TransportError):
    """The peer does not accept us, or we do not accept it: key, version, limits."""


class TransportTimeoutError(TransportError):
    """It took longer than allowed."""


class Segment(NamedTuple):
    """num_rows pieces of row_bytes each, stride_bytes from one to the next, from `address` on."""

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
    """Who is on the other end. info: what it said of itself when it connected (small, JSON)."""

    address: str
    info: Mapping[str, object]


class Endpoint(Protocol):
    """One end. Used by one thread at a time, except for close and is_lost."""

    peer: Peer
    max_message_bytes: int
    """Of one message to the peer: a part of its window."""

    def post(self, segments: Sequence[Segment], timeout_s: float = 10.0) -> int:
        """Send the segments' bytes, one after the other, as one message; its number (1, 2, ...).

        Their memory may be reused as soon as this returns. Waits for room in the peer's window.
        TransportTimeoutError, PeerLostError; ValueError if it is larger than max_message_bytes.
        """

    def poll(self, timeout_s: float = 0.0) -> Frame | None:
        """The next message, or None if there is none within the time. The GIL is free while it
        waits: it spins first, then sleeps.

        PeerLostError, once what had arrived before is taken; CorruptMessageError.
        """

    def release(self, frame: Frame) -> None:
        """The frame's memory may be written again. In any order, once for each frame."""

    @property
    def silence_s(self) -> float:
        """How long nothing was heard of the peer, heartbeats included."""

    @property
    def is_lost(self) -> bool:
        """Whether the peer is known to be lost, or this end is closed. From any thread."""

    def close(self) -> None:
        """End the connection and free both windows. From any thread, also while another one
        waits in poll or post, which then raises PeerLostError; more than once."""


class Listener(Protocol):
    """Where peers arrive."""

    url: str
    """As `connect` takes it; with the port that was chosen where 0 was asked for."""

    def accept(self, timeout_s: float | None = None) -> Endpoint | None:
        """The next authenticated peer; None if none came within the time, or after close.

        Peers that fail the set-up are refused, counted and never seen here.
        """

    @property
    def num_refused(self) -> int:
        """Connections that ended before they became an endpoint."""

    def close(self) -> None:
        """No more peers; accepted endpoints stay. From any thread; more than once."""
