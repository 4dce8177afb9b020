"""How long a step will take, learned from the steps that ran. Floats only: no torch, no asyncio.

Two laws, each linear in what a step does: one for steps that only decode, one for steps with
prompt rows. The coefficients are never negative, so more work never predicts less time. A bend
at 16 and one at 192 rows follow products that first wait for the weights and then for the
arithmetic (a CPU bends at the one, a GPU at the other).

Learning is least squares on relative errors over a sliding window: normal equations whose new
entries grow in weight, and two sweeps of coordinate descent from the last solution (Gauss-Seidel,
cut off at zero). An error is relative to the larger of predicted and real time: a step that the
machine stalled counts little.
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

# The share of steps that may take longer than predicted and the margin together, and how fast
# the margin follows. A step of twice the time was stalled: no margin is made for that.
_LATE_SHARE = 0.005
_MOST_MARGIN = 1.0
_MARGIN_STEP = 0.05
_FIRST_MARGIN = 0.2


@dataclass(slots=True)
class StepWork:
    """What a step computes.

    num_decodes: rows of sequences with one row; num_context: tokens before those rows.
    num_rows: all rows; num_pairs: products of prompt rows and the tokens before them;
    num_chunks: sequences with prompt rows; samples: whether any token is sampled.
    """

    num_decodes: int = 0
    num_context: int = 0
    num_rows: int = 0
    num_pairs: int = 0
    num_chunks: int = 0
    samples: bool = False

    @classmethod
    def of(cls, plan: StepPlan) -> StepWork:
        """Before the scheduler's update."""
        num_decodes = plan.num_decodes
        contexts = plan.contexts
        if contexts is None:
            contexts = [s.num_computed_tokens for s in plan.sequences]
        work = cls(num_decodes, sum(contexts[:num_decodes]), num_decodes)
        for context, rows in zip(contexts[num_decodes:], plan.num_rows[num_decodes:], strict=True):
            work.add(rows, context)
        work.samples = any(plan.samples)
        return work

    def add(self, rows: int, context: int) -> None:
        """Rows of one sequence after `context` computed tokens; a single one is a decode row."""
        self.num_rows += rows
        if rows == 1:
            self.num_decodes += 1
            self.num_context += context
        else:
            self.num_pairs += rows * context + rows * rows // 2
            self.num_chunks += 1

    def remove(self, rows: int, context: int) -> None:
        """Undo `add`."""
        self.num_rows -= rows
        if rows == 1:
            self.num_decodes -= 1
            self.num_context -= context
        else:
            self.num_pairs -= rows * context + rows * rows // 2
            self.num_chunks -= 1

    def decode_features(self) -> tuple[float, ...]:
        """Of the decode rows alone."""
        rows = self.num_decodes
        return (rows, 1, max(0, rows - _BENDS[0]), max(0, rows - _BENDS[1]), self.num_context)

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


class Law:
    """Seconds = pace x coefficients x features, with coefficients that are not negative.

    The coefficients learn slowly, from all steps of the window. The pace is how much longer than
    that the last steps took (their median): it follows within three steps when somebody else
    takes a core, and is 1 again when the coefficients or the machine have caught up.
    What comes first among the features takes what the data leave open: put rows there, and a
    law that has seen one size of step expects twice the rows to take twice the time.
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
        return self._pace * self._at_pace_1(features)

    def _at_pace_1(self, features: abc.Sequence[float]) -> float:
        seconds: float = sum(map(mul, self.coefficients, features))
        return seconds

    def learn(self, features: abc.Sequence[float], seconds: float) -> None:
        """seconds > 0."""
        predicted = self._at_pace_1(features)
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
    """Learned online. rows_per_step: those of a step that computes a prompt and nothing else."""

    def __init__(self, rows_per_step: int) -> None:
        self.rows_per_step = rows_per_step
        self.margin = _FIRST_MARGIN  # relative: almost every step ends within it
        self.last_step_s = 0.0
        self._decoding = Law(len(StepWork().decode_features()))
        self._mixed = Law(len(StepWork().features()))
        self._errors: list[float] = []
        self._num_errors = 0

    @property
    def knows_decoding(self) -> bool:
        """It has seen enough of steps that only decode."""
        return self._decoding.num_learned >= _ENOUGH_STEPS

    def predict(self, work: StepWork) -> float:
        """Seconds. 0 before anything was learned."""
        decoding, mixed = self._decoding, self._mixed
        least = 0.0
        if work.num_decodes and decoding.num_learned:
            least = decoding.predict(work.decode_features())
        if not work.num_chunks and least:
            return least
        if mixed.num_learned:
            return max(least, mixed.predict(work.features()))
        return least * work.num_rows / max(1, work.num_decodes)

    def learn(self, work: StepWork, seconds: float) -> None:
        """A step that ran through."""
        if seconds <= 0.0 or not work.num_rows:
            return
        predicted = self.predict(work)
        if predicted:
            error = seconds / predicted - 1.0
            self._remember(abs(predicted / seconds - 1.0))
            if work.num_chunks and work.num_decodes:
                is_late = self.margin < error < _MOST_MARGIN
                change = _MARGIN_STEP * (is_late - _LATE_SHARE)
                self.margin = min(_MOST_MARGIN, max(0.0, self.margin + change))
        if work.num_chunks:
            self._mixed.learn(work.features(), seconds)
        else:
            self._decoding.learn(work.decode_features(), seconds)

    def _remember(self, error: float) -> None:
        if len(self._errors) < _NUM_ERRORS:
            self._errors.append(error)
        else:
            self._errors[self._num_errors % _NUM_ERRORS] = error
        self._num_errors += 1

    def median_error(self) -> float | None:
        """Of the last steps: |predicted - real| / real, predicted before the step was learned."""
        return median(self._errors) if self._errors else None

    def most_rows(self, work: StepWork, context: int, most: int, limit_s: float) -> int:
        """The largest chunk after `context` tokens with which the step stays within limit_s: a
        multiple of GRANULARITY, or `most` itself; 0 if there is none."""

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
        """A prompt without company, its first num_cached tokens known. 0: nothing was learned."""
        missing = num_tokens - num_cached
        if missing < 1:
            return 0.0
        rows = min(missing, self.rows_per_step)
        step = StepWork(samples=rows == missing)
        step.add(rows, num_cached + (missing - rows) // 2)
        return self.predict(step) * missing / rows
