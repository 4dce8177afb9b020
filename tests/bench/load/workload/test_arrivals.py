"""Arrival times ascend and have the exact rate, whatever the process."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.load.workload.arrivals import arrival_times, count_requests, parse_qps, ramp_qps
from serve.errors import ConfigError

RATES = st.floats(0.01, 5000)
KINDS = st.sampled_from(["poisson", "constant", "gamma:0.05", "gamma:1", "gamma:20"])


def gaps(times: list[float]) -> list[float]:
    return [b - a for a, b in itertools.pairwise([0.0, *times])]


def spread(times: list[float]) -> float:
    return statistics.stdev(gaps(times)) / statistics.mean(gaps(times))


@given(KINDS, RATES, st.integers(1, 500), st.integers(-5, 1 << 40))
def test_ascending_and_of_exactly_the_rate(kind: str, qps: float, count: int, seed: int) -> None:
    times = arrival_times(kind, qps, count, seed)
    assert len(times) == count
    assert times == sorted(times) and times[0] >= 0
    assert times[-1] == pytest.approx(count / qps, rel=1e-12)
    assert times == arrival_times(kind, qps, count, seed)


@given(st.floats(0, 100), st.floats(0.1, 100), st.integers(1, 500), st.booleans())
def test_a_ramp_takes_as_long_as_its_mean_says(
    low: float, high: float, count: int, is_down: bool
) -> None:
    kind = f"ramp:{high}:{low}" if is_down else f"ramp:{low}:{high}"
    qps = ramp_qps(kind)
    assert qps == pytest.approx((low + high) / 2)
    times = arrival_times(kind, qps, count, seed=1)
    assert times == sorted(times) and times[0] >= 0
    assert times[-1] == pytest.approx(count / qps, rel=1e-6)


@given(
    st.lists(st.floats(0, 1e6), min_size=2, max_size=100).filter(lambda t: max(t) - min(t) > 1e-3),
    RATES,
)
def test_a_trace_is_stretched_to_the_rate(times_s: list[float], qps: float) -> None:
    times_s.sort()
    times = arrival_times("trace", qps, len(times_s), 0, times_s=times_s)
    assert times[0] == 0 and times == sorted(times)
    assert times[-1] == pytest.approx(len(times_s) / qps, rel=1e-9)
    factor = times[-1] / (times_s[-1] - times_s[0])
    assert times == pytest.approx([(at_s - times_s[0]) * factor for at_s in times_s])


def test_other_seeds_give_other_times() -> None:
    for kind in ("poisson", "gamma:2", "ramp:1:3"):
        first, second = (arrival_times(kind, 2, 10, seed) for seed in (0, 1))
        assert first != second and first[-1] == pytest.approx(second[-1])


def test_constant_is_constant() -> None:
    assert arrival_times("constant", 4, 3, 0) == [0.25, 0.5, 0.75]


@pytest.mark.parametrize(
    ("kind", "expected"), [("poisson", 1), ("gamma:0.25", 2), ("gamma:4", 0.5), ("gamma:100", 0.1)]
)
def test_gaps_vary_as_the_shape_says(kind: str, expected: float) -> None:
    """A gamma distribution has a standard deviation of 1 / sqrt(shape) of its mean."""
    assert spread(arrival_times(kind, 100, 40_000, 0)) == pytest.approx(expected, rel=0.05)


def test_a_ramp_is_linear_and_poisson_within() -> None:
    times = arrival_times("ramp:10:30", 20, 40_000, 0)
    duration_s = 2000.0
    for part in range(4):
        start_s, end_s = part * duration_s / 4, (part + 1) * duration_s / 4
        number = sum(start_s < at_s <= end_s for at_s in times)
        rate = 10 + 20 * (part + 0.5) / 4
        assert number == pytest.approx(rate * duration_s / 4, rel=0.03)
    middle = [at_s - 900 for at_s in times if 900 < at_s < 1100]
    assert spread(middle) == pytest.approx(1, rel=0.06)


def test_all_at_once() -> None:
    assert arrival_times("inf", math.inf, 3, 0) == [0, 0, 0]
    assert arrival_times("poisson", math.inf, 2, 0) == [0, 0]


@pytest.mark.parametrize(
    "kind",
    [
        *("", "uniform", "gamma", "gamma:", "gamma:0", "gamma:-1", "gamma:x", "gamma:nan"),
        *("ramp:1", "ramp:0:0", "ramp:1:inf", "ramp:-1:5", "ramp:1:2:3", "poisson:1", "inf:2"),
    ],
)
def test_what_is_no_arrival_process(kind: str) -> None:
    with pytest.raises(ConfigError, match="arrival"):
        arrival_times(kind, 1, 3, 0)


def test_a_trace_without_times_cannot_be_stretched() -> None:
    for times_s in ([], [5.0, 5.0]):
        with pytest.raises(ConfigError, match="trace"):
            arrival_times("trace", 1, len(times_s), 0, times_s=times_s)


@pytest.mark.parametrize(
    ("text", "rates"),
    [
        ("2.5", [2.5]),
        ("inf", [math.inf]),
        ("1:4:4", [1, 2, 3, 4]),
        ("4:1:3", [4, 2.5, 1]),
        ("1,2,inf", [1, 2, math.inf]),
        ("8, 1:2:2", [8, 1, 2]),
    ],
)
def test_rates(text: str, rates: list[float]) -> None:
    assert parse_qps(text) == rates


@pytest.mark.parametrize(
    "text",
    [
        *("0", "-1", "x", "nan", "", ",", "1,", "1:2", "1:2:1", "1:2:x", "1:2:-3", "1:inf:3"),
        *("1:2:3:4", "0:2:3", "1:2:100000", "1:2:²"),
    ],
)
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(ConfigError, match="qps"):
        parse_qps(text)


def test_counting() -> None:
    assert count_requests(2, None, None) == 100
    assert count_requests(2, 7, None) == 7
    assert count_requests(2.5, None, 10) == 25
    assert count_requests(0.01, None, 1) == 1
    for arguments in ((2, 7, 10.0), (math.inf, None, 10.0), (2, 0, None), (2, None, math.nan)):
        with pytest.raises(ConfigError):
            count_requests(*arguments)
