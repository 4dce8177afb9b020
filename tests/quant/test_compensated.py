"""Rounding errors that other inputs compensate."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quant.compensated import compensated_int4
from quant.int4 import Int4Weight, quantize_int4

pytestmark = pytest.mark.usefixtures("seeded")


def correlated(num_rows: int, num_in: int) -> Tensor:
    """Returns rows whose inputs are correlated and of different magnitudes."""
    mixed = torch.randn(num_rows, num_in // 2) @ torch.randn(num_in // 2, num_in)
    return (mixed + torch.randn(num_rows, num_in)) * torch.logspace(-1, 1, num_in)


def output_error(weight: Tensor, rounded: Int4Weight, x: Tensor) -> float:
    exact = x @ weight.T
    return float((x @ rounded.plain().T - exact).norm() / exact.norm())


@pytest.mark.parametrize("group", [16, 32, 64, 128])
def test_outputs_of_other_rows_are_more_accurate(group):
    weight, x = torch.randn(70, 256), correlated(3000, 256)
    seen, unseen = x[:2000], x[2000:]
    compensated = compensated_int4(weight, seen.T @ seen, group)
    searched = quantize_int4(weight, group, is_searched=True)
    error = output_error(weight, compensated, unseen)
    assert error < 0.7 * output_error(weight, searched, unseen)
    assert compensated.codes.shape == (70, 256)
    assert compensated.scales.shape == (70, 256 // group)
    assert compensated.codes.is_contiguous()
    assert int(compensated.codes.max()) < 16


def test_the_scale_of_moments_does_not_matter():
    weight, x = torch.randn(20, 128), correlated(500, 128)
    one, other = (compensated_int4(weight, f * (x.T @ x), 32) for f in (1.0, 2.0**-20))
    assert torch.equal(one.codes, other.codes)
    assert torch.equal(one.scales, other.scales)


def test_scales_are_those_that_the_kernels_keep():
    weight, x = torch.randn(20, 128), correlated(500, 128)
    rounded = compensated_int4(weight, x.T @ x, 32)
    assert torch.equal(rounded.scales.half().float(), rounded.scales)


@pytest.mark.parametrize("moments", ["none", "independent"])
def test_inputs_without_correlation_are_rounded_each_on_its_own(moments):
    weight = torch.randn(30, 128)
    sums = torch.zeros(128, 128) if moments == "none" else torch.eye(128) * 7
    rounded = compensated_int4(weight, sums, 64)
    steps = (weight / rounded.scales.repeat_interleave(64, 1)).round().clamp(-8, 7)
    assert torch.equal(rounded.codes, (steps + 8).to(torch.uint8))
    assert float((rounded.plain() - weight).norm()) < float(
        (quantize_int4(weight, 64).plain() - weight).norm()
    )


def test_weights_on_a_grid_are_exact():
    codes = torch.randint(-7, 7, (20, 128))
    codes[:, ::64] = -8
    weight, x = codes * 0.25, correlated(500, 128)
    assert torch.equal(compensated_int4(weight, x.T @ x, 64).plain(), weight)


def test_zeros_and_inputs_that_are_always_zero():
    weight, x = torch.randn(20, 128), correlated(500, 128)
    weight[3], x[:, 40:50] = 0.0, 0.0
    rounded = compensated_int4(weight, x.T @ x, 32)
    assert bool(torch.isfinite(rounded.plain()).all())
    assert bool((rounded.plain()[3] == 0).all())
    assert output_error(weight, rounded, x) < 0.1


def test_fewer_rows_than_inputs():
    weight, x = torch.randn(20, 128), correlated(3, 128)
    assert output_error(weight, compensated_int4(weight, x.T @ x, 32), x) < 0.1


def test_moments_that_are_not_finite_or_not_positive_are_refused():
    weight, sums = torch.randn(4, 64), torch.eye(64)
    sums[3, 3] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        compensated_int4(weight, sums, 32)
    sums = torch.full((64, 64), -5.0) + 6 * torch.eye(64)
    with pytest.raises(ValueError, match="not positive"):
        compensated_int4(weight, sums, 32)
