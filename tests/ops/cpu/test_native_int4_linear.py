"""4-bit linear layers on every instruction set of this machine, against float64.

Rows of whole numbers up to 127 are not rounded, so that only the weights' own arithmetic is left.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ops import Fusion, Norm
from ops.backend import INT4_GROUPS, NF4_VALUES, NO_FUSION, TABLE_VALUES
from ops.cpu import native_library
from ops.cpu.native_fusion import ACTIVATIONS
from ops.cpu.native_quantized_linear import NATIVE, Int8Linear
from ops.linear import MAX_ZERO, round_to_4_bits, split_scales
from ops.reference import ReferenceBackend
from quant.int4 import Int4Weight, quantize_int4, quantize_nf4
from tests.support.memory.native_rows import check_rows_alone

pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
    pytest.mark.usefixtures("seeded"),
]
REFERENCE = ReferenceBackend()
FUSED = [(kind, gated) for kind in ACTIVATIONS if kind for gated in (False, True)]
FUSED.remove(("swiglu_oai", False))  # it exists only with gates
KINDS = ["centred", "zeros", "minimums", *TABLE_VALUES]
SHAPES = [
    (1, 64, 32),
    (3, 100, 70),
    (16, 640, 96),
    (5, 33, 1),
    (65, 1024, 300),
    (200, 96, 32),
    (4, 17, 40),
]


def random_weight(num_out: int, num_in: int, kind: str, group: int = 64) -> Int4Weight:
    shape = (num_out, -(-num_in // group))
    scales = ((torch.rand(shape) + 0.1) * 0.02).half().float()
    return Int4Weight(
        torch.randint(0, 16, (num_out, num_in), dtype=torch.uint8),
        scales,
        torch.randint(0, MAX_ZERO + 1, shape, dtype=torch.uint8) if kind == "zeros" else None,
        group,
        kind if kind in TABLE_VALUES else "int4",
        minimums=(scales * 20 * torch.randn(shape)).half().float() if kind == "minimums" else None,
    )


def spread(x: Tensor, weight: Int4Weight) -> Tensor:
    """Returns numbers per group, [out, groups], for each input in float64."""
    return x.double().repeat_interleave(weight.group, 1)[:, : weight.codes.shape[1]]


def plain(weight: Int4Weight) -> Tensor:
    """Returns the numbers that a weight stands for, in float64."""
    scales = spread(weight.scales, weight)
    if weight.channel_scales is not None:
        scales *= weight.channel_scales.double()[:, None]
    if weight.table in TABLE_VALUES:
        values = torch.tensor(TABLE_VALUES[weight.table], dtype=torch.float32)
        return values.double()[weight.codes.long()] * scales
    if weight.minimums is not None:
        return weight.codes.double() * scales - spread(weight.minimums, weight)
    zeros = 8.0 if weight.zeros is None else spread(weight.zeros, weight)
    return (weight.codes.double() - zeros) * scales


def magnitudes(weight: Int4Weight) -> Tensor:
    """Returns the magnitudes of what the kernel adds for a weight, in float64."""
    if weight.minimums is None:
        return plain(weight).abs()
    scaled = weight.codes.double() * spread(weight.scales, weight).abs()
    return scaled + spread(weight.minimums, weight).abs()


def whole_rows(rows: int, size: int) -> Tensor:
    x = torch.randint(-127, 128, (rows, size)).float()
    x[:, 0] = 127.0
    return x


@pytest.mark.covering(2)
@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", INT4_GROUPS)
def test_nothing_is_rounded_but_the_sums_of_groups(isa, m, k, n, kind, group):
    weight, x = random_weight(n, k, kind, group), whole_rows(m, k)
    y = weight.linear(None)(x)
    wide = plain(weight)
    # the products and sums of each group, and the two scales: half a unit in the last place each
    per_group = 2 if weight.minimums is None else 4
    terms = x.abs().double() @ magnitudes(weight).T
    bound = terms * (per_group * weight.scales.shape[1] + 6) * 2.0**-24
    assert bool(((y - x.double() @ wide.T).abs() <= bound).all())


@pytest.mark.covering(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", INT4_GROUPS)
@pytest.mark.parametrize("code", [0, 15])
@pytest.mark.parametrize("zero", [0, MAX_ZERO])
def test_the_largest_sums_do_not_overflow(isa, kind, group, code, zero):
    """All codes and inputs are the largest; some kernels add several products in 16 bits."""
    weight = random_weight(40, 256, kind, group)
    codes = torch.full_like(weight.codes, code)
    zeros = None if weight.zeros is None else torch.full_like(weight.zeros, zero)
    weight = weight._replace(codes=codes, zeros=zeros)
    x = torch.tensor([127.0, -127.0])[:, None].expand(2, 256)
    exact = x.double() @ plain(weight).T
    bound = 127 * magnitudes(weight).sum(1) * (4 * weight.scales.shape[1] + 6) * 2.0**-24
    assert bool(((weight.linear(None)(x) - exact).abs() <= bound).all())


def test_zero_points_that_the_kernels_cannot_hold_are_refused():
    weight = random_weight(40, 64, "zeros")
    assert weight.zeros is not None
    weight.zeros[3, 0] = MAX_ZERO + 1
    with pytest.raises(AssertionError, match="zero points of at most 16"):
        weight.linear(None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_rows_are_rounded(isa, kind, dtype):
    weight, x = random_weight(100, 700, kind), torch.randn(7, 700).to(dtype)
    y = weight.linear(None)(x)
    wide, x = plain(weight), x.double()
    step = x.abs().amax(1, keepdim=True) / 127
    bound = 0.51 * step * wide.abs().sum(1)
    assert bool(((y - x @ wide.T).abs() <= bound + 1e-6).all())


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [16, 64])
def test_a_row_does_not_depend_on_the_others(isa, kind, group):
    check_rows_alone(random_weight(150, 700, kind, group).linear(torch.randn(150)), 700)


@pytest.mark.covering(2)
@pytest.mark.parametrize(("activation", "is_gated"), FUSED)
@pytest.mark.parametrize("kind", KINDS)
def test_activation_and_bias_are_fused(isa, activation, is_gated, kind):
    weight, x, bias = random_weight(90, 64, kind), whole_rows(5, 64), torch.randn(90)
    minimums = weight.minimums
    weight = weight._replace(
        scales=weight.scales / 64, minimums=None if minimums is None else minimums / 64
    )
    fusion = Fusion(None, activation, is_gated)
    y = weight.linear(bias, fusion)(x)
    expected = REFERENCE.pack_linear(plain(weight), bias.double(), fusion)(x.double())
    assert y.dtype == torch.bfloat16
    assert torch.allclose(y.double(), expected, rtol=5e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("size", [64, 100, 2048])
def test_norm_is_fused(isa, kind, size):
    norm_bias = torch.randn(size) if kind == "layer" else None
    norm = Norm(kind, torch.rand(size) + 0.5, norm_bias, 1e-5)
    weight, x = random_weight(40, size, "centred"), torch.randn(7, size) * 3 + 1
    y = weight.linear(None, Fusion(norm))(x)
    wide = Norm(kind, norm.weight.double(), None if norm_bias is None else norm_bias.double(), 1e-5)
    normed = REFERENCE.pack_linear(torch.eye(size).double(), None, Fusion(wide))(x.double())
    step = normed.abs().amax(1, keepdim=True) / 127
    bound = 0.52 * step * plain(weight).abs().sum(1) + 1e-4
    assert bool(((y - normed @ plain(weight).T).abs() <= bound).all())


@pytest.mark.parametrize("kind", KINDS)
def test_residual_and_zeros_and_empty_and_strided_rows(isa, kind):
    layer = random_weight(50, 64, kind).linear(None)
    x, residual = torch.randn(9, 64), torch.randn(9, 50)
    expected = residual + layer(x)
    got = layer(x, residual=residual)
    assert got is residual
    assert torch.equal(got, expected)
    assert torch.equal(layer(torch.zeros(3, 64)), torch.zeros(3, 50))
    assert layer(torch.empty(0, 64)).shape == (0, 50)
    wide = torch.randn(4, 200)
    assert torch.equal(layer(wide[:, 30:94]), layer(wide[:, 30:94].contiguous()))


def test_int8_weights_are_used_as_they_are(isa):
    weight = torch.randint(-128, 128, (75, 100), dtype=torch.int8)
    scales, x, bias = torch.rand(75) + 0.1, whole_rows(9, 100), torch.randn(75)
    y = Int8Linear(weight, bias, scales=scales)(x)
    expected = x.double() @ (weight.double() * scales[:, None]).T + bias
    assert torch.allclose(y.double(), expected, rtol=1e-6, atol=1e-3)
    gated = Int8Linear(weight[:70], None, Fusion(None, "silu", True), scales=scales[:70])
    wide = (weight[:70].double() * scales[:70, None]) / 1e3
    small = Int8Linear(weight[:70], None, Fusion(None, "silu", True), scales=scales[:70] / 1e3)
    assert gated(x).shape == (9, 35)
    expected = REFERENCE.pack_linear(wide, None, Fusion(None, "silu", True))(x.double())
    assert torch.allclose(small(x).double(), expected, rtol=5e-3, atol=1e-4)


# -- FP4


def fp4_weight(scales: Tensor, group: int, channel_scales: Tensor | None = None) -> Int4Weight:
    codes = torch.randint(0, 16, (len(scales), scales.shape[1] * group), dtype=torch.uint8)
    codes[:, ::group] = 7  # no group has only zeros
    return Int4Weight(codes, scales, None, group, "fp4", channel_scales=channel_scales)


def test_mxfp4_is_exact(isa):
    """Scales are e8m0 within 1 : 2^38 of the output's largest, in groups of 32."""
    for lowest in (-127, -40, 60):
        exponents = lowest + torch.randint(0, 39, (70, 5)).float()
        exponents[:, 0], exponents[:, 1] = lowest, lowest + 38
        weight = fp4_weight(torch.ldexp(torch.tensor(1.0), exponents), 32)
        wide = weight.linear(None)(torch.eye(160) * 127).T.double()
        assert torch.equal(wide, (plain(weight) * 127).float().double())
        assert torch.equal(weight.plain().double(), plain(weight))


def test_nvfp4_is_exact(isa):
    """Scales are all numbers of e4m3 times one fp32 per part of the weight, in groups of 16."""
    numbers = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    scales = torch.stack([numbers[torch.randperm(126)] for _ in range(36)])
    factors = torch.cat([torch.full((20,), 7.3e-5), torch.full((16,), 1.19e-3)])
    for channel_scales in (None, factors):
        weight = fp4_weight(scales, 16, channel_scales)
        got = weight.linear(None)(torch.eye(scales.shape[1] * 16) * 127).T.double()
        exact = plain(weight) * 127
        # without factors nothing is rounded; with them the end of the product is, once
        allowed = 0 if channel_scales is None else 2.0**-24
        assert bool(((got - exact).abs() <= allowed * exact.abs()).all())
        assert torch.equal(weight.plain(), plain(weight).float())


def test_scales_that_cannot_be_exact_are_refused(isa):
    scales = torch.ones(3, 4)
    for bad in ([2.0**20, 1, 1, 2.0**-20], [1, 1.0001, 1, 1], [1, float("nan"), 1, 1]):
        scales[1] = torch.tensor(bad)
        with pytest.raises(ValueError, match="FP4 scales of output 1"):
            fp4_weight(scales, 32).linear(None)
    # a group of zeros may have any scale
    scales[1] = torch.tensor([1, 2.0**127, 2.0**-127, 0.5])
    weight = fp4_weight(scales, 32)
    weight.codes[1, 32:96] = 8
    got = weight.linear(None)(torch.eye(128) * 127).T.double()
    assert torch.equal(got, plain(weight) * 127)


# -- rounding


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_scales_are_kept_exactly(dtype):
    spread = 2.0 ** torch.randint(-11, 1, (40, 9))
    scales = ((torch.rand(40, 9) * 0.75 + 0.25) * spread).to(dtype) * 1e-3
    half_scales, channels = split_scales(scales)
    assert torch.equal(half_scales.float() * channels[:, None], scales.float())
    assert float(half_scales.abs().max()) <= 1.0
    half_scales, channels = split_scales(torch.zeros(2, 3))
    assert torch.equal(half_scales.float() * channels[:, None], torch.zeros(2, 3))
    for extreme in (3e38, 1e-44):  # their next power of two is not finite or is subnormal in fp32
        half_scales, channels = split_scales(torch.tensor([[extreme, 0.0]]))
        assert torch.isfinite(channels).all() and torch.isfinite(half_scales).all()
        assert float(half_scales[0, 0]) * float(channels[0]) == pytest.approx(
            extreme, rel=1e-3, abs=1e-41
        )


@pytest.mark.parametrize("size", [64, 100, 256])
def test_int4_is_the_nearest_step(size):
    weight = torch.randn(30, size)
    rounded = quantize_int4(weight)
    scales = rounded.scales.repeat_interleave(64, 1)[:, :size]
    error = (plain(rounded) - weight).abs() / scales.abs()
    is_cut = weight / scales > 7  # the side of the group that has one step less
    assert float(error[~is_cut].max()) <= 0.5 + 1e-5
    assert float(error[is_cut].max()) <= 1.01
    again = quantize_int4(plain(rounded).float())
    assert torch.equal(again.codes, rounded.codes)
    assert torch.equal(again.scales, rounded.scales)


@pytest.mark.parametrize("size", [64, 100, 256])
def test_nf4_is_the_nearest_value(size):
    weight = torch.randn(30, size)
    rounded = quantize_nf4(weight)
    scales = rounded.scales.repeat_interleave(64, 1)[:, :size]
    values = torch.tensor(NF4_VALUES).double()
    nearest = (weight[..., None] / scales[..., None] - values).abs().amin(-1)
    assert torch.allclose((plain(rounded) - weight).abs() / scales, nearest, atol=1e-6)


@pytest.mark.parametrize("quantize", [quantize_int4, quantize_nf4])
def test_groups_of_zeros_stay_zeros(isa, quantize):
    weight = torch.randn(20, 128)
    weight[3], weight[5, :64] = 0.0, 0.0
    rounded = quantize(weight)
    assert bool((plain(rounded)[weight == 0] == 0).all())
    assert bool((rounded.linear(None)(torch.randn(2, 128))[:, 3] == 0).all())


# -- rounding and packing in one pass


def check_rounded(
    parts: list[Tensor],
    kind: str,
    group: int = 64,
    fusion: Fusion = NO_FUSION,
    bias: Tensor | None = None,
) -> None:
    """Compares with rounding by torch, to the last bit."""
    how = {"is_nf4": kind == "nf4", "is_searched": kind == "searched"}
    codes = round_to_4_bits(torch.cat(parts), group, **how)
    table = "nf4" if kind == "nf4" else "int4"
    expected = NATIVE.int4(*codes, None, bias, fusion, group=group, table=table)
    got = NATIVE.rounded4(parts, bias, fusion, group=group, **how)
    x = torch.cat([torch.randn(5, expected.num_in), torch.eye(expected.num_in)])
    assert torch.equal(got(x), expected(x))
    assert got.size_bytes == expected.size_bytes


ROUNDED = ["nearest", "searched", "nf4"]


@pytest.mark.covering(2)
@pytest.mark.parametrize(("n", "k"), [(32, 64), (70, 100), (1, 33), (300, 1024), (33, 32)])
@pytest.mark.parametrize("kind", ROUNDED)
@pytest.mark.parametrize("group", INT4_GROUPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_pass_rounds_as_torch_does(isa, n, k, kind, group, dtype):
    check_rounded([torch.randn(n, k).to(dtype)], kind, group)


@pytest.mark.parametrize("kind", ROUNDED)
def test_one_pass_takes_parts_gates_and_strides(isa, kind):
    wide = torch.randn(40, 500)
    parts = [wide[:, 100:300], torch.randn(24, 200), torch.randn(16, 400)[:, ::2]]
    check_rounded(parts, kind, bias=torch.randn(80))
    check_rounded([torch.randn(8, 64) for _ in range(5)], kind)
    gates = [torch.randn(45, 64), torch.randn(45, 64)]
    check_rounded(gates, kind, fusion=Fusion(None, "silu", True), bias=torch.randn(90))


@pytest.mark.parametrize("kind", ROUNDED)
def test_one_pass_rounds_ties_and_extremes_as_torch_does(isa, kind):
    """Equal magnitudes of both signs, groups of zeros, and scales whose fp16 is subnormal, zero or
    rounds to the next power of two."""
    few = torch.randint(-2, 3, (64, 256)).bfloat16()
    few[3], few[5, :64] = 0.0, 0.0
    spread = torch.randn(64, 256) * torch.logspace(-12, 0, 256)
    near = torch.randn(32, 128).clamp(-7.999, 7.999)
    near[:, 5] = -7.9999
    tiny = torch.randn(32, 128) * 1e-42
    for weight in (few, spread, near, spread * 1e-30, spread * 1e36, torch.zeros(32, 64), tiny):
        check_rounded([weight], kind)
