"""The native sampler equals its definition in float64, on every instruction set."""

from __future__ import annotations

import functools
import itertools
import math
from typing import NamedTuple

import numpy as np
import pytest
import torch

from ops.cpu import native_library, sampling
from serve.runner.sampler import uniform

pytestmark = pytest.mark.skipif(not sampling.is_available(), reason="not built")

SIZES = [1, 5, 16, 65, 256, 1024, 1025, 5000, 40000]
# The native sums are exact to about 1e-10, so a decision nearer to a boundary is not checked.
MARGIN = 1e-9


@pytest.fixture
def threads():
    before = native_library.num_threads()
    yield native_library.set_num_threads
    native_library.set_num_threads(before)


class Expected(NamedTuple):
    """margin: distance to the nearest boundary of the decision, as a fraction of the kept mass."""

    token: int
    margin: float


def expected_draw(row, u, *, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """Cuts and inverts one row, sorted whole. row: [V] fp32."""
    scaled = row / torch.tensor(temperature, dtype=torch.float32)
    in_order = 0 < top_k < len(row) or top_p < 1
    if min_p > 0:
        floor = np.float32(math.log(float(np.float32(min_p))))
        limit = scaled.max() + torch.tensor(floor)
        scaled = scaled.masked_fill(scaled < limit, float("-inf"))
    values, ids = torch.sort(scaled.double(), descending=True, stable=True)
    if 0 < top_k < len(row):
        values, ids = values[:top_k], ids[:top_k]
    mass = torch.exp(values - values[0])
    before = mass.cumsum(0) - mass
    probability_before = before / mass.sum()
    margin = 1.0
    if top_p < 1:
        margin = (
            float((probability_before[1:] - top_p).abs().min())
            if len(probability_before) > 1
            else 1.0
        )
        keep = probability_before < top_p
        keep[0] = True
        mass, ids = mass[keep], ids[keep]
    if not in_order:
        ids, order = ids.sort()
        mass = mass[order]
    cumulative = mass.cumsum(0) / mass.sum()
    index = int(torch.searchsorted(cumulative, torch.tensor([u]).double(), right=True)[0])
    margin = min(margin, float((cumulative[mass > 0] - u).abs().min()))
    return Expected(int(ids[min(index, len(ids) - 1)]), margin)


def make_rows(kind, size):
    generator = torch.Generator().manual_seed(size)
    noise = torch.randn(3, size, generator=generator)
    if kind == "peaked":
        return noise * 8
    if kind == "ties":
        return (noise * 2).round()
    if kind == "flat":
        return torch.zeros(3, size)
    if kind == "holes":
        noise[:, 1::3] = float("-inf")
    return noise * 2


def strided(rows):
    """Returns the same rows, apart from each other and unaligned."""
    wide = torch.full((rows.shape[0], rows.shape[1] + 7), float("nan"))
    wide[:, 3 : 3 + rows.shape[1]] = rows
    return wide[:, 3 : 3 + rows.shape[1]]


def sample(rows, choices, lengths):
    packed = sampling.packed_rows(len(choices))
    for i, (choice, length) in enumerate(zip(choices, lengths, strict=True)):
        choice.pack(packed, i, [0] * length, False)
    return sampling.sample(rows, packed)


CUTS = [
    {},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 700, "top_p": 0.9},
    {"top_k": 3000},
    {"top_p": 0.0},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 0.9999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"min_p": 0.001, "top_p": 0.8},
    {"min_p": 0.02, "top_k": 10, "top_p": 0.7},
]


@pytest.mark.parametrize("size", SIZES)
def test_argmax_is_the_first_of_the_largest(isa, size):
    for kind in ("normal", "ties", "flat", "holes"):
        rows = strided(make_rows(kind, size))
        got = sampling.argmax(rows)
        assert got == [int(np.argmax(row)) for row in rows.numpy()]
        plain = sample(rows, [sampling.SamplingInputs(seed=0, temperature=0.0)] * 3, [1] * 3)
        assert plain["token"].tolist() == got
    assert sampling.argmax(torch.full((2, size), float("-inf"))) == [0, 0]
    assert all(0 <= i < size for i in sampling.argmax(torch.full((2, size), float("nan"))))
    assert sampling.argmax(torch.zeros(0, size)) == []


DRAWS = list(itertools.product(CUTS, (0.7, 1.0), range(2)))


@functools.cache
def expected_draws(kind, size):
    """Returns, for each of DRAWS, what to expect of each row. Every set of kernels asks again."""
    found = []
    for cut, temperature, seed in DRAWS:
        u = uniform([seed] * 3, [4, 5, 6]).tolist()
        rows = make_rows(kind, size)
        found.append(
            [expected_draw(row, u[i], temperature=temperature, **cut) for i, row in enumerate(rows)]
        )
    return found


@pytest.mark.covering(2)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["normal", "peaked", "ties", "flat", "holes"])
def test_samples_equal_the_definition(isa, kind, size):
    rows = make_rows(kind, size)
    decided = 0
    for place, (cut, temperature, seed) in enumerate(DRAWS):
        choices = [
            sampling.SamplingInputs(seed=seed, temperature=temperature, **cut)
            for _ in range(len(rows))
        ]
        got = sample(strided(rows), choices, [4, 5, 6])["token"].tolist()
        for i, expected in enumerate(expected_draws(kind, size)[place]):
            if expected.margin > MARGIN:
                assert got[i] == expected.token, f"{cut} {temperature=} {seed=} row {i}"
                decided += 1
    assert decided > 80


@pytest.mark.covering(1)
@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 50, "top_p": 0.9}, {"top_k": 50}])
def test_the_last_kept_token(isa, cut):
    """A uniform number just below 1 gives the last kept token."""
    u = uniform(range(1_000_000), [1] * 1_000_000)
    seed = int(u.argmax())
    for kind in ("normal", "peaked", "ties"):
        rows = make_rows(kind, 5000)
        got = sample(
            rows, [sampling.SamplingInputs(seed=seed, temperature=1.0, **cut)] * 3, [1] * 3
        )
        for i, row in enumerate(rows):
            expected = expected_draw(row, float(u[seed]), temperature=1.0, **cut)
            if expected.margin > MARGIN:
                assert got["token"][i] == expected.token


def test_a_row_does_not_depend_on_the_batch_or_the_threads(isa, threads):
    torch.manual_seed(2)
    rows = torch.randn(11, 40000) * 3
    choices = [
        sampling.SamplingInputs(seed=i, temperature=0.6 + 0.1 * (i % 5), num_logprobs=i % 3, **cut)
        for i, cut in zip(range(11), CUTS, strict=False)
    ]
    lengths = list(range(1, 12))
    together = sample(rows, choices, lengths)
    for count in (1, 2):
        threads(count)
        for i in range(11):
            alone = sample(rows[i : i + 1], [choices[i]], [lengths[i]])
            assert alone[0] == together[i]
        assert np.array_equal(sample(rows, choices, lengths), together)
        assert np.array_equal(sample(rows[:3], choices[:3], lengths[:3]), together[:3])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["normal", "ties", "holes"])
def test_logprobs(isa, kind, size):
    rows = make_rows(kind, size)
    count = min(20, size)
    choices = [
        sampling.SamplingInputs(seed=0, temperature=0.0, num_logprobs=count),
        sampling.SamplingInputs(seed=1, temperature=1.0, num_logprobs=count),
        sampling.SamplingInputs(
            seed=2, temperature=0.5, top_p=0.9, num_logprobs=0, biases={0: -5.0}
        ),
    ]
    raw = rows.double()
    expected = torch.log_softmax(raw, -1)
    got = sample(rows, choices, [1] * 3)
    for i in range(3):
        token = int(got["token"][i])
        assert got["logprob"][i] == pytest.approx(float(expected[i, token]), abs=2e-6, rel=1e-6)
        assert got["rank"][i] == int((raw[i] > raw[i, token]).sum()) + 1
        order = torch.sort(raw[i], descending=True, stable=True).indices
        order = order[raw[i][order] > float("-inf")][: count if i < 2 else 0]
        assert got["num_top"][i] == len(order)
        assert got["top_tokens"][i][: len(order)].tolist() == order.tolist()
        best = got["top_logprobs"][i][: len(order)]
        assert best == pytest.approx(expected[i, order].numpy(), abs=2e-6, rel=1e-6)


def test_forbidden_and_biased_tokens(isa):
    rows = torch.zeros(2, 300)
    choice = sampling.SamplingInputs(
        seed=0, temperature=1.0, biases={7: 50.0, 9: 60.0}, forbidden=[9]
    )
    packed = sampling.packed_rows(2)
    choice.pack(packed, 0, [1, 2], True)
    choice.pack(packed, 1, [1, 2], False)
    assert sampling.sample(rows, packed)["token"].tolist() == [7, 9]
    assert rows[0, 9] == float("-inf")
    assert rows[1, 9] == 60.0


def test_a_token_beyond_the_vocabulary_is_refused():
    for settings, tokens in ([{"biases": {20: 1.0}}, [1]], [{"presence": 1.0}, [1, -1]]):
        packed = sampling.packed_rows(1)
        sampling.SamplingInputs(seed=0, temperature=0.0, **settings).pack(packed, 0, tokens, False)
        with pytest.raises(IndexError, match="vocabulary of 20"):
            sampling.sample(torch.zeros(1, 20), packed)


def test_rows_without_a_finite_maximum_still_give_a_token(isa):
    bad = torch.randn(4, 2000)
    bad[0] = float("-inf")
    bad[1] = float("nan")
    bad[2, 5] = float("inf")
    bad[3, 7] = float("nan")
    for cut in CUTS:
        choices = [sampling.SamplingInputs(seed=3, temperature=1.0, num_logprobs=5, **cut)] * 4
        got = sample(bad, choices, [1] * 4)["token"].tolist()
        assert all(0 <= token < 2000 for token in got)
        assert got[2] == 5
        assert got[3] != 7


@pytest.mark.parametrize("size", [1000, 2000, 5000])
def test_a_nan_hides_no_other_logit(isa, size):
    """The NaN is anywhere beside the largest logit."""
    for at in [*range(1, 70), size - 1]:
        logits = torch.randn(1, size)
        logits[0, 0], logits[0, at] = 50.0, math.nan
        assert sampling.argmax(logits)[0] == 0, f"NaN at {at}"
        for cut in ({"top_k": 1}, {"min_p": 0.5}, {"top_k": 1, "top_p": 0.9}, {"top_p": 0.5}, {}):
            choice = sampling.SamplingInputs(seed=3, temperature=1.0, **cut)
            assert sample(logits.clone(), [choice], [1])["token"].tolist() == [0], (
                f"NaN at {at}, {cut}"
            )


def test_history_follows_a_growing_list():
    history = sampling.TokenHistory()
    tokens = [3, 1]
    assert history.tokens(tokens).tolist() == tokens
    for length in (3, 64, 65, 500):
        tokens += range(length - len(tokens))
        assert history.tokens(tokens).tolist() == tokens
        assert history.follow(tokens) == length
