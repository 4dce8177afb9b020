"""Whether the engine goes on: a step that takes far longer than any before it hangs.

The watchdog learns how long steps take, so that it does not report long prompts or slow machines
as a stall, and gives a step that is larger than all before it time for its rows. It reports
nothing before MIN_STALL_S. The loop's thread writes; any thread reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable

MIN_STALL_S = 30.0
MAX_TIMES_LONGEST = 5.0
MAX_ROW_S = 0.25  # of a model that is too slow to be of use


class Watchdog:
    """The loop is at rest, or busy with one round: a step, or messages in between."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        is_output_alive: Callable[[], bool] = lambda: True,
    ) -> None:
        """is_output_alive: the thread that the loop hands its results to."""
        self._clock = clock
        self._is_output_alive = is_output_alive
        self._round: tuple[float, int] | None = None  # when it began, its rows
        self._longest_s, self._most_rows = 0.0, 0

    def begin(self, num_rows: int = 0) -> None:
        """A round begins, and the one before it, if any, has ended."""
        now_s = self._clock()
        self._learn(now_s)
        self._round = now_s, num_rows

    def rest(self) -> None:
        """The loop waits for something to do."""
        self._learn(self._clock())
        self._round = None

    def _learn(self, now_s: float) -> None:
        if self._round is not None:
            began_s, num_rows = self._round
            self._longest_s = max(self._longest_s, now_s - began_s)
            self._most_rows = max(self._most_rows, num_rows)

    def stall_reason(self) -> str | None:
        """In words; None: none."""
        if not self._is_output_alive():
            return "the thread that delivers answers has ended"
        seconds = self.stalled_s()
        return None if seconds is None else f"a step has taken {seconds:.0f} s and goes on"

    def stalled_s(self) -> float | None:
        """Seconds that the round has taken so far, if they are too many."""
        current = self._round  # once: the loop may go on meanwhile
        if current is None:
            return None
        began_s, num_rows = current
        allowed_s = max(MIN_STALL_S, MAX_TIMES_LONGEST * self._longest_s)
        if num_rows > 2 * self._most_rows:
            allowed_s = max(allowed_s, MAX_ROW_S * num_rows)
        age_s = self._clock() - began_s
        return age_s if age_s > allowed_s else None
