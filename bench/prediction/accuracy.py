"""Compares the errors and the calibration of predicted lengths: past answers alone, and "learned".

The embedded model answers its mixed requests greedily, in a random order, one after the other as
far as the predictors are concerned; the first quarter teaches only. Predictions are made when a
request arrives, when its prompt is computed, and each time its state is read again (the remaining
tokens). "log error" is the mean of |log(real / median)|, "error" that of |real - median| in tokens,
"rank" Spearman's correlation, P50 and P90 the shares of answers within those quantiles. The last
columns are the microseconds of a call.

Run: python -m bench.prediction.accuracy [--quick]
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import log
from statistics import fmean

import numpy as np

from bench.common import simulated
from bench.load.workload.mixed import mixed_requests, num_mixed
from bench.load.workload.work import Work
from bench.prediction.recorded import Recorded, record
from bench.simulate.engine import OTHER, make_sequence
from serve.prediction.learned import STAGES, LearnedPredictor
from serve.request import Request
from serve.sampling_params import SamplingParams
from serve.scheduler.length_predictor import HistoryPredictor, SequencePredictor

CONTEXT = 1024
TAUGHT = 0.25


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of one predictor at one stage."""

    count: int
    log_error: float
    error: float
    rank: float
    p50: float
    p90: float
    microseconds: float


@dataclass(slots=True)
class _Pairs:
    """Real and predicted remaining tokens at one stage: real, median and 90th percentile."""

    found: list[tuple[int, int, int]] = field(default_factory=list)
    seconds: float = 0.0
    calls: int = 0

    def result(self) -> Result:
        real, median, p90 = np.array(self.found).T
        return Result(
            len(real),
            fmean(abs(log(r / m)) for r, m in zip(real, median, strict=True)),
            float(np.abs(real - median).mean()),
            float(np.corrcoef(_ranks(real), _ranks(median))[0, 1]),
            float((real <= median).mean()),
            float((real <= p90).mean()),
            1e6 * self.seconds / max(1, self.calls),
        )


def _ranks(values: np.ndarray) -> np.ndarray:
    """Returns the mean rank of each value among equal ones."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    ranks: np.ndarray = (last - (count - 1) / 2)[place]
    return ranks


def replay(predictor: SequencePredictor, requests: Sequence[Recorded]) -> dict[str, Result]:
    """Shows the requests to a predictor, each to its end, and returns the figures by stage."""
    pairs = {stage: _Pairs() for stage in STAGES}
    for number, each in enumerate(requests):
        params = SamplingParams(max_tokens=CONTEXT - len(each.prompt), seed=0)
        sequence = make_sequence(Request(str(number), None, each.prompt, params, 0.0))
        counts = number >= TAUGHT * len(requests)
        moments: list[tuple[str, int, Callable[[], None]]] = [
            ("arrived", 0, lambda s=sequence: predictor.arrived(s))
        ]
        for num_output, sketch in sorted(each.sketches.items()):
            stage = "grown" if num_output else "computed"
            see = lambda s=sequence, n=num_output, x=sketch: predictor.saw_state(s, n, x)  # noqa: E731
            moments.append((stage, num_output, see))
        for stage, num_output, act in moments:
            sequence.token_ids = [*each.prompt, *[OTHER] * num_output]
            began_s = time.perf_counter()
            act()
            pairs[stage].seconds += time.perf_counter() - began_s
            pairs[stage].calls += 1
            remaining = each.num_output - num_output
            if counts and remaining > 0:
                levels = [predictor.quantile(sequence, level) - num_output for level in (0.5, 0.9)]
                pairs[stage].found.append((remaining, levels[0], levels[1]))
        sequence.token_ids = [*each.prompt, *[OTHER] * each.num_output]
        predictor.ended(sequence, is_whole=True)
    return {stage: each.result() for stage, each in pairs.items()}


def measure(is_quick: bool) -> dict[str, dict[str, Result]]:
    """Returns {stage: {predictor: figures}}."""
    count = 200 if is_quick else num_mixed()
    works = [Work(messages=messages) for messages in mixed_requests(0, count)]
    requests = record(works)
    random.Random("accuracy").shuffle(requests)
    predictors = {
        "history": SequencePredictor(HistoryPredictor()),
        "learned": LearnedPredictor(),
    }
    results = {name: replay(predictor, requests) for name, predictor in predictors.items()}
    return {stage: {name: results[name][stage] for name in results} for stage in STAGES}


def show(name: str, results: dict[str, Result]) -> None:
    """Prints a stage."""
    print(f"\n{name}")
    print(
        f"  {'predictor':9} {'count':>6} {'log error':>9} {'error':>7} {'rank':>6} {'P50':>7}"
        f" {'P90':>7} {'us':>6}"
    )
    for predictor, row in results.items():
        print(
            f"  {predictor:9} {row.count:6} {row.log_error:9.3f} {row.error:7.2f} {row.rank:6.3f}"
            f" {100 * row.p50:5.1f} % {100 * row.p90:5.1f} % {row.microseconds:6.1f}"
        )


if __name__ == "__main__":
    simulated.run(__doc__, measure, show)
