"""Prefill attention over bf16 and fp32 K/V on every instruction set of this machine.

Results are compared with float64. Bounds follow from the rounding of sums to fp32, of weights to
the type of K/V if it is bf16, and of results to the type of the rows. K/V have the layout of
memory/, surrounded by values that must not be read.
"""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from ops.backend import KeyValues
from ops.cpu import native_library
from ops.cpu.native_plain_attention import can_attend, prefill_attention
from tests.support.memory.plain_kv import REFERENCE, TYPES, Range, exact

pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
    pytest.mark.usefixtures("seeded"),
]


def check(q: Tensor, kv: Range, scale: float, window: int | None) -> None:
    cache = kv.view()
    expected, bound = exact(REFERENCE.prefill_attention, q, cache, scale, window)
    got = prefill_attention(q, cache, scale, window)
    assert got.out.dtype == q.dtype and got.lse.dtype == torch.float32
    error = torch.cat((got.out - expected.out, (got.lse - expected.lse)[..., None]), -1).abs()
    assert bool((error <= bound).all()), f"{float((error / bound).max())} times the bound"


SHAPES = [
    # heads, K/V heads, dim, rows, prefix length
    (1, 1, 16, 1, 0),
    (4, 4, 16, 2, 0),
    (8, 2, 64, 7, 30),
    (32, 8, 64, 60, 0),
    (6, 1, 48, 33, 100),
    (14, 2, 80, 80, 55),
    (8, 1, 128, 200, 3),
    (4, 2, 96, 130, 300),
    (2, 2, 256, 17, 250),
    (3, 1, 512, 9, 140),
]


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prefill_is_within_the_bound_of_its_roundings(isa, dtype, window, shape):
    heads, kv_heads, dim, rows, past = shape
    kv = Range(kv_heads, dim, past + rows, dtype)
    check(torch.randn(rows, heads, dim).to(dtype), kv, dim**-0.5, window)


def test_prefill_on_random_shapes(isa):
    pick = random.Random(7)
    for _ in range(40):
        dtype, kv_heads = pick.choice(TYPES), pick.randint(1, 3)
        rows, past, dim = pick.randint(1, 200), pick.randint(0, 300), 16 * pick.randint(1, 16)
        heads, window = kv_heads * pick.randint(1, 8), pick.choice([None, pick.randint(1, 400)])
        kv = Range(kv_heads, dim, past + rows, dtype)
        check(torch.randn(rows, heads, dim).to(dtype), kv, 0.7 * dim**-0.5, window)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("window", [None, 150])
def test_a_row_has_the_same_bits_however_the_prompt_is_cut(isa, dtype, window):
    for heads, kv_heads, dim in ((8, 2, 64), (3, 3, 32), (7, 1, 48)):
        length = 333
        kv = Range(kv_heads, dim, length, dtype)
        q = torch.randn(length, heads, dim).to(dtype)
        whole = prefill_attention(q, kv.view(), 0.2, window)
        for size in (1, 7, 64, 100, 129, 200):
            for first in range(0, length, size) if size > 7 else (0, 127, 128, 200, length - size):
                end = min(first + size, length)
                part = prefill_attention(q[first:end], kv.view(end), 0.2, window)
                assert torch.equal(part.out, whole.out[first:end]), f"{first} to {end}"
                assert torch.equal(part.lse, whole.lse[first:end]), f"{first} to {end}"


@pytest.mark.parametrize("dtype", TYPES)
def test_the_number_of_threads_changes_nothing(isa, dtype):
    kv = Range(2, 64, 400, dtype)
    q = torch.randn(400, 8, 64).to(dtype)
    before = native_library.num_threads()
    whole = prefill_attention(q, kv.view(), 0.125, None)
    native_library.set_num_threads(1)
    alone = prefill_attention(q, kv.view(), 0.125, None)
    native_library.set_num_threads(before)
    assert torch.equal(whole.out, alone.out)
    assert torch.equal(whole.lse, alone.lse)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("window", [None, 9])
def test_large_scores_select_one_key_and_do_not_overflow(isa, dtype, window):
    """Scores grow with the position up to 1e12, so that a row takes its last visible key or its
    first."""
    length, dim, scale = 300, 32, 1e3
    kv = Range(1, dim, length, dtype)
    kv.k.zero_()
    kv.k[0, 0, :, 3] = torch.arange(length).to(dtype) * 4.0
    position = torch.arange(length)
    q = torch.zeros(length, 2, dim, dtype=dtype)
    q[:, 0, 3], q[:, 1, 3] = 1e6, -1e6
    got = prefill_attention(q, kv.view(), scale, window)
    first = position * 0 if window is None else (position - window + 1).clamp(min=0)
    scores = q[:, :, 3].double() * scale
    for row in range(length):
        low = int(first[row])
        keys = kv.k[0, 0, low : row + 1, 3].double()
        for head in (0, 1):
            here = keys * scores[row, head]
            best = here == here.max()  # bf16 has only every second position beyond 256
            value = kv.v[0, 0, low : row + 1][best].double().mean(0)
            assert torch.allclose(got.out[row, head].double(), value, rtol=2.0**-7, atol=1e-2)
            lse = float(here.max()) + math.log(int(best.sum()))
            assert math.isclose(float(got.lse[row, head]), lse, rel_tol=1e-6, abs_tol=1e-6)


@pytest.mark.parametrize("dtype", TYPES)
def test_keys_that_no_row_sees_are_not_computed(isa, dtype):
    """K/V behind the last row and more than eight keys before the window may hold anything."""
    kv = Range(2, 64, 500, dtype)
    q = torch.randn(20, 4, 64).to(dtype)
    expected = prefill_attention(q, kv.view(450), 0.125, 50)
    kv.k[:, :, :373], kv.v[:, :, :373] = math.nan, math.nan  # the first row sees keys from 381 on
    kv.k[:, :, 450:], kv.v[:, :, 450:] = math.nan, math.nan
    got = prefill_attention(q, kv.view(450), 0.125, 50)
    assert bool(torch.isfinite(got.out).all())
    assert torch.equal(got.out, expected.out)


def test_fp32_rows_on_bf16_keys_are_not_rounded(isa):
    """Queries keep their bits: the error is that of fp32 except for the result's own terms."""
    kv = Range(2, 64, 90, torch.bfloat16)
    q = torch.randn(90, 4, 64)
    wide = KeyValues(kv.k.double(), kv.v.double())
    expected = REFERENCE.prefill_attention(q.double(), wide, 0.125, None)
    got = prefill_attention(q, kv.view(), 0.125, None)
    assert torch.allclose(got.out.double(), expected.out, rtol=1e-5, atol=1e-5)
    assert torch.allclose(got.lse.double(), expected.lse, rtol=1e-5, atol=1e-5)


def test_rows_of_a_wider_tensor(isa):
    """Rows of a fused projection are further apart than their heads are wide."""
    kv = Range(2, 32, 40, torch.bfloat16)
    wide = torch.randn(40, 8, 32).bfloat16()
    q = wide[:, 2:6]
    assert can_attend(q, kv.view())
    got = prefill_attention(q, kv.view(), 0.2, None)
    assert torch.equal(got.out, prefill_attention(q.contiguous(), kv.view(), 0.2, None).out)


def test_no_rows(isa):
    kv = Range(2, 32, 4, torch.float32)
    got = prefill_attention(torch.empty(0, 4, 32), kv.view(), 0.2, None)
    assert got.out.shape == (0, 4, 32)
    assert got.lse.shape == (0, 4)


def test_shapes_without_a_kernel(isa):
    kv = Range(2, 32, 4, torch.float32).view()
    q = torch.empty(4, 4, 32)  # only its shape is used
    assert can_attend(q, kv)
    assert not can_attend(q.half(), kv)
    assert not can_attend(q.double(), KeyValues(kv.k.double(), kv.v.double()))
    assert not can_attend(torch.empty(4, 4, 20), Range(2, 20, 4, torch.float32).view())
    assert not can_attend(q.transpose(0, 1).contiguous().transpose(0, 1), kv)
