"""Measures whether drafts pay, and lets them rest where they do not.

How long drafts are is chosen by predicted times of the models. They leave out what Python does for
a draft: looking for it, its rows in the sampler, its tokens in the scheduler. Where a step takes
half a millisecond, that is as much as the step. So the time from step to step is measured, all
included. A step with drafts saves what its tokens would have taken in steps without drafts, less
its own time. When the sum of this falls below the time of _ALLOWED_STEPS steps, drafts rest for so
long that all they have cost, prompts in a draft model included, is at most _SHARE of the time; and
for twice as long as the last time, up to _LONGEST_REST_S, if they have not paid since. After a
search that came to nothing they rest as well, until it was that share of the time.
"""

from __future__ import annotations

import collections.abc as abc
import time
from statistics import median

_SHARE = 0.01
_ALLOWED_STEPS = 2.0
_LONGEST_REST_S = 10.0
_MOST_SAVED_STEPS = 8.0  # what earlier drafts have saved counts for no more
_SETTLED_STEPS = 64  # steps with drafts in which they have to save what prompts took
_NUM_RATIOS = 15
_FEWEST_RATIOS = 3
_REFRESH_STEPS = 128  # steps with drafts before one without is measured again
_REST_STEPS = 8  # of the steps in which drafts rest, every so many are measured
_MOST_STALL = 4.0  # a step counts as at most so many steps longer than its drafts took


class DraftLedger:
    """The account of one engine's drafts. Only the compute thread calls it."""

    def __init__(self, clock: abc.Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._ratios: list[float] = []  # of measured to predicted times of steps without drafts
        self._saved_s = self._last_rest_s = 0.0
        self._invested_s = self._repaid_s = 0.0  # since they were last compared
        self._num_settled = 0  # steps with drafts since then
        self._rest_until_s: float | None = None
        self._num_since_plain = self._num_rested = 0
        # of the step that runs; None: it does not count
        self._counted_since_s: float | None = None
        self._began_s = self._predicted_s = self._draft_s = 0.0
        self._num_decodes = self._num_accepted = 0
        self._is_drafted = False

    def begin(self) -> bool:
        """Ends the step before, and begins one; returns whether it may have drafts."""
        now_s = self._began_s = self._clock()
        if self._counted_since_s is not None:
            self._end(now_s, now_s - self._counted_since_s)
            self._counted_since_s = None
        if self._rest_until_s is not None:
            if now_s < self._rest_until_s:
                self._num_rested += 1
                return False
            self._rest_until_s = None
        return True

    @property
    def measures_rest(self) -> bool:
        """Whether the step that has begun, in which drafts rest, shall show its time."""
        return self._num_rested % _REST_STEPS == 0

    def count(self, num_decodes: int, predicted_s: float) -> bool:
        """Says that the step counts: it only decodes, so many rows in predicted_s seconds without
        drafts. Returns whether it may have drafts; now and then it has to show its own time."""
        if not predicted_s:
            return True
        self._counted_since_s, self._predicted_s = self._began_s, predicted_s
        self._num_decodes, self._num_accepted = num_decodes, 0
        self._draft_s, self._is_drafted = 0.0, False
        return len(self._ratios) >= _FEWEST_RATIOS and self._num_since_plain < _REFRESH_STEPS

    def _end(self, now_s: float, seconds: float) -> None:
        if not self._is_drafted:
            ratio = (seconds - self._draft_s) / self._predicted_s
            self._ratios = [*self._ratios[1 - _NUM_RATIOS :], ratio]
            self._num_since_plain = 0
            return
        self._num_since_plain += 1
        plain_s = median(self._ratios) * self._predicted_s
        seconds = min(seconds, self._draft_s + _MOST_STALL * plain_s)
        tokens = self._num_decodes + self._num_accepted
        saved_s = plain_s * tokens / self._num_decodes - seconds
        self._saved_s = min(self._saved_s + saved_s, _MOST_SAVED_STEPS * plain_s)
        self._repaid_s += saved_s
        self._num_settled += 1
        if self._saved_s < -_ALLOWED_STEPS * plain_s:
            self._rest(now_s, self._invested_s - self._saved_s)
        elif self._num_settled >= _SETTLED_STEPS:
            if self._repaid_s < self._invested_s:
                self._rest(now_s, self._invested_s - self._repaid_s)
            else:
                self._last_rest_s = self._invested_s = self._repaid_s = 0.0
                self._num_settled = 0

    def _rest(self, now_s: float, lost_s: float) -> None:
        longer_s = min(2.0 * self._last_rest_s, _LONGEST_REST_S)
        self._last_rest_s = max(lost_s / _SHARE, longer_s)
        self._rest_until_s = now_s + self._last_rest_s
        self._saved_s = self._invested_s = self._repaid_s = 0.0
        self._num_settled = 0

    def found(self, num_drafted: int) -> None:
        """The step has so many draft tokens; it was looked for them since it began."""
        now_s = self._clock()
        self._draft_s, self._is_drafted = now_s - self._began_s, num_drafted > 0
        if not num_drafted:
            self._rest_until_s = now_s + self._draft_s / _SHARE

    def invested(self) -> None:
        """What was done since the step began is for later steps: prompts in a draft model."""
        self._invested_s += self._clock() - self._began_s
        self.disturbed()

    def accepted(self, count: int) -> None:
        """So many tokens of a draft are kept."""
        self._num_accepted += count

    def disturbed(self) -> None:
        """The step does not count: something else changes its time."""
        self._counted_since_s = None
