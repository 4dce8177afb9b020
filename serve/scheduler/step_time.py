"""Predicts how long a step will take, from the steps that ran. It imports no torch, no asyncio.

There are two models, both linear in the work of a step: one for steps that only decode, one for
steps with prompt rows. The coefficients are never negative, so more work never predicts less time.
The slope may change at 16 and at 192 rows, where matrix products turn from memory-bound to
compute-bound (the first on a CPU, the second on a GPU).

Learning is least squares on relative errors over a sliding window: normal equations whose new
entries grow in weight, and two sweeps of coordinate descent from the last solution (Gauss-Seidel,
cut off at zero). Errors are relative to the larger of predicted and real time, so a step during
which the machine stalled counts little.
"""

from __future__ import annotations

import collections.abc as abc
from dataclasses import dataclass
from operator import mul
from statistics import median

from serve.scheduler.step_plan import StepPlan

_BENDS = (16, 192)
_WINDOW = 128
_ENOUGH_STEPS = 64
_SWEEPS = 2
_LARGEST_WEIGHT = 1e60
_NUM_ERRORS = 256
_PACE_STEPS = 5
_LEAST_PACE, _MOST_PACE = 0.25, 4.0
GRANULARITY = 16

# The share of steps that may take longer than the prediction plus the margin, and the rate at which
# the margin adapts. The margin ignores a step that took twice its prediction, which was stalled.
_LATE_SHARE = 0.005
_MOST_MARGIN = 1.0
_MARGIN_STEP = 0.05
_FIRST_MARGIN = 0.2


@dataclass(slots=True)
class StepWork:
    """The amount of work in a step.

    num_decodes counts the decode rows, those of drafts included, num_context the tokens of their
    sequences before them, num_rows all rows, num_pairs the pairs of a prompt row and a token before
    it, and num_chunks the sequences with prompt rows. samples says whether any token is sampled.
    """

    num_decodes: int = 0
    num_context: int = 0
    num_rows: int = 0
    num_pairs: int = 0
    num_chunks: int = 0
    samples: bool = False

    @classmethod
    def of(cls, plan: StepPlan) -> StepWork:
        """Returns the plan's work. Call it before the scheduler updates the sequences."""
        num_decodes = plan.num_decodes
        contexts = plan.contexts
        if contexts is None:
            contexts = [s.num_computed_tokens for s in plan.sequences]
        rows = num_decodes + plan.num_drafted
        work = cls(rows, sum(contexts[:num_decodes]), rows)
        for context, rows in zip(contexts[num_decodes:], plan.num_rows[num_decodes:], strict=True):
            work.add(rows, context)
        work.samples = any(plan.samples)
        return work

    def add(self, rows: int, context: int) -> None:
        """Adds rows of one sequence after `context` computed tokens; one row is a decode row."""
        self.num_rows += rows
        if rows == 1:
            self.num_decodes += 1
            self.num_context += context
        else:
            self.num_pairs += rows * context + rows * rows // 2
            self.num_chunks += 1

    def remove(self, rows: int, context: int) -> None:
        """Undoes `add` with the same arguments."""
        self.num_rows -= rows
        if rows == 1:
            self.num_decodes -= 1
            self.num_context -= context
        else:
            self.num_pairs -= rows * context + rows * rows // 2
            self.num_chunks -= 1

    def decode_features(self) -> tuple[float, ...]:
        """Returns the features of the decode rows alone. The constant comes first: a few rows take
        hardly longer than one, because all of them wait for the same weights."""
        rows = self.num_decodes
        return (1, rows, max(0, rows - _BENDS[0]), max(0, rows - _BENDS[1]), self.num_context)

    def features(self) -> tuple[float, ...]:
        rows = self.num_rows
        return (
            rows,
            1,
            max(0, rows - _BENDS[0]),
            max(0, rows - _BENDS[1]),
            self.num_context,
            self.num_pairs,
            self.num_decodes + self.num_chunks,
            self.samples,
        )


def stage_seconds(interval_s: float, pass_s: float, num_stages: int) -> float:
    """Returns the time of a step in the slowest stage of a pipeline, which it does not show itself.

    interval_s: from the end of the step before to its end. It is too long if the pipeline was not
    full, or if the step before was smaller and left the stages waiting. pass_s: from its launch to
    its end. Its share for one stage is too long if larger steps were in front. The smaller one is
    right in all these cases, and in a full pipeline of equal steps both are.
    """
    return min(interval_s, pass_s / num_stages)


class LinearModel:
    """A linear model: seconds = pace x coefficients x features; no coefficient is negative.

    The coefficients learn slowly, from all steps of the window. The pace is the median of the
    last steps' times relative to that. It follows within three steps when another process takes
    a core, and returns to 1 when the coefficients or the machine have caught up.
    Where the data do not decide, the first feature explains the time. If it is the number of rows,
    a model that has seen steps of one size expects twice the rows to take twice as long.
    """

    def __init__(self, num_features: int, window: int = _WINDOW) -> None:
        self.coefficients = [0.0] * num_features
        self.num_learned = 0
        self._pace = 1.0
        self._ratios: list[float] = []
        self._products = [[0.0] * num_features for _ in range(num_features)]
        self._targets = [0.0] * num_features
        self._weight = 1.0
        self._growth = 1.0 + 1.0 / window

    def predict(self, features: abc.Sequence[float]) -> float:
        return self._pace * self.unpaced(features)

    def unpaced(self, features: abc.Sequence[float]) -> float:
        seconds: float = sum(map(mul, self.coefficients, features))
        return seconds

    def learn(self, features: abc.Sequence[float], seconds: float) -> None:
        """Learns from one step, which took seconds > 0."""
        predicted = self.unpaced(features)
        if predicted > 0.0:
            self._ratios = [*self._ratios[1 - _PACE_STEPS :], seconds / predicted]
            pace = sorted(self._ratios)[len(self._ratios) // 2]
            self._pace = min(_MOST_PACE, max(_LEAST_PACE, pace))
        self._weight *= self._growth
        weight = self._weight / max(predicted, seconds) ** 2
        products, targets = self._products, self._targets
        for i, value in enumerate(features):
            if value:
                value *= weight
                products[i] = [p + value * x for p, x in zip(products[i], features, strict=True)]
                targets[i] += value * seconds
        coefficients = self.coefficients
        for _ in range(_SWEEPS):
            for i, row in enumerate(products):
                if row[i] > 0.0:
                    change = (targets[i] - sum(map(mul, row, coefficients))) / row[i]
                    coefficients[i] = max(0.0, coefficients[i] + change)
        self.num_learned += 1
        if self._weight > _LARGEST_WEIGHT:
            self._rescale()

    def _rescale(self) -> None:
        self._products = [[p / self._weight for p in row] for row in self._products]
        self._targets = [target / self._weight for target in self._targets]
        self._weight = 1.0


class StepTimeModel:
    """Predicts step times, and learns online. rows_per_step is the number of rows of a step that
    computes nothing but a prompt."""

    def __init__(self, rows_per_step: int) -> None:
        self.rows_per_step = rows_per_step
        self.margin = _FIRST_MARGIN  # a share of the prediction; almost every step ends within it
        self.last_step_s = 0.0
        self._decoding = LinearModel(len(StepWork().decode_features()))
        self._mixed = LinearModel(len(StepWork().features()))
        self._errors: list[float] = []
        self._num_errors = 0

    @property
    def knows_decoding(self) -> bool:
        """Whether it has learned from enough steps that only decode."""
        return self._decoding.num_learned >= _ENOUGH_STEPS

    def predict(self, work: StepWork) -> float:
        """Returns seconds; 0 before the first step was learned."""
        decoding, mixed = self._decoding, self._mixed
        least = 0.0
        if work.num_decodes and decoding.num_learned:
            least = decoding.predict(work.decode_features())
        if not work.num_chunks and least:
            return least
        if mixed.num_learned:
            return max(least, mixed.predict(work.features()))
        return least * work.num_rows / max(1, work.num_decodes)

    def steady_seconds(self, work: StepWork) -> float:
        """Returns the time of decode rows alone without the pace of the last few steps, which may
        have been others; 0 before the first such step was learned."""
        return self._decoding.unpaced(work.decode_features())

    def decode_seconds(self, work: StepWork) -> float:
        """Returns the time of the decode rows alone; 0 before the first step was learned.

        It is the larger prediction of the two laws: while prompts never pause, no step only
        decodes, and what the first law knows is old. Before the first such step, the rows are taken
        to be as many as wait for the weights together.
        """
        rows, seconds = work.num_decodes, 0.0
        if self._decoding.num_learned:
            seconds = self._decoding.predict(work.decode_features())
        else:
            rows = max(rows, _BENDS[0])
        if self._mixed.num_learned:
            alone = StepWork(work.num_decodes, work.num_context, rows, samples=rows > 0)
            seconds = max(seconds, self._mixed.predict(alone.features()))
        return seconds

    def learn(self, work: StepWork, seconds: float) -> None:
        """Learns from a step that succeeded."""
        if seconds <= 0.0 or not work.num_rows:
            return
        predicted = self.predict(work)
        if predicted:
            error = seconds / predicted - 1.0
            self._record_error(abs(predicted / seconds - 1.0))
            if work.num_chunks and work.num_decodes:
                is_late = self.margin < error < _MOST_MARGIN
                change = _MARGIN_STEP * (is_late - _LATE_SHARE)
                self.margin = min(_MOST_MARGIN, max(0.0, self.margin + change))
        if work.num_chunks:
            self._mixed.learn(work.features(), seconds)
        else:
            self._decoding.learn(work.decode_features(), seconds)

    def _record_error(self, error: float) -> None:
        if len(self._errors) < _NUM_ERRORS:
            self._errors.append(error)
        else:
            self._errors[self._num_errors % _NUM_ERRORS] = error
        self._num_errors += 1

    def median_error(self) -> float | None:
        """Returns the median of |predicted - real| / real over the last steps; each was predicted
        before it was learned."""
        return median(self._errors) if self._errors else None

    def most_rows(self, work: StepWork, context: int, most: int, limit_s: float) -> int:
        """Returns the rows of the largest chunk after `context` tokens with which the step stays
        within limit_s: a multiple of GRANULARITY, or `most` itself; 0 if there is none."""

        def fits(rows: int) -> bool:
            step = StepWork(
                work.num_decodes,
                work.num_context,
                work.num_rows,
                work.num_pairs,
                work.num_chunks,
                samples=True,
            )
            step.add(rows, context)
            return self.predict(step) <= limit_s

        if most < 1 or fits(most):
            return max(0, most)
        low, high = 0, -(-most // GRANULARITY)  # in units: low fits, high does not
        while high - low > 1:
            middle = (low + high) // 2
            if fits(middle * GRANULARITY):
                low = middle
            else:
                high = middle
        return low * GRANULARITY

    def prefill_seconds(self, num_tokens: int, num_cached: int = 0) -> float:
        """Returns the time to compute a prompt alone, after its first num_cached tokens; 0 before
        the first step was learned."""
        missing = num_tokens - num_cached
        if missing < 1:
            return 0.0
        rows = min(missing, self.rows_per_step)
        step = StepWork(samples=rows == missing)
        step.add(rows, num_cached + (missing - rows) // 2)
        return self.predict(step) * missing / rows
