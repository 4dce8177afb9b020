"""Partial attention on the native kernels (ops/csrc/partials.inl): merging, and int8 for the wire.

Merging attention over disjoint sets of keys is exact: each part weighs exp(its log-sum-exp)
(Flash-Decoding; FlashInfer, arXiv 2501.01005).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops.backend import Partial
from ops.cpu.native_library import TYPES, address, library


def can_merge(total: Partial, part: Partial) -> bool:
    """Returns whether the kernel supports these types and dense heads of whole vectors."""
    (out, lse), (more, more_lse) = total, part
    is_dense = more.is_contiguous() and more_lse.is_contiguous()
    is_dense = is_dense and out.stride()[1:] == (out.shape[2], 1) and lse.stride(1) == 1
    has_types = out.dtype in TYPES and more.dtype in TYPES and lse.dtype == torch.float32
    return is_dense and has_types and more_lse.dtype == torch.float32 and out.shape[2] % 16 == 0


def merge_into(
    out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor, rows: Tensor | None = None
) -> None:
    """Merges a part into out: [T, H, D] and lse: [T, H], in place.

    part_out: [R, H, D], part_lse: [R, H]; row i belongs to row rows[i], [R] int64 without repeats,
    or to row i. All are dense, but rows of out and lse may be strided; out and part_out are
    fp32 or bf16, D is a multiple of 16. With natural logs and m the larger lse, out = (out
    exp(lse - m) + part_out exp(part_lse - m)) / w and lse = m + log(w), where w is the sum of both
    weights. Values whose lse is -inf are not read, so out may be uninitialized there.
    """
    num_rows, heads, dim = part_out.shape
    assert part_lse.shape == (num_rows, heads) and lse.shape == out.shape[:2], "lse per head"
    assert out.shape[1:] == (heads, dim) and dim % 16 == 0, f"{out.shape} and {part_out.shape}"
    assert lse.dtype == part_lse.dtype == torch.float32
    assert out.stride()[1:] == (dim, 1) and lse.stride(1) == 1, f"{out.stride()} {lse.stride()}"
    assert part_out.is_contiguous() and part_lse.is_contiguous()
    if rows is None:
        assert len(out) == num_rows, f"{len(out)} rows and {num_rows}"
    else:
        assert rows.shape == (num_rows,) and rows.dtype == torch.int64 and rows.is_contiguous()
    library().merge_partials(
        out.data_ptr(),
        TYPES[out.dtype],
        lse.data_ptr(),
        part_out.data_ptr(),
        TYPES[part_out.dtype],
        part_lse.data_ptr(),
        out.stride(0),
        lse.stride(0),
        address(rows),
        num_rows,
        heads,
        dim,
    )


def quantize_heads(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes x: [T, H, D] fp32 or bf16 with dense heads to int8 [T, H, D], fp32 scales [T, H].

    Each head is rounded to 127ths of its largest magnitude; the error is at most half a scale. D is
    a multiple of 16. A head with a NaN or an infinity is not finite after dequantization.
    """
    rows, heads, dim = x.shape
    assert x.stride()[1:] == (dim, 1) and dim % 16 == 0, f"{x.shape} {x.stride()}"
    values = torch.empty(x.shape, dtype=torch.int8)
    scales = torch.empty(rows, heads, dtype=torch.float32)
    where = (values.data_ptr(), scales.data_ptr())
    library().quantize_heads(x.data_ptr(), x.stride(0), TYPES[x.dtype], rows, heads, dim, *where)
    return values, scales


def dequantize_heads(values: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the fp32 or bf16 values of quantize_heads' result: [T, H, D]."""
    rows, heads, dim = values.shape
    assert values.dtype == torch.int8 and values.is_contiguous() and dim % 16 == 0
    assert scales.dtype == torch.float32 and scales.is_contiguous()
    assert scales.shape == (rows, heads), f"{scales.shape} for {values.shape}"
    out = torch.empty(values.shape, dtype=dtype)
    where = (values.data_ptr(), scales.data_ptr())
    library().dequantize_heads(*where, rows, heads, dim, out.data_ptr(), TYPES[dtype])
    return out
