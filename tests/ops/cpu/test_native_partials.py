"""Partial attention results are merged, and rows become bytes for the wire, on every instruction
set."""

from __future__ import annotations

import math

import pytest
import torch

from ops.backend import Partial
from ops.cpu import native_library
from ops.cpu.native_partials import can_merge, dequantize_heads, merge_into, quantize_heads
from ops.reference import ReferenceBackend

pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
    pytest.mark.usefixtures("seeded"),
]
REFERENCE = ReferenceBackend()
TYPES = [torch.float32, torch.bfloat16]
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8}
NOTHING = float("-inf")


def part_of(rows, heads, dim, dtype=torch.float32, spread=5.0):
    return Partial(torch.randn(rows, heads, dim).to(dtype), torch.randn(rows, heads) * spread)


def copy_of(part):
    return Partial(part.out.clone(), part.lse.clone())


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("part_type", TYPES)
@pytest.mark.parametrize("spread", [0.1, 5.0, 100.0])
def test_merging_is_the_softmax_over_both(isa, dtype, part_type, spread):
    for rows, heads, dim in ((1, 1, 16), (3, 17, 80), (16, 32, 64), (130, 6, 128)):
        total, part = (part_of(rows, heads, dim, t, spread) for t in (dtype, part_type))
        wide = [Partial(p.out.double(), p.lse.double()) for p in (total, part)]
        expected = REFERENCE.merge_partials(wide)
        merge_into(*total, *part)
        error = (total.out - expected.out).abs() / (wide[0].out.abs() + wide[1].out.abs())
        # weights exp(x) of x in fp32 are off by x times its rounding
        assert float(error.max()) <= ROUNDING[dtype] + spread * 1e-6
        bound = 2e-7 + 2.0**-23 * expected.lse.abs()
        assert bool(((total.lse - expected.lse).abs() <= bound).all())


def test_some_rows(isa):
    total, part = part_of(20, 5, 32), part_of(6, 5, 32)
    rows = torch.tensor([19, 0, 7, 8, 3, 11])
    expected = copy_of(total)
    some = Partial(expected.out[rows], expected.lse[rows])
    merge_into(*some, *part)
    expected.out[rows], expected.lse[rows] = some
    merge_into(*total, *part, rows)
    assert torch.equal(total.out, expected.out)
    assert torch.equal(total.lse, expected.lse)
    merge_into(*total, *part_of(0, 5, 32), rows[:0])
    assert torch.equal(total.out, expected.out)


def test_some_heads_of_rows(isa):
    total, part = part_of(20, 9, 32), part_of(20, 4, 32)
    expected = copy_of(total)
    some = Partial(expected.out[:, 3:7].contiguous(), expected.lse[:, 3:7].contiguous())
    merge_into(*some, *part)
    expected.out[:, 3:7], expected.lse[:, 3:7] = some
    view = Partial(total.out[:, 3:7], total.lse[:, 3:7])
    assert can_merge(view, part)
    merge_into(*view, *part)
    assert torch.equal(total.out, expected.out)
    assert torch.equal(total.lse, expected.lse)


def test_a_part_without_keys_is_not_read(isa):
    total, part = part_of(4, 20, 48), part_of(4, 20, 48)
    before = copy_of(total)
    part.out[0], part.lse[0] = math.nan, NOTHING
    total.out[1], total.lse[1] = math.nan, NOTHING
    total.lse[2], part.lse[2] = NOTHING, NOTHING
    part.out[3, 5], part.lse[3, 5] = math.nan, NOTHING
    merge_into(*total, *part)
    assert torch.equal(total.out[0], before.out[0])
    assert torch.equal(total.lse[0], before.lse[0])
    assert torch.equal(total.out[1], part.out[1])
    assert torch.equal(total.lse[1], part.lse[1])
    assert bool((total.lse[2] == NOTHING).all())
    assert torch.equal(total.out[3, 5], before.out[3, 5])
    assert bool(torch.isfinite(total.out).all())


@pytest.mark.parametrize("which", ["total", "part"])
def test_a_nan_is_not_hidden(isa, which):
    for at in ("out", "lse"):
        parts = {"total": part_of(1, 3, 16), "part": part_of(1, 3, 16)}
        broken = getattr(parts[which], at)
        broken[0, 1] = math.nan
        merge_into(*parts["total"], *parts["part"])
        finite = parts["total"].out.isfinite().all(-1)
        assert finite.tolist() == [[True, False, True]]


def test_a_row_has_the_same_bits_in_any_call(isa):
    total, part = part_of(150, 8, 96), part_of(150, 8, 96)
    alone = copy_of(total)
    for i in range(150):
        one = slice(i, i + 1)
        merge_into(alone.out[one], alone.lse[one], part.out[one], part.lse[one])
    head = Partial(total.out[:, 3:5].contiguous(), total.lse[:, 3:5].contiguous())
    merge_into(*head, part.out[:, 3:5].contiguous(), part.lse[:, 3:5].contiguous())
    merge_into(*total, *part)
    assert torch.equal(total.out, alone.out)
    assert torch.equal(total.lse, alone.lse)
    assert torch.equal(total.out[:, 3:5], head.out)
    assert torch.equal(total.lse[:, 3:5], head.lse)


def test_types_that_can_be_merged():
    part = part_of(2, 4, 32)
    assert can_merge(part, part)
    assert not can_merge(part_of(2, 4, 20), part_of(2, 4, 20))
    assert not can_merge(Partial(part.out.half(), part.lse), part)
    assert not can_merge(part, Partial(part.out.transpose(0, 1), part.lse))
    assert not can_merge(part, Partial(part.out, part.lse.double()))


@pytest.mark.parametrize("dtype", TYPES)
def test_bytes_are_within_half_a_step_of_their_head(isa, dtype):
    for rows, heads, dim in ((1, 1, 16), (16, 32, 64), (70, 3, 80)):
        wide = torch.randn(rows, heads + 2, dim) * torch.logspace(-6, 6, heads + 2)[:, None]
        x = wide.to(dtype)[:, 1:-1]  # strided, as from a fused projection
        values, scales = quantize_heads(x)
        top = x.float().abs().amax(-1)
        assert torch.allclose(scales, top / 127, rtol=1e-6)
        back = dequantize_heads(values, scales)
        assert bool(((back - x.float()).abs() <= scales[..., None] * 0.50001).all())
        rounded = dequantize_heads(values, scales, torch.bfloat16)
        assert torch.equal(rounded, back.bfloat16())


def test_bytes_of_zeros_and_of_nan(isa):
    x = torch.zeros(2, 3, 32)
    x[1] = torch.randn(3, 32)
    x[1, 0, 5], x[1, 2, 30] = math.nan, math.inf
    back = dequantize_heads(*quantize_heads(x))
    assert bool((back[0] == 0).all())
    finite = back[1].isfinite()
    assert bool(finite[1].all())
    assert not bool(finite[[0, 2]].any())
    values, scales = quantize_heads(x[:0])
    assert dequantize_heads(values, scales).shape == (0, 3, 32)
