"""What the prefix cache asks of a store of pages, and what it counts."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from memory.prefix.store_stats import StoreStats

Chain = Sequence[tuple[bytes, bytes | None]]
"""Keys of pages and their parents' (None: it has none), parents first."""


class PageStore(Protocol):
    """Where pages go for longer; `memory.tiers.disk_tier.DiskTier`. Futures: whether it worked.

    store_many and load_many raise before they have begun anything, or not at all.
    """

    @property
    def room(self) -> int:
        """Pages that may be on their way beside those that are; more would be refused."""

    def store_many(self, pages: Sequence[tuple[bytes, int]]) -> list[Future[bool]]:
        """Write the pages at these addresses under these keys; they do not change meanwhile."""

    def load_many(self, pages: Sequence[tuple[bytes, int]]) -> list[Future[bool]]:
        """Read the keys' pages to these addresses."""

    def use(self, keys: Sequence[bytes]) -> int:
        """Used just now; who is named last shall be forgotten last. How many pages could be
        stored without forgetting any of these."""

    def contains(self, key: bytes) -> bool:
        """It can probably be loaded."""

    def discard(self, key: bytes) -> bool:
        """Forget it, even while it is being written: its memory may change from now on."""

    def stats(self) -> StoreStats:
        """From any thread."""

    def close(self, timeout_s: float) -> bool:
        """When what is safe to write is written, or the time is over. False: memory is still
        being read or written, and that will go on for who knows how long."""


@dataclass(slots=True)
class PrefixStats:
    """Since the start: tokens asked for and found in memory; pages that memory has forgotten,
    that were written to the store, that came back from there, and that could not be read back.
    num_failed: writes that went wrong; their pages are written again later. num_declined: times
    that computing again was expected to be quicker than loading."""

    num_asked_tokens: int = 0
    num_hit_tokens: int = 0
    num_evicted: int = 0
    num_stored: int = 0
    num_loaded: int = 0
    num_lost: int = 0
    num_failed: int = 0
    num_declined: int = 0


@dataclass(frozen=True, slots=True)
class Write:
    """A page on its way to the store."""

    key: bytes
    page: int
    began_s: float
    future: Future[bool]


@dataclass(frozen=True, slots=True)
class Load:
    """A page on its way from the store."""

    key: bytes
    parent: bytes | None
    page: int
    future: Future[bool]


def has_worked(future: Future[bool]) -> bool:
    """It has ended; an exception is a failure like others."""
    return not future.cancelled() and future.exception() is None and future.result()
