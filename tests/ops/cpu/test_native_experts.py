"""The grouped product of a mixture and its router, on every instruction set of this machine.

Grouped experts have the bits of the same layers called one by one; these are compared with float64.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ops.backend import Fusion, LinearOp, Router, RouterKind, Routing
from ops.cpu import native_experts, native_library
from ops.cpu.backend import CpuBackend
from ops.cpu.native_experts import NativeExperts
from ops.cpu.native_quantized_linear import NATIVE
from ops.experts import ExpertsOneByOne
from ops.experts import route as slow_route
from ops.reference import ReferenceBackend
from tests.support.engine.router_kinds import ROUTER_KINDS

pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
    pytest.mark.usefixtures("seeded"),
]
REFERENCE = ReferenceBackend()
SILU = Fusion(None, "silu", True)
OAI = Fusion(None, "swiglu_oai", True)
RELU2 = Fusion(None, "relu2")
WEIGHTS = ["int8", "int4", "zeros", "minimums", "nf4", "fp4", "bf16", "fp32"]


def packed(weight: Tensor, bias: Tensor | None, fusion: Fusion, kind: str) -> LinearOp:
    if kind == "int8":
        return NATIVE.int8([weight], bias, fusion)
    if kind in ("bf16", "fp32"):
        dtype = torch.bfloat16 if kind == "bf16" else torch.float32
        bias = None if bias is None else bias.to(dtype)
        return CpuBackend().pack_linear(weight.to(dtype), bias, fusion)
    if kind in ("zeros", "minimums", "fp4"):
        group = 16 if kind == "fp4" else 32
        shape = (len(weight), -(-weight.shape[1] // group))
        scales, codes = torch.rand(shape) * 0.02, torch.randint(0, 16, weight.shape).byte()
        if kind == "fp4":
            scales = 2.0 ** torch.randint(-9, -6, shape)
            return NATIVE.int4(codes, scales, None, bias, fusion, group=group, table="fp4")
        if kind == "minimums":
            minimums = torch.rand(shape) * 0.1
            return NATIVE.int4(codes, scales, None, bias, fusion, group=group, minimums=minimums)
        zeros = torch.randint(0, 16, shape).byte()
        return NATIVE.int4(codes, scales, zeros, bias, fusion, group=group)
    return NATIVE.rounded4([weight], bias, fusion, group=64, is_nf4=kind == "nf4")


def layers(
    kind: str, num_experts: int, size: int, inner: int, fusion: Fusion, *, has_bias: bool = True
) -> tuple[list[LinearOp], list[LinearOp]]:
    """Returns the products of experts with random weights."""
    wide = 2 * inner if fusion.is_gated else inner
    ups, downs = [], []
    for _ in range(num_experts):
        bias = (torch.randn(wide), torch.randn(size)) if has_bias else (None, None)
        ups.append(packed(torch.randn(wide, size) / size**0.5, bias[0], fusion, kind))
        downs.append(packed(torch.randn(size, inner) / inner**0.5, bias[1], Fusion(), kind))
    return ups, downs


def random_routing(rows: int, num_experts: int, top_k: int) -> Routing:
    chosen = torch.rand(rows, num_experts).argsort(1)[:, :top_k]
    return Routing(chosen.int(), torch.rand(rows, top_k))


def rows_of(kind: str, rows: int, size: int) -> Tensor:
    return torch.randn(rows, size).to(torch.bfloat16 if kind == "bf16" else torch.float32)


def check_equal(ups, downs, x, routing, *, scales_input=False) -> None:
    """Grouped and single calls give the same bits, without and with a residual."""
    grouped = NativeExperts(ups, downs, scales_input)
    single = ExpertsOneByOne(ups, downs, scales_input)
    assert torch.equal(grouped(x, routing), single(x, routing))
    residual = torch.randn(len(x), grouped.num_out).to(x.dtype)
    expected = single(x, routing, residual.clone())
    assert torch.equal(grouped(x, routing, residual), expected)


@pytest.mark.covering(2)
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize(("size", "inner"), [(64, 32), (100, 70), (33, 1), (544, 200)])
def test_grouped_and_single_calls_have_the_same_bits(isa, kind, size, inner):
    ups, downs = layers(kind, 6, size, inner, SILU)
    for rows in (1, 2, 7, 40):
        check_equal(ups, downs, rows_of(kind, rows, size), random_routing(rows, 6, 3))


def test_experts_with_zero_points_beside_others(isa):
    """A checkpoint's weights lose their zero points one by one, where all of them are 8."""
    ups, downs = layers("zeros", 4, 96, 64, SILU)
    others = layers("minimums", 1, 96, 64, SILU)
    ups[1], downs[2] = others[0][0], others[1][0]
    ups[3] = NATIVE.rounded4([torch.randn(128, 96)], None, SILU, group=32, is_nf4=False)
    check_equal(ups, downs, torch.randn(9, 96), random_routing(9, 4, 2))


@pytest.mark.parametrize("kind", WEIGHTS)
def test_uneven_experts(isa, kind):
    """All rows to one expert, in several blocks of rows; and experts without rows."""
    ups, downs = layers(kind, 9, 64, 40, SILU, has_bias=False)
    x, weights = rows_of(kind, 300, 64), torch.rand(300, 2)
    one = torch.tensor([[7, 2]], dtype=torch.int32).expand(300, 2)
    check_equal(ups, downs, x, Routing(one, weights))
    skewed = random_routing(300, 9, 2)
    skewed.experts[:, 0], skewed.experts[:, 1] = 4, torch.arange(300).remainder(4)
    check_equal(ups, downs, x, skewed)


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("fusion", [OAI, RELU2], ids=["swiglu_oai", "relu2"])
@pytest.mark.parametrize("scales_input", [False, True])
def test_kinds_of_experts(isa, kind, fusion, scales_input):
    ups, downs = layers(kind, 5, 96, 48, fusion)
    x = rows_of(kind, 9, 96)
    check_equal(ups, downs, x, random_routing(9, 5, 2), scales_input=scales_input)


@pytest.mark.parametrize("kind", ["int8", "int4", "bf16", "fp32"])
def test_against_float64(isa, kind):
    """The error of rounded rows is that of the layers' own tests; here it bounds the mixing."""
    weights = (
        [torch.randn(80, 64) / 8 for _ in range(4)],
        [torch.randn(64, 40) / 6 for _ in range(4)],
    )
    ups = [packed(w, None, SILU, kind) for w in weights[0]]
    downs = [packed(w, None, Fusion(), kind) for w in weights[1]]
    x, routing = rows_of(kind, 30, 64), random_routing(30, 4, 2)
    exact = REFERENCE.pack_experts(
        [REFERENCE.pack_linear(w.double(), None, SILU) for w in weights[0]],
        [REFERENCE.pack_linear(w.double()) for w in weights[1]],
    )(x.double(), routing)
    error = (NativeExperts(ups, downs, False)(x, routing).double() - exact).norm() / exact.norm()
    assert error < {"int8": 0.02, "int4": 0.25, "bf16": 0.01, "fp32": 1e-6}[kind]


@pytest.mark.parametrize("kind", ["int8", "zeros", "bf16"])
def test_a_row_does_not_depend_on_the_others(isa, kind):
    experts = NativeExperts(*layers(kind, 12, 100, 70, OAI), False)
    x, routing = rows_of(kind, 300, 100), random_routing(300, 12, 4)
    alone = torch.cat(
        [experts(x[i : i + 1], Routing(*(r[i : i + 1] for r in routing))) for i in range(300)]
    )
    threads = native_library.num_threads()
    for count in {1, threads}:
        native_library.set_num_threads(count)
        for m in (2, 13, 64, 300):
            found = experts(x[-m:], Routing(*(r[-m:] for r in routing)))
            assert torch.equal(found, alone[-m:]), f"{m} rows, {count} threads"
    native_library.set_num_threads(threads)


def test_the_order_of_a_rows_experts_is_the_order_of_its_sum(isa):
    experts = NativeExperts(*layers("int8", 3, 32, 32, SILU), False)
    x = torch.randn(1, 32)

    def one(expert: int) -> Tensor:
        return experts(x, Routing(torch.tensor([[expert]], dtype=torch.int32), torch.ones(1, 1)))

    chosen = Routing(torch.tensor([[2, 0, 1]], dtype=torch.int32), torch.tensor([[0.7, 0.2, 0.1]]))
    expected = one(2) * 0.7 + one(0) * 0.2 + one(1) * 0.1
    assert torch.equal(experts(x, chosen), expected)


def test_many_rows_are_mixed_in_passes(isa):
    """More pairs than one pass takes, and more results than stay in cache."""
    ups, downs = layers("int4", 10, 320, 32, SILU)
    check_equal(ups, downs, torch.randn(1200, 320), random_routing(1200, 10, 8))


def test_no_rows_strided_rows_and_other_types(isa):
    ups, downs = layers("int8", 4, 64, 32, SILU)
    experts = NativeExperts(ups, downs, False)
    assert experts(torch.empty(0, 64), random_routing(0, 4, 2)).shape == (0, 64)
    wide, routing = torch.randn(5, 200), random_routing(5, 4, 2)
    assert torch.equal(experts(wide[:, 30:94], routing), experts(wide[:, 30:94].clone(), routing))
    columns = torch.randn(64, 5).t()
    assert torch.equal(experts(columns, routing), experts(columns.contiguous(), routing))
    check_equal(ups, downs, torch.randn(5, 64).bfloat16(), routing)
    residual = torch.randn(5, 100)
    expected = ExpertsOneByOne(ups, downs, False)(columns, routing, residual[:, 20:84].clone())
    assert torch.equal(experts(columns, routing, residual[:, 20:84]), expected)


@pytest.mark.parametrize("kind", ["int8", "int4", "fp32"])
def test_nan_stays_in_its_row(isa, kind):
    ups, downs = layers(kind, 4, 64, 32, SILU)
    x, routing = torch.randn(6, 64), random_routing(6, 4, 2)
    experts = NativeExperts(ups, downs, False)
    expected = experts(x, routing)
    x[2, 5] = torch.nan
    found = experts(x, routing)
    others = [0, 1, 3, 4, 5]
    assert bool(found[2].isnan().all()) and torch.equal(found[others], expected[others])


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_experts_take_their_bytes_and_no_more():
    """An expert is a few huge pages large; of its last one, nothing is left unused."""
    weight = torch.randn(1536, 2048)
    before = resident_bytes()
    layers = [NATIVE.int8([weight], None, SILU) for _ in range(40)]
    size = sum(layer.size_bytes for layer in layers)
    assert 0.9 * size < resident_bytes() - before < 1.1 * size
    del layers
    assert resident_bytes() - before < 0.2 * size


def test_layers_that_cannot_be_grouped():
    ups, downs = layers("int8", 3, 64, 32, SILU)
    others = layers("fp32", 3, 64, 32, SILU)
    assert native_experts.can_group(ups, downs)
    assert not native_experts.can_group(ups, others[1])
    assert not native_experts.can_group([*ups[:2], others[0][2]], downs)
    assert not native_experts.can_group([*ups[:2], lambda x: x], downs)
    assert isinstance(CpuBackend().pack_experts(ups, others[1]), ExpertsOneByOne)
    assert isinstance(CpuBackend().pack_experts(ups, downs), NativeExperts)
    ups[1] = packed(torch.randn(60, 64), None, SILU, "int8")
    with pytest.raises(ValueError, match="not of one shape"):
        NativeExperts(ups, downs, False)


def test_an_expert_that_does_not_exist():
    experts = NativeExperts(*layers("int8", 3, 64, 32, SILU), False)
    for expert in (-1, 3):
        bad = Routing(torch.tensor([[0, expert]], dtype=torch.int32), torch.ones(1, 2))
        with pytest.raises(ValueError, match="no such expert"):
            experts(torch.randn(1, 64), bad)


# -- the router


@pytest.mark.covering(2)
@pytest.mark.parametrize("kind", ROUTER_KINDS.values(), ids=ROUTER_KINDS)
@pytest.mark.parametrize("rows", [0, 1, 5, 77])
@pytest.mark.parametrize("has_extras", [False, True])
def test_routers(isa, kind, rows, has_extras):
    num_experts, size = 40, 100
    extras = [torch.randn(num_experts) / 4 for _ in range(3)] if has_extras else []
    weight = torch.randn(num_experts, size) / 10
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(rows, size).to(dtype)
        router = Router(kind, weight.to(dtype), *extras)
        found = native_experts.route(x, router)
        wide = router._replace(weight=router.weight.double())
        for name in ("bias", "correction", "expert_scales"):
            if getattr(wide, name) is not None:
                wide = wide._replace(**{name: getattr(wide, name).double()})
        expected = route_fp64(x, wide)
        assert found.experts.dtype == torch.int32 and found.weights.dtype == torch.float32
        assert torch.equal(found.experts, expected.experts)
        torch.testing.assert_close(found.weights.double(), expected.weights, rtol=2e-5, atol=1e-7)


def route_fp64(x: Tensor, router: Router) -> Routing:
    """Chooses experts by sorting, one row at a time, in float64."""
    kind, experts, weights = router.kind, [], []
    for row in x.double():
        logits = router.weight @ row + (0 if router.bias is None else router.bias)
        scores = logits
        if not kind.is_after_top_k:
            scores = logits.softmax(0) if kind.score == "softmax" else logits.sigmoid()
        choice = scores + (0 if router.correction is None else router.correction)
        groups = choice.view(kind.num_groups, -1)
        value = groups.sort(descending=True).values[:, : kind.group_best].sum(1)
        kept = sorted(range(kind.num_groups), key=lambda g: -value[g])[: kind.num_top_groups]
        each = groups.shape[1]
        allowed = [e for e in range(len(choice)) if e // each in kept]
        best = sorted(allowed, key=lambda e: -choice[e])[: kind.top_k]
        found = scores[best]
        if kind.is_after_top_k:
            found = found.softmax(0) if kind.score == "softmax" else found.sigmoid()
        if kind.is_normalized:
            found = found / (found.sum() + kind.sum_eps)
        found = found * kind.scale
        if router.expert_scales is not None:
            found = found * router.expert_scales[best]
        experts.append(best)
        weights.append(found)
    shape = (len(x), kind.top_k)
    chosen = torch.tensor(experts, dtype=torch.int32).reshape(shape)
    return Routing(chosen, torch.stack(weights) if weights else torch.zeros(shape).double())


@pytest.mark.parametrize("num_experts", [3, 64, 130])
@pytest.mark.parametrize("size", [16, 300, 2048])
def test_a_rows_experts_do_not_depend_on_the_others(isa, num_experts, size):
    router = Router(RouterKind(top_k=3, is_normalized=True), torch.randn(num_experts, size))
    x = torch.randn(70, size)
    alone = [native_experts.route(row[None], router) for row in x]
    threads = native_library.num_threads()
    for count in {1, threads}:
        native_library.set_num_threads(count)
        for m in (1, 3, 4, 6, 33, 70):
            found = native_experts.route(x[-m:], router)
            for one, expected in zip(found, zip(*alone[-m:], strict=True), strict=True):
                assert torch.equal(one, torch.cat(expected))
    native_library.set_num_threads(threads)


def test_of_equal_scores_the_lower_expert_comes_first(isa):
    logits = torch.tensor([[1.0, 3.0, 1.0, 3.0, 0.0, 3.0, 1.0, 1.0]])
    router = Router(RouterKind(top_k=6), torch.eye(8))
    assert native_experts.route(logits, router).experts.tolist() == [[1, 3, 5, 0, 2, 6]]
    assert slow_route(logits, router).experts.tolist() == [[1, 3, 5, 0, 2, 6]]


def test_rows_with_nan_still_name_experts(isa):
    router = Router(RouterKind(top_k=3, num_groups=2), torch.randn(8, 16))
    x = torch.randn(3, 16)
    expected = native_experts.route(x, router)
    x[1, 0] = torch.nan
    found = native_experts.route(x, router)
    assert sorted(set(found.experts[1].tolist())) == sorted(found.experts[1].tolist())
    assert bool(((found.experts >= 0) & (found.experts < 8)).all())
    assert bool(found.weights[1].isnan().all())
    assert torch.equal(found.weights[[0, 2]], expected.weights[[0, 2]])


def test_rows_of_any_stride(isa):
    router = Router(RouterKind(top_k=2), torch.randn(8, 16))
    wide = torch.randn(40, 40)
    for rows in (wide[:5, 3:19], wide[3:19, :5].t()):
        found, expected = (native_experts.route(x, router) for x in (rows, rows.contiguous()))
        assert torch.equal(found.experts, expected.experts)
        assert torch.equal(found.weights, expected.weights)
