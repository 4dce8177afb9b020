"""The router in Triton against float64, in the interpreter where there is no GPU."""

from __future__ import annotations

import os

import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

from torch import Tensor

from ops import experts as slow
from ops.backend import Router, RouterKind, Routing
from ops.cuda.backend import CudaBackend
from ops.triton_kernels import router as kernels
from ops.triton_kernels.router import route
from tests.support.engine.router_kinds import ROUTER_KINDS
from tests.support.profile import every_day

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

pytestmark = pytest.mark.usefixtures("seeded")


def random_router(
    kind: RouterKind, num_experts: int, size: int, *, has_extras: bool = False
) -> Router:
    extras = [torch.randn(num_experts, device=DEVICE) / 4 for _ in range(3)] if has_extras else []
    return Router(kind, torch.randn(num_experts, size, device=DEVICE) / size**0.5, *extras)


def route_fp64(x: Tensor, router: Router) -> Routing:
    """Chooses experts by sorting, one row at a time, in float64."""
    kind, experts, weights = router.kind, [], []
    zero = torch.zeros(1, device=DEVICE)
    _, weight, *rest = router
    bias, correction, scales = (zero if x is None else x.double() for x in rest)
    for row in x.double():
        logits = weight.double() @ row + bias
        scores = logits
        if not kind.is_after_top_k:
            scores = logits.softmax(0) if kind.score == "softmax" else logits.sigmoid()
        choice = (scores + correction).tolist()
        each = len(choice) // kind.num_groups
        groups = [choice[g : g + each] for g in range(0, len(choice), each)]
        value = [sum(sorted(group)[-kind.group_best :]) for group in groups]
        kept = sorted(range(kind.num_groups), key=lambda g: -value[g])[: kind.num_top_groups]
        allowed = [e for e in range(len(choice)) if e // each in kept]
        best = sorted(allowed, key=lambda e: -choice[e])[: kind.top_k]
        found = scores[best]
        if kind.is_after_top_k:
            found = found.softmax(0) if kind.score == "softmax" else found.sigmoid()
        if kind.is_normalized:
            found = found / (found.sum() + kind.sum_eps)
        experts.append(best)
        weights.append(found * kind.scale * (scales[best] if rest[2] is not None else 1))
    return Routing(torch.tensor(experts, dtype=torch.int32, device=DEVICE), torch.stack(weights))


def assert_same(found: Routing, expected: Routing) -> None:
    assert torch.equal(found.experts, expected.experts)
    assert torch.equal(found.weights, expected.weights)


@pytest.mark.parametrize("kind", ROUTER_KINDS.values(), ids=ROUTER_KINDS)
@pytest.mark.parametrize("has_extras", every_day((1,), [False, True]))
def test_routers(kind, has_extras):
    router = random_router(kind, 40, 100, has_extras=has_extras)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(5, 100, device=DEVICE).to(dtype)
        own = router._replace(weight=router.weight.to(dtype))
        found, expected = route(x, own), route_fp64(x, own)
        assert found.experts.dtype == torch.int32 and found.weights.dtype == torch.float32
        assert torch.equal(found.experts, expected.experts)
        torch.testing.assert_close(found.weights.double(), expected.weights, rtol=2e-5, atol=1e-7)
        torch.testing.assert_close(found.weights, slow.route(x, own).weights, rtol=4e-5, atol=1e-7)


@pytest.mark.parametrize(("num_experts", "size"), [(3, 48), (24, 130), (130, 20)])
def test_sizes(num_experts, size, monkeypatch):
    monkeypatch.setattr(kernels, "SLICE", 64)
    router = random_router(RouterKind(top_k=3, is_normalized=True), num_experts, size)
    x = torch.randn(3, size, device=DEVICE)
    found, expected = route(x, router), route_fp64(x, router)
    assert torch.equal(found.experts, expected.experts)
    torch.testing.assert_close(found.weights.double(), expected.weights, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("rows", [2, 17, 65])
def test_a_rows_experts_do_not_depend_on_the_others(rows, monkeypatch):
    """Both tiles, and slices with and without programs of their own, give the same bits."""
    monkeypatch.setattr(kernels, "SLICE", 128)
    router = random_router(RouterKind(top_k=2, score="sigmoid", is_normalized=True), 10, 300)
    x = torch.randn(rows, 300, device=DEVICE)
    whole = route(x, router)
    for first, end in ((0, 1), (1, 2), (rows - 1, rows), (rows // 2, rows)):
        alone = route(x[first:end], router)
        assert_same(alone, Routing(*(each[first:end] for each in whole)))


@pytest.mark.parametrize("rows", [3, 256])
def test_logits_have_the_same_bits_in_every_tile(rows, monkeypatch):
    monkeypatch.setattr(kernels, "SLICE", 128)
    weight, x = torch.randn(20, 300, device=DEVICE), torch.randn(rows, 300, device=DEVICE)
    found = []
    for many in (1, 1000):
        monkeypatch.setattr(kernels, "MANY_ROWS", many)
        parts = kernels._logits(x, weight)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        found.append(total)
    assert torch.equal(*found)
    torch.testing.assert_close(found[0], x @ weight.T, rtol=1e-5, atol=1e-4)


def test_of_equal_scores_the_lower_expert_comes_first():
    logits = torch.tensor([[1.0, 3.0, 1.0, 3.0, -0.0, 3.0, 1.0, 0.0]], device=DEVICE)
    eye = torch.eye(8, device=DEVICE)
    for kind in (RouterKind(top_k=8), RouterKind(top_k=8, is_after_top_k=True)):
        found = route(logits, Router(kind, eye))
        assert found.experts.tolist() == [[1, 3, 5, 0, 2, 6, 4, 7]]
    groups = RouterKind(top_k=3, num_groups=4, num_top_groups=2)  # 0 to 2 are equal
    assert route(logits, Router(groups, eye)).experts.tolist() == [[1, 3, 0]]


def test_rows_with_nan_still_name_experts():
    router = random_router(RouterKind(top_k=3, num_groups=2), 8, 16)
    x = torch.randn(4, 16, device=DEVICE)
    expected = route(x, router)
    x[1, 0], x[3, 0] = torch.nan, torch.inf
    found = route(x, router)
    for row in (1, 3):
        assert len(set(found.experts[row].tolist())) == 3
        assert bool(found.weights[row].isnan().all())
    assert bool(((found.experts >= 0) & (found.experts < 8)).all())
    for row in (0, 2):
        assert torch.equal(found.weights[row], expected.weights[row])


def test_extreme_logits_and_no_rows():
    logits = torch.tensor([[-200.0, 300.0, 0.0, -1e30], [-1e4] * 4], device=DEVICE)
    for score in ("softmax", "sigmoid"):
        router = Router(RouterKind(top_k=4, score=score), torch.eye(4, device=DEVICE))
        found, expected = route(logits, router), slow.route(logits, router)
        assert torch.equal(found.experts, expected.experts)
        torch.testing.assert_close(found.weights, expected.weights, rtol=1e-5, atol=1e-30)
    none = route(logits[:0], router)
    assert none.experts.shape == none.weights.shape == (0, 4)


def test_rows_of_any_stride():
    router = random_router(RouterKind(top_k=2), 8, 16)
    wide = torch.randn(40, 40, device=DEVICE)
    for rows in (wide[:5, 3:19], wide[3:19, :5].t()):
        assert_same(*(CudaBackend().route(x, router) for x in (rows, rows.contiguous())))
