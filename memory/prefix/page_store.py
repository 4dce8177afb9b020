"""The protocol of a page store behind the prefix cache, and the cache's counters."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from memory.prefix.store_stats import StoreStats

logger = logging.getLogger(__name__)

Chain = Sequence[tuple[bytes, bytes | None]]
"""(key, parent key) pairs of pages, parents first; the first page of a sequence has no parent."""


class PageStore(Protocol):
    """Keeps pages longer than memory does, like `memory.tiers.disk_tier.DiskTier`.

    A future's result says whether its transfer succeeded. store_many and load_many raise before
    they have started a transfer, or not at all.
    """

    @property
    def room(self) -> int:
        """The number of further transfers that the store accepts now."""

    def store_many(self, pages: Sequence[tuple[bytes, int]]) -> list[Future[bool]]:
        """Writes the pages at these (key, address) pairs. They do not change until the futures
        end."""

    def load_many(self, pages: Sequence[tuple[bytes, int]]) -> list[Future[bool]]:
        """Reads the pages with these keys to these addresses."""

    def use(self, keys: Sequence[bytes]) -> int:
        """Marks these pages as just used; the last one is to be evicted last. Returns how many
        pages could be stored without evicting any of these."""

    def contains(self, key: bytes) -> bool:
        """Returns whether the page can probably be loaded."""

    def discard(self, key: bytes) -> bool:
        """Drops the page, even while it is being written: its memory may change from now on.
        Returns whether it was there."""

    def stats(self) -> StoreStats:
        """Returns the counters. Any thread may call it."""

    def close(self, timeout_s: float) -> bool:
        """Ends transfers and closes the store, within the time limit if possible. Returns False if
        memory is still being read or written, for an unknown time."""


@dataclass(slots=True)
class PrefixStats:
    """Counters since the start."""

    num_asked_tokens: int = 0  # of sequences that were looked up
    num_hit_tokens: int = 0  # found in memory
    num_evicted: int = 0  # pages evicted from memory
    num_stored: int = 0  # pages written to the store
    num_loaded: int = 0  # pages loaded from it
    num_lost: int = 0  # pages that could not be loaded
    num_failed: int = 0  # failed writes; their pages are written again later
    num_declined: int = 0  # loads not started because computing was expected to be faster


@dataclass(frozen=True, slots=True)
class Write:
    """A page that is being written to the store."""

    key: bytes
    page: int
    began_s: float
    future: Future[bool]


@dataclass(frozen=True, slots=True)
class Load:
    """A page that is being loaded from the store."""

    key: bytes
    parent: bytes | None
    page: int
    future: Future[bool]


@contextmanager
def suppressed(action: str) -> Iterator[None]:
    """Logs an exception of a store, and goes on."""
    try:
        yield
    except Exception:
        logger.exception("K/V on disk: %s failed", action)
