"""int8 x int8 and e4m3 x e4m3 products, fused with the operations that follow them in a layer.

int8 sums are exact integers and the scaling after them is elementwise, so that neither tile size,
split of K nor batch changes a bit of a row. This needs enable_fp_fusion=False. Sums of e4m3 are in
floating point; with one tile, a row's bits do not depend on the batch.

With many rows (M > 64) the tensor cores are the bound. On sm_90 wgmma reads both operands from
shared memory: a tile of 128 x 256 reads (128 + 256) bytes of K for 65,536 multiply-adds, 2/3 of
what 128 x 128 does; 8 warps keep 128 sums per thread in registers. Tiles are ordered in groups of
rows, so that concurrent programs share weights in the L2 cache.

With few rows the bytes of the weights are the bound. The weights are the first operand (`swap`), 16
to 64 of them per program, and rows are padded to 8 or 16. Speed depends on the bytes in flight:
4.3 TB/s at about 1 us are 4.3 MB or 32 KiB per SM, so num_stages - 1 tiles of weights of all
programs on an SM should have about 64 KiB. With too few programs, K is split.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import threading
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.triton_kernels.rows import ACTIVATIONS, Quantized, activate, gate_factor


class Tile(NamedTuple):
    """The tiling of a product: a program computes m x n results, k inputs at a time.

    swap: weights are the first operand of the tensor cores' instruction. split_k: programs that
    share a tile's inputs. group_m: number of row tiles in a group that runs together.
    """

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int
    swap: bool = False
    split_k: int = 1
    group_m: int = 8


class ScaledWeight(NamedTuple):
    """A packed weight. codes: [N, K] int8 or e4m3; scales: [N] fp32; bias: [N] fp32 or None.

    K is a multiple of 16. For gated layers, rows 2j are gates and rows 2j + 1 the up factors.
    """

    codes: Tensor
    scales: Tensor
    bias: Tensor | None = None


@triton.jit
def tile_place(num_m, num_n, GROUP_M: tl.constexpr):
    """Returns (row tile, channel tile); GROUP_M row tiles precede the next channel tile."""
    program = tl.program_id(0)
    in_group = GROUP_M * num_n
    first = program // in_group * GROUP_M
    size = tl.minimum(num_m - first, GROUP_M)
    return first + program % in_group % size, program % in_group // size


@triton.jit
def finish(
    y, bias_at, residual_at, out_at, m0, n0, M, N, residual_stride, out_stride,
    BIAS: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Applies bias, activation, gate and residual to y: [BM, BN] fp32, and stores it in out.

    N counts channels before the gate.
    """
    if BIAS:
        cols = n0 + tl.arange(0, BN)
        y += tl.load(bias_at + cols, mask=cols < N, other=0.0)[None, :]
    WIDTH: tl.constexpr = BN // 2 if GATED else BN
    if GATED:
        gate, up = tl.split(tl.reshape(y, (BM, WIDTH, 2)))
        y = activate(gate, ACT) * gate_factor(up, ACT)
        n0 = n0 // 2
        N = N // 2
    else:
        y = activate(y, ACT)
    rows = (m0 + tl.arange(0, BM)).to(tl.int64)[:, None]
    cols = n0 + tl.arange(0, WIDTH)[None, :]
    mask = (rows < M) & (cols < N)
    if RESIDUAL:
        y += tl.load(residual_at + rows * residual_stride + cols, mask=mask, other=0.0)
    tl.store(out_at + rows * out_stride + cols, y.to(out_at.dtype.element_ty), mask=mask)


@triton.jit
def scale_and_finish(
    acc, row_scales, scales_at, bias_at, residual_at, out_at, m0, n0, M, N,
    residual_stride, out_stride,
    BIAS: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Scales acc: [BM, BN] int32 by row_scales: [BM] and the channel scales, then calls finish."""
    if RESIDUAL and BM * BN > 8192:
        # In halves, because sums, residual and results of a large tile do not fit the registers.
        HALF: tl.constexpr = BN // 2
        left, right = tl.split(tl.permute(tl.reshape(acc, (BM, 2, HALF)), (0, 2, 1)))
        scale_and_finish(
            left, row_scales, scales_at, bias_at, residual_at, out_at, m0, n0, M, N,
            residual_stride, out_stride, BIAS, ACT, GATED, RESIDUAL, BM, HALF,
        )  # fmt: skip
        scale_and_finish(
            right, row_scales, scales_at, bias_at, residual_at, out_at, m0, n0 + HALF, M, N,
            residual_stride, out_stride, BIAS, ACT, GATED, RESIDUAL, BM, HALF,
        )  # fmt: skip
    else:
        cols = n0 + tl.arange(0, BN)
        scales = tl.load(scales_at + cols, mask=cols < N, other=0.0)
        y = acc.to(tl.float32) * scales[None, :] * row_scales[:, None]
        finish(
            y, bias_at, residual_at, out_at, m0, n0, M, N, residual_stride, out_stride,
            BIAS, ACT, GATED, RESIDUAL, BM, BN,
        )  # fmt: skip


@triton.jit
def last_of_split(acc, sums_at, counts_at, tile, SPLIT_K: tl.constexpr):
    """Adds a program's int32 sums to its tile. Returns (whether it is the last, the total if so).

    The last program resets the scratch to zeros for the next launch.
    """
    SIZE: tl.constexpr = acc.shape[0] * acc.shape[1]
    at = tl.arange(0, acc.shape[0])[:, None] * acc.shape[1] + tl.arange(0, acc.shape[1])[None, :]
    at = sums_at + tile * SIZE + at
    tl.atomic_add(at, acc, sem="relaxed")
    # All threads store their sums before one of them counts the program.
    tl.debug_barrier()
    before = tl.atomic_add(counts_at + tile, 1, sem="acq_rel")
    is_last = before == SPLIT_K - 1
    if is_last:
        acc = tl.atomic_xchg(at, tl.zeros_like(acc), sem="relaxed")
        tl.atomic_xchg(counts_at + tile, 0, sem="relaxed")
    return is_last, acc


@triton.jit
def multiply(a_at, b_at, acc, first, last, K, BK: tl.constexpr, EVEN_K: tl.constexpr):
    """Adds the product of blocks first to last of K to acc. a_at: [.., BK], b_at: [BK, ..]."""
    NOTHING: tl.constexpr = 0 if acc.dtype == tl.int32 else 0.0
    ks = tl.arange(0, BK)
    for block in range(first, last):
        k0 = block * BK
        if EVEN_K:
            a = tl.load(a_at + k0)
            b = tl.load(b_at + k0)
        else:
            a = tl.load(a_at + k0, mask=ks[None, :] < K - k0, other=NOTHING)
            b = tl.load(b_at + k0, mask=ks[:, None] < K - k0, other=NOTHING)
        acc = tl.dot(a, b, acc, out_dtype=acc.dtype)
    return acc


@triton.jit(do_not_specialize=["M"])
def product_kernel(
    x_at, row_scales_at, w_at, scales_at, bias_at, residual_at, out_at, sums_at, counts_at,
    M, N, K, x_stride, w_stride, residual_stride, out_stride,
    BIAS: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr,
    SWAP: tl.constexpr, SPLIT_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Multiplies x: [M, K] with row scales and w: [N, K] with channel scales, int8 or e4m3.

    Grid: tiles, SPLIT_K (1 for e4m3).
    """
    tile_m, tile_n = tile_place(tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP_M)
    m0, n0 = tile_m * BM, tile_n * BN
    # Reading the last row again beyond the end avoids masks; its results are not stored.
    rows = tl.minimum(m0 + tl.arange(0, BM), M - 1).to(tl.int64)
    channels = tl.minimum(n0 + tl.arange(0, BN), N - 1).to(tl.int64)
    ks = tl.arange(0, BK)
    SUMS: tl.constexpr = tl.int32 if x_at.dtype.element_ty == tl.int8 else tl.float32
    num_blocks = tl.cdiv(K, BK)
    blocks = tl.cdiv(num_blocks, SPLIT_K)
    first = tl.program_id(1) * blocks
    last = tl.minimum(first + blocks, num_blocks)
    if SWAP:
        a_at = w_at + channels[:, None] * w_stride + ks[None, :]
        b_at = x_at + rows[None, :] * x_stride + ks[:, None]
        acc = tl.zeros((BN, BM), SUMS)
    else:
        a_at = x_at + rows[:, None] * x_stride + ks[None, :]
        b_at = w_at + channels[None, :] * w_stride + ks[:, None]
        acc = tl.zeros((BM, BN), SUMS)
    acc = multiply(a_at, b_at, acc, first, last, K, BK, EVEN_K)
    if SWAP:
        acc = tl.trans(acc)
    is_last = True
    if SPLIT_K > 1:
        tile = tl.program_id(0)
        is_last, acc = last_of_split(acc, sums_at, counts_at, tile, SPLIT_K)
    if is_last:
        row_scales = tl.load(row_scales_at + rows)
        scale_and_finish(
            acc, row_scales, scales_at, bias_at, residual_at, out_at, m0, n0, M, N,
            residual_stride, out_stride, BIAS, ACT, GATED, RESIDUAL, BM, BN,
        )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def finish_kernel(
    sums_at, row_scales_at, scales_at, bias_at, residual_at, out_at,
    M, N, residual_stride, out_stride,
    SCALED: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    RESIDUAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Finishes sums: [M, N] int32, or bf16 with SCALED. The bytes of the sums are the bound.

    Grid: rows / BM, channels / BN.
    """
    m0, n0 = tl.program_id(0) * BM, tl.program_id(1) * BN
    rows = (m0 + tl.arange(0, BM)).to(tl.int64)
    cols = n0 + tl.arange(0, BN)
    mask = (rows[:, None] < M) & (cols[None, :] < N)
    y = tl.load(sums_at + rows[:, None] * N + cols[None, :], mask=mask, other=0).to(tl.float32)
    if SCALED:
        finish(
            y, bias_at, residual_at, out_at, m0, n0, M, N, residual_stride, out_stride,
            BIAS, ACT, GATED, RESIDUAL, BM, BN,
        )  # fmt: skip
    else:
        row_scales = tl.load(row_scales_at + rows, mask=rows < M, other=0.0)
        scale_and_finish(
            y, row_scales, scales_at, bias_at, residual_at, out_at, m0, n0, M, N,
            residual_stride, out_stride, BIAS, ACT, GATED, RESIDUAL, BM, BN,
        )  # fmt: skip


def scaled_linear(
    x: Quantized,
    weight: ScaledWeight,
    out: Tensor,
    residual: Tensor | None = None,
    activation: str | None = None,
    *,
    is_gated: bool = False,
    tile: Tile,
) -> Tensor:
    """Writes act(x @ weight.T + bias) (+ residual) to out: [T, N or N / 2].

    The fp32 residual may be out itself.
    """
    (num_rows, num_in), num_out = x.codes.shape, weight.codes.shape[0]
    assert weight.codes.shape[1] == num_in and out.stride(1) == 1, f"{x.codes.shape} {out.stride()}"
    if not num_rows:
        return out
    tiles = triton.cdiv(num_rows, tile.m) * triton.cdiv(num_out, tile.n)
    sums = counts = None
    if tile.split_k > 1:
        sums, counts = split_scratch(out.device)
        assert tiles * tile.m * tile.n <= len(sums) and tiles <= len(counts), f"{tile} {out.shape}"
    product_kernel[(tiles, tile.split_k)](
        x.codes,
        x.scales,
        weight.codes,
        weight.scales,
        weight.bias,
        residual,
        out,
        sums,
        counts,
        num_rows,
        num_out,
        num_in,
        x.codes.stride(0),
        weight.codes.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        BIAS=weight.bias is not None,
        ACT=ACTIVATIONS[activation],
        GATED=is_gated,
        RESIDUAL=residual is not None,
        BM=tile.m,
        BN=tile.n,
        BK=tile.k,
        EVEN_K=num_in % tile.k == 0,
        SWAP=tile.swap,
        SPLIT_K=tile.split_k,
        GROUP_M=tile.group_m,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=False,
    )
    return out


def library_linear(
    x: Quantized,
    weight: ScaledWeight,
    out: Tensor,
    residual: Tensor | None = None,
    activation: str | None = None,
    *,
    is_gated: bool = False,
) -> Tensor:
    """Computes scaled_linear with torch's product, for more than 16 rows and N a multiple of 16.

    torch rounds products of e4m3 to bf16.
    """
    is_int8 = x.codes.dtype == torch.int8
    if is_int8:
        sums = torch._int_mm(x.codes, weight.codes.t())
    else:
        scales = x.scales[:, None], weight.scales[None]
        sums = torch._scaled_mm(x.codes, weight.codes.t(), *scales, out_dtype=torch.bfloat16)
    num_rows, num_out = sums.shape
    finish_kernel[(triton.cdiv(num_rows, 8), triton.cdiv(num_out, 512))](
        sums,
        x.scales,
        weight.scales,
        weight.bias,
        residual,
        out,
        num_rows,
        num_out,
        0 if residual is None else residual.stride(0),
        out.stride(0),
        SCALED=not is_int8,
        BIAS=weight.bias is not None,
        ACT=ACTIVATIONS[activation],
        GATED=is_gated,
        RESIDUAL=residual is not None,
        BM=8,
        BN=512,
        enable_fp_fusion=False,
    )
    return out


# The most sums of a split product: [64, 32768].
MAX_SPLIT_SUMS = 1 << 21
_scratch = threading.local()


def split_scratch(device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns (sums, counts) of zeros, which kernels reset after use.

    Each thread has its own, and its launches must be on one stream at a time; an engine computes in
    one thread. Call it once before a graph is captured.
    """
    made: dict[torch.device, tuple[Tensor, Tensor]] = _scratch.__dict__.setdefault("made", {})
    if device not in made:
        sums = torch.zeros(MAX_SPLIT_SUMS, dtype=torch.int32, device=device)
        made[device] = (
            sums,
            torch.zeros(MAX_SPLIT_SUMS // 128, dtype=torch.int32, device=device),
        )
    return made[device]
