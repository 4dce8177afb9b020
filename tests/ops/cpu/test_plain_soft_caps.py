"""Soft caps and sinks over bf16 and fp32 K/V, on every instruction set and without native kernels.

Bounds are those of attention without them (plain_kv.exact), and the rounding of tanh times the cap.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from ops import get_backend
from ops.backend import KeyValues, Partial
from ops.cpu import native_library
from ops.cpu.backend import CpuBackend
from ops.cpu.native_plain_attention import (
    begin_decode,
    decode_attention,
    prefill_attention,
    prefix_attention,
)
from ops.reference import attention_fp64
from tests.support.memory.plain_kv import EPS, TYPES, Range

pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
    pytest.mark.usefixtures("seeded"),
]

CASES = [
    # heads, K/V heads, dim, rows, prefix length, window, soft cap
    (1, 1, 16, 1, 0, None, 1.0),
    (8, 2, 64, 7, 30, None, 2.0),
    (14, 2, 80, 80, 55, 20, 0.5),
    (6, 1, 96, 33, 100, None, 50.0),
    (4, 2, 192, 60, 130, 128, 3.0),
    (2, 2, 256, 17, 250, 256, 50.0),
    (3, 1, 512, 9, 140, 1, 5.0),
    (8, 8, 64, 40, 600, None, 0.0),
]


def near(
    got: Partial,
    q: Tensor,
    cache: KeyValues,
    scale: float,
    expected: Partial,
    cap: float,
    of_exp: float = 0.0,
) -> None:
    """Checks a result against fp64, within the bound of its roundings. of_exp: the relative error
    of exponentials."""
    k, v = cache.k[0].double(), cache.v[0].double()
    longest = float(k.norm(dim=-1).max()) if k.numel() else 0.0
    most = float(q.double().norm(dim=-1).max()) * longest * scale
    score = (q.shape[2] + 8) * 2.0**-24 * most + 1e-6 + cap * 2.0**-20 + of_exp
    sums = (k.shape[1] + 16) * 2.0**-24
    weights = 2.0**-8 if q.dtype == torch.bfloat16 else 0.0
    largest = float(v.abs().max()) if v.numel() else 0.0
    bound = largest * (weights + 2 * score + sums) + expected.out.abs() * EPS[q.dtype] + 1e-7
    error = (got.out.double() - expected.out).abs()
    assert bool((error <= bound).all()), f"{float((error / bound).max())} times the bound"
    is_none = torch.isneginf(expected.lse)
    assert torch.equal(torch.isneginf(got.lse), is_none)
    error = (got.lse.double() - expected.lse).abs().masked_fill(is_none, 0)
    bound = score + sums + 1e-6 + 2.0**-23 * expected.lse.abs().masked_fill(is_none, 0)
    assert bool((error <= bound).all()), f"{float((error / bound).max())} times the bound"


def fp64(q, cache, scale, window, cap, sinks, first=None) -> Partial:
    k, v = (x[0].transpose(0, 1) for x in cache)
    values = None if sinks is None else sinks.tolist()
    return attention_fp64(
        q, k, v, scale, window=window, soft_cap=cap, sinks=values, first_position=first
    )


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_prefill(isa, dtype, has_sinks, case):
    heads, kv_heads, dim, rows, past, window, cap = case
    kv = Range(kv_heads, dim, past + rows, dtype)
    cache = kv.view()
    q = 3 * torch.randn(rows, heads, dim).to(dtype)
    sinks = 4 * torch.randn(heads) if has_sinks else None
    got = prefill_attention(q, cache, 0.3, window, soft_cap=cap, sinks=sinks)
    near(got, q, cache, 0.3, fp64(q, cache, 0.3, window, cap, sinks), cap)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_prefix(isa, dtype, case):
    heads, kv_heads, dim, rows, past, window, cap = case
    kv = Range(kv_heads, dim, past, dtype)
    cache = kv.view()
    q = 3 * torch.randn(rows, heads, dim).to(dtype)
    got = prefix_attention(q, cache, 0.3, window, soft_cap=cap)
    near(got, q, cache, 0.3, fp64(q, cache, 0.3, window, cap, None, past), cap)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("shape", [(4, 2, 64), (6, 1, 80), (4, 4, 256), (5, 1, 512)], ids=str)
def test_decode_in_one_call_and_in_two(isa, dtype, has_sinks, shape):
    heads, kv_heads, dim = shape
    lengths = [1, 15, 16, 17, 100, 513, 700]
    ranges = [Range(kv_heads, dim, length, dtype) for length in lengths]
    caches = [one.view() for one in ranges]
    q = 3 * torch.randn(len(lengths), heads, dim).to(dtype)
    sinks = 4 * torch.randn(heads) if has_sinks else None
    got = decode_attention(q, caches, 0.2, soft_cap=2.5, sinks=sinks)
    for i, cache in enumerate(caches):
        expected = fp64(q[i : i + 1], cache, 0.2, None, 2.5, sinks)
        near(Partial(got.out[i : i + 1], got.lse[i : i + 1]), q, cache, 0.2, expected, 2.5)
        alone = decode_attention(q[i : i + 1], [cache], 0.2, soft_cap=2.5, sinks=sinks)
        assert torch.equal(alone.out[0], got.out[i]) and torch.equal(alone.lse[0], got.lse[i])
    begun = begin_decode(q, caches, 0.2, soft_cap=2.5)
    again = decode_attention(q, caches, 0.2, begun, soft_cap=2.5, sinks=sinks)
    assert torch.equal(again.out, got.out) and torch.equal(again.lse, got.lse)


def test_a_decode_row_without_keys_has_its_sinks_alone(isa):
    kv = Range(2, 64, 5, torch.float32)
    cache = kv.view(0)
    sinks = torch.tensor([1.0, -2.0, 3.0, 40.0])
    got = decode_attention(torch.randn(1, 4, 64), [cache], 0.2, sinks=sinks)
    assert not got.out.any() and torch.allclose(got.lse[0], sinks)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_has_the_same_bits_in_any_chunk(isa, dtype):
    pick = random.Random(5)
    kv, sinks = Range(2, 96, 400, dtype), torch.randn(6)
    cache = kv.view()
    q = torch.randn(400, 6, 96).to(dtype)
    whole = prefill_attention(q, cache, 0.1, 130, soft_cap=1.5, sinks=sinks)
    at = 0
    while at < 400:
        end = min(400, at + pick.choice([1, 2, 3, 16, 50, 129]))
        part = KeyValues(cache.k[:, :, :end], cache.v[:, :, :end])
        got = prefill_attention(q[at:end], part, 0.1, 130, soft_cap=1.5, sinks=sinks)
        assert torch.equal(got.out, whole.out[at:end])
        assert torch.equal(got.lse, whole.lse[at:end])
        at = end


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_without_native_kernels(monkeypatch, dtype, cap):
    """Heads of 20 have no native kernel: torch's flash kernel computes them, or the reference."""
    of_exp = 2.0**-12 if dtype == torch.bfloat16 else 2e-5  # torch's exp is coarser for bf16
    monkeypatch.setattr(native_library, "is_available", lambda: False)
    sinks = torch.randn(4)
    for backend in (CpuBackend(), get_backend("reference")):
        for rows, past, window in ((5, 40, None), (70, 10, 9), (1, 50, None)):
            kv = Range(2, 20, past + rows, dtype)
            cache = kv.view()
            q = torch.randn(rows, 4, 20).to(dtype)
            got = backend.prefill_attention(q, cache, 0.3, window, soft_cap=cap, sinks=sinks)
            near(got, q, cache, 0.3, fp64(q, cache, 0.3, window, cap, sinks), cap, of_exp)
            before = KeyValues(cache.k[:, :, :past], cache.v[:, :, :past])
            got = backend.prefix_attention(q, before, 0.3, window, soft_cap=cap)
            near(got, q, before, 0.3, fp64(q, before, 0.3, window, cap, None, past), cap, of_exp)
        got = backend.decode_attention(q, [cache], 0.3, soft_cap=cap, sinks=sinks)
        near(got, q, cache, 0.3, fp64(q, cache, 0.3, None, cap, sinks), cap, of_exp)
