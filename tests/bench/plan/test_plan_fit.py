"""A step's cost fitted to traced steps recovers the true cost despite stalls and noise."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.plan.calibrate import MIN_STEPS, TERMS, FittedCost, fit, fit_times
from serve.engine.step_trace import TracedStep
from serve.errors import ConfigError
from serve.scheduler.step_time import StepWork
from tests.support.profile import examples

TRUTH = FittedCost(
    bend=32,
    coefficients=(2e-3, 5e-5, 1e-4, 1e-7, 2e-8, 1e-4, 3e-6, 2e-4),
    num_steps=0,
    stalled_share=0.0,
    median_error=0.0,
    p90_error=0.0,
)


def random_work(rng: random.Random) -> StepWork:
    work = StepWork(samples=rng.random() < 0.9)
    for _ in range(rng.randint(0, 40)):
        work.add(1, rng.randint(1, 2000))
    if rng.random() < 0.4 or not work.num_rows:
        work.add(rng.randint(2, 256), rng.randint(0, 1000))
    return work


def random_steps(
    cost: FittedCost, count: int, *, noise: float = 0.0, stalled: float = 0.0
) -> list[tuple[StepWork, float]]:
    rng = random.Random(7)
    steps = []
    for _ in range(count):
        work = random_work(rng)
        seconds = cost.seconds(work) * rng.uniform(1 - noise, 1 + noise)
        if rng.random() < stalled:
            seconds *= rng.uniform(3, 30)
        steps.append((work, seconds))
    return steps


def test_what_made_the_steps_is_found() -> None:
    found = fit_times(random_steps(TRUTH, 400))
    assert found.bend == TRUTH.bend
    assert found.coefficients == pytest.approx(TRUTH.coefficients, rel=1e-6)
    assert found.num_steps == 400 and found.p90_error < 1e-6


def test_noise_and_stalls_do_not_pull() -> None:
    """Every tenth step takes 3 to 30 times as long, and no prediction is off by more than 3 %."""
    steps = random_steps(TRUTH, 1500, noise=0.1, stalled=0.1)
    found = fit_times(steps)
    assert all(
        found.seconds(work) == pytest.approx(TRUTH.seconds(work), rel=0.03) for work, _ in steps
    )
    assert 0.03 < found.median_error < 0.07
    assert 0.85 * 1500 < found.num_steps < 0.95 * 1500
    extra = sum(max(0.0, seconds - TRUTH.seconds(work)) for work, seconds in steps)
    assert found.stalled_share == pytest.approx(extra / sum(s for _, s in steps), rel=0.1)


def test_steps_that_vary_take_as_long_together() -> None:
    """With log-normal noise of a quarter the fit follows the mean, not the shortest steps."""
    rng = random.Random(11)
    steps = [(work, s * rng.lognormvariate(0, 0.25)) for work, s in random_steps(TRUTH, 2000)]
    found = fit_times(steps)
    predicted = sum(found.seconds(work) for work, _ in steps) / sum(s for _, s in steps)
    assert predicted == pytest.approx(1 - found.stalled_share) and found.stalled_share < 0.02
    for batch in (1, 16, 32):
        work = StepWork(batch, 500 * batch, batch, samples=True)
        assert found.seconds(work) == pytest.approx(TRUTH.seconds(work), rel=0.08)


def test_steps_that_only_decode_are_enough() -> None:
    rng = random.Random(3)
    steps = []
    for _ in range(100):
        work = StepWork(samples=True)
        for _ in range(rng.randint(1, 64)):
            work.add(1, rng.randint(1, 500))
        steps.append((work, TRUTH.seconds(work)))
    found = fit_times(steps)
    assert all(found.seconds(work) == pytest.approx(seconds, rel=0.01) for work, seconds in steps)


def test_traced_steps() -> None:
    times = random_steps(TRUTH, 100)
    traced = [TracedStep(5.0, 5.0 + seconds, work, 1, 0, 0) for work, seconds in times]
    assert fit(traced).coefficients == pytest.approx(TRUTH.coefficients, rel=1e-4)


def test_no_work_takes_no_time() -> None:
    assert TRUTH.seconds(StepWork()) == 0.0
    idle = [(StepWork(), 1.0)] * 100
    found = fit_times(random_steps(TRUTH, 100) + idle)
    assert found.num_steps == 100


@pytest.mark.parametrize("count", [0, MIN_STEPS - 1])
def test_too_few_steps(count: int) -> None:
    with pytest.raises(ConfigError, match=f"{MIN_STEPS} steps, not {count}"):
        fit_times(random_steps(TRUTH, count))


def test_saved_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    TRUTH.save(path)
    assert FittedCost.load(path) == TRUTH
    path.write_text(path.read_text().replace('"pair"', '"pears"'))
    with pytest.raises(ConfigError, match=r"cost.json is not a fitted cost: KeyError\('pair'\)"):
        FittedCost.load(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"cost.json is not a fitted cost"):
        FittedCost.load(path)
    with pytest.raises(ConfigError, match="No such file"):
        FittedCost.load(tmp_path / "none.json")


@examples(60)
@given(
    st.lists(st.tuples(st.integers(1, 64), st.integers(0, 500)), min_size=1, max_size=8),
    st.integers(1, 64),
    st.integers(0, 500),
    st.lists(st.floats(0, 1e-3), min_size=len(TERMS), max_size=len(TERMS)),
    st.booleans(),
)
def test_more_work_never_takes_less(
    parts: list[tuple[int, int]],
    rows: int,
    context: int,
    coefficients: list[float],
    samples: bool,
) -> None:
    cost = replace(TRUTH, coefficients=tuple(coefficients))
    work = StepWork(samples=samples)
    for chunk, before in parts:
        work.add(chunk, before)
    before_s = cost.seconds(work)
    work.add(rows, context)
    assert cost.seconds(work) >= before_s
