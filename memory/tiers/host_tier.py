"""The host tier: a page store in host memory, between device memory and an optional store below.

Pages are stored into a bounded arena of host memory. The least recently used ones are written ahead
of need to the store below (`memory.tiers.disk_tier.DiskTier`, or none) and are then evicted. A load
looks in the arena, then below. Any failure is a miss and a counter; only pages that were copied
completely are found.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace

from memory.prefix.page_store import PageStore
from memory.prefix.store_stats import StoreStats
from memory.tiers.host_arena import HostCounters, TransferRequest
from memory.tiers.host_worker import HostWorker
from memory.tiers.page_copy import PageCopier

logger = logging.getLogger(__name__)

# The share of its time that `close` flushes, and the share of the rest that it stops the thread.
_FLUSH_SHARE, _STOP_SHARE = 0.6, 0.5

# Tiers whose host memory may still be written after `close`. It is never freed.
_abandoned: list[HostTier] = []


@dataclass(slots=True)
class HostStats(HostCounters):
    """Counters since the start, and the present state."""

    entries: int = 0
    bytes_used: int = 0
    requests: int = 0  # in progress


class HostTier:
    """A `PageStore` in host memory. Requests come from any thread that `copier.follow` supports."""

    def __init__(
        self,
        page_bytes: int,
        capacity_bytes: int,
        copier: PageCopier,
        below: PageStore | None = None,
        *,
        max_requests: int = 1024,
    ) -> None:
        """The tier closes the copier and the store below. The store below ends its futures in any
        thread, but never while it holds a lock that its `contains` takes. Raises OSError if there
        is no memory."""
        assert capacity_bytes >= page_bytes > 0, f"{capacity_bytes=} {page_bytes=}"
        self.page_bytes = page_bytes
        self._copier = copier
        self._below = below
        self._max_requests = max_requests
        self._is_closed = False
        self._is_quiet = True
        self._num_slots = capacity_bytes // page_bytes
        base = copier.allocate(self._num_slots * page_bytes)
        self._worker = HostWorker(page_bytes, self._num_slots, base, copier, below)

    def store_many(self, pages: Sequence[tuple[bytes, int]]) -> list[Future[bool]]:
        """Stores the pages at these (key, address) pairs. A key always stands for the same content.
        A page must not change until its future ends, which waits for a slot. True: a load may find
        the page."""
        return self._submit(
            [TransferRequest(key, address, is_store=True) for key, address in pages]
        )

    def load_many(self, pages: Sequence[tuple[bytes, int]]) -> list[Future[bool]]:
        """Copies the keys' pages to these addresses, which belong to the tier until the future
        ends. False is a miss, and the content there is undefined."""
        return self._submit(
            [TransferRequest(key, address, is_store=False) for key, address in pages]
        )

    def _submit(self, requests: list[TransferRequest]) -> list[Future[bool]]:
        is_ordered = bool(requests) and not self._worker.is_over and self._follow()
        self._worker.take(requests, self._max_requests if is_ordered else 0)
        return [request.future for request in requests]

    def _follow(self) -> bool:
        try:
            self._copier.follow()
        except OSError as error:
            logger.warning("K/V in host memory: no order with the kernels (%s)", error)
            return False
        return True

    def contains(self, key: bytes) -> bool:
        """Returns whether the page is here, in the store below, or being stored."""
        return self._worker.contains(key)

    def use(self, keys: Sequence[bytes]) -> int:
        """Marks pages as used in the store below, to which evicted pages go."""
        return self._below.use(keys) if self._below is not None else self.room

    def discard(self, key: bytes) -> bool:
        """Drops the page here and below, even while it is being stored: its memory may change from
        now on. Returns whether it was there."""
        was_here = self._worker.discard(key)
        was_below = self._below is not None and self._below.discard(key)
        return was_here or was_below

    @property
    def room(self) -> int:
        return max(0, self._max_requests - len(self._worker.open))

    def stats(self) -> StoreStats:
        """Returns the counters of the store below, and the bytes of this tier."""
        below = StoreStats() if self._below is None else self._below.stats()
        return replace(below, host_bytes=self._worker.arena.num_used * self.page_bytes)

    def host_stats(self) -> HostStats:
        """Returns the tier's own counters. Any thread may call it."""
        with self._worker.changed:
            return HostStats(
                **asdict(self._worker.stats),
                entries=len(self._worker.arena.entries),
                bytes_used=self._worker.arena.num_used * self.page_bytes,
                requests=len(self._worker.open),
            )

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Writes all pages to the store below. Returns whether it has them all."""
        try:
            return self._worker.flush().result(timeout_s)
        except TimeoutError:
            return False

    def close(self, timeout_s: float = 30.0) -> bool:
        """Writes pages that the store below lacks, ends transfers and closes the store below, as
        far as the time allows. Must not be called from a future's callback. Returns False if pages
        may still be read or written; host memory that may still be written is never freed."""
        end_s = time.monotonic() + timeout_s
        if not self._is_closed:
            self._is_closed = True
            if self._below is not None:
                self.flush(_FLUSH_SHARE * timeout_s)
            self._is_quiet = self._worker.stop(_STOP_SHARE * (end_s - time.monotonic()))
            if self._is_quiet:
                self._close_copier()
            else:
                _abandoned.append(self)
                size = self._num_slots * self.page_bytes >> 20
                logger.error("K/V in host memory: %d MiB stay: they may still be written", size)
            if self._below is not None:
                self._below.close(max(0.0, end_s - time.monotonic()))
        return self._is_quiet

    def _close_copier(self) -> None:
        try:
            self._copier.close()
        except OSError as error:
            logger.warning("K/V in host memory: closing failed (%s)", error)
