"""What fails several times in a row is left alone for a while, twice as long each time until it
works (truncated exponential backoff)."""

from __future__ import annotations

FAILURES_IN_A_ROW = 3
_PAUSE_S, _MAX_PAUSE_S = 1.0, 60.0


class Backoff:
    """Whoever tries tells how it went. pause_s: the last pause; 0 when it has worked since."""

    def __init__(self) -> None:
        self.pause_s = 0.0
        self._num_failures = 0  # in a row
        self._until_s = 0.0

    def is_paused(self, now_s: float) -> bool:
        return now_s < self._until_s

    @property
    def is_longest(self) -> bool:
        """It has failed for so long that pauses do not grow any more."""
        return self.pause_s >= _MAX_PAUSE_S

    def worked(self) -> None:
        self._num_failures = 0
        self.pause_s = 0.0

    def failed(self, now_s: float, times: int = 1) -> bool:
        """Whether that begins a pause."""
        self._num_failures += times
        if self._num_failures < FAILURES_IN_A_ROW or self.is_paused(now_s):
            return False
        self.pause(now_s)
        return True

    def pause(self, now_s: float) -> None:
        self.pause_s = min(max(_PAUSE_S, 2 * self.pause_s), _MAX_PAUSE_S)
        self._until_s = now_s + self.pause_s

    def end_pause(self) -> None:
        """For a last trial."""
        self._until_s = 0.0
