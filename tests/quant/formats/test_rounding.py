"""Stored 8-bit weights become int8: the native pass against the one in torch, to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ops.cpu import native_library
from ops.cpu.native_quantized_linear import Int8Linear
from quant.formats.weights import E4M3, Weight8

pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
    pytest.mark.usefixtures("seeded"),
]
KINDS = [E4M3, torch.int8, torch.uint8]


def random_codes(kind: torch.dtype, *shape: int) -> Tensor:
    """Returns all codes, also e4m3's subnormal numbers."""
    return torch.randint(0, 256, shape, dtype=torch.uint8).view(kind)


def random_weight(
    kind: torch.dtype, shape: tuple[int, int], group: int, *, has_zeros: bool = False
) -> Weight8:
    groups = -(-shape[1] // group)
    scales = torch.randn(shape[0], groups) * 2.0 ** torch.randint(-20, 4, (shape[0], groups))
    zeros = torch.randint(0, 256, (shape[0], groups)).float() if has_zeros else None
    return Weight8(random_codes(kind, *shape), scales, group, zeros)


def check_equal(weight: Weight8) -> None:
    codes, steps = weight.rounded()
    expected_codes, expected_steps = weight._rounded_in_torch()
    assert codes.dtype == torch.int8 and torch.equal(codes, expected_codes)
    assert torch.equal(steps, expected_steps)


@pytest.mark.covering(2)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize(
    ("shape", "group"),
    [
        ((70, 256), 128),
        ((33, 500), 128),
        ((130, 1000), 1000),
        ((9, 77), 77),
        ((6, 90), 12),
        ((5, 40), 24),
        ((3, 8), 1),
        ((1, 20_000), 64),
        ((2000, 16), 16),
    ],
)
def test_bits_of_the_pass_in_torch(isa, kind, has_zeros, shape, group):
    check_equal(random_weight(kind, shape, group, has_zeros=has_zeros))


def test_every_number_of_e4m3(isa):
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3)
    numbers = codes[~codes.float().isnan()]
    weight = Weight8(numbers[:, None].contiguous(), torch.ones(len(numbers), 1), 1)
    values, steps = numbers.float(), weight.rounded()[1]
    assert torch.equal(steps, values.abs() / 127)
    assert torch.equal(weight.rounded()[0][:, 0], values.sign().mul(127).to(torch.int8))


def test_rows_of_zeros_and_of_tiny_numbers(isa):
    weight = random_weight(E4M3, (5, 200), 128)
    weight.codes.view(torch.uint8)[1] = 128  # -0
    weight.scales[2] = 1e-34
    weight.scales[3] = 0.0
    check_equal(weight)
    codes, steps = weight.rounded()
    assert not codes[1:4].any() and not steps[1:4].any()


def test_a_scale_of_all_rows_and_strided_codes(isa):
    """A scale per tensor is one number seen by all rows; a fused expert is a part of a tensor."""
    codes = random_codes(E4M3, 4, 48, 320)
    check_equal(Weight8(codes[2], torch.tensor([[0.02]]).expand(48, 1), 320))
    check_equal(Weight8(codes[1, :, 64:256], torch.rand(48, 2), 128))
    check_equal(Weight8(codes[0].T, torch.rand(320, 1), 48))


def test_inputs_in_another_order_take_the_pass_in_torch(isa):
    order = torch.randperm(64) // 32
    weight = random_weight(torch.uint8, (8, 64), 32, has_zeros=True)
    check_equal(Weight8(weight.codes, weight.scales, 32, weight.zeros, order))


@pytest.mark.parametrize("num_in", [1, 3, 64, 254, 257, 600])
def test_packed_codes_are_those_given(isa, num_in):
    """The products of whole numbers are exact, so they show every code."""
    codes, scales = torch.randint(-127, 128, (45, num_in), dtype=torch.int8), torch.ones(45)
    x = torch.randint(-127, 128, (4, num_in)).float()
    x[:, 0] = 127.0
    expected = x.double() @ codes.double().T
    for parts in ([codes], [codes[:20], codes[20:]]):
        assert torch.equal(Int8Linear(parts, None, scales=scales)(x).double(), expected)
