"""Products with 4-bit and with fp8 weights on CUDA, against fp64."""

from __future__ import annotations

import os

import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

import triton
import triton.language as tl

from ops.backend import (
    FP4_VALUES,
    INT4_GROUPS,
    NF4_VALUES,
    NO_FUSION,
    TABLES,
    Fusion,
    LinearOp,
    Norm,
)
from ops.cuda.backend import CudaLinears
from ops.cuda.linear import Fp8Linear, PlainLinear
from ops.reference import ReferenceBackend, _activate
from ops.triton_kernels.linear import ScaledWeight, Tile, scaled_linear
from ops.triton_kernels.linear4 import CODES, int4_linear, unpack
from ops.triton_kernels.rows import quantize_rows
from quant.formats.weights import Weight8
from quant.int4 import Int4Weight, quantize_int4, quantize_nf4
from tests.support.profile import every_day

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TILES = (
    Tile(16, 32, 32, 4, 3, swap=True),
    Tile(8, 16, 256, 4, 3, swap=True),
    Tile(64, 128, 64, 4, 3, swap=True),
)
GATED = Fusion(Norm("rms", 1 + 0.2 * torch.randn(90), None, 1e-5), "silu", True)
EDGES = {"plain": NO_FUSION, "relu": Fusion(None, "relu"), "gated": GATED}

pytestmark = pytest.mark.usefixtures("seeded")


def with_zeros(weight: torch.Tensor, group: int) -> Int4Weight:
    groups = -(-weight.shape[1] // group)
    zeros = torch.randint(0, 17, (len(weight), groups), dtype=torch.uint8)
    return quantize_int4(weight, group)._replace(zeros=zeros)


def with_minimums(weight: torch.Tensor, group: int) -> Int4Weight:
    rounded = quantize_int4(weight, group)
    minimums = (rounded.scales * (8 + torch.randn(rounded.scales.shape))).half().float()
    return rounded._replace(minimums=minimums)


def fp4(weight: torch.Tensor, group: int) -> Int4Weight:
    """Returns random FP4 weights with e4m3 scales and a factor for each output."""
    shape = (len(weight), -(-weight.shape[1] // group))
    scales = (448 * torch.rand(shape)).to(torch.float8_e4m3fn).float()
    codes = torch.randint(0, 16, weight.shape, dtype=torch.uint8)
    return Int4Weight(
        codes, scales, None, group, "fp4", channel_scales=1e-3 * (1 + torch.rand(len(weight)))
    )


def iq4(weight: torch.Tensor, group: int) -> Int4Weight:
    """Returns random codes of IQ4_NL with scales of either sign."""
    scales = torch.randn(len(weight), -(-weight.shape[1] // group)).half().float() / 1024
    codes = torch.randint(0, 16, weight.shape, dtype=torch.uint8)
    return Int4Weight(codes, scales, None, group, "iq4")


KINDS = {
    "int4": quantize_int4,
    "zeros": with_zeros,
    "nf4": quantize_nf4,
    "minimums": with_minimums,
    "fp4": fp4,
    "iq4": iq4,
}


def layer4(weight: Int4Weight, bias=None, fusion: Fusion = NO_FUSION) -> LinearOp:
    return weight.linear(bias, fusion, CudaLinears(DEVICE))


def reference(x: torch.Tensor, plain: torch.Tensor, bias, fusion: Fusion, dtype=torch.int8):
    """Computes in fp64, with rows rounded as the layer rounds them. plain: [out, in]."""
    norm = fusion.norm and fusion.norm._replace(weight=fusion.norm.weight.to(DEVICE))
    codes, scales = quantize_rows(x, norm, dtype=dtype)
    codes = codes[:, : plain.shape[1]].double()
    y = codes * scales.double()[:, None] @ plain.to(DEVICE).double().T
    y = y if bias is None else y + bias.to(DEVICE).double()
    if fusion.is_gated:
        gate, up = y.chunk(2, 1)
        return _activate(gate, fusion.activation) * up
    return y if fusion.activation is None else _activate(y, fusion.activation)


def check_close(found: torch.Tensor, want: torch.Tensor) -> None:
    rtol = 2**-7 if found.dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(found.double(), want, rtol=rtol, atol=2e-5 * want.abs().max().item())


def test_values_are_the_cpu_kernels():
    assert [n / 127 for n in CODES["nf4"]] == list(NF4_VALUES)
    assert [n / 2 for n in CODES["fp4"]] == list(FP4_VALUES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", INT4_GROUPS)
def test_scales_are_searched_as_on_the_cpu(group, dtype):
    weight = (torch.randn(40, 300) * torch.logspace(-3, 0, 300)).to(dtype)
    expected = layer4(quantize_int4(weight, group, is_searched=True))
    parts = [weight[:10], weight[10:]]
    linears = CudaLinears(DEVICE)
    got = linears.rounded4(parts, None, group=group, is_nf4=False, is_searched=True)
    for ours, theirs in zip(got.weight, expected.weight, strict=True):
        same = torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs
        assert same


@pytest.mark.exhaustive
@pytest.mark.parametrize("quantize", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("group", INT4_GROUPS)
def test_int4_products(group, quantize):
    for rows, outputs, inputs in ((1, 16, 64), (19, 38, 300)):
        weight = quantize(torch.randn(outputs, inputs), group)
        layer, x = layer4(weight), torch.randn(rows, inputs, device=DEVICE)
        codes = quantize_rows(x, multiple=max(group, 64))
        outs = [
            int4_linear(codes, layer.weight, torch.empty(rows, outputs, device=DEVICE), tile=tile)
            for tile in TILES
        ]
        check_close(outs[0], reference(x, weight.plain(), None, NO_FUSION))
        assert all(torch.equal(outs[0], other) for other in outs)


# Every kind and every edge at least twice each day.
@pytest.mark.parametrize(
    ("kind", "group", "edge"),
    every_day(
        (0, 1, 4, 5, 6, 8, 9, 11),
        [
            (*kind, edge)
            for kind in (("zeros", 32), ("minimums", 64), ("fp4", 16), ("iq4", 32))
            for edge in EDGES
        ],
    ),
)
def test_int4_layer(kind, group, edge):
    fusion = EDGES[edge]
    weight, bias = KINDS[kind](torch.randn(36, 90), group), torch.randn(36)
    x = torch.randn(20, 90, device=DEVICE)
    layer, want = layer4(weight, bias, fusion), reference(x, weight.plain(), bias, fusion)
    found = layer(x)
    assert found.dtype == torch.bfloat16
    check_close(found, want)
    assert torch.equal(layer(x[3:4]), found[3:4]) and torch.equal(layer(x[2:9]), found[2:9])
    assert layer(x[:0]).shape == (0, 18 if fusion.is_gated else 36)
    if not fusion.is_gated:
        residual = torch.randn(20, 36, device=DEVICE)
        total = want + residual.double()
        check_close(layer(x, residual), total)


def test_int4_takes_half_the_bytes():
    layer = layer4(quantize_int4(torch.randn(64, 512), 64))
    assert layer.size_bytes == 64 * 512 // 2 + 4 * 64 * 8 + 4 * 64


def test_int4_nan_and_infinity_stay_in_their_row():
    layer, x = layer4(quantize_int4(torch.randn(20, 64))), torch.randn(4, 64, device=DEVICE)
    x[1, 3], x[2] = float("nan"), 0
    found = layer(x)
    assert found.isfinite().all(1).tolist() == [True, False, True, True] and not found[2].any()


@triton.jit
def unpack_kernel(packed_at, zeros_at, out_at, TABLE: tl.constexpr, ASM: tl.constexpr):
    at = tl.arange(0, 256)
    low, high = unpack(tl.load(packed_at + at), tl.load(zeros_at + at), TABLE, ASM)
    tl.store(out_at + at, low)
    tl.store(out_at + 256 + at, high)


@pytest.mark.cuda
@pytest.mark.skipif(DEVICE.type != "cuda", reason="machine instructions")
def test_unpacking_by_words_equals_unpacking_by_bytes():
    """The machine's byte permutations equal the interpreter's arithmetic for all codes."""
    packed = torch.arange(256, device=DEVICE).to(torch.uint8).view(torch.int8)
    for table in range(len(TABLES)):
        for zero in (0, 8, 16):
            zeros, outs = torch.full_like(packed, zero), []
            for asm in (False, True):
                outs.append(torch.empty(512, dtype=torch.int8, device=DEVICE))
                unpack_kernel[(1,)](packed, zeros, outs[-1], TABLE=table, ASM=asm)
            assert torch.equal(*outs)


def fp8_plain(weight: torch.Tensor) -> torch.Tensor:
    """Returns [out, in] fp32, rounded to e4m3 per channel by torch."""
    steps = weight.abs().amax(1, keepdim=True) / 448
    return (weight / steps).to(torch.float8_e4m3fn).float() * steps


def needs_fp8() -> None:
    if DEVICE.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("a GPU without fp8")


@pytest.mark.parametrize("fusion", EDGES.values(), ids=EDGES)
def test_fp8_layer(fusion):
    needs_fp8()
    weight, bias = torch.randn(32, 90), torch.randn(32)
    x = torch.randn(20, 90, device=DEVICE)
    want = reference(x, fp8_plain(weight), bias, fusion, torch.float8_e4m3fn)
    layer = Fp8Linear([weight[:10], weight[10:]], bias, fusion, device=DEVICE)
    # a weight halfway between two steps may be rounded either way
    far = (layer(x).double() - want).abs().max()
    assert far <= 0.01 * want.abs().max()
    assert torch.equal(layer(x[3:9]), layer(x[3 : 7 + 2]))
    assert layer(x[:0]).shape == (0, layer.num_out)


@pytest.mark.parametrize("fusion", EDGES.values(), ids=EDGES)
def test_fp8_weights_of_a_checkpoint_are_used_as_they_are(fusion):
    """Their scales are not those that rounding would choose."""
    needs_fp8()
    codes = (torch.randn(32, 90) * 30).to(torch.float8_e4m3fn)
    scales, bias = 0.01 + 0.01 * torch.rand(32, 1), torch.randn(32)
    x = torch.randn(20, 90, device=DEVICE)
    weight = codes.float() * scales
    stored = Weight8(codes, scales, 90)
    layer = stored.linear(bias, fusion, CudaLinears(DEVICE))
    assert isinstance(layer, Fp8Linear)
    want = reference(x, weight, bias, fusion, torch.float8_e4m3fn)
    assert (layer(x).double() - want).abs().max() <= 0.01 * want.abs().max()
    rounded = Fp8Linear([weight], bias, fusion, device=DEVICE)
    assert (layer(x) - rounded(x)).abs().max() > 0
    half = stored.scaled(0.5).linear(None, NO_FUSION, CudaLinears(DEVICE))
    whole = stored.linear(None, NO_FUSION, CudaLinears(DEVICE))
    torch.testing.assert_close(2 * half(x), whole(x))


def test_fp8_codes_are_torchs():
    needs_fp8()
    x = torch.cat([torch.randn(6, 200), 1e-3 * torch.randn(6, 200)], 1).to(DEVICE)
    codes, scales = quantize_rows(x, dtype=torch.float8_e4m3fn)
    steps = 448 / x.abs().amax(1, keepdim=True)
    assert torch.equal(codes.float(), (x * steps).to(torch.float8_e4m3fn).float())
    torch.testing.assert_close(scales, x.abs().amax(1) / 448)


def test_fp8_product():
    needs_fp8()
    x, w = torch.randn(5, 112, device=DEVICE), torch.randn(40, 112, device=DEVICE)
    rows, weight = (quantize_rows(each, dtype=torch.float8_e4m3fn) for each in (x, w))
    want = (rows.codes.double() * rows.scales.double()[:, None]) @ (
        weight.codes.double() * weight.scales.double()[:, None]
    ).T
    for tile in (Tile(16, 32, 64, 4, 3), Tile(8, 16, 32, 4, 3, swap=True)):
        out = torch.empty(5, 40, device=DEVICE)
        found = scaled_linear(rows, ScaledWeight(*weight), out, tile=tile)
        torch.testing.assert_close(found.double(), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("fusion", EDGES.values(), ids=EDGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_layer(fusion, dtype):
    """The layer equals the reference's steps in the same type."""
    weight, bias = torch.randn(36, 90).to(dtype), torch.randn(36).to(dtype)
    x = torch.randn(7, 90).to(dtype).to(DEVICE)
    norm = fusion.norm and fusion.norm._replace(weight=fusion.norm.weight.to(DEVICE))
    want = ReferenceBackend().pack_linear(
        weight.double().to(DEVICE), bias.double().to(DEVICE), fusion._replace(norm=norm)
    )(x.double())
    layer = PlainLinear(weight, bias, fusion, device=DEVICE)
    found, rtol = layer(x), 1e-4 if dtype == torch.float32 else 0.03
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), want, rtol=rtol, atol=rtol * want.abs().max().item())
    if not fusion.is_gated:
        residual = torch.randn(7, 36).to(dtype).to(DEVICE)
        total = want + residual.double()
        found = layer(x, residual)
        torch.testing.assert_close(
            found.double(), total, rtol=rtol, atol=0.1 if rtol > 0.01 else 1e-3
        )
