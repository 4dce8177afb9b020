"""The counters of a page store."""

from __future__ import annotations

from dataclasses import dataclass

from memory.prefix.peer_stats import PeersStats


@dataclass(slots=True)
class StoreStats:
    """Counters since the start; from `entries` on, the present state."""

    hits: int = 0
    misses: int = 0  # for every reason
    stores: int = 0  # pages written
    corrupt: int = 0  # checksum wrong, page dropped
    read_errors: int = 0
    write_errors: int = 0
    refused: int = 0  # too many requests, no room, or writing is paused
    evictions: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    entries: int = 0
    pinned: int = 0
    bytes_used: int = 0
    host_bytes: int = 0  # in host memory, of a tier above the disk
    requests: int = 0  # in progress
    is_paused: bool = False
    peers: PeersStats | None = None  # of engines from which pages are pulled, if there are any
