"""Attention on int4 K/V whose recent tokens are in int8, on every instruction set, against float64
and against itself."""

from __future__ import annotations

import math

import pytest
import torch

from ops.cpu import native_library
from ops.reference import round_kv4
from quant.kv import RECENT_BLOCK
from tests.support.memory.int8_kv import Cache, out_error4, rounded_query4
from tests.support.memory.recent_kv import RecentCache, recent_attention_fp64

pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
    pytest.mark.usefixtures("seeded"),
]
CASES = [
    {"heads": 4, "kv_heads": 2, "dim": 64, "length": 37},
    {"heads": 4, "kv_heads": 2, "dim": 64, "length": 128},
    {"heads": 8, "kv_heads": 2, "dim": 64, "length": 700},
    {"heads": 4, "kv_heads": 4, "dim": 128, "length": 530, "group": 64},
    {"heads": 4, "kv_heads": 1, "dim": 32, "length": 165, "group": 16},
    {"heads": 6, "kv_heads": 2, "dim": 80, "length": 300},
    {"heads": 24, "kv_heads": 2, "dim": 256, "length": 270, "group": 256},
    {"heads": 8, "kv_heads": 2, "dim": 64, "length": 400, "window": 200},
    {"heads": 8, "kv_heads": 2, "dim": 64, "length": 400, "window": 40},
    {"heads": 8, "kv_heads": 2, "dim": 64, "length": 290, "soft_cap": 2.0},
    {"heads": 4, "kv_heads": 2, "dim": 64, "length": 350, "slopes": [0.5, 0.25, 0.1, 0.01]},
    {"heads": 4, "kv_heads": 2, "dim": 64, "length": 350, "sinks": [0.0, 3.0, -5.0, 60.0]},
]


def filled(shape, length, options) -> tuple[RecentCache, torch.Tensor, torch.Tensor]:
    cache = RecentCache(**shape, tokens=length, **options)
    k, v = torch.randn(2, length, shape["kv_heads"], shape["dim"])
    cache.fill(k, v)
    return cache, k, v


def parts_of(case) -> tuple[dict, int, dict]:
    case = {"group": 64, **case}
    shape = {name: case.pop(name) for name in ("heads", "kv_heads", "dim", "group")}
    return shape, case.pop("length"), case


@pytest.mark.covering(1)
@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(f"{k}{v}" for k, v in c.items()))
def test_attention(isa, case):
    shape, length, options = parts_of(case)
    cache, k, v = filled(shape, length, options)
    heads, dim = shape["heads"], shape["dim"]
    q, lse = torch.randn(length, heads, dim), torch.empty(length, heads)
    whole = cache.attend(q, length, lse=lse)
    expected, expected_lse = recent_attention_fp64(
        q, rounded_query4(q), k, v, (cache.group, cache.group8), dim**-0.5, **options
    )
    assert float((whole - expected).abs().max()) <= out_error4(round_kv4(v, cache.group))
    assert float((whole - expected).norm() / expected.norm()) < 0.01
    assert float((lse - expected_lse).abs().max()) <= 2e-4
    first_block = min(RECENT_BLOCK, length)  # which is int8 alone
    error = (whole - expected)[:first_block].norm() / expected[:first_block].norm()
    assert float(error) < 2e-4
    # any division of the rows gives the same bits
    for first in (length - 1, length - 3, length // 2):
        again = torch.empty(length - first, heads)
        assert torch.equal(cache.attend(q[first:], length, lse=again), whole[first:])
        assert torch.equal(again, lse[first:])
    for last in (1, length // 3, length // 2 + 1):
        assert torch.equal(cache.attend(q[last - 1 : last], last), whole[last - 1 : last])


@pytest.mark.covering(2)
@pytest.mark.parametrize("options", [{}, {"window": 150}, {"sinks": [0.5, 1.0, -1.0, 2.0]}])
@pytest.mark.parametrize("chunk", [1, 7, 64, 300])
def test_rows_have_the_same_bits_whatever_the_chunks(isa, chunk, options):
    shape = {"heads": 4, "kv_heads": 2, "dim": 64}
    whole, k, v = filled(shape, 410, options)
    q = torch.randn(410, 4, 64)
    expected = whole.attend(q, 410)
    cache = RecentCache(**shape, tokens=410, **options)
    for begin in range(0, 410, chunk):
        end = min(410, begin + chunk)
        step = cache.step([0], [end - begin], [end])
        cache.op.append(step, k[begin:end], v[begin:end], None)
        assert torch.equal(cache.op.attend(step, q[begin:end]), expected[begin:end])


def test_rows_beside_other_sequences_have_the_same_bits(isa):
    shape = {"heads": 4, "kv_heads": 2, "dim": 64}
    lengths, rows = [130, 256, 40, 300], [1, 1, 30, 140]
    together = RecentCache(**shape, tokens=300, sequences=4)
    kv = [torch.randn(2, length, 2, 64) for length in lengths]
    for i, pair in enumerate(kv):
        together.fill(*pair, sequence=i)
    q = torch.randn(sum(rows), 4, 64)
    found = together.op.attend(together.step([0, 1, 2, 3], rows, lengths), q).split(rows)
    for i, (part, one) in enumerate(zip(q.split(rows), found, strict=True)):
        assert torch.equal(together.attend(part, lengths[i], sequence=i), one), f"sequence {i}"


def test_no_row_reads_int4_in_its_block_or_int8_before_it(isa):
    """What a row does not read is NaN."""
    shape = {"heads": 4, "kv_heads": 2, "dim": 64}
    cache, _, _ = filled(shape, 300, {})
    q = torch.randn(44, 4, 64)
    expected = cache.attend(q, 300)
    clean = cache.used().clone(), cache.recent.used().clone()
    tiles = 256 // 16
    cache.used()[tiles * cache.tile_bytes :] = 0x7F
    cache.recent.used()[: tiles * cache.recent.tile_bytes] = 0x7F
    assert torch.equal(cache.attend(q, 300), expected)
    assert torch.equal(cache.attend(q[-1:], 300), expected[-1:])
    cache.used()[:] = clean[0]
    cache.recent.used()[:] = 0x7F
    assert not bool(cache.attend(q, 300).isfinite().any()), "rows read their block in int8"


def test_a_part_without_own_keys_is_int4(isa):
    shape = {"heads": 4, "kv_heads": 2, "dim": 64}
    cache, k, v = filled(shape, 256, {})
    plain = Cache(**shape, bits=4, tokens=256)
    plain.fill(k, v)
    q = torch.randn(3, 4, 64)
    expected = plain.op.attend(plain.step([0], [3], [256], prefix_only=True), q)
    assert torch.equal(cache.op.attend(cache.step([0], [3], [256], prefix_only=True), q), expected)


def test_a_layer_without_a_recent_store_is_int4_in_any_step(isa):
    shape = {"heads": 4, "kv_heads": 2, "dim": 64}
    cache, k, v = filled(shape, 200, {})
    plain = Cache(**shape, bits=4, tokens=200)
    plain.fill(k, v)
    q = torch.randn(5, 4, 64)
    step = plain.step([0], [5], [200])
    step.add_recent(cache.recent.address, cache.recent.tile_bytes, [0])
    assert torch.equal(plain.op.attend(step, q), plain.attend(q, 200))


def test_instruction_sets_with_fused_sums_compute_the_same_bits():
    cache, _, _ = filled({"heads": 12, "kv_heads": 2, "dim": 80}, 600, {})
    q, found, before = torch.randn(90, 12, 80), [], native_library.instruction_set()
    for name in native_library.library().instruction_sets():
        if name == "portable":
            continue
        native_library.library().choose_instruction_set(name)
        found.append(cache.attend(q, 600))
    native_library.library().choose_instruction_set(before)
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("at", [70, 270])
def test_a_nan_spoils_the_rows_that_see_it(isa, which, at):
    """It is in an earlier block of the last rows, or in their own."""
    length, shape = 300, {"heads": 4, "kv_heads": 2, "dim": 64}
    clean, k, v = filled(shape, length, {})
    q = torch.randn(length, 4, 64)
    expected = clean.attend(q, length)
    {"q": q, "k": k, "v": v}[which][at, 1, 5] = math.nan
    cache = RecentCache(**shape, tokens=length)
    cache.fill(k, v)
    spoilt = torch.zeros(length, 4, dtype=torch.bool)
    if which == "q":
        spoilt[at, 1] = True
    else:
        spoilt[at:, 2:] = True  # the second K/V head
    for first in (0, length - 1):
        out, is_bad = cache.attend(q[first:], length), spoilt[first:]
        assert not bool(out[is_bad].isfinite().any())
        assert torch.equal(out[~is_bad], expected[first:][~is_bad])
