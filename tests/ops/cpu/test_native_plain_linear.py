"""Linear layers on bf16 and fp32 weights, on every instruction set of this machine.

Whole numbers need no rounding before the result, so most comparisons are exact; the others have the
bounds of their types: u = 2^-24 for every sum in fp32, 2^-8 for a result in bf16.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ops import Fusion, Norm
from ops.cpu import native_library
from ops.cpu.backend import CpuBackend
from ops.cpu.native_fusion import ACTIVATIONS
from ops.cpu.native_plain_linear import PlainLinear
from ops.linear import PlainLinear as SeparateCalls
from ops.reference import ReferenceBackend

pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
    pytest.mark.usefixtures("seeded"),
]
REFERENCE = ReferenceBackend()
FUSED = [(kind, gated) for kind in ACTIVATIONS if kind for gated in (False, True)]
FUSED.remove(("swiglu_oai", False))  # it exists only with gates
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 1, 1), (1, 64, 32), (3, 17, 70), (5, 255, 33), (13, 641, 96), (40, 1030, 300)]
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


def whole(*shape: int, dtype: torch.dtype, largest: int = 9) -> Tensor:
    return torch.randint(-largest, largest + 1, shape).to(dtype)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns the exact product of whole numbers, rounded once to their type."""
    y = x.double() @ weight.double().T
    return (y if bias is None else y + bias.double()).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "k", "n"), [*SHAPES, (300, 520, 64)])
def test_product_is_within_the_bound_of_its_type(isa, dtype, m, k, n):
    x, weight, bias = (torch.randn(s).to(dtype) for s in ((m, k), (n, k), (n,)))
    y = PlainLinear(weight, bias)(x)
    exact = x.double() @ weight.double().T + bias.double()
    sums = (k + 1) * 2.0**-24 * (x.double().abs() @ weight.double().abs().T + bias.double().abs())
    assert y.dtype == dtype
    assert bool(((y.double() - exact).abs() <= sums + UNIT[dtype] * exact.abs()).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "n"), [(1, 1), (17, 70), (258, 33), (512, 96), (1301, 40)])
def test_whole_numbers_sum_exactly(isa, dtype, k, n):
    """Covers every number of rows that the kernels distinguish, and several blocks."""
    weight = whole(n, k, dtype=dtype)
    layer = PlainLinear(weight, None)
    x = whole(300, k, dtype=dtype)
    expected = product(x, weight)
    for m in [*range(1, 41), 127, 129, 300]:
        assert torch.equal(layer(x[:m]), expected[:m]), f"{m} rows"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "fusion",
    [
        Fusion(),
        Fusion(Norm("rms", torch.rand(1301) + 0.5, None, 1e-5), "silu", True),
        Fusion(Norm("layer", torch.rand(1301) + 0.5, torch.randn(1301), 1e-5), "gelu"),
    ],
    ids=["plain", "rms-gated", "layer-gelu"],
)
def test_a_row_does_not_depend_on_the_others(isa, dtype, fusion):
    norm = fusion.norm
    if norm is not None:
        bias = None if norm.bias is None else norm.bias.to(dtype)
        fusion = fusion._replace(norm=norm._replace(weight=norm.weight.to(dtype), bias=bias))
    layer = PlainLinear(torch.randn(150, 1301).to(dtype), torch.randn(150).to(dtype), fusion)
    x = torch.randn(300, 1301).to(dtype)
    alone = torch.cat([layer(x[i : i + 1]) for i in range(300)])
    for m in (2, 5, 12, 13, 24, 31, 64, 129, 300):
        assert torch.equal(layer(x[:m]), alone[:m]), f"{m} rows"
        assert torch.equal(layer(x[-m:]), alone[-m:]), f"the last {m} rows"
    threads = native_library.num_threads()
    native_library.set_num_threads(1)
    assert torch.equal(layer(x), alone)
    native_library.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "is_gated"), FUSED)
def test_activation_and_bias_are_fused(isa, dtype, kind, is_gated):
    # about 10 bits before the rounding, in the range where activations are not linear
    x, weight = whole(14, 70, dtype=dtype), whole(90, 70, dtype=dtype, largest=31) / 256
    bias = whole(90, dtype=dtype)
    fusion = Fusion(None, kind, is_gated)
    got = PlainLinear(weight, bias, fusion)(x)
    # as separate operators: the product is rounded, then the activation, then their product
    expected = SeparateCalls(CpuBackend(), lambda x: product(x, weight, bias), fusion)(x)
    assert got.dtype == dtype and got.shape == expected.shape
    if kind == "relu":  # relu has no error but roundings
        assert torch.equal(got, expected)
    # exp and erf are good to 2e-7 of the argument, which may change a rounding of the activation
    bound = (2 if is_gated else 1) * 2 * UNIT[dtype] * expected.abs() + 2e-5
    assert bool(((got.double() - expected.double()).abs() <= bound).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 30])
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu", None])
@pytest.mark.parametrize("size", [50, 64])
def test_residual_is_added_to_the_rounded_result(isa, dtype, rows, kind, size):
    x, weight = torch.randn(rows, 64).to(dtype), torch.randn(size, 64).to(dtype)
    residual = torch.randn(rows, size).to(dtype)
    layer = PlainLinear(weight, None, Fusion(None, kind))
    expected = residual + layer(x)
    got = layer(x, residual=residual)
    assert got is residual
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("size", [31, 64, 100, 520])
def test_norm_is_fused(isa, dtype, kind, size):
    """The weight is the identity, so the result is the normalized rows, rounded once."""
    norm_bias = torch.randn(size).to(dtype) if kind == "layer" else None
    norm = Norm(kind, (torch.rand(size) + 0.5).to(dtype), norm_bias, 1e-5)
    x = (torch.randn(7, size) * 3 + 1).to(dtype)
    y = PlainLinear(torch.eye(size).to(dtype), None, Fusion(norm))(x)
    wide = Norm(kind, norm.weight.double(), None if norm_bias is None else norm_bias.double(), 1e-5)
    exact = REFERENCE.pack_linear(torch.eye(size).double(), None, Fusion(wide))(x.double())
    assert bool(((y.double() - exact).abs() <= UNIT[dtype] * exact.abs() + 5e-6).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_stay_in_their_row(isa, dtype):
    weight = whole(40, 33, dtype=dtype)
    x = whole(6, 33, dtype=dtype)
    expected = product(x, weight)
    x[1, 32], x[4, 0] = torch.nan, torch.inf
    for kind in (None, "silu", "gelu", "gelu_tanh", "relu", "relu2"):
        y = PlainLinear(weight, None, Fusion(None, kind))(x)
        assert bool(y[1].isnan().all()), f"{kind}"
    gated = PlainLinear(weight, None, Fusion(None, "swiglu_oai", True))(x)
    assert bool(gated[1].isnan().all())
    y = PlainLinear(weight, None)(x)
    by_sign = torch.where(weight[:, 0] == 0, torch.nan, torch.inf * weight[:, 0])
    assert torch.equal(y[4].nan_to_num(7.0), by_sign.nan_to_num(7.0))
    others = [0, 2, 3, 5]
    assert torch.equal(y[others], expected[others])


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_at_the_ends_of_the_range(isa, dtype):
    """The cases are the largest finite numbers, overflow, and ties that bf16 rounds to even."""
    big = torch.finfo(dtype).max
    weight = torch.tensor([[big, 0.0], [0.0, big], [1.0, 1.0]]).to(dtype)
    x = torch.tensor([[1.0, 2.0], [-1.0, -2.0], [256.0, 1.0], [258.0, 1.0]]).to(dtype)
    got = PlainLinear(weight, None)(x)
    expected = (x.double() @ weight.double().T).to(dtype)
    assert torch.equal(got, expected)
    assert got[0, 0] == big and got[0, 1] == torch.inf and got[1, 1] == -torch.inf


@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_and_strided_operands(isa, dtype):
    weight = whole(40, 64, dtype=dtype)
    layer = PlainLinear(weight, None)
    assert layer(torch.empty(0, 64, dtype=dtype)).shape == (0, 40)
    wide = whole(4, 200, dtype=dtype)
    assert torch.equal(layer(wide[:, 30:94]), product(wide[:, 30:94], weight))
    assert torch.equal(layer(wide[:, :128:2]), product(wide[:, :128:2], weight))
    x = wide[:, :64].contiguous()
    assert torch.equal(PlainLinear(weight.t().contiguous().t(), None)(x), product(x, weight))
    part = whole(40, 100, dtype=dtype)[:, 7:71]
    assert torch.equal(PlainLinear(part, None)(x), product(x, part))
    out = torch.zeros(4, 60, dtype=dtype)
    layer(x, residual=out[:, 10:50])
    assert torch.equal(out[:, 10:50], product(x, weight))
    assert not out[:, :10].any() and not out[:, 50:].any()


def test_the_weight_is_a_copy(isa):
    weight, bias = torch.ones(8, 8), torch.ones(8)
    layer = PlainLinear(weight, bias)
    weight.zero_(), bias.zero_()
    assert torch.equal(layer(torch.ones(1, 8)), torch.full((1, 8), 9.0))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_the_back_end_uses_native_layers_where_there_is_a_kernel(dtype):
    layer = CpuBackend().pack_linear(torch.ones(8, 8, dtype=dtype))
    assert isinstance(layer, PlainLinear) == (dtype in DTYPES)
    assert layer(torch.ones(2, 8, dtype=dtype)).dtype == dtype
