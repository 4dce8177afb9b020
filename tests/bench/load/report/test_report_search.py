"""Intervals, and the search for the highest rate."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest

from bench.load.client.record import RunResult
from bench.load.results.confidence import (
    Estimate,
    order_ranks,
    sample_intervals,
    t_interval,
    t_quantile,
    wilson,
)
from bench.load.results.search import find_max_qps
from bench.load.results.slo import Slo
from serve.errors import ConfigError, MergestepError
from tests.support.engine.load_runs import queue_run


@pytest.mark.parametrize(
    ("freedom", "level", "expected"),
    [
        (1, 0.95, 12.7062),
        (2, 0.95, 4.30265),
        (3, 0.95, 3.18245),
        (8, 0.95, 2.30600),
        (9, 0.99, 3.24984),
        (30, 0.95, 2.04227),
        (200, 0.95, 1.97190),
    ],
)
def test_students_t(freedom, level, expected):
    """Quantiles equal those of the printed tables."""
    assert t_quantile(freedom, level) == pytest.approx(expected, rel=1e-5)


def test_t_interval():
    found = t_interval([1.0, 2.0, 3.0])
    assert found.value == 2 and found.high == pytest.approx(2 + 4.30265 / math.sqrt(3), rel=1e-5)
    assert t_interval([5.0, math.nan]).value == 5.0 and math.isnan(t_interval([5.0]).low)
    assert math.isnan(t_interval([]).value)


def test_wilson():
    """The interval equals that of the example in Newcombe 1998, 81 of 263."""
    found = wilson(81, 263)
    assert found == pytest.approx((81 / 263, 0.2553, 0.3662), abs=5e-5)
    assert wilson(10, 10).high == 1.0 and 0.6 < wilson(10, 10).low < 0.8
    assert math.isnan(wilson(0, 0).value)


@pytest.mark.parametrize("count", [100, 1000])
def test_intervals_of_one_run_cover_as_often_as_they_say(count):
    """With skewed values, each interval contains its point and is within the data."""
    rng = np.random.default_rng(count)
    percents = (50, 90, 95, 99)
    z = [NormalDist().inv_cdf(percent / 100) for percent in percents]
    truths = [*np.exp(0.8 * np.array(z)), math.exp(0.8**2 / 2)]
    hits, found = np.zeros(5), np.zeros(5)
    for _ in range(300):
        values = rng.lognormal(0, 0.8, count)
        for place, value in enumerate(sample_intervals(values, np.arange(count), percents)):
            if not math.isnan(value.low):
                found[place] += 1
                assert values.min() <= value.low <= value.value <= value.high <= values.max()
                hits[place] += value.low <= truths[place] <= value.high
    assert list(found[:3]) == [300] * 3 and found[4] == 300
    assert found[3] == (300 if count >= 368 else 0), "p99 needs 368 values"
    assert (hits[found > 0] >= 0.9 * 300).all(), hits


def test_intervals_of_many_values_of_a_request_cover_too():
    """100 requests have 20 similar gaps each, with most of the spread between requests."""
    rng = np.random.default_rng(3)
    owners = np.repeat(np.arange(100), 20)
    truths = np.exp(math.hypot(0.5, 0.2) * np.array([0.0, NormalDist().inv_cdf(0.9)]))
    hits = np.zeros(2)
    for _ in range(200):
        values = np.exp(rng.normal(0, 0.5, 100)[owners] + rng.normal(0, 0.2, 2000))
        found = sample_intervals(values, owners, (50, 90))[:2]
        hits += [e.low <= truth <= e.high for e, truth in zip(found, truths, strict=True)]
    assert (hits >= 180).all(), hits


@pytest.mark.parametrize(
    ("count", "share", "expected"),
    # From the tables of Hahn & Meeker; 368 is the first number with 0.99^368 <= 0.025.
    [(20, 0.5, (6, 15)), (100, 0.5, (40, 61)), (367, 0.99, None), (5, 0.5, None), (0, 0.5, None)],
)
def test_ranks_of_the_values_around_a_quantile(count, share, expected):
    assert order_ranks(count, share) == expected
    assert order_ranks(368, 0.99)[1] == 368


def test_ranks_of_many_values_are_the_normal_ones():
    low, high = order_ranks(1_000_000, 0.9)
    assert (low - 900_000, high - 900_000) == pytest.approx((-588, 588), abs=3)


def test_intervals_count_requests_not_gaps():
    """A hundred equal values of a request narrow an interval no more than one."""
    values = np.random.default_rng(1).exponential(size=200)
    single = sample_intervals(values, np.arange(200), (50,))
    repeated = sample_intervals(np.repeat(values, 100), np.repeat(np.arange(200), 100), (50,))
    for one, many in zip(single, repeated, strict=True):
        assert many.high - many.low == pytest.approx(one.high - one.low, rel=0.15)
    lone = sample_intervals(values, np.zeros(200, np.int64), (50,))
    assert all(math.isnan(value.low) and not math.isnan(value.value) for value in lone)


def test_overlap():
    assert Estimate(1, 0.5, 1.5).overlaps(Estimate(2, 1.4, 2.6))
    assert not Estimate(1, 0.5, 1.5).overlaps(Estimate(2, 1.6, 2.6))
    assert Estimate(1).overlaps(Estimate(2, 1.6, 2.6))


def waiting_below(limit: float, load: float) -> float:
    """Returns P(wait <= limit) in an M/D/1 queue with a service time of 1 (Erlang's formula)."""
    return (1 - load) * sum(
        (load * (k - limit)) ** k / math.factorial(k) * math.exp(-load * (k - limit))
        for k in range(math.floor(limit) + 1)
    )


def test_the_rate_found_is_the_analytic_one():
    """In an M/D/1 queue of 100 ms a request, 90 % of answers within 500 ms wait 400 ms at most."""
    low, high = 0.0, 0.999
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if waiting_below(4.0, middle) >= 0.9 else (low, middle)

    def run(qps: float, seed: int) -> RunResult:
        return queue_run(qps, seed, count=12_000)

    found = find_max_qps(run, Slo(e2e_s=0.5), attainment=0.9, start=1.0, resolution=0.02)
    assert found.is_found and found.above <= found.max_qps * 1.02
    assert found.max_qps == pytest.approx(10 * low, rel=0.03)
    rates = [tried.qps for tried in found.tried]
    assert rates[:4] == [1, 2, 4, 8], "a geometric bracket"
    assert len(rates) <= 12
    by_rate = sorted(found.tried, key=lambda tried: tried.qps)
    assert [tried.is_passed for tried in by_rate] == sorted(
        (tried.is_passed for tried in by_rate), reverse=True
    )


def test_a_start_above_the_rate_goes_down():
    found = find_max_qps(queue_run, Slo(e2e_s=0.5), attainment=0.9, start=50, resolution=0.1)
    assert 6.5 < found.max_qps < 8.5
    assert [tried.qps for tried in found.tried[:3]] == [50, 25, 12.5]


def test_clear_rates_need_one_seed():
    asked = []

    def run(qps: float, seed: int) -> RunResult:
        asked.append((qps, seed))
        return queue_run(qps, seed, count=500)

    found = find_max_qps(run, Slo(e2e_s=0.5), attainment=0.9, start=1, seeds=3, resolution=0.02)
    assert asked[:3] == [(1, 0), (2, 0), (4, 0)]
    close = [tried for tried in found.tried if not tried.is_clear]
    assert close and all(len(tried.summary.runs) == 3 for tried in close)


def test_no_rate_is_low_enough():
    found = find_max_qps(queue_run, Slo(e2e_s=0.05), start=4, lowest=1)
    assert found.max_qps == 0 and not found.is_found
    assert [tried.qps for tried in found.tried] == [4, 2, 1]
    assert "no rate was low enough" in str(found)


def test_what_even_one_request_alone_misses_ends_the_search():
    """Halving the rate would not end, since each run takes twice as long."""
    rates = []

    def run(qps, seed):
        rates.append(qps)
        return queue_run(qps, seed, service_s=0.01, count=100)

    found = find_max_qps(run, Slo(ttft_s=0.001), start=4.0)
    assert not found.is_found and "one at a time" in found.stopped
    assert len(rates) <= 9 and min(rates) > 0.01


def test_the_highest_rate_allowed_passes():
    found = find_max_qps(queue_run, Slo(e2e_s=5.0), attainment=0.9, start=1, highest=3)
    assert (found.max_qps, found.above) == (3, math.inf)
    assert "highest allowed" in found.stopped


def test_a_client_that_is_too_slow_ends_the_search():
    def run(qps: float, seed: int) -> RunResult:
        result = queue_run(qps, seed, count=500)
        if qps > 2:
            for record in result.records:
                record.sent_s += 0.02
        return result

    found = find_max_qps(run, Slo(e2e_s=0.5), attainment=0.9)
    assert found.max_qps == 2 and not found.is_found
    assert "at 4 requests/s the generator fell behind" in found.stopped


def test_an_interrupted_run_ends_the_search():
    def run(qps: float, seed: int) -> RunResult:
        result = queue_run(qps, seed, count=500)
        result.was_interrupted = qps == 4
        return result

    found = find_max_qps(run, Slo(e2e_s=0.5), attainment=0.9)
    assert (found.max_qps, len(found.tried)) == (2, 2) and "interrupted" in str(found)


@pytest.mark.parametrize("seed", range(4))
def test_short_runs_do_not_pass_above_the_capacity(seed):
    """400 requests at 1.1 times what the queue can serve wait 4 s at most: all within the SLO, and
    only their rise shows that a longer run would exceed it."""
    found = find_max_qps(
        lambda qps, seed: queue_run(qps, seed, count=400),
        Slo(e2e_s=10.0),
        attainment=0.9,
        first_seed=10 * seed,
    )
    assert found.max_qps <= 10.5 and found.is_found
    above = min(found.tried, key=lambda tried: abs(tried.qps - found.above))
    assert not above.is_passed and above.why == "not a steady state"
    assert above.attainment.value > 0.95
    assert "not a steady state" in str(found)


def test_bursts_end_the_search():
    """If such a rate passed, the search would double it without end."""
    found = find_max_qps(
        lambda qps, seed: queue_run(qps, seed, count=40, service_s=1e-6), Slo(e2e_s=1.0)
    )
    assert found.max_qps == 32 and "less than the limit of 1 s" in found.stopped
    assert len(found.tried) == 6


@pytest.mark.parametrize(
    "error", [MergestepError("no server"), OSError("gone"), KeyboardInterrupt()]
)
def test_an_error_leaves_what_was_found(error):
    def run(qps: float, seed: int) -> RunResult:
        if qps == failing:
            raise error
        return queue_run(qps, seed, count=500)

    failing = 4
    found = find_max_qps(run, Slo(e2e_s=0.5), attainment=0.9)
    assert (found.max_qps, len(found.tried)) == (2, 2) and found.error is error
    assert "at 4 requests/s: " in found.stopped and not found.is_found
    failing = 1
    with pytest.raises(type(error)):
        find_max_qps(run, Slo(e2e_s=0.5), attainment=0.9)


def test_bad_settings_of_a_search():
    slo = Slo(e2e_s=1)
    for change in ({"attainment": 0}, {"attainment": 1.1}, {"seeds": 0}, {"start": 0.0}):
        with pytest.raises(ConfigError):
            find_max_qps(queue_run, slo, **change)
    with pytest.raises(ConfigError, match="resolution"):
        find_max_qps(queue_run, slo, resolution=0)
    with pytest.raises(ConfigError, match="SLO"):
        find_max_qps(queue_run, Slo())


def test_a_search_that_decided_nothing_says_so():
    def late(qps: float, seed: int) -> RunResult:
        result = queue_run(qps, seed, count=100)
        for record in result.records:
            record.sent_s += 0.02
        return result

    text = str(find_max_qps(late, Slo(e2e_s=0.5), start=1.20507))
    assert text.startswith("search stopped: at 1.21 requests/s the generator fell behind")
    assert text.endswith("; no rate was decided")
