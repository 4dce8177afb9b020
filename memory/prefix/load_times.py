"""The time that pages take to load from a store, measured while they are loaded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future

# The weight of earlier batches after one more batch.
_DECAY = 0.8
# A batch counts as at most this multiple of the estimate: a disk that hung once is not slow.
_MOST_MORE = 4.0
# The estimate sinks by this factor each time a load is declined, so that a disk that was slow once
# is tried again.
_HOPE = 0.95


class LoadTimes:
    """Seconds per page, exponentially weighted over batches. The store's threads record when loads
    end, so that the estimate does not depend on when the cache polls."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._page_s = 0.0
        self._began_s = self._ended_s = 0.0
        self._num_pages = 0

    def begin(self, futures: Iterable[Future[bool]]) -> None:
        """Records the start of a batch of loads."""
        self._began_s = self._ended_s = self._clock()
        self._num_pages = 0
        for future in futures:
            self._num_pages += 1
            future.add_done_callback(self._record_end)

    def _record_end(self, _: Future[bool]) -> None:
        self._ended_s = self._clock()

    def end(self) -> None:
        """Updates the estimate after all loads of the batch have ended, unless no end was
        recorded."""
        page_s = (self._ended_s - self._began_s) / max(1, self._num_pages)
        if self._num_pages and page_s > 0.0:
            if self._page_s:
                page_s = min(page_s, _MOST_MORE * self._page_s)
                page_s = _DECAY * self._page_s + (1.0 - _DECAY) * page_s
            self._page_s = page_s
        self._num_pages = 0

    def seconds(self, num_pages: int) -> float:
        """Returns the estimated seconds for so many pages, 0 before the first batch."""
        return num_pages * self._page_s

    def declined(self) -> None:
        """Lowers the estimate after a load was declined as too slow."""
        self._page_s *= _HOPE
