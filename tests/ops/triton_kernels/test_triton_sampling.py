"""The kernels of device-side sampling, against their definitions in float64."""

from __future__ import annotations

import pytest
import torch

from tests.support.cuda.device_sampling import (
    DEVICE,
    SMALL,
    draw,
    expected_draw,
    make_rows,
    make_sampler,
)

pytest.importorskip("triton")

import triton
import triton.language as tl

from ops.cuda.device_sampler import Kind
from ops.cuda.sampling_inputs import DeviceSamplingInputs, Row
from ops.triton_kernels.sample_token import uniform
from ops.triton_kernels.sampling import weigh
from serve.runner.sampler import uniform as uniform_on_the_host

# numpy, as the interpreter, subtracts infinities and NaNs that are masked out afterwards
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# The sums are exact to about 1e-10, so a decision nearer to a boundary is not checked.
MARGIN = 1e-9
KINDS = ["normal", "peaked", "ties", "flat", "holes"]
CUTS = [
    {},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 90, "top_p": 0.9},
    {"top_k": 3000},
    {"top_p": 0.0},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 0.9999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"min_p": 0.001, "top_p": 0.8},
    {"min_p": 0.3, "top_k": 80, "top_p": 0.9},
    {"min_p": 0.02, "top_k": 10, "top_p": 0.7},
]


@triton.jit
def _uniform(plan, out):
    tl.store(out + tl.program_id(0), uniform(plan, tl.program_id(0)))


@triton.jit
def _weigh(scaled, top, out, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, weigh(tl.load(scaled + i), tl.load(top)))


def test_the_random_numbers_are_those_of_the_cpu():
    seeds = [0, 1, 2**63 - 1, -1, 0x9E3779B97F4A7C15, -(2**63), 12345]
    sampler = make_sampler(50)
    rows = [
        Row(DeviceSamplingInputs(seed=s, temperature=1.0), 0, [0] * (7 * i))
        for i, s in enumerate(seeds)
    ]
    plan = sampler.plan(rows)
    sampler.upload(plan)
    out = torch.zeros(len(seeds), dtype=torch.float64, device=DEVICE)
    _uniform[(len(seeds),)](sampler.records.view(torch.int32), out)
    assert out.tolist() == uniform_on_the_host(seeds, [7 * i for i in range(len(seeds))]).tolist()


def test_weights_are_exp_in_fixed_point():
    scaled = torch.cat([torch.linspace(-60, 0, 1000), torch.linspace(-1, 0, 24)]) + 17.5
    scaled[0] = float("-inf")
    scaled[1] = -3e38
    out = torch.zeros(1024, dtype=torch.int64, device=DEVICE)
    _weigh[(1,)](scaled.to(DEVICE), torch.tensor([17.5]).to(DEVICE), out, SIZE=1024)
    exact = torch.exp(scaled.double() - 17.5) * 2.0**44
    assert float(((out.cpu() - exact).abs() - 0.5).max()) < 2.0**44 * 6e-11
    assert out[:2].tolist() == [0, 0]


@pytest.mark.parametrize("size", [1, 255, 1000, 4099])
def test_argmax_is_the_first_of_the_largest(size):
    for kind in KINDS:
        logits = make_rows(kind, 3, size)
        assert draw(logits, [{"seed": 0, "temperature": 0.0}] * 3) == logits.argmax(-1).tolist()
    nothing = torch.full((2, size), float("-inf"))
    assert draw(nothing, [{"seed": 0, "temperature": 0.0}] * 2) == [0, 0]
    nothing[0] = float("nan")
    nothing[1, size // 2 :] = float("nan")
    assert draw(nothing, [{"seed": 0, "temperature": 0.0}] * 2) == [0, 0]
    nothing[:, -1] = -1e30
    assert draw(nothing, [{"seed": 0, "temperature": 0.0}] * 2) == [size - 1] * 2


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "size"), [*((kind, 97) for kind in KINDS), ("peaked", 600), ("ties", 600)]
)
def test_samples_equal_the_definition(kind, size):
    """Candidate lists fit in some rows and overflow in others (more than 200 candidates)."""
    cuts = [(cut, 0.7 if i % 2 else 1.0) for i, cut in enumerate(CUTS)]
    rows = make_rows(kind, len(cuts), size)
    choices = [{"seed": i, "temperature": t, **cut} for i, (cut, t) in enumerate(cuts)]
    got = draw(rows, choices)
    u = uniform_on_the_host(range(len(cuts)), [4] * len(cuts)).tolist()
    decided = 0
    for i, (cut, temperature) in enumerate(cuts):
        expected = expected_draw(rows[i], u[i], temperature=temperature, **cut)
        if expected.margin > MARGIN:
            assert got[i] == expected.token, f"{cut} {temperature=}"
            decided += 1
    assert decided >= len(cuts) * 2 // 3


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "cut", [{"top_k": 4}, {"top_p": 0.55}, {"top_k": 6, "top_p": 0.6}, {"min_p": 0.4}]
)
def test_exactly_the_kept_tokens_are_drawn(cut):
    """Of tokens with equal logits at the boundary, the lower token ids stay."""
    row = torch.tensor([0.0, 0.0, 0.5, -1.0, 0.0, 0.0, 0.5, 0.0])
    expected = expected_draw(row, 0.5, temperature=1.0, **cut)
    count = 40 if "min_p" in cut else 14
    got = draw(row.repeat(count, 1), [{"seed": i, "temperature": 1.0, **cut} for i in range(count)])
    assert set(got) == expected.kept


def test_rows_without_a_probability_distribution_take_the_largest():
    logits = torch.randn(4, 50)
    logits[0, 20] = float("inf")
    logits[1] = float("-inf")
    logits[2] = float("nan")
    logits[3, 4] = 3e38  # beyond fp32 once divided by the temperature
    choices = [{"seed": i, "temperature": 0.1, "top_p": 0.9} for i in range(4)]
    assert draw(logits, choices) == [20, 0, 0, 4]


def test_nan_is_never_drawn():
    logits = torch.zeros(12, 40)
    logits[:, ::2] = float("nan")
    cuts = [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.5}]
    got = draw(logits, [{"seed": i, "temperature": 1.0, **cuts[i % 4]} for i in range(12)])
    assert all(token % 2 for token in got)


@pytest.mark.exhaustive
def test_distribution():
    """Chi-square test with 5 degrees of freedom, p ~ 0.001."""
    size, count = 6, 120
    logits = torch.randn(size, generator=torch.Generator().manual_seed(5))
    got = draw(logits.repeat(count, 1), [{"seed": i, "temperature": 1.3} for i in range(count)])
    expected = torch.softmax(logits.double() / 1.3, -1) * count
    counts = torch.bincount(torch.tensor(got), minlength=size)
    assert float(((counts - expected) ** 2 / expected).sum()) < 20.5


@pytest.mark.exhaustive
def test_a_row_draws_the_same_token_in_any_batch():
    logits = make_rows("normal", 4, 400)
    cuts = [{}, {"top_k": 7}, {"top_p": 0.8}, {"top_k": 300, "top_p": 0.9}]
    choices = [{"seed": i, "temperature": 0.9, **cut} for i, cut in enumerate(cuts)]
    together = draw(logits, choices)
    assert [draw(logits[i : i + 1], [choices[i]])[0] for i in range(4)] == together
    other = SMALL._replace(chunk=64, block=128, capacity=1000)
    assert draw(logits, choices, config=other) == together


def test_padding_rows_are_harmless():
    sampler = make_sampler(60, max_rows=8)
    sampler.last_tokens.fill_(-7)
    rows = [Row(DeviceSamplingInputs(seed=1, temperature=1.0, top_k=3), 2, [1])]
    for kind in (Kind.GREEDY, Kind.FULL, Kind.DESCRIBED):
        plan = sampler.plan(rows)
        sampler.upload(plan)
        logits = torch.zeros(4, 60, device=DEVICE)
        logits[1:] = float("nan")
        assert sampler.run(logits, kind).shape == (4,)
    assert (sampler.last_tokens == -7).sum() == len(sampler.last_tokens) - 1
