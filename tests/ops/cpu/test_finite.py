"""NaN and infinities are found in tensors of every type, at every place."""

from __future__ import annotations

import math

import pytest
import torch

from ops.cpu import native_library
from ops.cpu.finite import all_finite

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
pytestmark = pytest.mark.skipif(
    not native_library.is_available(), reason="native kernels not built"
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_value_is_found(isa, dtype, bad):
    for size in (1, 2, 33, 129):
        largest = torch.finfo(dtype).max
        numbers = torch.full((size,), -largest, dtype=dtype)
        numbers[::3] = largest
        assert all_finite(numbers)
        for at in range(size):
            spoilt = numbers.clone()
            spoilt[at] = bad
            assert not all_finite(spoilt), f"{bad} at {at} of {size}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_shares_of_a_large_tensor_are_read(isa, dtype):
    numbers = torch.zeros(5, 200_003, dtype=dtype)
    assert all_finite(numbers)
    for at in (0, 524_287, 524_288, numbers.numel() - 1):
        numbers.view(-1)[at] = math.nan
        assert not all_finite(numbers)
        numbers.view(-1)[at] = 0.0


def test_other_tensors():
    assert all_finite(torch.tensor([2**31 - 1, -1], dtype=torch.int32))
    assert all_finite(torch.empty(0))
    assert all_finite(torch.ones(4, 6).t())
    assert not all_finite(torch.full((4, 6), math.nan).t())


@pytest.mark.parametrize(
    ("dtype", "bad"),
    [
        (torch.float8_e4m3fn, (0x7F, 0xFF)),
        (torch.float8_e5m2, (0x7C, 0x7D, 0xFC, 0xFF)),
        (torch.float8_e8m0fnu, (0xFF,)),
    ],
)
def test_bytes_of_numbers(dtype, bad):
    every = torch.arange(256, dtype=torch.uint8)
    numbers = every[every.view(dtype).float().isfinite()].tolist()
    assert all_finite(torch.tensor(numbers, dtype=torch.uint8).view(dtype))
    for byte in bad:
        tensor = torch.tensor([*numbers, byte], dtype=torch.uint8).view(dtype)
        assert not all_finite(tensor), hex(byte)
