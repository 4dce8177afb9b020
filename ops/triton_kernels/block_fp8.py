"""e4m3 x e4m3 products with a scale for each 128 inputs, of weights and of rows.

The sums of 128 inputs are scaled and added in fp32, in order, so that nothing is lost in the tensor
cores' own sums (DeepSeek-V3, arXiv 2412.19437). Both tiles take the same steps, so that a row's
bits do not depend on the batch. Up to 64 rows the bytes of the weights are the bound, beyond that
the tensor cores. One kernel serves single products and experts, whose pairs are those of
experts.py.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.triton_kernels.experts import MAX_SHARES, SortedPairs, find
from ops.triton_kernels.linear import Tile
from ops.triton_kernels.rows import ACTIVATIONS, Quantized, activate, gate_factor, quantize_rows

GROUP = 128
E4M3 = torch.float8_e4m3fn
FEW, MANY = Tile(64, 32, GROUP, 4, 4), Tile(64, 128, GROUP, 4, 3)


class BlockWeight(NamedTuple):
    """A packed weight, or the addresses of those of experts, [E] int64 each.

    codes: [N, K] e4m3, K padded to a multiple of 128; scales: [K / 128, N] fp32; bias: [N] fp32 or
    None. For gated layers, rows 2j are gates and rows 2j + 1 the up factors.
    """

    codes: Tensor
    scales: Tensor
    bias: Tensor | None


@triton.jit(do_not_specialize=["M"])
def block_kernel(
    x_at, row_scales_at, w_at, scales_at, bias_at, order_at, starts_at, residual_at, out_at,
    M, N, K, x_stride, residual_stride, out_stride,
    GROUPED: tl.constexpr, PER_ROW: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr,
    GATED: tl.constexpr, RESIDUAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Multiplies rows of x: [.., K] with row scales [.., K / GROUP] and w: [N, K]. GROUPED: of each
    expert, whose addresses w, scales and bias are.

    Grid: tiles of channels, experts, programs that share the rows.
    """
    n0, expert = tl.program_id(0) * BN, tl.program_id(1)
    first, end = 0, M
    if GROUPED:
        first, end = tl.load(starts_at + expert), tl.load(starts_at + expert + 1)
        w_at = find(w_at, expert, x_at)
        scales_at = find(scales_at, expert, row_scales_at)
        if BIAS:
            bias_at = find(bias_at, expert, row_scales_at)
    channels = tl.minimum(n0 + tl.arange(0, BN), N - 1)
    ks = tl.arange(0, GROUP)
    b_at = w_at + channels.to(tl.int64)[None, :] * K + ks[:, None]
    for m0 in range(first + tl.program_id(2) * BM, end, BM * tl.num_programs(2)):
        # Reading the last pair again beyond the end avoids masks; its results are not stored.
        places = m0 + tl.arange(0, BM)
        pairs = tl.minimum(places, end - 1).to(tl.int64)
        if GROUPED:
            pairs = tl.load(order_at + pairs).to(tl.int64)
        rows = pairs // PER_ROW
        a_at = x_at + rows[:, None] * x_stride + ks[None, :]
        y = tl.zeros((BM, BN), tl.float32)
        for group in range(0, K // GROUP):
            a, b = tl.load(a_at + group * GROUP), tl.load(b_at + group * GROUP)
            of_rows = tl.load(row_scales_at + rows * (K // GROUP) + group)
            of_channels = tl.load(scales_at + group * N + channels)
            part = tl.dot(a, b, out_dtype=tl.float32)
            y += part * of_rows[:, None] * of_channels[None, :]
        if BIAS:
            y += tl.load(bias_at + channels)[None, :]
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
        if RESIDUAL:
            at = residual_at + pairs[:, None] * residual_stride + cols
            y += tl.load(at, mask=mask, other=0.0)
        at = out_at + pairs[:, None] * out_stride + cols
        tl.store(at, y.to(out_at.dtype.element_ty), mask=mask)


def quantize_groups(x: Tensor) -> Quantized:
    """Rounds x: [T, N] fp32 or bf16 to e4m3 with a scale for each 128 values of a row.

    codes: [T, N padded to a multiple of 128]; scales: [T, groups].
    """
    padding = -x.shape[1] % GROUP
    if padding:
        x = torch.nn.functional.pad(x, (0, padding))
    found = quantize_rows(x.reshape(-1, GROUP), dtype=E4M3)
    return Quantized(found.codes.view(x.shape), found.scales.view(len(x), -1))


def block_product(
    x: Quantized,
    weight: BlockWeight,
    num_channels: int,
    out: Tensor,
    residual: Tensor | None = None,
    activation: str | None = None,
    *,
    is_gated: bool = False,
    pairs: SortedPairs | None = None,
    most_rows: int,
    rows_per_expert: int,
) -> Tensor:
    """Writes act(x @ weight.T + bias) (+ residual) to out: [T, N or N / 2], N channels.

    With pairs, the weights are those of experts, and the results those of all pairs. most_rows: the
    most rows or pairs of one of them. The fp32 residual may be out itself.
    """
    num_in = x.codes.shape[1]
    assert num_in % GROUP == 0 and out.stride(1) == 1, f"{x.codes.shape} {out.stride()}"
    tile = FEW if rows_per_expert <= FEW.m else MANY
    shares = triton.cdiv(most_rows, tile.m)
    experts = 1
    if pairs is not None:
        shares, experts = min(shares, MAX_SHARES), len(pairs.starts) - 1
    block_kernel[(triton.cdiv(num_channels, tile.n), experts, shares)](
        x.codes,
        x.scales,
        *weight,
        None if pairs is None else pairs.order,
        None if pairs is None else pairs.starts,
        residual,
        out,
        len(x.codes),
        num_channels,
        num_in,
        x.codes.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        GROUPED=pairs is not None,
        PER_ROW=1 if pairs is None else pairs.per_row,
        BIAS=weight.bias is not None,
        ACT=ACTIVATIONS[activation],
        GATED=is_gated,
        RESIDUAL=residual is not None,
        BM=tile.m,
        BN=tile.n,
        GROUP=GROUP,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=False,
    )
    return out
