"""Prefix attention on every instruction set: a step's rows over the keys before it, compared
with float64, and merged with the rows' own keys against attention over all keys."""

from __future__ import annotations

import random

import pytest
import torch

from ops.backend import KeyValues, Partial
from ops.cpu import native_library
from ops.cpu.native_partials import merge_into
from ops.cpu.native_plain_attention import decode_attention, prefill_attention, prefix_attention
from ops.reference import attention_fp64, round_kv
from quant.kv import TILE_TOKENS
from tests.support.memory.int8_kv import Cache, out_error, score_error
from tests.support.memory.plain_kv import REFERENCE, TYPES, Range, exact

pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
    pytest.mark.usefixtures("seeded"),
]
NOTHING = float("-inf")


def random_case(pick):
    kv_heads = pick.randint(1, 3)
    dim = pick.choice([64, 80, 96, 128])
    shape = {"heads": kv_heads * pick.choice([1, 2, 4, 8]), "kv_heads": kv_heads, "dim": dim}
    window = pick.choice([None, None, 1, pick.randint(2, 40), pick.randint(1, 800)])
    length = pick.choice([0, 1, 16, pick.randint(1, 64), pick.randint(1, 700)])
    return shape, window, length, pick.choice([1, 1, 2, pick.randint(1, 70)])


def split(q, k, v, cache, past, *, scratch):
    """Returns (out, lse) of the rows over the prefix in cache and over their own keys in
    scratch."""
    n = len(q)
    cache.fill(k[:past], v[:past])
    scratch.fill(k[past:], v[past:])
    own_lse, prefix_lse = torch.empty(n, q.shape[1]), torch.empty(n, q.shape[1])
    own = scratch.attend(q, n, lse=own_lse)
    before = cache.op.attend(cache.step([0], [n], [past], prefix_only=True), q, prefix_lse)
    merge_into(own, own_lse, before, prefix_lse)
    return own, own_lse


def test_int8_prefix_on_random_steps(isa):
    """Steps have several sequences, and the memory behind their keys is NaN."""
    pick = random.Random(11)
    for _ in range(12):
        shape, window, _, _ = random_case(pick)
        cases = [random_case(pick)[2:] for _ in range(pick.randint(1, 5))]
        cache = Cache(**shape, tokens=800, sequences=len(cases), window=window)
        kv = [torch.randn(2, length, shape["kv_heads"], shape["dim"]) for length, _ in cases]
        for i, (k, v) in enumerate(kv):
            cache.fill(k, v, i)
        rows, lengths = [n for _, n in cases], [length for length, _ in cases]
        q = torch.randn(sum(rows), shape["heads"], shape["dim"])
        lse = torch.empty(q.shape[:2])
        step = cache.step(range(len(cases)), rows, lengths, prefix_only=True)
        out = cache.op.attend(step, q, lse)
        scale = shape["dim"] ** -0.5
        for (k, v), q_s, out_s, lse_s in zip(
            kv, q.split(rows), out.split(rows), lse.split(rows), strict=True
        ):
            k, v = round_kv(k, cache.group), round_kv(v, cache.group)
            expected, expected_lse = attention_fp64(
                q_s, k, v, scale, window=window, first_position=len(k)
            )
            sees = expected_lse > NOTHING
            assert torch.equal(lse_s > NOTHING, sees)
            assert bool((out_s[~sees] == 0).all())
            of_score = score_error(q_s, k, scale)
            assert float((out_s - expected).abs().max()) <= out_error(of_score, v)
            off = (lse_s - expected_lse)[sees].abs()
            assert bool((off <= of_score + 1e-4).all()), f"{float(off.max())} of {of_score}"


SWITCHES = [
    {},
    {"window": 1},
    {"window": 20},
    {"window": 300},
    {"soft_cap": 2.0},
    {"slopes": [0.5, 0.25, 0.1, 0.01]},
    {"sinks": [0.0, 3.0, -5.0, 8.0]},
]


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_int8_prefix_and_own_keys_make_the_whole(isa, switches):
    for past, n in ((0, 1), (1, 1), (700, 1), (530, 1), (5, 40), (600, 33), (64, 70), (0, 9)):
        shape = {"heads": 4, "kv_heads": 2, "dim": 64, "group": 32}
        cache, scratch = (Cache(**shape, tokens=800, **switches) for _ in range(2))
        q, (k, v) = torch.randn(n, 4, 64), torch.randn(2, past + n, 2, 64)
        out, lse = split(q, k, v, cache, past, scratch=scratch)
        k, v = round_kv(k, 32), round_kv(v, 32)
        expected, expected_lse = attention_fp64(q, k, v, 0.125, **switches)
        of_score = score_error(q, k, 0.125)
        assert float((out - expected).abs().max()) <= 2 * out_error(of_score, v)
        assert float((lse - expected_lse).abs().max()) <= of_score + 1e-4


def test_int8_rows_of_a_prefix_have_the_same_bits_in_any_step(isa):
    """A row is computed beside other sequences, alone, on one thread, and with the heads of one
    node."""
    lengths, rows = [700, 16, 513, 5, 0, 300], [1, 30, 70, 1, 3, 2]
    shape = {"heads": 24, "kv_heads": 3, "dim": 80, "group": 16}
    cache = Cache(**shape, tokens=700, sequences=len(lengths))
    k, v = torch.randn(2, len(lengths), 700, 3, 80)
    q = torch.randn(sum(rows), 24, 80)
    for i, length in enumerate(lengths):
        cache.fill(k[i, :length], v[i, :length], i)
    lse = torch.empty(q.shape[:2])
    step = cache.step(range(len(lengths)), rows, lengths, prefix_only=True)
    out = cache.op.attend(step, q, lse)
    threads = native_library.num_threads()
    native_library.set_num_threads(1)
    alone = cache.op.attend(step, q)
    native_library.set_num_threads(threads)
    assert torch.equal(alone, out)

    for first, last in ((0, 1), (1, 3), (2, 3)):  # K/V heads
        part = Cache(heads=8 * (last - first), kv_heads=last - first, dim=80, group=16, tokens=4200)
        row = 0
        for n, length, k_s, v_s in zip(rows, lengths, k, v, strict=True):
            part.fill(k_s[:length, first:last], v_s[:length, first:last])
            for size in (n, 1):
                for at in range(row, row + n, size):
                    queries = q[at : at + size, 8 * first : 8 * last]
                    part_lse = torch.empty(queries.shape[:2])
                    one = part.step([0], [size], [length], prefix_only=True)
                    got = part.op.attend(one, queries, part_lse)
                    assert torch.equal(got, out[at : at + size, 8 * first : 8 * last])
                    assert torch.equal(part_lse, lse[at : at + size, 8 * first : 8 * last])
            row += n


@pytest.mark.parametrize("nodes", [2, 3])
def test_int8_tiles_partitioned_over_nodes_make_the_whole(isa, nodes):
    """Each node has every n-th tile of 16 tokens in order; the last tile may be partial."""
    for past, n in ((16 * nodes + 1, 1), (700, 1), (15, 5), (345, 40)):
        shape = {"heads": 8, "kv_heads": 2, "dim": 64}
        own, q = Cache(**shape, tokens=64), torch.randn(n, 8, 64)
        k, v = torch.randn(2, past + n, 2, 64)
        own.fill(k[past:], v[past:])
        lse = torch.empty(n, 8)
        out = own.attend(q, n, lse=lse)
        for node in range(nodes):
            here = torch.arange(past) // TILE_TOKENS % nodes == node
            cache, part_lse = Cache(**shape, tokens=800), torch.empty(n, 8)
            cache.fill(k[:past][here], v[:past][here])
            step = cache.step([0], [n], [int(here.sum())], prefix_only=True)
            merge_into(out, lse, cache.op.attend(step, q, part_lse), part_lse)
        k, v = round_kv(k, 64), round_kv(v, 64)
        expected, expected_lse = attention_fp64(q, k, v, 0.125)
        of_score = score_error(q, k, 0.125)
        assert float((out - expected).abs().max()) <= (nodes + 1) * out_error(of_score, v)
        assert float((lse - expected_lse).abs().max()) <= of_score + 1e-4


def test_int8_rows_are_appended_behind_their_prefix(isa):
    whole, parts = (Cache(heads=2, kv_heads=2, dim=48, tokens=112) for _ in range(2))
    k, v = torch.randn(2, 112, 2, 48)
    whole.fill(k, v)
    for first, last in ((0, 30), (30, 31), (31, 100), (100, 112)):
        step = parts.step([0], [last - first], [first], prefix_only=True)
        parts.op.append(step, k[first:last], v[first:last], None)
    used = [c.memory[c.address - c.memory.data_ptr() :][: c.range_bytes] for c in (whole, parts)]
    assert torch.equal(*used)


@pytest.mark.parametrize("dtype", TYPES)
def test_plain_prefix_on_random_shapes(isa, dtype):
    pick = random.Random(12)
    for _ in range(40):
        shape, window, length, rows = random_case(pick)
        kv = Range(shape["kv_heads"], shape["dim"], length, dtype)
        q = torch.randn(rows, shape["heads"], shape["dim"]).to(dtype)
        got = prefix_attention(q, kv.view(), 0.1, window)
        if length == 0:
            assert bool((got.lse == NOTHING).all()) and bool((got.out == 0).all())
            continue
        expected, bound = exact(REFERENCE.prefix_attention, q, kv.view(), 0.1, window)
        sees = expected.lse > NOTHING
        assert torch.equal(got.lse > NOTHING, sees)
        assert bool((got.out[~sees] == 0).all())
        error = torch.cat((got.out - expected.out, (got.lse - expected.lse)[..., None]), -1).abs()
        assert bool((error[sees] <= bound[sees]).all())


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("window", [None, 1, 40, 200])
def test_plain_prefix_and_own_keys_make_the_whole(isa, dtype, window):
    for past, n in ((0, 1), (3, 1), (600, 1), (130, 70), (5, 40)):
        kv, q = Range(2, 64, past + n, dtype), torch.randn(n, 8, 64).to(dtype)
        k, v = kv.view()
        own = prefill_attention(q, KeyValues(k[:, :, past:], v[:, :, past:]), 0.125, window)
        before = prefix_attention(q, KeyValues(k[:, :, :past], v[:, :, :past]), 0.125, window)
        merge_into(*own, *before)
        expected, bound = exact(REFERENCE.prefill_attention, q, kv.view(), 0.125, window)
        error = torch.cat((own.out - expected.out, (own.lse - expected.lse)[..., None]), -1).abs()
        # each part and the merged result are rounded to the type of the rows
        rounding = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-7}[dtype] * float(v.abs().max())
        assert bool((error <= bound + rounding).all())


@pytest.mark.parametrize("dtype", TYPES)
def test_plain_rows_of_a_prefix_have_the_same_bits_in_any_call(isa, dtype):
    """A row is computed alone, on one thread, and with the heads of one node."""
    kv, q = Range(3, 96, 333, dtype), torch.randn(70, 12, 96).to(dtype)
    k, v = kv.view()
    whole = prefix_attention(q, kv.view(), 0.1, None)
    threads = native_library.num_threads()
    native_library.set_num_threads(1)
    alone = prefix_attention(q, kv.view(), 0.1, None)
    native_library.set_num_threads(threads)
    assert torch.equal(alone.out, whole.out)
    assert torch.equal(alone.lse, whole.lse)
    decoded = decode_attention(q[:5], [kv.view()] * 5, 0.1)
    for first, last in ((0, 1), (1, 3)):  # K/V heads
        cache, heads = KeyValues(k[:, first:last], v[:, first:last]), slice(4 * first, 4 * last)
        for rows in (slice(0, 70), slice(3, 4), slice(20, 53)):
            got = prefix_attention(q[rows, heads], cache, 0.1, None)
            assert torch.equal(got.out, whole.out[rows, heads])
            assert torch.equal(got.lse, whole.lse[rows, heads])
        got = decode_attention(q[:5, heads], [cache] * 5, 0.1)
        assert torch.equal(got.out, decoded.out[:, heads])
        assert torch.equal(got.lse, decoded.lse[:, heads])


def test_decode_rows_without_keys(isa):
    """A second row has keys."""
    kv, none = Range(2, 64, 600, torch.float32), Range(2, 64, 0, torch.float32)
    q = torch.randn(3, 4, 64)
    got = decode_attention(q, [none.view(), kv.view(), none.view()], 0.1)
    assert bool((got.lse[[0, 2]] == NOTHING).all()) and bool((got.out[[0, 2]] == 0).all())
    expected: Partial = decode_attention(q[1:2], [kv.view()], 0.1)
    assert torch.equal(got.out[1:2], expected.out)
    assert torch.equal(got.lse[1:2], expected.lse)
