"""Counters of pulling from peers, and of serving them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class PullStats:
    """What was pulled from one peer since the start. is_connected: now."""

    is_connected: bool = False
    asked: int = 0  # names
    found: int = 0  # of them, that the peer has
    pulled: int = 0  # pages
    missing: int = 0  # pages that it had no more
    seconds: float = 0.0  # of requests for pages
    lost: int = 0  # connections that ended, and answers that were late
    refused: int = 0  # connections ended for what the peer sent or is

    def add(self, other: PullStats) -> None:
        self.is_connected |= other.is_connected
        self.asked += other.asked
        self.found += other.found
        self.pulled += other.pulled
        self.missing += other.missing
        self.seconds += other.seconds
        self.lost += other.lost
        self.refused += other.refused


@dataclass(slots=True)
class ServeStats:
    """What peers got from this engine since the start."""

    served: int = 0  # pages
    missing: int = 0  # pages that were asked for and are not here
    refused: int = 0  # connections ended for what the peer sent, is, or did not take


@dataclass(slots=True)
class CopyStats:
    """Copies here of pages that other engines' sequences use. pages and num_bytes: now; the others
    since the start."""

    pages: int = 0
    num_bytes: int = 0
    copied: int = 0  # pages
    used: int = 0  # pages read again, here or by a peer
    declined: int = 0  # sequences for which there was no room, or whose pages did not come


@dataclass(frozen=True, slots=True)
class PeersStats:
    """All of them: pulls by the peer's address; those of all peers that requests have named are one
    entry, so that clients cannot make endless ones. engine_id: this engine's, as peers see it.
    url: where peers pull; None: nowhere. copies: those of others' pages; None: there are none by
    the settings."""

    pulls: dict[str, PullStats]
    serves: ServeStats
    engine_id: str = ""
    url: str | None = None
    copies: CopyStats | None = None
