"""The growth of a quantity over time: a robust slope with its interval, and when it was full.

Theil and Sen's slope is the median over all pairs of points, so that single outliers do not move
it. The interval is that of Sen (1968), from the distribution of Kendall's tau. Neighbouring samples
of memory are not independent, which would make it too narrow: the samples are first reduced to one
point for each part of the time. That point is the median, or the floor: a value that a tenth of the
samples are below. Calls in flight raise the median and not the floor, a leak raises both.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

_Z = 1.96  # of the normal distribution, for 95 %
_FULL = 0.95  # a cache is full at this share of its greatest size

Points = Sequence[tuple[float, float]]


class Slope(NamedTuple):
    """Units per second, with the ends of the 95 % interval."""

    value: float
    low: float
    high: float

    def __mul__(self, factor: object) -> Slope:
        assert isinstance(factor, int | float) and factor >= 0
        return Slope(*(factor * each for each in self))


def slope_of(points: Points) -> Slope | None:
    """Returns the slope of (seconds, value) points in order of time; None for fewer than three."""
    count = len(points)
    if count < 3:
        return None
    slopes = sorted(
        (b - a) / (to_s - from_s)
        for i, (from_s, a) in enumerate(points)
        for to_s, b in points[i + 1 :]
    )
    spread = _Z * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    low = max(0, math.floor((len(slopes) - spread) / 2))
    high = min(len(slopes) - 1, math.ceil((len(slopes) + spread) / 2))
    return Slope(statistics.median(slopes), slopes[low], slopes[high])


def medians_of(points: Points) -> list[tuple[float, float]]:
    """Returns the median of each of at most 60 parts of the time."""
    return list(_reduced(points, statistics.median, most_parts=60, least_points=3))


def floor_of(points: Points) -> list[tuple[float, float]]:
    """Returns the lowest tenth of each of at most 24 parts of the time."""
    return list(_reduced(points, _lowest_tenth, most_parts=24, least_points=6))


def _lowest_tenth(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 10]


def _reduced(
    points: Points,
    value_of: Callable[[list[float]], float],
    *,
    most_parts: int,
    least_points: int,
) -> Iterator[tuple[float, float]]:
    """Yields the median time and value_of(values) of equal parts of the time, of which there are
    so few that each has about least_points points."""
    if not points:
        return
    num_parts = max(1, min(most_parts, len(points) // least_points))
    first_s, length_s = points[0][0], max(1e-9, points[-1][0] - points[0][0])
    parts: list[list[tuple[float, float]]] = [[] for _ in range(num_parts)]
    for at_s, value in points:
        number = int((at_s - first_s) / length_s * num_parts)
        parts[min(number, num_parts - 1)].append((at_s, value))
    for part in filter(None, parts):
        yield statistics.median(at_s for at_s, _ in part), value_of([value for _, value in part])


def step_of(points: Points) -> tuple[float, float]:
    """Returns the time of the largest rise after which all values are higher than all before, and
    by how much they are; (0, 0) if there is none. There are two values at least on either side."""
    most = 0.0, 0.0
    for i in range(2, len(points) - 1):
        highest = max(value for _, value in points[:i])
        lowest = min(value for _, value in points[i:])
        most = max(most, (points[i][0], lowest - highest), key=lambda found: found[1])
    return most


def full_at_s(points: Points) -> float:
    """Returns the time from which on a size was at least _FULL of its greatest one."""
    most = max((value for _, value in points), default=0.0)
    for at_s, value in points:
        if value >= _FULL * most:
            return at_s
    return 0.0
