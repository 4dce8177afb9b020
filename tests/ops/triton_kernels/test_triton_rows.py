"""Row kernels between products (ops/triton_kernels/rows.py) against fp64."""

from __future__ import annotations

import os

import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

from ops.backend import Norm
from ops.reference import ReferenceBackend, _activate, gate
from ops.triton_kernels.rows import activation_rows, gated_rows, norm_rows, quantize_rows
from tests.support.profile import every_day

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REFERENCE = ReferenceBackend()
KINDS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
WIDTHS = (1, 17, 64, 200)


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch, seeded):
    """Makes rows of more than 64 values need several blocks."""
    monkeypatch.setattr("ops.triton_kernels.rows.MAX_BLOCK", 64)


def a_norm(kind: str, n: int, *, has_bias: bool = True) -> Norm:
    bias = torch.randn(n, device=DEVICE) if kind == "layer" and has_bias else None
    return Norm(kind, 1 + 0.3 * torch.randn(n, device=DEVICE), bias, 1e-5)


def exact_norm(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    x, weight = x.double(), norm.weight.double()
    if norm.kind == "rms":
        return REFERENCE.rms_norm(x, weight, norm.eps)
    bias = None if norm.bias is None else norm.bias.double()
    return REFERENCE.layer_norm(x, weight, bias, norm.eps)


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("width", WIDTHS)
def test_norm(kind, width):
    x = 3 * torch.randn(4, width, device=DEVICE) + 1
    for norm in (a_norm(kind, width), a_norm(kind, width, has_bias=False)):
        want = exact_norm(x, norm)
        torch.testing.assert_close(norm_rows(x, norm).double(), want, rtol=1e-5, atol=1e-5)
    found = norm_rows(x.bfloat16(), norm)
    assert found.dtype == torch.bfloat16
    want = exact_norm(x.bfloat16(), norm)
    # the interpreter truncates
    torch.testing.assert_close(found.double(), want, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("size", [1e-25, 1e-12, 1e10, 3e18])
def test_norm_of_any_magnitude(size):
    x = size * torch.randn(3, 100, device=DEVICE)
    norm = a_norm("rms", 100)._replace(eps=0.0 if size > 1e-15 else 1e-5)
    want = exact_norm(x, norm)
    torch.testing.assert_close(norm_rows(x, norm).double(), want, rtol=1e-5, atol=0)


def test_norm_of_heads_in_a_wider_row():
    qkv = torch.randn(3, 7, 32, device=DEVICE)
    norm = a_norm("rms", 32)
    found = norm_rows(qkv[:, 2:5], norm)
    assert found.shape == (3, 3, 32) and found.is_contiguous()
    assert torch.equal(found, norm_rows(qkv[:, 2:5].contiguous(), norm))


@pytest.mark.parametrize("kind", KINDS)
def test_activation(kind):
    x = torch.cat([5 * torch.randn(2, 70), torch.linspace(-100, 100, 70)[None]]).to(DEVICE)
    want = _activate(x.double(), kind)
    torch.testing.assert_close(activation_rows(x, kind).double(), want, rtol=2e-5, atol=2e-6)
    found = gated_rows(torch.cat([x, x + 1], 1), kind)
    torch.testing.assert_close(found.double(), want * (x + 1).double(), rtol=2e-5, atol=2e-4)
    assert gated_rows(x.bfloat16(), kind).dtype == torch.bfloat16


def test_clamped_gates():
    x = torch.cat([5 * torch.randn(2, 70), torch.linspace(-100, 100, 70)[None]]).to(DEVICE)
    both = torch.cat([x, x.flip(1)], 1)
    want = gate(x.double(), x.flip(1).double(), "swiglu_oai")
    found = gated_rows(both, "swiglu_oai")
    torch.testing.assert_close(found.double(), want, rtol=2e-5, atol=2e-5)
    check_codes(want, both, activation="swiglu_oai", is_gated=True)
    both[1, 3], both[2, 80] = torch.nan, torch.nan
    where = gated_rows(both, "swiglu_oai").isnan().nonzero()
    assert where.tolist() == [[1, 3], [2, 10]]


def check_codes(values: torch.Tensor, x, **how) -> None:
    """values: the input of the quantization, in fp64."""
    width = values.shape[1]
    codes, scales = quantize_rows(x, **how)
    assert codes.shape == (len(x), -(-width // 16) * 16) and not codes[:, width:].any()
    largest = values.abs().amax(1)
    torch.testing.assert_close(scales.double(), largest / 127, rtol=1e-5, atol=0)
    steps = values * (127 / largest)[:, None]
    assert (codes[:, :width] - steps).abs().max() < 0.5 + 1e-3
    assert codes.int().abs().amax(1).eq(127).all()


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", WIDTHS)
def test_quantize(width, dtype):
    x = (2 * torch.randn(4, width, device=DEVICE) + 0.5).to(dtype)
    check_codes(x.double(), x)
    for norm in (a_norm("rms", width), a_norm("layer", width)):
        check_codes(exact_norm(x, norm), x, norm=norm)


@pytest.mark.parametrize("kind", KINDS)
def test_quantize_the_output_of_an_activation(kind):
    x = torch.randn(3, 140, device=DEVICE)
    check_codes(_activate(x.double(), kind), x, activation=kind)
    gate, up = x.double().chunk(2, 1)
    check_codes(_activate(gate, kind) * up, x, activation=kind, is_gated=True)


def test_codes_are_rounded_half_to_even():
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, -127.0]], device=DEVICE)
    codes, scales = quantize_rows(x)
    assert codes[0, :8].tolist() == [127, 0, 2, 2, 0, -2, -126, -127]
    assert scales.item() == 1.0


def test_strided_and_no_rows():
    wide = torch.randn(5, 300, device=DEVICE)
    for norm in (None, a_norm("rms", 100)):
        found, want = (
            quantize_rows(wide[:, 50:150], norm),
            quantize_rows(wide[:, 50:150].contiguous(), norm),
        )
        assert torch.equal(found.codes, want.codes) and torch.equal(found.scales, want.scales)
    turned = torch.randn(100, 5, device=DEVICE).t()
    assert torch.equal(quantize_rows(turned).codes, quantize_rows(turned.contiguous()).codes)
    assert quantize_rows(wide[:0]).codes.shape == (0, 304)
    assert norm_rows(wide[:0, :100], a_norm("rms", 100)).shape == (0, 100)
    assert gated_rows(wide[:0], "silu").shape == (0, 150)


def test_nan_and_infinity_stay_in_their_row():
    x = torch.randn(5, 100, device=DEVICE)
    x[1, 3], x[2, 99], x[3] = float("nan"), -float("inf"), 0.0
    for norm in (None, a_norm("rms", 100)):
        codes, scales = quantize_rows(x, norm)
        assert scales.isfinite().tolist() == [True, False, False, True, True]
        assert not codes[1:4].any() and scales[3] == 0
        for row in (0, 4):
            alone = quantize_rows(x[row : row + 1], norm)
            assert torch.equal(alone.codes[0], codes[row]) and alone.scales[0] == scales[row]
    y = norm_rows(x, a_norm("layer", 100, has_bias=False))
    assert y.isfinite().all(1).tolist() == [True, False, False, True, True] and not y[3].any()


@pytest.mark.parametrize("blocks", every_day((0,), [((32, 128, 512),), ((32, 64, 256),)]))
def test_no_bit_depends_on_the_block(blocks, monkeypatch):
    """Sums of squares are sums of integers, so their order does not matter."""
    x = 10 * torch.randn(3, 500, device=DEVICE)
    for kind in ("rms", "layer"):
        norm, found = a_norm(kind, 500), []
        for block in blocks:
            monkeypatch.setattr("ops.triton_kernels.rows.MAX_BLOCK", block)
            codes, scales = quantize_rows(x, norm)
            found.append((codes, scales, norm_rows(x, norm)))
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
