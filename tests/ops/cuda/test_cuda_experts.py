"""Mixtures of experts in Triton: the bits of their layers called one by one."""

from __future__ import annotations

import os
from itertools import product

import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

from torch import Tensor

from ops.backend import NO_FUSION, Fusion, LinearOp, Routing
from ops.cuda.backend import CudaBackend
from ops.cuda.experts import CudaExperts
from ops.cuda.linear import CudaLinear
from ops.experts import ExpertsOneByOne
from ops.reference import ReferenceBackend
from ops.triton_kernels.experts import sort_pairs
from ops.triton_kernels.linear import Tile
from tests.support.profile import every_day

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SILU = Fusion(None, "silu", True)
OAI = Fusion(None, "swiglu_oai", True)
KINDS = ["int8", "int4", "zeros", "nf4"]

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.fixture(scope="module")
def backend():
    return CudaBackend()


def packed(backend, weight: Tensor, bias: Tensor | None, fusion: Fusion, kind: str) -> LinearOp:
    if kind == "int8":
        return backend.quantized.int8([weight], bias, fusion)
    if kind == "zeros":
        shape = (len(weight), -(-weight.shape[1] // 32))
        scales, zeros = torch.rand(shape) * 0.02, torch.randint(0, 16, shape, dtype=torch.uint8)
        codes = torch.randint(0, 16, weight.shape, dtype=torch.uint8)
        return backend.quantized.int4(codes, scales, zeros, bias, fusion, group=32)
    return backend.quantized.rounded4([weight], bias, fusion, group=64, is_nf4=kind == "nf4")


def layers(backend, kind: str, num_experts: int, size: int, inner: int, fusion: Fusion):
    wide = 2 * inner if fusion.is_gated else inner
    ups, downs = [], []
    for _ in range(num_experts):
        up, down = torch.randn(wide, size) / size**0.5, torch.randn(size, inner) / inner**0.5
        ups.append(packed(backend, up, torch.randn(wide), fusion, kind))
        downs.append(packed(backend, down, torch.randn(size), NO_FUSION, kind))
    return ups, downs


def random_routing(rows: int, num_experts: int, top_k: int) -> Routing:
    chosen = torch.rand(rows, num_experts).argsort(1)[:, :top_k]
    return Routing(chosen.int().to(DEVICE), torch.rand(rows, top_k, device=DEVICE))


def check_equal(ups, downs, x, routing, *, scales_input=False) -> None:
    grouped = CudaExperts(ups, downs, scales_input)
    single = ExpertsOneByOne(ups, downs, scales_input)
    rtol = 2**-7 if x.dtype == torch.bfloat16 else 0  # the interpreter truncates
    torch.testing.assert_close(grouped(x, routing), single(x, routing), rtol=rtol, atol=0)
    residual = torch.randn(len(x), downs[0].num_out, device=DEVICE)
    expected = single(x, routing, residual.clone())
    assert torch.equal(grouped(x, routing, residual), expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "inner"), [(64, 32), (90, 37)])
def test_grouped_and_single_calls_have_the_same_bits(backend, kind, size, inner):
    ups, downs = layers(backend, kind, 5, size, inner, SILU)
    for rows in (1, 3, 21):
        x = torch.randn(rows, size, device=DEVICE)
        check_equal(ups, downs, x, random_routing(rows, 5, 3))


@pytest.mark.parametrize(
    ("fusion", "scales_input"),
    every_day((0, 3), list(product([OAI, Fusion(None, "relu2")], [False, True]))),
)
def test_kinds_of_experts(backend, fusion, scales_input):
    ups, downs = layers(backend, "int8", 4, 48, 32, fusion)
    x = torch.randn(6, 48, device=DEVICE)
    check_equal(ups, downs, x, random_routing(6, 4, 2), scales_input=scales_input)
    routing = random_routing(6, 4, 1)
    check_equal(ups, downs, x.bfloat16(), routing, scales_input=scales_input)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("shares", [1, 3])
def test_uneven_experts(backend, kind, shares, monkeypatch):
    """One expert's rows take several blocks; others have none."""
    monkeypatch.setattr("ops.triton_kernels.experts.MAX_SHARES", shares)
    ups, downs = layers(backend, kind, 6, 64, 32, SILU)
    x, weights = torch.randn(70, 64, device=DEVICE), torch.rand(70, 2, device=DEVICE)
    one = torch.tensor([[4, 1]], dtype=torch.int32, device=DEVICE).expand(70, 2)
    check_equal(ups, downs, x, Routing(one, weights))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_against_float64(backend, kind):
    reference = ReferenceBackend()
    up, down = torch.randn(4, 80, 64) / 8, torch.randn(4, 64, 40) / 6
    experts = CudaExperts(
        [packed(backend, w, None, SILU, kind) for w in up],
        [packed(backend, w, None, NO_FUSION, kind) for w in down],
        False,
    )
    x, routing = torch.randn(10, 64, device=DEVICE), random_routing(10, 4, 2)
    exact = reference.pack_experts(
        [reference.pack_linear(w.double().to(DEVICE), None, SILU) for w in up],
        [reference.pack_linear(w.double().to(DEVICE)) for w in down],
    )(x.double(), routing)
    error = (experts(x, routing).double() - exact).norm() / exact.norm()
    assert error < {"int8": 0.02, "int4": 0.25}[kind]


def test_fp8_experts(backend):
    """Tiles differ between the calls, and so does the order of their sums."""
    fp8 = backend.quantized.fp8
    ups = [fp8([torch.randn(64, 48) / 7], torch.randn(64), SILU) for _ in range(3)]
    downs = [fp8([torch.randn(48, 32) / 6], None) for _ in range(3)]
    x, routing = torch.randn(7, 48, device=DEVICE), random_routing(7, 3, 2)
    found = CudaExperts(ups, downs, False)(x, routing)
    expected = ExpertsOneByOne(ups, downs, False)(x, routing)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


PLAIN = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def plain_layers(backend, dtype, fusion: Fusion, sizes=(4, 40, 24), *, has_bias=True):
    """Returns experts, and the same in float64, one by one."""
    num_experts, size, inner = sizes
    reference, found, exact = ReferenceBackend(), ([], []), ([], [])
    wide = 2 * inner if fusion.is_gated else inner
    for _ in range(num_experts):
        for side, (rows, cols) in enumerate(((wide, size), (size, inner))):
            weight = (torch.randn(rows, cols, device=DEVICE) / cols**0.5).to(dtype)
            bias = torch.randn(rows, device=DEVICE).to(dtype) if has_bias else None
            of = NO_FUSION if side else fusion
            found[side].append(backend.pack_linear(weight, bias, of))
            wide_bias = None if bias is None else bias.double()
            exact[side].append(reference.pack_linear(weight.double(), wide_bias, of))
    return backend.pack_experts(*found), reference.pack_experts(*exact)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", PLAIN.values(), ids=PLAIN)
@pytest.mark.parametrize("fusion", [SILU, OAI, Fusion(None, "relu2")])
@pytest.mark.parametrize("has_bias", [False, True])
def test_plain_experts_against_float64(backend, dtype, fusion, has_bias):
    sizes = (4, 150, 72) if fusion is SILU else (4, 40, 24)
    experts, exact = plain_layers(backend, dtype, fusion, sizes, has_bias=has_bias)
    assert isinstance(experts, CudaExperts)
    x, routing = torch.randn(9, sizes[1], device=DEVICE), random_routing(9, 4, 2)
    x = x.to(dtype)
    residual = torch.randn(9, sizes[1], device=DEVICE)
    expected = exact(x.double(), routing)
    for found, what in (
        (experts(x, routing), expected),
        (experts(x, routing, residual.clone()), expected + residual),
    ):
        error = (found.double() - what).norm() / what.norm()
        assert error < (1e-6 if dtype == torch.float32 else 0.01)


@pytest.mark.parametrize("dtype", PLAIN.values(), ids=PLAIN)
def test_a_row_of_plain_experts_does_not_depend_on_the_others(backend, dtype, monkeypatch):
    """One expert has more rows than a tile; programs share them, and others have none."""
    monkeypatch.setattr("ops.triton_kernels.experts_plain.MAX_SHARES", 2)
    experts, _ = plain_layers(backend, dtype, SILU)
    x, weights = torch.randn(140, 40, device=DEVICE), torch.rand(140, 2, device=DEVICE)
    chosen = torch.tensor([[3, 1]], dtype=torch.int32, device=DEVICE).repeat(140, 1)
    chosen[7] = torch.tensor([0, 3])
    whole = experts(x, Routing(chosen, weights))
    for some in (slice(0, 1), slice(7, 8), slice(60, 77), slice(139, 140)):
        found = experts(x[some], Routing(chosen[some], weights[some]))
        assert torch.equal(found, whole[some])


@pytest.mark.parametrize("scales_input", [False, True])
def test_plain_experts_and_the_layers_alone(backend, scales_input):
    """The two sides may be of different kinds."""
    ups = [backend.pack_linear(torch.randn(64, 48) / 7, None, SILU) for _ in range(3)]
    x, routing = torch.randn(7, 48, device=DEVICE), random_routing(7, 3, 2)
    for kind in ("float32", "int8"):
        downs = layers(backend, "int8", 3, 48, 32, SILU)[1]
        if kind == "float32":
            downs = [backend.pack_linear(torch.randn(48, 32) / 6) for _ in range(3)]
        grouped = backend.pack_experts(ups, downs, scales_input=scales_input)
        single = ExpertsOneByOne(ups, downs, scales_input)
        assert isinstance(grouped, CudaExperts)
        assert grouped.size_bytes == sum(op.size_bytes for op in (*ups, *downs))
        rtol, atol = (1e-5, 1e-5) if kind == "float32" else (0.02, 0.02)
        torch.testing.assert_close(grouped(x, routing), single(x, routing), rtol=rtol, atol=atol)


def test_plain_experts_of_different_shapes(backend):
    ups = [backend.pack_linear(torch.randn(64, n), None, SILU) for n in (48, 40)]
    downs = [backend.pack_linear(torch.randn(48, 32)) for _ in range(2)]
    with pytest.raises(ValueError, match="not of one shape"):
        backend.pack_experts(ups, downs)


@pytest.mark.parametrize("kind", ["int8", "zeros"])
def test_a_row_does_not_depend_on_the_others(backend, kind):
    experts = CudaExperts(*layers(backend, kind, 5, 64, 32, OAI), False)
    x, routing = torch.randn(40, 64, device=DEVICE), random_routing(40, 5, 2)
    whole = experts(x, routing)
    for some in (slice(0, 1), slice(7, 12), slice(20, 40)):
        found = experts(x[some], Routing(*(each[some] for each in routing)))
        assert torch.equal(found, whole[some])


@pytest.mark.exhaustive
def test_no_tile_changes_a_bit(backend, monkeypatch):
    ups, downs = layers(backend, "int8", 3, 96, 64, SILU)
    experts = CudaExperts(ups, downs, False)
    x, routing = torch.randn(30, 96, device=DEVICE), random_routing(30, 3, 2)
    expected = experts(x, routing)
    for tile in (Tile(16, 32, 64, 4, 3), Tile(8, 16, 128, 4, 3, swap=True)):
        for side in (experts._ups, experts._downs):
            monkeypatch.setattr(side, "tile", lambda rows, tile=tile: tile)
        assert torch.equal(experts(x, routing), expected)


def test_nan_stays_in_its_row_and_no_rows(backend):
    experts = CudaExperts(*layers(backend, "int4", 4, 64, 32, SILU), False)
    x, routing = torch.randn(4, 64, device=DEVICE), random_routing(4, 4, 2)
    x[1, 3] = torch.nan
    assert experts(x, routing).isfinite().all(1).tolist() == [True, False, True, True]
    none = Routing(*(each[:0] for each in routing))
    assert experts(x[:0], none).shape == (0, 64)


@pytest.mark.parametrize("count", [1, 5, 300])
def test_pairs_are_sorted(count):
    experts = torch.randint(0, 7, (count, 3), dtype=torch.int32, device=DEVICE)
    experts[experts == 2] = 6  # the third expert has no pairs
    order, starts, per_row = sort_pairs(experts, 7, 3)
    flat = experts.flatten()
    assert order.tolist() == flat.argsort(stable=True).tolist() and per_row == 3
    assert starts.tolist() == [int((flat < e).sum()) for e in range(8)]


def test_pairs_of_several_blocks_are_sorted():
    experts = torch.randint(0, 3, (5000, 1), dtype=torch.int32, device=DEVICE)
    order = sort_pairs(experts, 3, 1).order
    assert torch.equal(order.long(), experts.flatten().argsort(stable=True))


def test_layers_that_cannot_be_grouped(backend):
    ups, downs = layers(backend, "int8", 3, 64, 32, SILU)
    half = [backend.pack_linear(torch.randn(64, 32).half()) for _ in range(3)]
    assert isinstance(backend.pack_experts(ups, half), ExpertsOneByOne)
    plain = [backend.pack_linear(torch.randn(64, 32)) for _ in range(3)]
    assert isinstance(backend.pack_experts(ups, [*plain[:2], downs[2]]), ExpertsOneByOne)
    assert isinstance(backend.pack_experts(ups, plain), CudaExperts)
    assert isinstance(backend.pack_experts(ups, downs), CudaExperts)
    mixed = [*downs[:2], *layers(backend, "int4", 1, 64, 32, SILU)[1]]
    assert isinstance(backend.pack_experts(ups, mixed), ExpertsOneByOne)
    assert all(isinstance(layer, CudaLinear) for layer in (*ups, *mixed))
    others = layers(backend, "int4", 3, 64, 32, SILU)[1]
    check = random_routing(5, 3, 2)
    check_equal(ups, others, torch.randn(5, 64, device=DEVICE), check)
    ups[1] = packed(backend, torch.randn(60, 64), torch.randn(60), SILU, "int8")
    with pytest.raises(ValueError, match="not of one shape"):
        backend.pack_experts(ups, downs)
