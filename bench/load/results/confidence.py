"""Confidence intervals of means, shares and percentiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
REACH = 12  # standard deviations beyond which the probability is taken as 0
MAX_FREEDOM = 1000  # above it, the normal distribution replaces Student's t

Floats = NDArray[np.float64]


class Estimate(NamedTuple):
    """A figure and its 95 % interval, whose bounds are NaN if unknown."""

    value: float
    low: float = math.nan
    high: float = math.nan

    def overlaps(self, other: Estimate) -> bool:
        """Returns whether the intervals overlap; True if one is unknown."""
        return not (self.low > other.high or self.high < other.low)


def t_quantile(freedom: int, level: float = LEVEL) -> float:
    """Returns the bound within which |t| lies with probability `level` (Abramowitz & Stegun
    26.7.3-4)."""
    assert freedom >= 1 and 0 < level < 1
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (low, angle) if _within(angle, freedom) > level else (angle, high)
    return math.tan(low) * math.sqrt(freedom)


def _within(angle: float, freedom: int) -> float:
    """Returns P(|t| <= tan(angle) * sqrt(freedom))."""
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
    """Returns the mean of independent runs, without bounds if there are fewer than two."""
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
    """Returns a share of independent trials with Wilson's score interval."""
    if total == 0:
        return Estimate(math.nan)
    z = NormalDist().inv_cdf((1 + level) / 2)
    share, shrink = good / total, 1 + z * z / total
    middle = (share + z * z / (2 * total)) / shrink
    half = z / shrink * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return Estimate(share, min(share, middle - half), max(share, middle + half))


def sample_intervals(
    values: Floats, owners: NDArray[np.int64], percents: Sequence[float]
) -> list[Estimate]:
    """Returns estimates of percentiles, then of the mean. Each value belongs to an owner (a
    request); only owners are independent of each other. A single owner gives no bounds.

    A percentile's bounds are two of the values, whatever their distribution (David & Nagaraja,
    Order Statistics, 7.1). A sample that is too small has no such values (p99: fewer than 368).
    Several values of an owner count as fewer values, by the variance of the share below (Woodruff
    1952; Korn & Graubard 1998). The mean's bounds are Student's t over the owners."""
    values, owner = np.asarray(values, np.float64), np.unique(owners, return_inverse=True)[1]
    sizes = np.bincount(owner)
    points = [float(point) for point in np.percentile(values, percents)]
    mean = float(values.mean())
    if len(sizes) < 2:
        return [Estimate(point) for point in (*points, mean)]
    ordered = np.sort(values)
    estimates = []
    for percent, point in zip(percents, points, strict=True):
        share, count = percent / 100, len(values)
        if len(sizes) < len(values):
            below = np.bincount(owner, values <= point)
            count = _effective_count(below, sizes)
        estimates.append(Estimate(point, *_order_bounds(ordered, share, count, point)))
    sums = np.bincount(owner, values)
    half = _t(len(sizes)) * _ratio_error(sums, sizes)
    low, high = max(mean - half, float(ordered[0])), min(mean + half, float(ordered[-1]))
    return [*estimates, Estimate(mean, min(low, mean), max(high, mean))]


def _t(num_owners: int) -> float:
    return t_quantile(min(num_owners - 1, MAX_FREEDOM))


def _ratio_error(sums: NDArray[Any], sizes: NDArray[np.int64]) -> float:
    """Returns the standard error of sum(sums) / sum(sizes), which have an item per owner."""
    count, total = len(sizes), float(sizes.sum())
    left = sums - float(sums.sum()) / total * sizes
    return math.sqrt(count / (count - 1) * float(left @ left)) / total


def _effective_count(below: NDArray[Any], sizes: NDArray[np.int64]) -> int:
    """Returns the number of independent values that would give the share below the same error."""
    total = int(sizes.sum())
    share, error = float(below.sum()) / total, _ratio_error(below, sizes)
    shrink = NormalDist().inv_cdf((1 + LEVEL) / 2) / _t(len(sizes))
    count = share * (1 - share) / error**2 if error > 0 else total
    return min(total, int(count * shrink**2))


def _order_bounds(ordered: Floats, share: float, count: int, point: float) -> tuple[float, float]:
    """Returns the two of the ordered values that order_ranks of `count` names, or NaN if none."""
    ranks = order_ranks(count, share)
    if ranks is None:
        return math.nan, math.nan
    low = math.floor((ranks[0] - 1) / count * len(ordered))
    high = math.ceil(ranks[1] / count * len(ordered)) - 1
    return min(float(ordered[low]), point), max(float(ordered[high]), point)


def order_ranks(count: int, share: float, level: float = LEVEL) -> tuple[int, int] | None:
    """Returns the ranks (from 1) of two of `count` values between which the quantile lies with
    probability `level` at least, where each tail has at most half of the rest. None if there are no
    such values."""
    if count < 1 or not 0 < share < 1:
        return None
    middle, spread = count * share, math.sqrt(count * share * (1 - share))
    first = max(0, math.floor(middle - REACH * spread - REACH))
    last = min(count, math.ceil(middle + REACH * spread + REACH))
    numbers = np.arange(first, last)
    # P(k + 1) / P(k) of the binomial distribution, as logarithms
    growth = np.log((count - numbers) / (numbers + 1)) + math.log(share / (1 - share))
    logs = np.concatenate([[0.0], np.cumsum(growth)])
    chances = np.exp(logs - logs.max())
    chances /= chances.sum()
    tail = (1 - level) / 2
    low = first + int(np.searchsorted(np.cumsum(chances), tail, side="right"))  # P(B < low) <= tail
    high = last + 1 - int(np.searchsorted(np.cumsum(chances[::-1]), tail, side="right"))
    return (low, high) if low >= 1 and high <= count else None
