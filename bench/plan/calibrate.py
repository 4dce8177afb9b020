"""Fits the cost of a step to the steps that a real engine ran (serve/engine/step_trace.py).

    seconds = fixed + row x rows + bent x rows beyond a bend + context x tokens before decode rows
            + pair x pairs + chunk x chunks + sequence x sequences + sample, if any is sampled

No coefficient is negative, so more work never takes less time. The bend is the number of rows at
which products stop waiting for the weights: the one of BENDS that fits best. The fit minimises the
squares of errors relative to the prediction. Stalled steps do not distort it: errors beyond a few
times the median error have a lower weight (Huber), and steps that take more than twice their
prediction have none.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serve.engine.step_trace import TracedStep
from serve.errors import ConfigError, reason
from serve.regular_file import open_regular
from serve.scheduler.step_time import StepWork

BENDS = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192)
TERMS = ("fixed", "row", "bent", "context", "pair", "chunk", "sequence", "sample")
MIN_STEPS = 32
_ROUNDS = 8
_STALLED = 2.0
_HUBER = 3.0

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class FittedCost:
    """A fit. coefficients are seconds in the order of TERMS. Together they predict the total
    time of the num_steps steps that were not stalled, whose relative errors are median_error and
    p90_error. stalled_share is the share of all time that stalled steps took beyond their
    prediction."""

    bend: int
    coefficients: tuple[float, ...]
    num_steps: int
    stalled_share: float
    median_error: float
    p90_error: float

    def seconds(self, work: StepWork) -> float:
        """Returns the seconds of a step; 0 without rows."""
        rows = work.num_rows
        if not rows:
            return 0.0
        fixed, row, bent, context, pair, chunk, sequence, sample = self.coefficients
        seconds = fixed + row * rows + context * work.num_context
        if rows > self.bend:
            seconds += bent * (rows - self.bend)
        if work.num_chunks:
            seconds += pair * work.num_pairs + chunk * work.num_chunks
        seconds += sequence * (work.num_decodes + work.num_chunks)
        return seconds + sample if work.samples else seconds

    def save(self, path: Path) -> None:
        values = asdict(self) | {"coefficients": dict(zip(TERMS, self.coefficients, strict=True))}
        path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> FittedCost:
        """Reads a file that `save` wrote. Raises ConfigError for any other file."""
        try:
            with open_regular(path) as file:
                values: dict[str, Any] = json.loads(file.read())
            coefficients = tuple(float(values["coefficients"][name]) for name in TERMS)
            return cls(**values | {"coefficients": coefficients})
        except OSError as error:
            raise ConfigError(f"cost {path}: {reason(error)}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"cost {path} is not a fitted cost: {error!r}") from error


def fit(steps: Sequence[TracedStep]) -> FittedCost:
    """Fits traced steps. Raises ConfigError if there are fewer than MIN_STEPS."""
    return fit_times([(step.work, step.ended_s - step.began_s) for step in steps])


def fit_times(times: Sequence[tuple[StepWork, float]]) -> FittedCost:
    """Fits pairs of a step's work and its seconds, as `fit` does."""
    usable = [(work, seconds) for work, seconds in times if work.num_rows and seconds > 0]
    if len(usable) < MIN_STEPS:
        raise ConfigError(f"a fit of the cost needs {MIN_STEPS} steps, not {len(usable)}")
    works = [work for work, _ in usable]
    seconds = np.array([seconds for _, seconds in usable])
    fits = [_fit_bend(works, seconds, bend) for bend in BENDS]
    return min(fits, key=lambda fitted: (fitted.median_error + fitted.p90_error, fitted.bend))


def _features(works: Sequence[StepWork], bend: int) -> Array:
    """Returns a float64 array [steps, TERMS]."""
    rows = [
        (
            1.0,
            work.num_rows,
            max(0, work.num_rows - bend),
            work.num_context,
            work.num_pairs,
            work.num_chunks,
            work.num_decodes + work.num_chunks,
            work.samples,
        )
        for work in works
    ]
    return np.array(rows, dtype=np.float64)


def _fit_bend(works: Sequence[StepWork], seconds: Array, bend: int) -> FittedCost:
    features = _features(works, bend)
    scale, weights = seconds, np.ones(len(works))
    coefficients = np.zeros(len(TERMS))
    for _ in range(_ROUNDS):
        rows = weights / scale
        coefficients = _non_negative(features * rows[:, None], seconds * rows)
        predicted = features @ coefficients
        # errors relative to the measured time would favour the shorter of two equal steps
        scale = np.maximum(predicted, seconds / _STALLED)
        errors = np.abs(seconds - predicted) / scale
        usual = max(float(np.median(errors)), 1e-6)
        weights = np.sqrt(np.minimum(1.0, _HUBER * usual / np.maximum(errors, 1e-12)))
        is_stalled = seconds > _STALLED * predicted
        weights[is_stalled & ~is_stalled.all()] = 0.0
    kept = ~is_stalled | is_stalled.all()
    factor = float(seconds[kept].sum() / predicted[kept].sum())
    errors = np.abs(factor * predicted / seconds - 1)[kept]
    return FittedCost(
        bend=bend,
        coefficients=tuple(map(float, factor * coefficients)),
        num_steps=int(kept.sum()),
        stalled_share=float(1 - factor * predicted.sum() / seconds.sum()),
        median_error=float(np.median(errors)),
        p90_error=float(np.quantile(errors, 0.9)),
    )


def _non_negative(matrix: Array, target: Array) -> Array:
    """Returns the non-negative least-squares coefficients (Lawson and Hanson)."""
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    scaled = matrix / scale
    count = scaled.shape[1]
    solution, is_free = np.zeros(count), np.zeros(count, dtype=bool)
    for _ in range(10 * count):
        slope = scaled.T @ (target - scaled @ solution)
        slope[is_free] = -np.inf
        best = int(np.argmax(slope))
        if slope[best] <= 1e-9 * np.linalg.norm(target):
            break
        is_free[best] = True
        while True:
            tried = np.zeros(count)
            tried[is_free] = np.linalg.lstsq(scaled[:, is_free], target, rcond=None)[0]
            falls = is_free & (tried <= 0)
            if not falls.any():
                break
            share = np.min(solution[falls] / np.maximum(solution[falls] - tried[falls], 1e-300))
            solution = solution + share * (tried - solution)
            is_free &= solution > 1e-12
        solution = tried
    coefficients: Array = solution / scale
    return coefficients
