"""How far a figure may be from the truth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
RESAMPLES = 200
MAX_VALUES = 50_000  # more of them are thinned out, and the interval is scaled


class Estimate(NamedTuple):
    """A figure and its interval (95 %); NaN bounds: not known."""

    value: float
    low: float = math.nan
    high: float = math.nan

    def overlaps(self, other: Estimate) -> bool:
        """Also if an interval is not known."""
        return not (self.low > other.high or self.high < other.low)


def t_quantile(freedom: int, level: float = LEVEL) -> float:
    """Two-sided: Student's t is within it with that probability (Abramowitz & Stegun 26.7.3-4)."""
    assert freedom >= 1 and 0 < level < 1
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (low, angle) if _within(angle, freedom) > level else (angle, high)
    return math.tan(low) * math.sqrt(freedom)


def _within(angle: float, freedom: int) -> float:
    """P(|t| <= tan(angle) * sqrt(freedom))."""
    cos2, sine = math.cos(angle) ** 2, math.sin(angle)
    if freedom % 2 == 0:
        term, total = 1.0, 1.0
        for k in range(2, freedom - 1, 2):
            term *= (k - 1) / k * cos2
            total += term
        return sine * total
    if freedom == 1:
        return 2 * angle / math.pi
    term = total = math.cos(angle)
    for k in range(3, freedom - 1, 2):
        term *= (k - 1) / k * cos2
        total += term
    return 2 / math.pi * (angle + sine * total)


def t_interval(values: Sequence[float]) -> Estimate:
    """The mean of independent runs; without bounds for fewer than two."""
    kept = [value for value in values if not math.isnan(value)]
    if not kept:
        return Estimate(math.nan)
    mean = math.fsum(kept) / len(kept)
    if len(kept) == 1 or not math.isfinite(mean):
        return Estimate(mean)
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in kept) / (len(kept) - 1))
    half = t_quantile(len(kept) - 1) * spread / math.sqrt(len(kept))
    return Estimate(mean, mean - half, mean + half)


def wilson(good: int, total: int, level: float = LEVEL) -> Estimate:
    """A share of independent trials (Wilson's score interval)."""
    if total == 0:
        return Estimate(math.nan)
    z = NormalDist().inv_cdf((1 + level) / 2)
    share, shrink = good / total, 1 + z * z / total
    middle = (share + z * z / (2 * total)) / shrink
    half = z / shrink * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return Estimate(share, min(share, middle - half), max(share, middle + half))


def bootstrap(
    values: NDArray[np.float64], owners: NDArray[np.int64], percents: Sequence[float], seed: int = 0
) -> list[Estimate]:
    """Percentiles, then the mean, of values that belong to owners (requests), which are resampled
    as a whole (block bootstrap). Of many owners a part is resampled, and the interval scaled by
    the root of the part (m out of n)."""
    points = [float(np.percentile(values, p)) for p in percents] + [float(values.mean())]
    names, owner = np.unique(owners, return_inverse=True)
    if len(names) < 2:
        return [Estimate(point) for point in points]
    rng = np.random.default_rng(seed)
    num_kept = len(names)
    if len(values) > MAX_VALUES:
        num_kept = max(2, int(len(names) * MAX_VALUES / len(values)))
        is_kept = np.zeros(len(names), np.bool_)
        is_kept[rng.permutation(len(names))[:num_kept]] = True
        keep = is_kept[owner]
        values, owner = values[keep], (np.cumsum(is_kept) - 1)[owner[keep]]
    order = np.argsort(values)
    values, owner = values[order], owner[order]
    found = np.empty((RESAMPLES, len(points)))
    ranks = np.asarray(percents) / 100
    for row in found:
        drawn = np.bincount(rng.integers(0, num_kept, num_kept), minlength=num_kept)
        weights = np.cumsum(drawn[owner])
        places = np.searchsorted(weights, ranks * weights[-1])
        row[:-1] = values[np.minimum(places, len(values) - 1)]
        row[-1] = float(values @ drawn[owner]) / weights[-1]
    tail = 50 * (1 - LEVEL)
    low, middle, high = np.percentile(found, [tail, 50, 100 - tail], axis=0)
    scale = math.sqrt(num_kept / len(names))
    return [
        Estimate(point, min(point, point - (m - lo) * scale), max(point, point + (hi - m) * scale))
        for point, lo, m, hi in zip(
            points, low.tolist(), middle.tolist(), high.tolist(), strict=True
        )
    ]
