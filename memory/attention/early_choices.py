"""Decides by measured times whether the tiles of a layer are chosen before it begins.

Choosing early, by queries that the layer before tells, finds more of what a layer reads than the
last step's reads do, and takes a product and a choice more. What is faster depends on the disk, the
processors and the model. So now and then a few steps go the other way, and the way whose steps took
less time is kept; the longer it stays the same, the rarer these trials are.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

_LEAST_FETCHED = 1 / 16  # of what a step reads: with less from the file there is nothing to hide
_TRIAL_STEPS = 4  # the first one does not count
_FEWEST_BETWEEN, _MOST_BETWEEN = 32, 1024  # steps between trials
_KEPT_TIMES = 9
_FEWEST_TIMES = 3
_KEPT_RATIOS = 3
_MARGIN = 0.97  # of the time without early choices: what the time with them has to stay below


class EarlyChoices:
    """Says for each step whether tiles are chosen early. Only the compute thread calls it."""

    always: bool | None = None
    """None: what is faster. Benchmarks and tests set it."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._asked_bytes = self._fetched_before = 0
        self._seconds: dict[bool, deque[float]] = {
            way: deque(maxlen=_KEPT_TIMES) for way in (False, True)
        }
        self._ratios: deque[float] = deque(maxlen=_KEPT_RATIOS)  # of the last trials
        self._is_faster = False
        self._between, self._num_steps = _FEWEST_BETWEEN, 0
        # of the step that runs; None: its time does not count
        self._rows: list[int] | None = None
        self._began_s, self._way = 0.0, False

    def asked(self, num_bytes: int) -> None:
        """Notes what a layer read."""
        self._asked_bytes += num_bytes

    def begin(self, num_rows: Sequence[int], fetched_bytes: int) -> bool:
        """Ends the step before and begins one; returns whether tiles are chosen early in it.
        num_rows: of each sequence, empty where no row selects. fetched_bytes: from the file, in
        all steps so far."""
        now_s, rows = self._clock(), list(num_rows)
        fetched, self._fetched_before = fetched_bytes - self._fetched_before, fetched_bytes
        asked, self._asked_bytes = self._asked_bytes, 0
        if rows and rows == self._rows:
            self._seconds[self._way].append((now_s - self._began_s) / len(rows))
        if not rows or fetched < asked * _LEAST_FETCHED:
            self._rows, self._way = None, False
            return False
        before, self._way = self._way, self._next_way() if self.always is None else self.always
        self._began_s = now_s
        # what the step before fetched ahead helps or harms the first one of the other way
        self._rows = rows if self._way is before else None
        return self._way

    def _next_way(self) -> bool:
        self._num_steps += 1
        if self._num_steps > self._between + _TRIAL_STEPS:
            self._compare()
            self._num_steps = 1
        is_trial = self._num_steps > self._between
        return self._is_faster is not is_trial

    def _compare(self) -> None:
        """Compares a trial with the steps just before it. Times of an earlier trial are of no use:
        contexts and batches may have become others. Its ratio is, against chance."""
        with_s, without_s = self._seconds[True], self._seconds[False]
        if min(len(with_s), len(without_s)) >= _FEWEST_TIMES:
            self._ratios.append(median(with_s) / median(without_s))
            is_faster = median(self._ratios) < _MARGIN
            stays = is_faster is self._is_faster
            self._between = min(2 * self._between, _MOST_BETWEEN) if stays else _FEWEST_BETWEEN
            self._is_faster = is_faster
        with_s.clear()
        without_s.clear()
