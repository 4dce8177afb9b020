"""The experts of a mixture with bf16 or fp32 weights: the grid and pairs of experts.py.

The weights stay as they were packed, gates stacked on up factors: a program reads rows j and F + j
side by side. One tile serves every batch, so that the sums of a row have one order. Up to its 64
rows of an expert the bytes of the weights are the bound anyway; beyond that the tensor cores are.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.triton_kernels.experts import MAX_SHARES, SortedPairs, address_table, find
from ops.triton_kernels.linear import Tile
from ops.triton_kernels.rows import ACTIVATIONS, activate, gate_factor
from ops.triton_kernels.tiles import as_operand

# fp32 is multiplied without tensor cores.
TILES = {torch.bfloat16: Tile(64, 128, 64, 4, 3), torch.float32: Tile(32, 64, 32, 4, 2)}


@triton.jit
def plain_experts_kernel(
    x_at, first_at, weights_at, biases_at, order_at, starts_at, out_at,
    N, K, x_stride, w_stride, out_stride,
    PER_ROW: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Multiplies rows of x with w: [N, K] of each expert. PER_ROW: pairs that share a row of x.

    first_at: any tensor of the weights' type. Grid: tiles of channels, experts, programs that share
    an expert's rows.
    """
    n0, expert = tl.program_id(0) * BN, tl.program_id(1)
    first, end = tl.load(starts_at + expert), tl.load(starts_at + expert + 1)
    COMPUTE: tl.constexpr = first_at.dtype.element_ty
    channels = tl.minimum(n0 + tl.arange(0, BN), N - 1)
    if GATED:
        channels = channels // 2 + channels % 2 * (N // 2)
    ks = tl.arange(0, BK)
    w_at = find(weights_at, expert, first_at)
    b_at = w_at + channels.to(tl.int64)[None, :] * w_stride + ks[:, None]
    for m0 in range(first + tl.program_id(2) * BM, end, BM * tl.num_programs(2)):
        # Reading the last pair again beyond the end avoids masks; its results are not stored.
        places = m0 + tl.arange(0, BM)
        pairs = tl.load(order_at + tl.minimum(places, end - 1)).to(tl.int64)
        a_at = x_at + (pairs // PER_ROW)[:, None] * x_stride + ks[None, :]
        y = tl.zeros((BM, BN), tl.float32)
        for k0 in range(0, K, BK):
            if EVEN_K:
                a, b = tl.load(a_at + k0), tl.load(b_at + k0)
            else:
                a = tl.load(a_at + k0, mask=ks[None, :] < K - k0, other=0.0)
                b = tl.load(b_at + k0, mask=ks[:, None] < K - k0, other=0.0)
            a, b = as_operand(a, COMPUTE), as_operand(b, COMPUTE)
            y = tl.dot(a, b, y, input_precision="ieee")
        if BIAS:
            y += tl.load(find(biases_at, expert, first_at) + channels).to(tl.float32)[None, :]
        WIDTH: tl.constexpr = BN // 2 if GATED else BN
        if GATED:
            gate, up = tl.split(tl.reshape(y, (BM, WIDTH, 2)))
            y = activate(gate, ACT) * gate_factor(up, ACT)
            cols = n0 // 2 + tl.arange(0, WIDTH)[None, :]
            mask = (places < end)[:, None] & (cols < N // 2)
        else:
            y = activate(y, ACT)
            cols = n0 + tl.arange(0, WIDTH)[None, :]
            mask = (places < end)[:, None] & (cols < N)
        at = out_at + pairs[:, None] * out_stride + cols
        tl.store(at, y.to(out_at.dtype.element_ty), mask=mask)


class PlainWeights(NamedTuple):
    """Weights of one shape and type, [N, K] each, with the addresses of them and of their biases:
    [E] int64.

    first is the weight of expert 0; the caller keeps all weights alive.
    """

    first: Tensor
    addresses: Tensor
    biases: Tensor | None


def plain_weights(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> PlainWeights:
    """Collects the addresses of dense weights, and biases of their type, on their device.
    ValueError if they differ in shape."""
    assert all(weight.is_contiguous() for weight in weights)
    addresses = address_table(weights)
    assert addresses is not None
    return PlainWeights(weights[0], addresses, address_table(biases))


def plain_experts_product(
    x: Tensor,
    pairs: SortedPairs,
    weights: PlainWeights,
    out: Tensor,
    activation: str | None = None,
    *,
    is_gated: bool = False,
    most_rows: int,
) -> Tensor:
    """Writes act(x[row] @ weight[expert].T + bias) of every pair to out: [pairs, N or N / 2].

    x: [T, K] of the weights' type. most_rows: the most pairs of one expert.
    """
    first, num_experts = weights.first, len(pairs.starts) - 1
    (num_out, num_in), tile = first.shape, TILES[first.dtype]
    assert x.dtype == first.dtype and x.stride(1) == out.stride(1) == 1, f"{x.dtype} {x.stride()}"
    assert out.shape[0] == len(pairs.order) and x.shape[1] == num_in, f"{x.shape} {out.shape}"
    shares = min(triton.cdiv(most_rows, tile.m), MAX_SHARES)
    plain_experts_kernel[(triton.cdiv(num_out, tile.n), num_experts, shares)](
        x,
        first,
        weights.addresses,
        weights.biases,
        pairs.order,
        pairs.starts,
        out,
        num_out,
        num_in,
        x.stride(0),
        first.stride(0),
        out.stride(0),
        PER_ROW=pairs.per_row,
        BIAS=weights.biases is not None,
        ACT=ACTIVATIONS[activation],
        GATED=is_gated,
        BM=tile.m,
        BN=tile.n,
        BK=tile.k,
        EVEN_K=num_in % tile.k == 0,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=False,
    )
    return out
