"""Searched scales of int4: never worse than the nearest ones, exact where that is possible."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ops.backend import INT4_GROUPS
from quant.int4 import quantize_int4
from tests.support.profile import examples


def weighted_error(weight: Tensor, plain: Tensor) -> Tensor:
    """Returns each output's squared error, weighted by the magnitudes of the weights."""
    return (weight.double().abs() * (plain.double() - weight.double()) ** 2).sum(1)


def drawn(kind: str, shape: tuple[int, int], seed: int) -> Tensor:
    torch.manual_seed(seed)
    if kind == "normal":
        return torch.randn(shape)
    if kind == "student":
        return torch.distributions.StudentT(5.0).sample(shape)
    return torch.rand(shape) if kind == "positive" else torch.randn(shape).sign()


@given(
    st.sampled_from(["normal", "student", "positive", "signs"]),
    st.sampled_from(INT4_GROUPS),
    st.integers(1, 5),
    st.integers(1, 300),
    st.integers(-30, 30),
    st.integers(0, 1000),
)
@pytest.mark.property
@examples(300)
def test_the_weighted_error_is_at_most_that_of_the_nearest(kind, group, rows, size, power, seed):
    weight = drawn(kind, (rows, size), seed) * 2.0**power
    nearest, searched = (
        weighted_error(weight, quantize_int4(weight, group, is_searched=is_searched).plain())
        for is_searched in (False, True)
    )
    # scales are rounded to 11 bits: the search compares what they are before that
    allowed = 2.0**-10 * weighted_error(weight, torch.zeros_like(weight)) * 2.0**-4
    assert bool((searched <= nearest + allowed).all())


@pytest.mark.parametrize(("kind", "gain"), [("normal", 0.95), ("student", 0.95)])
def test_errors_of_random_weights_are_smaller(kind, gain):
    weight = drawn(kind, (64, 2048), 0)
    plain = [quantize_int4(weight, 64, is_searched=x).plain() for x in (False, True)]
    nearest, searched = (float(weighted_error(weight, each).sum()) for each in plain)
    assert searched < gain * nearest
    nearest, searched = (float(((each - weight) ** 2).sum()) for each in plain)
    assert searched < nearest


@pytest.mark.parametrize("group", INT4_GROUPS)
@pytest.mark.parametrize("largest", [-8, 7])
def test_weights_on_a_grid_are_exact(group, largest):
    torch.manual_seed(1)
    codes = torch.randint(-7, 7, (40, 4 * group))
    codes[:, ::group] = largest
    scales = (torch.rand(40, 4) * 0.9 + 0.1).half().float() * 2**-10
    scales[::2] *= -1
    weight = codes * scales.repeat_interleave(group, 1)
    assert torch.equal(quantize_int4(weight, group, is_searched=True).plain(), weight)


def test_groups_of_zeros_of_one_value_and_of_any_magnitude():
    weight = torch.zeros(5, 128)
    weight[1], weight[2, 70], weight[3], weight[4] = 0.3, -2.0, 3e38, 1e-44
    plain = quantize_int4(weight, 64, is_searched=True).plain()
    assert torch.equal(plain[0], weight[0])
    assert torch.equal(plain[2], weight[2])
    for row in (1, 3):
        assert torch.allclose(plain[row], weight[row], rtol=2**-11)
    assert bool(((plain[4] - weight[4]).abs() <= 2e-45).all())


def test_rows_do_not_depend_on_one_another(monkeypatch):
    """So the ranks that divide a product's outputs have the codes of one process."""
    weight = drawn("normal", (100, 256), 3)
    monkeypatch.setattr("ops.linear._SEARCHED_AT_ONCE", 30 * 256)
    whole = quantize_int4(weight, 32, is_searched=True)
    for rows in (slice(0, 7), slice(25, 63), slice(99, 100)):
        own = quantize_int4(weight[rows], 32, is_searched=True)
        assert torch.equal(own.codes, whole.codes[rows])
        assert torch.equal(own.scales, whole.scales[rows])
