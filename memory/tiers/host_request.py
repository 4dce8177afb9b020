"""What is asked of the host tier, and what it counts."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field


@dataclass(slots=True)
class HostCounters:
    """Pages, unless it says otherwise."""

    hits: int = 0  # loaded from host memory
    hits_below: int = 0  # loaded from the store below
    misses: int = 0  # for every reason
    stores: int = 0
    refused: int = 0  # too many requests, closed, or out of order
    pushed_down: int = 0  # written to the store below
    lost: int = 0  # had to give way, and the store below does not have them
    copy_errors: int = 0  # batches
    bytes_in: int = 0
    bytes_out: int = 0


@dataclass(slots=True, eq=False)
class TransferRequest:
    """A page to be kept, or to be brought back."""

    key: bytes
    address: int
    is_store: bool
    is_from_below: bool = False
    is_discarded: bool = False  # a store whose page may have changed
    future: Future[bool] = field(default_factory=Future)
