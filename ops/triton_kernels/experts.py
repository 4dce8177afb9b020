"""The experts of a mixture: pairs of a row and an expert, sorted by expert on the device.

One program per expert counts and places its pairs, so that no launch waits for the device. A
product has a program for a tile of channels of an expert; further programs share the blocks of its
rows, and those without rows end at once. Programs read the rows of their pairs in place and find
the weights by address, because each expert is packed by itself: there is no copy of either.

The arithmetic is that of ops.triton_kernels.linear and linear4, so a pair has the bits of its
layer called alone. The sum of a row is in the order of its experts. This needs
enable_fp_fusion=False.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.backend import TABLES
from ops.triton_kernels.linear import ScaledWeight, Tile, multiply
from ops.triton_kernels.linear4 import PANEL, Int4Weight, int4_sums
from ops.triton_kernels.rows import ACTIVATIONS, Quantized, activate, gate_factor

# Programs that share the rows of an expert, at most.
MAX_SHARES = 8


@triton.jit
def sort_kernel(experts_at, order_at, starts_at, num_pairs, BLOCK: tl.constexpr):
    """Writes the pairs of each expert, in their order, and where they start. Grid: experts."""
    expert = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    before = tl.zeros((), tl.int32)
    for start in range(0, num_pairs, BLOCK):
        mask = start + lanes < num_pairs
        before += tl.sum(
            (tl.load(experts_at + start + lanes, mask=mask, other=expert) < expert).to(tl.int32), 0
        )
    tl.store(starts_at + expert, before)
    for start in range(0, num_pairs, BLOCK):
        pairs = start + lanes
        is_own = tl.load(experts_at + pairs, mask=pairs < num_pairs, other=-1) == expert
        places = before + tl.cumsum(is_own.to(tl.int32), 0) - 1
        tl.store(order_at + places, pairs, mask=is_own)
        before += tl.sum(is_own.to(tl.int32), 0)
    if expert == tl.num_programs(0) - 1:
        tl.store(starts_at + expert + 1, before)


@triton.jit
def find(table_at, expert, type_at):
    """Returns an address of a table as a pointer of type_at's type, to whole lines of 16 bytes."""
    return tl.multiple_of(tl.load(table_at + expert).to(type_at.dtype), 16)


@triton.jit
def store_pairs(
    acc, row_scales_at, scales_at, bias_at, out_at, rows, pairs, is_pair, n0, N, out_stride,
    BIAS: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Scales acc: [BM, BN], adds the bias, activates, and stores the results of pairs."""
    cols = n0 + tl.arange(0, BN)
    scales = tl.load(scales_at + cols, mask=cols < N, other=0.0)
    y = acc.to(tl.float32) * scales[None, :] * tl.load(row_scales_at + rows)[:, None]
    if BIAS:
        y += tl.load(bias_at + cols, mask=cols < N, other=0.0)[None, :]
    WIDTH: tl.constexpr = BN // 2 if GATED else BN
    if GATED:
        gate, up = tl.split(tl.reshape(y, (BM, WIDTH, 2)))
        y = activate(gate, ACT) * gate_factor(up, ACT)
        n0 = n0 // 2
        N = N // 2
    else:
        y = activate(y, ACT)
    cols = n0 + tl.arange(0, WIDTH)[None, :]
    at = out_at + pairs[:, None] * out_stride + cols
    tl.store(at, y.to(out_at.dtype.element_ty), mask=is_pair[:, None] & (cols < N))


@triton.jit
def scaled_experts_kernel(
    x_at, row_scales_at, weights_at, scales_at, biases_at, order_at, starts_at, out_at,
    N, K, x_stride, w_stride, out_stride,
    PER_ROW: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr,
    SWAP: tl.constexpr,
):  # fmt: skip
    """Multiplies rows of int8 or e4m3. PER_ROW: pairs that share a row of x.

    Grid: tiles of channels, experts, programs that share an expert's rows.
    """
    n0, expert = tl.program_id(0) * BN, tl.program_id(1)
    first, end = tl.load(starts_at + expert), tl.load(starts_at + expert + 1)
    channels = tl.minimum(n0 + tl.arange(0, BN), N - 1).to(tl.int64)
    ks = tl.arange(0, BK)
    SUMS: tl.constexpr = tl.int32 if x_at.dtype.element_ty == tl.int8 else tl.float32
    w_at = find(weights_at, expert, x_at)
    bias_at = row_scales_at
    if BIAS:
        bias_at = find(biases_at, expert, row_scales_at)
    for m0 in range(first + tl.program_id(2) * BM, end, BM * tl.num_programs(2)):
        # Reading the last pair again beyond the end avoids masks; its results are not stored.
        places = m0 + tl.arange(0, BM)
        pairs = tl.load(order_at + tl.minimum(places, end - 1)).to(tl.int64)
        rows = pairs // PER_ROW
        if SWAP:
            a_at = w_at + channels[:, None] * w_stride + ks[None, :]
            b_at = x_at + rows[None, :] * x_stride + ks[:, None]
            acc = tl.zeros((BN, BM), SUMS)
        else:
            a_at = x_at + rows[:, None] * x_stride + ks[None, :]
            b_at = w_at + channels[None, :] * w_stride + ks[:, None]
            acc = tl.zeros((BM, BN), SUMS)
        acc = multiply(a_at, b_at, acc, 0, tl.cdiv(K, BK), K, BK, EVEN_K)
        if SWAP:
            acc = tl.trans(acc)
        store_pairs(
            acc, row_scales_at, find(scales_at, expert, row_scales_at), bias_at, out_at,
            rows, pairs, places < end, n0, N, out_stride, BIAS, ACT, GATED, BM, BN,
        )  # fmt: skip


@triton.jit
def int4_experts_kernel(
    x_at, row_scales_at, sums_at, packed_at, words_at, channels_at, biases_at,
    order_at, starts_at, out_at,
    N, N_padded, chunks, x_stride, out_stride,
    STAGES: tl.constexpr, TABLE: tl.constexpr, MINIMUMS: tl.constexpr, ASM: tl.constexpr,
    GROUP: tl.constexpr, HALF: tl.constexpr, PANEL: tl.constexpr, CHUNKS: tl.constexpr,
    PER_ROW: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Multiplies rows of int8 with 4-bit weights; the grid is that of scaled_experts_kernel."""
    n0, expert = tl.program_id(0) * BN, tl.program_id(1)
    first, end = tl.load(starts_at + expert), tl.load(starts_at + expert + 1)
    channels = tl.minimum(n0 + tl.arange(0, BN), N_padded - 1)
    bias_at = row_scales_at
    if BIAS:
        bias_at = find(biases_at, expert, row_scales_at)
    for m0 in range(first + tl.program_id(2) * BM, end, BM * tl.num_programs(2)):
        places = m0 + tl.arange(0, BM)
        pairs = tl.load(order_at + tl.minimum(places, end - 1)).to(tl.int64)
        rows = pairs // PER_ROW
        acc = int4_sums(
            x_at, sums_at, find(packed_at, expert, x_at), find(words_at, expert, order_at),
            rows, channels, N_padded, chunks, x_stride,
            STAGES, TABLE, MINIMUMS, ASM, GROUP, HALF, PANEL, CHUNKS, BM, BN,
        )  # fmt: skip
        store_pairs(
            tl.trans(acc), row_scales_at, find(channels_at, expert, row_scales_at), bias_at, out_at,
            rows, pairs, places < end, n0, N, out_stride, BIAS, ACT, GATED, BM, BN,
        )  # fmt: skip


@triton.jit
def sum_kernel(
    parts_at, weights_at, residual_at, out_at, N, residual_stride, out_stride, top_k,
    WEIGHTED: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds the weighted parts: [T, top_k, N] of each row. Grid: rows, blocks of columns."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < N
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(0, top_k):
        pair = row * top_k + k
        part = tl.load(parts_at + pair * N + cols, mask=mask, other=0.0).to(tl.float32)
        if WEIGHTED:
            part *= tl.load(weights_at + pair)
        total += part
    if RESIDUAL:
        total += tl.load(residual_at + row * residual_stride + cols, mask=mask, other=0.0)
    tl.store(out_at + row * out_stride + cols, total.to(out_at.dtype.element_ty), mask=mask)


Grid = tuple[int, int, int]


class SortedPairs(NamedTuple):
    """Pairs sorted by expert. order: [pairs] int32; starts: [E + 1] int32; per_row: pairs that
    share a row of the products' rows."""

    order: Tensor
    starts: Tensor
    per_row: int


class ExpertWeights(NamedTuple):
    """Packed weights of one shape, with the addresses of their tensors: [E] int64 each.

    first is the weight of expert 0; the caller keeps all weights alive.
    """

    first: ScaledWeight | Int4Weight
    addresses: tuple[Tensor | None, ...]


def expert_weights(weights: Sequence[ScaledWeight | Int4Weight]) -> ExpertWeights:
    """Collects the addresses of packed weights on their device. ValueError if shapes differ."""
    first = weights[0]
    tables: list[Tensor | None] = []
    for parts in zip(*weights, strict=True):
        if isinstance(first, Int4Weight) and not isinstance(parts[0], Tensor | None):
            if any(part != parts[0] for part in parts):
                raise ValueError(f"the experts are not of one kind: {set(parts)}")
            continue
        tables.append(address_table(parts))
    return ExpertWeights(first, tuple(tables))


def address_table(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Returns the addresses of tensors of one shape: [E] int64, or None if there are none.
    ValueError if shapes differ."""
    shapes = {None if part is None else part.shape for part in parts}
    if len(shapes) != 1:
        raise ValueError(f"the experts are not of one shape: {shapes}")
    given = [part for part in parts if part is not None]
    if not given:
        return None
    addresses = [part.data_ptr() for part in given]
    return torch.tensor(addresses, dtype=torch.int64, device=given[0].device)


def sort_pairs(experts: Tensor, num_experts: int, per_row: int) -> SortedPairs:
    """Sorts experts: [T, K] int32, dense."""
    order = torch.empty(experts.numel(), dtype=torch.int32, device=experts.device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=experts.device)
    block = min(4096, triton.next_power_of_2(max(16, experts.numel())))
    sort_kernel[(num_experts,)](experts, order, starts, experts.numel(), BLOCK=block)
    return SortedPairs(order, starts, per_row)


def experts_product(
    x: Quantized,
    pairs: SortedPairs,
    weights: ExpertWeights,
    out: Tensor,
    activation: str | None = None,
    *,
    is_gated: bool = False,
    tile: Tile,
    most_rows: int,
) -> Tensor:
    """Writes act(x[row] @ weight[expert].T + bias) of every pair to out: [pairs, N or N / 2].

    most_rows: the most pairs of one expert. x and the tile are as in scaled_linear or int4_linear.
    """
    first, num_experts = weights.first, len(pairs.starts) - 1
    assert out.shape[0] == len(pairs.order) and out.stride(1) == 1 and tile.split_k == 1
    num_out = first.num_out if isinstance(first, Int4Weight) else first.codes.shape[0]
    shares = min(triton.cdiv(most_rows, tile.m), MAX_SHARES)
    grid = (triton.cdiv(num_out, tile.n), num_experts, shares)
    usual: dict[str, object] = {
        "PER_ROW": pairs.per_row,
        "BIAS": first.bias is not None,
        "ACT": ACTIVATIONS[activation],
        "GATED": is_gated,
        "BM": tile.m,
        "BN": tile.n,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "enable_fp_fusion": False,
    }
    if isinstance(first, Int4Weight):
        _int4_product(x, pairs, weights, first, out, grid, tile, usual)
    else:
        _scaled_product(x, pairs, weights, first, out, grid, tile, usual)
    return out


def _int4_product(
    x: Quantized,
    pairs: SortedPairs,
    weights: ExpertWeights,
    first: Int4Weight,
    out: Tensor,
    grid: Grid,
    tile: Tile,
    usual: dict[str, object],
) -> None:
    assert tile.swap, f"{tile}"
    panels, chunks, _, half = first.packed.shape
    sums = None
    if first.has_minimums:
        sums = x.codes.view(len(x.codes), -1, first.group).sum(2, dtype=torch.int32)
    int4_experts_kernel[grid](
        x.codes,
        x.scales,
        sums,
        *weights.addresses,
        pairs.order,
        pairs.starts,
        out,
        first.num_out,
        panels * PANEL,
        chunks,
        x.codes.stride(0),
        out.stride(0),
        STAGES=tile.num_stages,
        TABLE=TABLES.index(first.table),
        MINIMUMS=first.has_minimums,
        ASM=not triton.knobs.runtime.interpret,
        GROUP=first.group,
        HALF=half,
        PANEL=PANEL,
        CHUNKS=math.gcd(max(1, tile.k // half), chunks),
        **usual,
    )


def _scaled_product(
    x: Quantized,
    pairs: SortedPairs,
    weights: ExpertWeights,
    first: ScaledWeight,
    out: Tensor,
    grid: Grid,
    tile: Tile,
    usual: dict[str, object],
) -> None:
    num_out, num_in = first.codes.shape
    scaled_experts_kernel[grid](
        x.codes,
        x.scales,
        *weights.addresses,
        pairs.order,
        pairs.starts,
        out,
        num_out,
        num_in,
        x.codes.stride(0),
        first.codes.stride(0),
        out.stride(0),
        BK=tile.k,
        EVEN_K=num_in % tile.k == 0,
        SWAP=tile.swap,
        **usual,
    )


def sum_parts(
    parts: Tensor, weights: Tensor | None, residual: Tensor | None, out: Tensor
) -> Tensor:
    """Writes the sum of parts: [T, K, N], times weights: [T, K] fp32, plus the residual to out.

    The residual may be out itself.
    """
    num_rows, top_k, num_out = parts.shape
    assert parts.is_contiguous() and out.shape == (num_rows, num_out) and out.stride(1) == 1
    block = min(1024, triton.next_power_of_2(num_out))
    sum_kernel[(num_rows, triton.cdiv(num_out, block))](
        parts,
        weights,
        residual,
        out,
        num_out,
        0 if residual is None else residual.stride(0),
        out.stride(0),
        top_k,
        WEIGHTED=weights is not None,
        RESIDUAL=residual is not None,
        BLOCK=block,
        enable_fp_fusion=False,
    )
    return out
