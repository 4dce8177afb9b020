"""The host-memory tier of K/V memory: pages of a device wait in host memory, then below it.

Between device memory and the store below (`memory.spill.SpillStore`, or none) lies a bounded arena
of host memory. Pages are stored into the arena; those used longest ago are written to the store
below ahead of need and give way to others. A load looks in the arena, then below. Whatever goes
wrong is a miss and a counter; only what was copied whole is ever found.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass

from memory.host_worker import HostCounters, HostWorker, Request
from memory.page_copy import PageCopier
from memory.prefix_cache import PageStore

logger = logging.getLogger(__name__)

# Host memory that somebody may still be writing when its tier was closed. Never given back.
_abandoned: list[HostTier] = []


@dataclass(slots=True)
class HostStats(HostCounters):
    """Counters since the start, and the state now."""

    entries: int = 0
    bytes_used: int = 0
    requests: int = 0  # under way


class HostTier:
    """`PageStore` in host memory. Requests from any thread whose work `copier` may follow."""

    def __init__(
        self,
        page_bytes: int,
        capacity_bytes: int,
        copier: PageCopier,
        below: PageStore | None = None,
        *,
        max_requests: int = 1024,
        close_timeout_s: float = 30.0,
    ) -> None:
        """The copier and the store below are closed with the tier. below: ends its futures in
        any thread, but never while it holds a lock that its `contains` takes. OSError if there is
        no memory."""
        assert capacity_bytes >= page_bytes > 0, f"{capacity_bytes=} {page_bytes=}"
        self.page_bytes = page_bytes
        self._copier = copier
        self._below = below
        self._max_requests = max_requests
        self._close_timeout_s = close_timeout_s
        self._num_slots = capacity_bytes // page_bytes
        base = copier.allocate(self._num_slots * page_bytes)
        self._worker = HostWorker(page_bytes, self._num_slots, base, copier, below)

    def store_many(self, pages: Sequence[tuple[bytes, int]]) -> list[Future[bool]]:
        """Keep the pages at these addresses under these keys, which name their content for good;
        they do not change until the future ends. True: a load may find it. Waits for a slot."""
        return self._submit([Request(key, address, is_store=True) for key, address in pages])

    def load_many(self, pages: Sequence[tuple[bytes, int]]) -> list[Future[bool]]:
        """Copy the keys' pages to these addresses, which are the tier's until the future ends.
        False: a miss, and the content there is undefined."""
        return self._submit([Request(key, address, is_store=False) for key, address in pages])

    def _submit(self, requests: list[Request]) -> list[Future[bool]]:
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
        """It is there or below, or on its way."""
        return self._worker.contains(key)

    def stats(self) -> HostStats:
        with self._worker.changed:
            return HostStats(
                **asdict(self._worker.stats),
                entries=len(self._worker.arena.entries),
                bytes_used=self._worker.arena.num_used * self.page_bytes,
                requests=len(self._worker.open),
            )

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Everything is below, and safe there. False: not all, or there is nothing below."""
        until = time.monotonic() + timeout_s
        future = self._worker.flush()
        try:
            is_down = future.result(timeout_s)
        except TimeoutError:
            return False
        if self._below is None:
            return is_down
        return self._below.flush(max(0.0, until - time.monotonic())) and is_down

    def close(self) -> None:
        """After what is under way, but not the waiting; what `flush` has not brought below is
        lost. Not from a future's callback. What does not end in time is left as it is, with the
        memory that it may still touch; then the store below stays open."""
        if self._worker.is_closing:
            return
        is_quiet = self._worker.stop(self._close_timeout_s)
        if self._worker.is_broken:
            _abandoned.append(self)
            size = self._num_slots * self.page_bytes >> 20
            logger.error("K/V in host memory: %d MiB stay: they may still be written", size)
        else:
            self._close_copier()
        if self._below is not None and is_quiet:
            self._below.close()

    def _close_copier(self) -> None:
        try:
            self._copier.close()
        except OSError as error:
            logger.warning("K/V in host memory: closing failed (%s)", error)
