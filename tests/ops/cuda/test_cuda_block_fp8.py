"""fp8 products with a scale for each 128 inputs, against float64 of the same codes and scales."""

from __future__ import annotations

import os

import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

from torch import Tensor

from ops.backend import NO_FUSION, Fusion, Norm, Routing
from ops.cuda.backend import CudaBackend
from ops.cuda.block_linear import BlockFp8Linear
from ops.cuda.experts import CudaExperts
from ops.cuda.heads import CudaHeads
from ops.experts import ExpertsOneByOne
from ops.reference import ReferenceBackend
from ops.triton_kernels import block_fp8 as kernels
from ops.triton_kernels.block_fp8 import E4M3, quantize_groups

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SILU = Fusion(None, "silu", True)
OAI = Fusion(None, "swiglu_oai", True)

pytestmark = pytest.mark.usefixtures("seeded")


def random_codes(num_out: int, num_in: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (codes, scales: [out, groups], the weight in float64)."""
    codes = (torch.randn(num_out, num_in) * 100).clamp(-448, 448).to(E4M3)
    groups = -(-num_in // 128)
    # of very different sizes, so that a wrong group is noticed
    scales = torch.rand(num_out, groups) * 10.0 ** torch.randint(-2, 1, (num_out, groups))
    scales = scales / (100 * num_in**0.5)
    wide = scales.double().repeat_interleave(128, 1)[:, :num_in]
    return codes, scales, codes.double() * wide


def rounded(x: Tensor) -> Tensor:
    """Returns rows as the kernels round them, in float64."""
    parts = []
    for part in x.double().split(128, 1):
        scale = part.abs().amax(1, keepdim=True) / 448
        parts.append((part / scale).float().to(E4M3).double() * scale)
    return torch.cat(parts, 1)


def layer(num_out: int, num_in: int, fusion: Fusion = NO_FUSION, *, has_bias: bool = True):
    codes, scales, wide = random_codes(num_out, num_in)
    bias = torch.randn(num_out) if has_bias else None
    op = CudaBackend().quantized.fp8([codes[:3], codes[3:]], bias, fusion, scales=scales)
    assert isinstance(op, BlockFp8Linear)
    wide_bias = None if bias is None else bias.double().to(DEVICE)
    reference = ReferenceBackend().pack_linear(
        wide.to(DEVICE), wide_bias, fusion._replace(norm=None)
    )
    return op, reference


@pytest.mark.covering(1)
@pytest.mark.parametrize("num_in", [128, 200, 384])
@pytest.mark.parametrize("fusion", [NO_FUSION, SILU, OAI, Fusion(None, "relu2")])
def test_against_float64(num_in, fusion):
    op, reference = layer(40, num_in, fusion, has_bias=num_in != 128)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(5, num_in, device=DEVICE).to(dtype)
        expected = reference(rounded(x))
        found = op(x)
        assert found.dtype == torch.bfloat16 and found.shape == expected.shape
        torch.testing.assert_close(found.double(), expected, rtol=2**-6, atol=2e-3)
    assert op(x[:0]).shape == (0, op.num_out)


def test_a_norm_before_and_a_residual_after():
    weight = torch.rand(200, device=DEVICE) + 0.5
    op, reference = layer(30, 200, Fusion(Norm("rms", weight, None, 1e-5)))
    x, residual = torch.randn(4, 200, device=DEVICE), torch.randn(4, 30, device=DEVICE)
    normed = ReferenceBackend().rms_norm(x, weight, 1e-5)
    expected = reference(rounded(normed)) + residual
    found = op(x, residual.clone())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=5e-3)


def test_rows_are_rounded_in_groups():
    x = torch.randn(3, 300, device=DEVICE) * torch.tensor([[1.0], [1e-4], [1e3]], device=DEVICE)
    codes, scales = quantize_groups(x)
    assert codes.shape == (3, 384) and scales.shape == (3, 3)
    wide = codes.double() * scales.double().repeat_interleave(128, 1)
    torch.testing.assert_close(wide[:, :300], rounded(x), rtol=1e-6, atol=0)
    assert not wide[:, 300:].any()


def test_a_row_does_not_depend_on_the_others():
    """Both tiles are used."""
    op, _ = layer(40, 256)
    x = torch.randn(70, 256, device=DEVICE)
    whole = op(x)
    for some in (slice(0, 1), slice(60, 70), slice(69, 70)):
        assert torch.equal(op(x[some]), whole[some])


@pytest.mark.covering(1)
@pytest.mark.parametrize("scales_input", [False, True])
@pytest.mark.parametrize("fusion", [SILU, OAI])
def test_experts_have_the_bits_of_their_layers(fusion, scales_input, monkeypatch):
    ups = [layer(64, 200, fusion)[0] for _ in range(3)]
    downs = [layer(200, 32)[0] for _ in range(3)]
    grouped = CudaBackend().pack_experts(ups, downs, scales_input=scales_input)
    assert isinstance(grouped, CudaExperts)
    assert grouped.size_bytes == sum(op.size_bytes for op in (*ups, *downs))
    single = ExpertsOneByOne(ups, downs, scales_input)
    x, residual = torch.randn(4, 200, device=DEVICE), torch.randn(4, 200, device=DEVICE)
    chosen = torch.rand(4, 3).argsort(1)[:, :2].int().to(DEVICE)
    routing = Routing(chosen, torch.rand(4, 2, device=DEVICE))
    expected = single(x, routing, residual.clone())
    assert torch.equal(grouped(x, routing, residual.clone()), expected)
    monkeypatch.setattr(kernels, "FEW", kernels.MANY)
    assert torch.equal(grouped(x, routing, residual), expected)


def test_heads():
    ops = [layer(20, 48)[0] for _ in range(2)]
    heads = CudaBackend().pack_heads(ops)
    assert isinstance(heads, CudaHeads)
    x = torch.randn(3, 2, 48, device=DEVICE)
    assert torch.equal(heads(x), torch.stack([op(x[:, i]) for i, op in enumerate(ops)], 1))


def test_devices_without_fp8(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    codes, scales, _ = random_codes(8, 128)
    with pytest.raises(ValueError, match="8\\.9"):
        BlockFp8Linear([codes], None, scales=scales, device=torch.device("cuda"))
