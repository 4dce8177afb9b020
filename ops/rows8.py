"""Rows in 8 bits with one scale for each row and head."""

from __future__ import annotations

import torch
from torch import Tensor


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: [R, H, D] -> values [R, H, D] int8, scales [R, H] fp32; x is about values * scale."""
    x = x.float()
    scales = x.abs().amax(-1).div_(127.0)
    values = (x / scales.clamp_min(1e-30)[..., None]).round_().clamp_(-127, 127)
    return values.to(torch.int8), scales


def dequantize(values: Tensor, scales: Tensor) -> Tensor:
    """-> [R, H, D] fp32."""
    return values.float() * scales[..., None]
