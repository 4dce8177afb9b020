"""Times to completion of several orders, pooled over rounds, with intervals of a bootstrap over the
rounds: those of a round belong together, as they depend on its arrivals and on the machine."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

BASE, BEST = "fcfs", "srpt, oracle"
RESAMPLES = 1000
LEVEL = 0.95

Rounds = list[dict[str, list[float]]]
"""The seconds of each request by order, for each round; all orders served the same requests."""


@dataclass(frozen=True, slots=True)
class Result:
    """Seconds from arrival to the last token. gain: the share of fcfs's mean that is saved.
    of_oracle: the share of what srpt with known lengths saves. Each has the bounds of its interval.
    They are NaN where known lengths save nothing, in all rounds or in those of a resample."""

    name: str
    count: int
    mean_s: float
    p50_s: float
    p99_s: float
    gain: float
    gain_low: float
    gain_high: float
    of_oracle: float
    of_oracle_low: float
    of_oracle_high: float


def results_of(rounds: Rounds) -> list[Result]:
    """Returns a result for each order."""
    names = list(rounds[0])
    counts = [len(found[BASE]) for found in rounds]
    sums = {name: [math.fsum(found[name]) for found in rounds] for name in names}
    every = range(len(rounds))
    rng = random.Random(0)
    samples = [rng.choices(every, k=len(rounds)) for _ in range(RESAMPLES)]
    results = []
    for name in names:
        values = sorted(seconds for found in rounds for seconds in found[name])
        gain = _gain(sums, name, every)
        share = _share(sums, name, every)
        gains = bounds([_gain(sums, name, sample) for sample in samples])
        shares = bounds([_share(sums, name, sample) for sample in samples])
        p50, p99 = values[len(values) // 2], values[int(0.99 * (len(values) - 1))]
        mean = math.fsum(sums[name]) / sum(counts)
        results.append(Result(name, len(values), mean, p50, p99, gain, *gains, share, *shares))
    return results


def _saved(sums: dict[str, list[float]], name: str, chosen: Sequence[int]) -> float:
    return math.fsum(sums[BASE][i] - sums[name][i] for i in chosen)


def _gain(sums: dict[str, list[float]], name: str, chosen: Sequence[int]) -> float:
    """Returns the share of fcfs's mean that an order saves in the chosen rounds."""
    return _saved(sums, name, chosen) / math.fsum(sums[BASE][i] for i in chosen)


def _share(sums: dict[str, list[float]], name: str, chosen: Sequence[int]) -> float:
    best = _saved(sums, BEST, chosen)
    return _saved(sums, name, chosen) / best if best > 0 else math.nan


def bounds(values: list[float]) -> tuple[float, float]:
    """Returns the bounds of the middle of the resampled values; NaN if one of them is not known."""
    if any(math.isnan(value) for value in values):
        return math.nan, math.nan
    ranked = sorted(values)
    outside = round((1.0 - LEVEL) / 2 * len(ranked))
    return ranked[outside], ranked[-1 - outside]
