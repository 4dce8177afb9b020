"""Slopes with their intervals, and when caches were full, against known series."""

from __future__ import annotations

import random

import pytest

from bench.soak.slope import floor_of, full_at_s, medians_of, slope_of


def series(
    per_s: float, noise: float, count: int = 400, seed: int = 0
) -> list[tuple[float, float]]:
    rng = random.Random(seed)
    return [(5.0 * i, 100.0 + per_s * 5.0 * i + rng.gauss(0, noise)) for i in range(count)]


def test_a_straight_line_has_its_slope() -> None:
    slope = slope_of(medians_of(series(0.25, 0.0)))
    assert slope is not None
    assert abs(slope.value - 0.25) < 1e-9
    assert abs(slope.low - 0.25) < 1e-9 and abs(slope.high - 0.25) < 1e-9


def test_single_peaks_do_not_move_the_slope() -> None:
    points = series(0.0, 0.1)
    for i in range(0, len(points), 9):
        points[i] = points[i][0], points[i][1] + 1000.0
    for reduced in (medians_of(points), floor_of(points)):
        slope = slope_of(reduced)
        assert slope is not None and abs(slope.value) < 1e-3


def test_the_interval_contains_the_true_slope_as_often_as_it_says() -> None:
    slopes = [slope_of(medians_of(series(0.01, 5.0, seed=seed))) for seed in range(200)]
    inside = [slope is not None and slope.low <= 0.01 <= slope.high for slope in slopes]
    assert 180 <= sum(inside) <= 200
    assert all(slope is not None and slope.high - slope.low < 0.02 for slope in slopes)


def test_too_few_samples_have_no_slope() -> None:
    for reduce, least in ((medians_of, 9), (floor_of, 18)):
        assert slope_of(reduce([])) is None
        assert slope_of(reduce(series(1.0, 0.0, count=least - 1))) is None
        assert slope_of(reduce(series(1.0, 0.0, count=least))) is not None


def test_the_parts_keep_the_whole_time() -> None:
    points = series(1.0, 0.0, count=1000)
    for parts, count in ((medians_of(points), 60), (floor_of(points), 24)):
        assert len(parts) == count
        assert parts[0][0] < 150 and parts[-1][0] > 4850


def test_the_floor_is_a_low_value_of_each_part() -> None:
    """Its time is that of the part. A few samples that are too low, as while a child process is
    replaced, do not count."""
    points = [(float(i), 50.0 + i % 7) for i in range(480)]
    points[100] = 100.0, 0.0
    assert {value for _, value in floor_of(points)} <= {50.0, 51.0}
    assert floor_of(points)[0][0] == pytest.approx(9.5, abs=1)


def test_a_cache_is_full_when_it_stays_near_its_greatest_size() -> None:
    filling = [(float(i), min(i, 50) * 1.0) for i in range(200)]
    assert full_at_s(filling) == 48.0
    growing = [(float(i), float(i)) for i in range(200)]
    assert full_at_s(growing) > 185
    assert full_at_s([(0.0, 7.0), (1.0, 7.0)]) == 0.0
