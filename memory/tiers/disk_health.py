"""The disk tier's counters, pauses after errors, and warnings, at most one per minute."""

from __future__ import annotations

import logging
from collections.abc import Callable

from memory.prefix.backoff import Backoff
from memory.prefix.store_stats import StoreStats

logger = logging.getLogger(__name__)

_WARNING_S = 60.0


class DiskHealth:
    """Counts the disk's reads, writes and errors, and decides when writes pause. It has no lock of
    its own: the caller holds the store's lock."""

    def __init__(self, where: str, clock: Callable[[], float]) -> None:
        self.stats = StoreStats()
        self._where = where
        self._clock = clock
        self._backoff = Backoff()
        self._warn_from = 0.0
        self._num_unread = 0  # not yet reported by a warning

    @property
    def is_paused(self) -> bool:
        return self._backoff.is_paused(self._clock())

    def count_write(self, length: int, error: OSError | None) -> None:
        """Counts a write. After some errors in a row writes pause, twice as long each time."""
        if error is None:
            self.stats.stores += 1
            self.stats.bytes_written += length
            self._backoff.worked()
            return
        self.stats.write_errors += 1
        if self._backoff.failed(self._clock()):
            pause_s = self._backoff.pause_s
            logger.warning("K/V on disk: not writing for %.0f s (%s)", pause_s, error)

    def count_read(self, length: int, error: OSError | None, *, is_right: bool) -> None:
        """Counts a load. is_right: the page is the one that was stored."""
        self.stats.hits += is_right
        self.stats.misses += not is_right
        if is_right:
            self.stats.bytes_read += length
            return
        self.stats.read_errors += error is not None
        self.stats.corrupt += error is None
        self._num_unread += 1
        if self._clock() >= self._warn_from:
            why = "content damaged" if error is None else str(error)
            logger.warning(
                "K/V on disk in %s: %d pages could not be read back (the last one: %s); "
                "they are computed again",
                self._where,
                self._num_unread,
                why,
            )
            self._num_unread = 0
            self._warn_from = self._clock() + _WARNING_S
