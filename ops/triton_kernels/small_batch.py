"""Small-batch GEMV: norm, rounding to int8 and the product in one kernel, for up to four rows.

A decode step of few rows is a chain of small kernels. The launch of the rows' kernel and its single
program take about 3 us between two products, in which no weights are read. Here every program
rounds all rows itself, with the code of that kernel. All programs write the same codes to the same
place, so the order of the writes does not matter, and a program only waits for its own threads. The
product follows as in linear.py. Its first weights are prefetched into the L2 cache before anything
else.

The estimated cost on an H200: values come from the L2 cache, 5.5 TB/s or 42 KB per SM and us, so M
rows of K fp32 values take 4 M K / 42,000 us per program of an SM (4096: 0.4 us, 14336: 1.4), after
about 1 us of latency per row. The first programs of an SM do nothing else in that time, which is
worth it for one row of 4096, not for four. Later programs share the L2 cache with the weights,
4.3 TB/s: n channels per program need (1 + 4 M / n) * 4.3 TB/s, which is within 5.5 for n >= 16 M.
The kernel needs enable_fp_fusion=False.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.backend import Norm
from ops.triton_kernels.linear import (
    ScaledWeight,
    Tile,
    last_of_split,
    multiply,
    scale_and_finish,
    split_scratch,
)
from ops.triton_kernels.rows import ACTIVATIONS, NORMS, make_row

MAX_ROWS = 4
# Registers of a thread. By default the assembler uses fewer and spills.
MAX_REGISTERS = 128


@triton.jit(do_not_specialize=["M"])
def small_batch_kernel(
    x_at, norm_at, norm_bias_at, codes_at, row_scales_at,
    w_at, scales_at, bias_at, residual_at, out_at, sums_at, counts_at,
    M, N, n, K, x_stride, w_stride, residual_stride, out_stride, eps,
    NORM: tl.constexpr, NORM_BIAS: tl.constexpr,
    BIAS: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr,
    SPLIT_K: tl.constexpr, ONE_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x: [M, n], M <= BM; w: [N, K] int8. All programs write codes: [M, K] and row_scales: [M].

    Grid: tiles, SPLIT_K.
    """
    n0 = tl.program_id(0) * BN
    # Reading the last row again beyond the end avoids masks; its results are not stored.
    rows = tl.minimum(tl.arange(0, BM), M - 1)
    channels = tl.minimum(n0 + tl.arange(0, BN), N - 1).to(tl.int64)
    ks = tl.arange(0, BK)
    num_blocks = tl.cdiv(K, BK)
    blocks = tl.cdiv(num_blocks, SPLIT_K)
    first = tl.program_id(1) * blocks
    last = tl.minimum(first + blocks, num_blocks)
    # Prefetch four blocks, a byte of each 32-byte sector; unused loads are not waited for.
    sectors = first * BK + tl.arange(0, BK // 8) * 32
    sectors_at = w_at + channels[:, None] * w_stride + sectors[None, :]
    tl.load(sectors_at, mask=sectors[None, :] < tl.minimum(last * BK, K), volatile=True)
    for row in range(0, M):
        make_row(
            row, x_at, norm_at, norm_bias_at, codes_at, row_scales_at,
            x_stride, 0, 1, K, n, K, eps,
            NORM, NORM_BIAS, 0, False, True, ONE_BLOCK, BLOCK,
        )  # fmt: skip
    # A thread reads what other threads of its program wrote.
    tl.debug_barrier()
    a_at = w_at + channels[:, None] * w_stride + ks[None, :]
    b_at = codes_at + rows[None, :] * K + ks[:, None]
    acc = tl.zeros((BN, BM), tl.int32)
    acc = tl.trans(multiply(a_at, b_at, acc, first, last, K, BK, EVEN_K))
    is_last = True
    if SPLIT_K > 1:
        is_last, acc = last_of_split(acc, sums_at, counts_at, tl.program_id(0), SPLIT_K)
    if is_last:
        row_scales = tl.load(row_scales_at + rows)
        scale_and_finish(
            acc, row_scales, scales_at, bias_at, residual_at, out_at, 0, n0, M, N,
            residual_stride, out_stride, BIAS, ACT, GATED, RESIDUAL, BM, BN,
        )  # fmt: skip


def small_batch_linear(
    x: Tensor,
    norm: Norm | None,
    weight: ScaledWeight,
    out: Tensor,
    residual: Tensor | None = None,
    activation: str | None = None,
    *,
    is_gated: bool = False,
    tile: Tile,
) -> Tensor:
    """Computes the bits of scaled_linear(quantize_rows(x, norm), ...) in int8.

    x: [T <= 4, K], fp32 or bf16; it must not overlap out.
    """
    (num_rows, width), (num_out, num_in) = x.shape, weight.codes.shape
    assert 0 < num_rows <= min(MAX_ROWS, tile.m) and tile.swap, f"{x.shape} {tile}"
    assert num_in == -(-width // 16) * 16 and out.stride(1) == 1, f"{x.shape} {out.stride()}"
    assert not _overlap(x, out), "programs read x while others write"
    if x.stride(1) != 1:
        x = x.contiguous()
    codes = torch.empty(num_rows, num_in, dtype=torch.int8, device=x.device)
    row_scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    tiles = triton.cdiv(num_out, tile.n)
    sums = counts = None
    if tile.split_k > 1:
        sums, counts = split_scratch(out.device)
        assert tiles * tile.m * tile.n <= len(sums) and tiles <= len(counts), f"{tile} {out.shape}"
    # a thread holds 32 values in registers
    block = min(1024 * tile.num_warps, triton.next_power_of_2(num_in))
    small_batch_kernel[(tiles, tile.split_k)](
        x,
        None if norm is None else norm.weight,
        None if norm is None else norm.bias,
        codes,
        row_scales,
        weight.codes,
        weight.scales,
        weight.bias,
        residual,
        out,
        sums,
        counts,
        num_rows,
        num_out,
        width,
        num_in,
        x.stride(0),
        weight.codes.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        0.0 if norm is None else norm.eps,
        NORM=0 if norm is None else NORMS[norm.kind],
        NORM_BIAS=norm is not None and norm.bias is not None,
        BIAS=weight.bias is not None,
        ACT=ACTIVATIONS[activation],
        GATED=is_gated,
        RESIDUAL=residual is not None,
        BM=tile.m,
        BN=tile.n,
        BK=tile.k,
        EVEN_K=num_in % tile.k == 0,
        SPLIT_K=tile.split_k,
        ONE_BLOCK=num_in <= block,
        BLOCK=block,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        maxnreg=MAX_REGISTERS,
        enable_fp_fusion=False,
    )
    return out


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Returns whether the address ranges of two tensors overlap."""
    ends = []
    for t in (one, other):
        last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
        ends.append((t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()))
    (begin, end), (other_begin, other_end) = ends
    return begin < other_end and other_begin < end
