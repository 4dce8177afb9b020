"""Stored weights on the native kernels: 8 bits are rounded to int8, 4 bits are unpacked."""

from __future__ import annotations

import torch
from torch import Tensor

from ops.cpu.native_library import address, is_available, library

_KINDS = {torch.float8_e4m3fn: 0, torch.int8: 1, torch.uint8: 2}  # the library's numbers


def can_round(codes: Tensor) -> bool:
    return is_available() and codes.device.type == "cpu" and codes.dtype in _KINDS


def round_codes(
    codes: Tensor, scales: Tensor, group: int, zeros: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Rounds (codes - zeros) * scales to the nearest of 127 steps of a row's largest magnitude.

    codes: [rows, in]; scales and zeros: [rows, groups] fp32, of `group` inputs each, the last of
    which may be shorter. Returns [rows, in] int8 and the steps, [rows] fp32.
    """
    rows, num_in = codes.shape
    shape = (rows, -(-num_in // group))
    for each in (scales, zeros):
        assert each is None or (each.shape == shape and each.dtype == torch.float32), f"{shape}"
    if codes.stride(1) != 1:
        codes = codes.contiguous()
    scales, zeros = scales.contiguous(), None if zeros is None else zeros.contiguous()
    rounded, steps = torch.empty(rows, num_in, dtype=torch.int8), torch.empty(rows)
    library().round_rows(
        codes.data_ptr(),
        codes.stride(0),
        _KINDS[codes.dtype],
        rows,
        num_in,
        group,
        scales.data_ptr(),
        address(zeros),
        rounded.data_ptr(),
        steps.data_ptr(),
    )
    return rounded, steps


def unpack_nibbles(packed: Tensor, *, is_low_first: bool) -> Tensor:
    """Unpacks packed: [n, m] uint8 to [n, 2 m] uint8 below 16. Two codes share a byte."""
    packed = packed.contiguous()
    assert packed.dtype == torch.uint8
    codes = torch.empty(packed.shape[0], 2 * packed.shape[1], dtype=torch.uint8)
    args = (packed.data_ptr(), packed.numel(), is_low_first, codes.data_ptr())
    library().unpack_nibbles(*args)
    return codes
