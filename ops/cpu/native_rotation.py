"""Rotary position embedding in fp32 on the native kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from ops.cpu.native_library import library


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies Backend.rotary in place to x: [T, H, D] fp32 with dense heads."""
    rows, heads, dim = x.shape
    assert x.dtype == torch.float32 and x.stride()[1:] == (dim, 1), f"{x.stride()}"
    check_rotation((cos, sin), rows, dim)
    if rows:
        half = cos.shape[1]
        args = (x.data_ptr(), x.stride(0), rows, heads, dim, cos.data_ptr(), sin.data_ptr(), half)
        library().rotate(*args)
    return x


def check_rotation(rotation: tuple[Tensor, Tensor], rows: int, head_dim: int) -> None:
    for table in rotation:
        assert table.dtype == torch.float32 and table.is_contiguous()
        assert table.shape == rotation[0].shape and table.shape[0] == rows, f"{table.shape}"
        assert 2 * table.shape[1] <= head_dim, f"{table.shape} for heads of {head_dim}"
