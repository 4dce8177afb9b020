"""The router of a mixture in two launches: logits, then the choice of experts.

The inputs are summed in slices of a fixed size, in fp32 and in one order, and the slices are added
in order. So neither the tile nor the batch changes a bit of a row. With few rows the
bytes of the weight are the bound, and a program has one slice of 16 experts, so that many programs
share the reading; with many rows fp32 arithmetic is, and a program has all slices of a larger tile.

The choice has one program a row. It compares scores as integers of the same order, NaN above all
numbers, so that every row names different experts that exist. This needs enable_fp_fusion=False.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.backend import Router, Routing

SLICE = 512  # inputs with a sum of their own; it does not depend on the batch
MANY_ROWS = 64
_LEAST = tl.constexpr(-(2**63))


class _Tile(NamedTuple):
    """A program computes the logits of m rows and n experts."""

    m: int
    n: int
    num_warps: int
    num_stages: int


_FEW, _MANY = _Tile(16, 16, 2, 6), _Tile(64, 64, 8, 3)
BLOCK_K = 32  # of both, because a device may sum a block of inputs before it adds the sum


@triton.jit(do_not_specialize=["M"])
def logits_kernel(
    x_at, w_at, sums_at, M, E, K, x_stride, w_stride,
    SLICE: tl.constexpr, SLICES: tl.constexpr, EVEN_K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Multiplies x: [M, K] with w: [E, K], fp32 or bf16. sums: [programs of K, M, E] fp32.

    Grid: experts / BN, rows / BM, slices / SLICES.
    """
    experts = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = (tl.program_id(1) * BM + tl.arange(0, BM)).to(tl.int64)
    ks = tl.arange(0, BK)
    # Reading the last row or expert again avoids masks; its results are not stored.
    a_at = x_at + tl.minimum(rows, M - 1)[:, None] * x_stride + ks[None, :]
    b_at = w_at + tl.minimum(experts, E - 1).to(tl.int64)[None, :] * w_stride + ks[:, None]
    total = tl.zeros((BM, BN), tl.float32)
    for number in range(0, SLICES):
        first = (tl.program_id(2) * SLICES + number) * SLICE
        acc = tl.zeros((BM, BN), tl.float32)
        for k0 in range(first, tl.minimum(first + SLICE, K), BK):
            if EVEN_K:
                a, b = tl.load(a_at + k0), tl.load(b_at + k0)
            else:
                a = tl.load(a_at + k0, mask=ks[None, :] < K - k0, other=0.0)
                b = tl.load(b_at + k0, mask=ks[:, None] < K - k0, other=0.0)
            acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
        total += acc
    at = sums_at + (tl.program_id(2) * M + rows[:, None]) * E + experts[None, :]
    tl.store(at, total, mask=(rows[:, None] < M) & (experts[None, :] < E))


@triton.jit
def ordered(x, index):
    """Returns int64 in the order of x: fp32, and of equal numbers the lower index first."""
    x = tl.where(x == 0.0, 0.0, x)
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def index_of(key):
    """Returns the index in a result of `ordered`."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(tl.where(x < -88.0, 88.0, -x)))


@triton.jit
def in_best_groups(
    choice, experts, is_expert, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST: tl.constexpr,
    GP: tl.constexpr, SP: tl.constexpr,
):  # fmt: skip
    """Returns whether a group is among the best: [GP, 1]. choice: [GP, SP]."""
    keys = tl.where(is_expert, ordered(choice, experts), _LEAST)
    value = tl.zeros((GP,), tl.float32)
    for _ in range(0, BEST):
        best = tl.max(keys, axis=1)
        is_best = keys == best[:, None]
        value += tl.sum(tl.where(is_best & is_expert, choice, 0.0), axis=1)
        keys = tl.where(is_best, _LEAST, keys)
    groups = tl.arange(0, GP)
    keys = tl.where(groups < GROUPS, ordered(value, groups), _LEAST)
    is_top = groups < 0
    for _ in range(0, TOP_GROUPS):
        is_best = keys == tl.max(keys, axis=0)
        is_top = is_top | is_best
        keys = tl.where(is_best, _LEAST, keys)
    return is_top[:, None]


@triton.jit(do_not_specialize=["M"])
def choose_kernel(
    sums_at, bias_at, correction_at, expert_scales_at, experts_at, weights_at,
    M, E, num_sums, sum_eps, scale,
    TOP_K: tl.constexpr, SIGMOID: tl.constexpr, AFTER: tl.constexpr, NORMALIZED: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST: tl.constexpr,
    BIAS: tl.constexpr, CORRECTION: tl.constexpr, SCALES: tl.constexpr,
    GP: tl.constexpr, SP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Chooses the experts of a row. GP, SP: groups and experts of a group, padded. Grid: rows.

    Latency is the bound: a row is a few kilobytes.
    """
    row = tl.program_id(0).to(tl.int64)
    size = E // GROUPS
    inner = tl.arange(0, SP)[None, :]
    experts = tl.arange(0, GP)[:, None] * size + inner
    is_expert = (tl.arange(0, GP)[:, None] < GROUPS) & (inner < size)
    logits = tl.load(sums_at + row * E + experts, mask=is_expert, other=0.0)
    for number in range(1, num_sums):
        at = sums_at + (number * M + row) * E + experts
        logits += tl.load(at, mask=is_expert, other=0.0)
    if BIAS:
        logits += tl.load(bias_at + experts, mask=is_expert, other=0.0)
    scores = logits
    if not AFTER:
        if SIGMOID:
            scores = sigmoid(logits)
        else:
            top = tl.max(tl.max(tl.where(is_expert, logits, float("-inf")), axis=1), axis=0)
            scores = tl.where(is_expert, tl.exp(logits - top), 0.0)
            scores = scores / tl.sum(tl.sum(scores, axis=1), axis=0)
    choice = scores
    if CORRECTION:
        choice += tl.load(correction_at + experts, mask=is_expert, other=0.0)
    if GROUPS > 1:
        is_top = in_best_groups(choice, experts, is_expert, GROUPS, TOP_GROUPS, BEST, GP, SP)
        choice = tl.where(is_top, choice, float("-inf"))
    keys = tl.where(is_expert, ordered(choice, experts), _LEAST)
    lanes = tl.arange(0, KP)
    chosen = tl.zeros((KP,), tl.int32)
    weights = tl.zeros((KP,), tl.float32)
    for k in range(0, TOP_K):
        best = tl.max(tl.max(keys, axis=1), axis=0)
        is_best = keys == best
        weight = tl.sum(tl.sum(tl.where(is_best, scores, 0.0), axis=1), axis=0)
        chosen = tl.where(lanes == k, index_of(best), chosen)
        weights = tl.where(lanes == k, weight, weights)
        keys = tl.where(is_best, _LEAST, keys)
    is_chosen = lanes < TOP_K
    if AFTER:
        if SIGMOID:
            weights = sigmoid(weights)
        else:
            top = tl.max(tl.where(is_chosen, weights, float("-inf")), axis=0)
            weights = tl.where(is_chosen, tl.exp(weights - top), 0.0)
            weights = weights / tl.sum(weights, axis=0)
    if NORMALIZED:
        weights = weights / (tl.sum(tl.where(is_chosen, weights, 0.0), axis=0) + sum_eps)
    weights *= scale
    if SCALES:
        weights *= tl.load(expert_scales_at + chosen, mask=is_chosen, other=0.0)
    tl.store(experts_at + row * TOP_K + lanes, chosen, mask=is_chosen)
    tl.store(weights_at + row * TOP_K + lanes, weights, mask=is_chosen)


def route(x: Tensor, router: Router) -> Routing:
    """Computes Backend.route for x: [T, in] fp32 or bf16, on the device of the router."""
    num_rows, num_experts, top_k = len(x), len(router.weight), router.kind.top_k
    assert x.shape[1] == router.weight.shape[1] and top_k <= num_experts, f"{x.shape} {router.kind}"
    experts = torch.empty(num_rows, top_k, dtype=torch.int32, device=x.device)
    weights = torch.empty(num_rows, top_k, dtype=torch.float32, device=x.device)
    if num_rows:
        _choose(_logits(x, router.weight), router, experts, weights)
    return Routing(experts, weights)


def _logits(x: Tensor, weight: Tensor) -> Tensor:
    """Returns sums whose total over the first dimension are the logits, [programs of K, T, E]."""
    if x.stride(1) != 1:
        x = x.contiguous()
    assert weight.stride(1) == 1, f"{weight.stride()}"
    (num_rows, num_in), num_experts = x.shape, len(weight)
    is_few = num_rows < MANY_ROWS
    tile = _FEW if is_few else _MANY
    slices = triton.cdiv(num_in, SLICE)
    programs = slices if is_few else 1
    sums = torch.empty(programs, num_rows, num_experts, dtype=torch.float32, device=x.device)
    grid = triton.cdiv(num_experts, tile.n), triton.cdiv(num_rows, tile.m), programs
    logits_kernel[grid](
        x,
        weight,
        sums,
        num_rows,
        num_experts,
        num_in,
        x.stride(0),
        weight.stride(0),
        SLICE=SLICE,
        SLICES=slices // programs,
        EVEN_K=num_in % BLOCK_K == 0,
        BM=tile.m,
        BN=tile.n,
        BK=BLOCK_K,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=False,
    )
    return sums


def _choose(sums: Tensor, router: Router, experts: Tensor, weights: Tensor) -> None:
    kind = router.kind
    programs, num_rows, num_experts = sums.shape
    each, rest = divmod(num_experts, kind.num_groups)
    assert rest == 0 and kind.group_best <= each, f"{num_experts} experts, {kind}"
    assert kind.num_top_groups <= kind.num_groups, f"{kind}"
    groups, size = (triton.next_power_of_2(n) for n in (kind.num_groups, each))
    choose_kernel[(num_rows,)](
        sums,
        router.bias,
        router.correction,
        router.expert_scales,
        experts,
        weights,
        num_rows,
        num_experts,
        programs,
        kind.sum_eps,
        kind.scale,
        TOP_K=kind.top_k,
        SIGMOID=kind.score != "softmax",
        AFTER=kind.is_after_top_k,
        NORMALIZED=kind.is_normalized,
        GROUPS=kind.num_groups,
        TOP_GROUPS=kind.num_top_groups,
        BEST=kind.group_best,
        BIAS=router.bias is not None,
        CORRECTION=router.correction is not None,
        SCALES=router.expert_scales is not None,
        GP=groups,
        SP=size,
        KP=triton.next_power_of_2(kind.top_k),
        num_warps=max(1, min(8, groups * size // 256)),
        enable_fp_fusion=False,
    )
