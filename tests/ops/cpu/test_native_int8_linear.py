"""int8 linear layers on every instruction set, against float64 and against themselves.

Bounds follow from the scales: half a step for every rounded factor.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ops import Fusion, Norm
from ops.cpu import native_library
from ops.cpu.native_fusion import ACTIVATIONS
from ops.cpu.native_quantized_linear import Int8Linear
from ops.reference import ReferenceBackend, int8_linear, quantize_int8
from tests.support.memory.native_rows import check_rows_alone

pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
    pytest.mark.usefixtures("seeded"),
]
REFERENCE = ReferenceBackend()
FUSED = [(kind, gated) for kind in ACTIVATIONS if kind for gated in (False, True)]
FUSED.remove(("swiglu_oai", False))  # it exists only with gates


def expected_product(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns x @ weight.T in float64, and the error bound from rounding both factors."""
    _, x_step = quantize_int8(x)
    _, w_step = quantize_int8(weight)
    x, weight, x_step, w_step = (t.double() for t in (x, weight, x_step, w_step))
    ones_x, ones_w = torch.ones_like(x), torch.ones_like(weight)
    bound = 0.5 * (x.abs() @ (ones_w * w_step).T) + 0.5 * ((ones_x * x_step) @ weight.abs().T)
    return x @ weight.T, bound + 0.25 * x.shape[1] * x_step * w_step.T + 1e-6


SHAPES = [(1, 64, 32), (3, 100, 70), (13, 640, 96), (16, 2048, 33), (40, 1024, 300), (200, 96, 32)]


@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_is_within_the_bound_of_its_scales(isa, m, k, n, dtype):
    x, weight = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
    y = Int8Linear(weight, None)(x)
    exact, bound = expected_product(x.float(), weight.float())
    assert bool(((y - exact).abs() <= bound).all())


@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_linear_is_the_reference(isa, m, k, n):
    """Up to four of an output's values may be rounded to the other code, because the reference
    rounds x * (127 / largest) in fp32."""
    x, weight = torch.randn(m, k), torch.randn(n, k)
    steps = quantize_int8(x)[1].double() * quantize_int8(weight)[1].double().T
    error = (Int8Linear(weight, None)(x) - int8_linear(x, weight)).abs()
    assert bool((error <= 4 * 127 * steps + 1e-4).all())


@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_linear_sums_exactly(isa, m, k, n):
    """Whole numbers are not rounded, so the sums must be right to the last bit of fp32."""
    x = torch.randint(-127, 128, (m, k)).float()
    weight = torch.randint(-127, 128, (n, k)).float()
    x[:, 0], weight[:, 0] = 127.0, -127.0
    y = Int8Linear(weight, None)(x)
    assert torch.allclose(y.double(), x.double() @ weight.double().T, rtol=1e-6, atol=0)


def test_a_row_does_not_depend_on_the_others(isa):
    check_rows_alone(Int8Linear(torch.randn(150, 700), torch.randn(150)), 700)


@pytest.mark.parametrize(("kind", "is_gated"), FUSED)
def test_activation_and_bias_are_fused(isa, kind, is_gated):
    """The factors are whole numbers, so they are not rounded, and scaled so that activations are
    not linear."""
    x = torch.randint(-127, 128, (5, 64)).float()
    weight = torch.randint(-127, 128, (90, 64)).float()
    x[:, 0], weight[:, 0] = 127.0, 127.0
    weight, bias = weight / 4e4, torch.randn(90)
    y = Int8Linear(weight, bias, Fusion(None, kind, is_gated))(x)
    plain = REFERENCE.pack_linear(weight.double(), bias.double(), Fusion(None, kind, is_gated))
    expected = plain(x.double())
    assert y.dtype == torch.bfloat16
    assert torch.allclose(y.double(), expected, rtol=5e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("size", [64, 100, 2048])
def test_norm_is_fused(isa, kind, size):
    norm_bias = torch.randn(size) if kind == "layer" else None
    norm = Norm(kind, torch.rand(size) + 0.5, norm_bias, 1e-5)
    x, weight = torch.randn(7, size) * 3 + 1, torch.randn(40, size)
    y = Int8Linear(weight, None, Fusion(norm))(x)
    wide = Norm(kind, norm.weight.double(), None if norm_bias is None else norm_bias.double(), 1e-5)
    normed = REFERENCE.pack_linear(torch.eye(size).double(), None, Fusion(wide))(x.double())
    exact, bound = expected_product(normed.float(), weight)
    assert bool(((y - exact).abs() <= bound + 1e-3).all())


def test_residual_is_added_in_place(isa):
    x, weight, residual = torch.randn(9, 64), torch.randn(50, 64), torch.randn(9, 50)
    layer = Int8Linear(weight, None)
    expected = residual + layer(x)
    got = layer(x, residual=residual)
    assert got is residual
    assert torch.equal(got, expected)


def test_zeros_and_empty_and_strided_rows(isa):
    layer = Int8Linear(torch.randn(40, 64), None)
    assert torch.equal(layer(torch.zeros(3, 64)), torch.zeros(3, 40))
    assert layer(torch.empty(0, 64)).shape == (0, 40)
    wide = torch.randn(4, 200)
    assert torch.equal(layer(wide[:, 30:94]), layer(wide[:, 30:94].contiguous()))
    assert torch.equal(
        Int8Linear(torch.zeros(40, 64), None)(torch.randn(2, 64)), torch.zeros(2, 40)
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("norm", [None, Norm("rms", torch.ones(100), None, 1e-5)])
def test_a_row_with_a_nan_or_an_infinity_shows_it(isa, bad, norm):
    """No other row shows it."""
    x = torch.randn(5, 100)
    layer = Int8Linear(torch.randn(40, 100), None, Fusion(norm))
    expected = layer(x)
    for at in (0, 17, 31, 63, 99):
        spoilt = x.clone()
        spoilt[2, at] = bad
        y = layer(spoilt)
        assert not bool(y[2].isfinite().any()), f"{bad} at {at}"
        assert torch.equal(y[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])
