"""Kernels that do nothing but reach a ceiling: reading memory, multiplying what is in reach."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

READ_BLOCK = 8192


@triton.jit
def read_kernel(x_at, out_at, num_blocks, BLOCK: tl.constexpr):
    """x: num_blocks * BLOCK int32, below 2^31 -> out[program]: the xor of what it reads."""
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        total = total ^ tl.load(x_at + block * BLOCK + lanes)
    tl.store(out_at + tl.program_id(0) * BLOCK + lanes, total)


def read_all(x: Tensor, out: Tensor) -> None:
    """x: int32, a multiple of READ_BLOCK values; out: [programs, READ_BLOCK] int32."""
    read_kernel[(out.shape[0],)](x, out, x.numel() // READ_BLOCK, BLOCK=READ_BLOCK, num_warps=8)


@triton.jit
def multiply_kernel(
    a_at, b_at, out_at, repeats,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, IS_INT8: tl.constexpr,
):  # fmt: skip
    """The product of the same two tiles, added up `repeats` times: a: [M, K], b: [N, K]."""
    rows, cols, depth = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_at + rows[:, None] * K + depth[None, :])
    b = tl.load(b_at + cols[None, :] * K + depth[:, None])
    if IS_INT8:
        total = tl.zeros((M, N), tl.int32)
        for _ in range(repeats):
            total = tl.dot(a, b, total, out_dtype=tl.int32)
    else:
        total = tl.zeros((M, N), tl.float32)
        for _ in range(repeats):
            total = tl.dot(a, b, total)
    at = tl.program_id(0).to(tl.int64) * M * N
    tl.store(out_at + at + rows[:, None] * N + cols[None, :], total)


def multiply(a: Tensor, b: Tensor, out: Tensor, repeats: int, num_warps: int = 8) -> int:
    """Every program multiplies a: [M, K] by b: [N, K]; out: [programs, M, N]. The operations."""
    (rows, depth), cols = a.shape, b.shape[0]
    multiply_kernel[(out.shape[0],)](
        a, b, out, repeats,
        M=rows, N=cols, K=depth, IS_INT8=a.dtype == torch.int8, num_warps=num_warps,
    )  # fmt: skip
    return 2 * rows * cols * depth * repeats * out.shape[0]
