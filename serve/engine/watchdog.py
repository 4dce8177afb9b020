"""Detects a stalled engine: a step that takes far longer than any step before it.

The watchdog learns how long steps take, so that it does not report long prompts or slow machines
as a stall, and gives a step that is larger than all before it time for its rows. It reports
nothing before MIN_STALL_S. The loop's thread writes; any thread reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable

MIN_STALL_S = 30.0
MAX_TIMES_LONGEST = 5.0
MAX_ROW_S = 0.25  # seconds per row; a model that needs more is too slow to be of use


class Watchdog:
    """Times the loop's rounds. A round is a step, or the messages between two steps."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        is_output_alive: Callable[[], bool] = lambda: True,
    ) -> None:
        """is_output_alive: whether the thread of pool 3 runs."""
        self._clock = clock
        self._is_output_alive = is_output_alive
        self.on_round: Callable[[bool], None] | None = None
        """Called in the loop when a round begins or the loop rests, with whether the round has
        rows of a prompt."""
        self._round: tuple[float, int] | None = None  # when it began, and its rows; None: idle
        self._longest_s, self._most_rows = 0.0, 0

    def begin(self, num_rows: int = 0, num_decodes: int = 0) -> None:
        """Starts a round and ends the one before it, if there is one. num_decodes: those of the
        rows that are not a prompt's."""
        if self.on_round is not None:
            self.on_round(num_rows > num_decodes)
        now_s = self._clock()
        self._learn(now_s)
        self._round = now_s, num_rows

    def rest(self) -> None:
        """Ends the round: the loop waits for work."""
        if self.on_round is not None:
            self.on_round(False)
        self._learn(self._clock())
        self._round = None

    def _learn(self, now_s: float) -> None:
        if self._round is not None:
            began_s, num_rows = self._round
            self._longest_s = max(self._longest_s, now_s - began_s)
            self._most_rows = max(self._most_rows, num_rows)

    def stall_reason(self) -> str | None:
        """Returns the reason why the engine has stalled, as text; None if it has not."""
        if not self._is_output_alive():
            return "the thread that delivers answers has ended"
        seconds = self.stalled_s()
        return None if seconds is None else f"a step has taken {seconds:.0f} s and goes on"

    def stalled_s(self) -> float | None:
        """Seconds that the current round has taken, if that is too long; else None."""
        current = self._round  # read once, because the loop may start another round
        if current is None:
            return None
        began_s, num_rows = current
        allowed_s = max(MIN_STALL_S, MAX_TIMES_LONGEST * self._longest_s)
        if num_rows > 2 * self._most_rows:
            allowed_s = max(allowed_s, MAX_ROW_S * num_rows)
        age_s = self._clock() - began_s
        return age_s if age_s > allowed_s else None
