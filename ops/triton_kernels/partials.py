"""Merging of partial attention in place, one program for a row and head.

Memory is the bound: a head of both parts is read once and one is written, with a few instructions
for each value. Values whose log-sum-exp is -inf are not read.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ops.backend import Partial
from ops.triton_kernels.tiles import row_stride


@triton.jit
def merge_kernel(
    out,
    out_stride,
    lse,
    lse_stride,
    part_out,
    part_out_stride,
    part_lse,
    part_lse_stride,
    rows,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    HAS_ROWS: tl.constexpr,
):
    """Merges row i of the part into row rows[i] (int64) of out and lse, or into row i."""
    index, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = index
    if HAS_ROWS:
        row = tl.load(rows + index)
    one = tl.arange(0, 1)
    d = tl.arange(0, DIM_PAD)
    here = lse + row * lse_stride + head + one
    mine = tl.load(here)
    other = tl.load(part_lse + index * part_lse_stride + head + one)
    most = tl.maximum(mine, other)
    least = float("-inf")
    base = tl.where(most == least, 0.0, most)  # both may see no key
    weight, other_weight = tl.exp(mine - base), tl.exp(other - base)
    total = weight + other_weight
    safe = tl.where(total == 0.0, 1.0, total)
    at = out + row * out_stride + head * HEAD_DIM + d
    mask = d < HEAD_DIM
    values = tl.load(at, mask=mask & (mine != least), other=0).to(tl.float32)
    more = part_out + index * part_out_stride + head * HEAD_DIM + d
    other_values = tl.load(more, mask=mask & (other != least), other=0).to(tl.float32)
    merged = (values * weight + other_values * other_weight) / safe
    tl.store(at, merged.to(out.dtype.element_ty), mask=mask)
    tl.store(here, tl.where(total == 0.0, least, base + tl.log(safe)))


def merge_into(total: Partial, part: Partial, rows: Tensor | None = None) -> None:
    """Computes Backend.merge_into. Heads are dense; rows may be strided. lse is fp32."""
    count, heads, dim = part.out.shape
    assert total.out.shape[1:] == (heads, dim), f"{total.out.shape} and {part.out.shape}"
    assert rows is not None or len(total.out) == count, f"{len(total.out)} rows and {count}"
    assert total.lse.stride(1) == part.lse.stride(1) == 1 or heads == 1, "lse of adjacent heads"
    if count:
        merge_kernel[(count, heads)](
            total.out,
            row_stride(total.out),
            total.lse,
            total.lse.stride(0),
            part.out,
            row_stride(part.out),
            part.lse,
            part.lse.stride(0),
            total.lse if rows is None else rows,
            HEAD_DIM=dim,
            DIM_PAD=triton.next_power_of_2(dim),
            HAS_ROWS=rows is not None,
            num_warps=1,
        )
