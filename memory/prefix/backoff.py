"""Truncated exponential backoff: after some failures in a row there is a pause, and each pause is
twice as long as the last one until an attempt succeeds."""

from __future__ import annotations

FAILURES_IN_A_ROW = 3
_PAUSE_S, _MAX_PAUSE_S = 1.0, 60.0


class Backoff:
    """Counts the outcomes of attempts. pause_s: the last pause, or 0 after a success."""

    def __init__(self) -> None:
        self.pause_s = 0.0
        self._num_failures = 0  # in a row
        self._until_s = 0.0

    def is_paused(self, now_s: float) -> bool:
        return now_s < self._until_s

    @property
    def is_longest(self) -> bool:
        """Whether pauses do not grow any more."""
        return self.pause_s >= _MAX_PAUSE_S

    def worked(self) -> None:
        self._num_failures = 0
        self.pause_s = 0.0

    def failed(self, now_s: float, times: int = 1) -> bool:
        """Counts failures. Returns whether they begin a pause."""
        self._num_failures += times
        if self._num_failures < FAILURES_IN_A_ROW or self.is_paused(now_s):
            return False
        self.pause(now_s)
        return True

    def pause(self, now_s: float) -> None:
        self.pause_s = min(max(_PAUSE_S, 2 * self.pause_s), _MAX_PAUSE_S)
        self._until_s = now_s + self.pause_s

    def end_pause(self) -> None:
        """Ends the pause for a last attempt."""
        self._until_s = 0.0
