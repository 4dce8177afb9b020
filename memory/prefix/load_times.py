"""How long pages take to come back from a store, measured while they do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future

# What the past counts for after one more batch.
_DECAY = 0.8
# A batch counts for so much more than what is known at most: a disk that hung once is not slow.
_MOST_MORE = 4.0
# Each time it seemed too much, the estimate sinks: a disk that was slow once is tried again.
_HOPE = 0.95


class LoadTimes:
    """Seconds a page, exponentially weighted over batches. Ends are noted in the store's threads,
    so that it does not matter when somebody looks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._page_s = 0.0
        self._began_s = self._ended_s = 0.0
        self._num_pages = 0

    def begin(self, futures: Iterable[Future[bool]]) -> None:
        """A batch of pages is on its way."""
        self._began_s = self._ended_s = self._clock()
        self._num_pages = 0
        for future in futures:
            self._num_pages += 1
            future.add_done_callback(self._note_end)

    def _note_end(self, _: Future[bool]) -> None:
        self._ended_s = self._clock()

    def end(self) -> None:
        """All of the batch has come, or failed. Nothing is learned where no end was noted yet."""
        page_s = (self._ended_s - self._began_s) / max(1, self._num_pages)
        if self._num_pages and page_s > 0.0:
            if self._page_s:
                page_s = min(page_s, _MOST_MORE * self._page_s)
                page_s = _DECAY * self._page_s + (1.0 - _DECAY) * page_s
            self._page_s = page_s
        self._num_pages = 0

    def seconds(self, num_pages: int) -> float:
        """What so many pages would take; 0 before anything is known."""
        return num_pages * self._page_s

    def declined(self) -> None:
        """That was too long for somebody."""
        self._page_s *= _HOPE
