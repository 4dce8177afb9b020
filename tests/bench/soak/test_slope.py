"""Slopes with their intervals, and when caches were full, against known series."""

from __future__ import annotations

import random

from bench.soak.slope import full_at_s, parts_of, slope_of


def series(
    per_s: float, noise: float, count: int = 400, seed: int = 0
) -> list[tuple[float, float]]:
    rng = random.Random(seed)
    return [(5.0 * i, 100.0 + per_s * 5.0 * i + rng.gauss(0, noise)) for i in range(count)]


def test_a_straight_line_has_its_slope() -> None:
    slope = slope_of(series(0.25, 0.0))
    assert slope is not None
    assert abs(slope.value - 0.25) < 1e-9
    assert abs(slope.low - 0.25) < 1e-9 and abs(slope.high - 0.25) < 1e-9


def test_single_peaks_do_not_move_the_slope() -> None:
    points = series(0.0, 0.1)
    for i in range(0, len(points), 9):
        points[i] = points[i][0], points[i][1] + 1000.0
    slope = slope_of(points)
    assert slope is not None and abs(slope.value) < 1e-3


def test_the_interval_contains_the_true_slope_as_often_as_it_says() -> None:
    slopes = [slope_of(series(0.01, 5.0, seed=seed)) for seed in range(200)]
    inside = [slope is not None and slope.low <= 0.01 <= slope.high for slope in slopes]
    assert 180 <= sum(inside) <= 200
    assert all(slope is not None and slope.high - slope.low < 0.02 for slope in slopes)


def test_too_few_samples_have_no_slope() -> None:
    assert slope_of([]) is None
    assert slope_of(series(1.0, 0.0, count=8)) is None
    assert slope_of(series(1.0, 0.0, count=9)) is not None


def test_the_parts_keep_the_whole_time() -> None:
    points = series(1.0, 0.0, count=1000)
    parts = parts_of(points)
    assert len(parts) == 60
    assert parts[0][0] < 100 and parts[-1][0] > 4900


def test_a_cache_is_full_when_it_stays_near_its_greatest_size() -> None:
    filling = [(float(i), min(i, 50) * 1.0) for i in range(200)]
    assert full_at_s(filling) == 48.0
    growing = [(float(i), float(i)) for i in range(200)]
    assert full_at_s(growing) > 185
    assert full_at_s([(0.0, 7.0), (1.0, 7.0)]) == 0.0
