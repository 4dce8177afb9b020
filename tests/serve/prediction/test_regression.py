"""Regressions find what is there, forget, and stay bounded whatever they are taught."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.prediction.regression import MAX_TARGET, OnlineRegression
from serve.prediction.token_regression import NUM_PLACES, TokenRegression, places_of

NUM = 6
NUMBERS = st.floats(allow_nan=True, allow_infinity=True)


def taught(weights, count, *, seed=0, noise=0.0):
    rng = np.random.default_rng(seed)
    regression = OnlineRegression(NUM)
    for _ in range(count):
        rows = [rng.normal(size=NUM) for _ in range(2)]
        regression.learn(rows, [float(row @ weights + noise * rng.normal()) for row in rows])
    return regression


def test_a_linear_law_is_found():
    weights = np.array([0.5, -1.0, 0.0, 0.3, 0.0, 0.8])
    regression = taught(weights, 800, noise=0.1)
    assert np.abs(regression.weights - weights).max() < 0.05
    assert regression.predict(np.ones(NUM)) == pytest.approx(0.6, abs=0.1)


def test_little_evidence_moves_little():
    regression = OnlineRegression(NUM)
    for _ in range(8):
        regression.learn([np.eye(NUM)[0]], [1.0])
    assert regression.num_learned == 8
    assert regression.predict(np.eye(NUM)[0]) == pytest.approx(8 / 10, abs=0.02), "the ridge is 2"


def test_a_changed_law_is_learned_anew():
    regression = taught(np.ones(NUM), 3000)
    rng = np.random.default_rng(1)
    for _ in range(20_000):
        row = rng.normal(size=NUM)
        regression.learn([row], [-float(row.sum())])
    assert np.allclose(regression.weights, -1.0, atol=0.1)


@given(st.lists(st.tuples(st.lists(NUMBERS, min_size=NUM, max_size=NUM), NUMBERS), max_size=40))
def test_weights_stay_finite_and_bounded(taught_rows):
    regression = OnlineRegression(NUM)
    for row, target in taught_rows * 3:
        regression.learn([np.array(row)], [target])
    assert np.isfinite(regression.weights).all()
    most = MAX_TARGET * (4096 / 2.0) ** 0.5 / 2
    assert np.linalg.norm(regression.weights) <= most
    assert abs(regression.predict(np.ones(NUM))) <= MAX_TARGET


def test_the_last_tokens_decide_the_places():
    one, other = places_of(range(100), "a"), places_of((7, *range(1, 100)), "a")
    assert one == other, "only the last tokens and the octave of the length count"
    assert places_of((*range(99), 5), "a") != one != places_of(range(100), "b")
    assert len(one) == 3 + 8 + 7
    assert all(0 <= place < NUM_PLACES for place in places_of((2**40, 0, -3), "\ud800"))
    assert len(places_of((3,), "")) == 4


def test_tokens_get_their_weights():
    regression = TokenRegression()
    long, short = places_of((1, 2, 3, 9), ""), places_of((1, 2, 3, 8), "")
    for _ in range(60):
        regression.learn([long], [2.0])
        regression.learn([short], [-2.0])
    assert regression.predict(long) == pytest.approx(2.0, abs=0.2)
    assert regression.predict(short) == pytest.approx(-2.0, abs=0.2)
    assert abs(regression.predict(places_of((50, 51, 52, 53), ""))) < 0.5


@settings(deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 2**31), min_size=1, max_size=9), NUMBERS)))
def test_weights_of_tokens_stay_bounded(answers):
    regression = TokenRegression()
    for prompt, target in answers * 3:
        regression.learn([places_of(prompt, "x")], [target])
    weights = regression.state()["sums"][0]
    assert np.isfinite(weights).all() and np.abs(weights).max() <= MAX_TARGET
