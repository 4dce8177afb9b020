"""Rotation of n batches over n - 1 replicas: no bubbles where the times fit, and what else."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest

from serve.rotation import replica_of, simulate, start_of

COUNTS = [2, 3, 4, 5]


@pytest.mark.parametrize("n", COUNTS)
def test_the_schedule_fills_every_device(n: int) -> None:
    """By the formula alone: slices start on time, one after the other, nobody twice at once."""
    unit = Fraction(1, n - 1)  # t_model is 1, t_attention one unit
    starts = {
        (batch, k): Fraction(start_of(batch, k, n, 1.0)).limit_denominator(1000)
        for batch in range(n)
        for k in range(20)
    }
    for (batch, k), start in starts.items():
        if k:
            assert start == starts[batch, k - 1] + 1 + unit, "after products and attention"
    assert sorted(start + 1 for start in starts.values()) == [
        1 + i * unit for i in range(20 * n)
    ], "the memory devices get one batch after the other"
    for replica in range(n - 1):
        own = sorted(s for (batch, k), s in starts.items() if replica_of(batch, k, n) == replica)
        assert all(after - before == 1 for before, after in pairwise(own))


@pytest.mark.parametrize("n", COUNTS)
def test_no_bubbles_where_the_times_fit(n: int) -> None:
    found = simulate(n, 3.0, 3.0 / (n - 1))
    assert found.replicas == pytest.approx([1.0] * (n - 1))
    assert found.memory == pytest.approx(1.0)
    assert found.slice_s == pytest.approx(3.0 * n / (n - 1))


@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("ratio", [0.25, 0.9])
def test_quick_attention_leaves_memory_devices_idle(n: int, ratio: float) -> None:
    found = simulate(n, 1.0, ratio / (n - 1))
    assert found.replicas == pytest.approx([1.0] * (n - 1))
    assert found.memory == pytest.approx(ratio)


@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("ratio", [1.1, 4.0])
def test_slow_attention_leaves_replicas_idle(n: int, ratio: float) -> None:
    found = simulate(n, 1.0, ratio / (n - 1))
    assert found.memory == pytest.approx(1.0)
    # the window ends within a slice
    assert found.replicas == pytest.approx([1 / ratio] * (n - 1), rel=0.02)
    assert found.slice_s == pytest.approx(n * ratio / (n - 1))
