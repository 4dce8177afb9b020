"""Attention on int8 K/V on every instruction set, against float64 and against itself.

Bounds follow from the scales: half a step for every rounded factor.
"""

from __future__ import annotations

import math

import pytest
import torch

from ops.cpu import native_library
from ops.reference import ReferenceBackend, attention_fp64, round_kv
from quant.kv import GROUPS
from tests.support.memory.int8_kv import Cache, out_error, score_error

pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
    pytest.mark.usefixtures("seeded"),
]
REFERENCE = ReferenceBackend()


CASES = [
    {"heads": 4, "kv_heads": 2, "dim": 64, "length": 37},
    {"heads": 8, "kv_heads": 2, "dim": 64, "length": 700, "group": 32},
    {"heads": 4, "kv_heads": 4, "dim": 128, "length": 1100},
    {"heads": 4, "kv_heads": 1, "dim": 32, "length": 65, "group": 16},
    {"heads": 4, "kv_heads": 2, "dim": 16, "length": 530, "group": 8},
    {"heads": 6, "kv_heads": 2, "dim": 80, "length": 200, "group": 16},
    {"heads": 14, "kv_heads": 2, "dim": 96, "length": 130, "group": 32},
    {"heads": 24, "kv_heads": 2, "dim": 256, "length": 70, "group": 256},
    {"heads": 8, "kv_heads": 2, "dim": 64, "length": 900, "window": 100},
    {"heads": 8, "kv_heads": 2, "dim": 64, "length": 90, "soft_cap": 2.0},
    {"heads": 4, "kv_heads": 2, "dim": 64, "length": 600, "slopes": [0.5, 0.25, 0.1, 0.01]},
    {"heads": 4, "kv_heads": 2, "dim": 64, "length": 600, "sinks": [0.0, 3.0, -5.0, 60.0]},
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(f"{k}{v}" for k, v in c.items()))
def test_attention(isa, case):
    case = dict(case)
    length, heads, kv_heads, dim = (case.pop(x) for x in ("length", "heads", "kv_heads", "dim"))
    group = case.pop("group", 64)
    cache = Cache(heads=heads, kv_heads=kv_heads, dim=dim, group=group, tokens=length, **case)
    q = torch.randn(length, heads, dim)
    k, v = torch.randn(2, length, kv_heads, dim)
    cache.fill(k, v)
    lse = torch.empty(length, heads)
    whole = cache.attend(q, length, lse=lse)
    stored_k, stored_v = round_kv(k, cache.group), round_kv(v, cache.group)
    expected, expected_lse = attention_fp64(q, stored_k, stored_v, dim**-0.5, **case)
    of_score = score_error(q, stored_k, dim**-0.5)
    assert float((whole - expected).abs().max()) <= out_error(of_score, stored_v)
    assert float((lse - expected_lse).abs().max()) <= of_score + 1e-4
    # any division of the rows gives the same bits
    for first in (length - 1, length - 3, length // 2):
        assert torch.equal(cache.attend(q[first:], length), whole[first:]), f"from {first}"
    for last in (1, length // 3, length // 2 + 1):
        assert torch.equal(cache.attend(q[last - 1 : last], last), whole[last - 1 : last])


@pytest.mark.parametrize("rest", [0.1, 0.01, 0.001])
def test_a_sink_with_small_values_leaves_the_others_their_precision(isa, rest):
    """One token has nearly all the weight and a hundredth of the others' values."""
    length, dim = 256, 64
    cache = Cache(heads=1, kv_heads=1, dim=dim, group=64, tokens=length)
    k = torch.full((length, 1, dim), 1e-7)
    k[0, 0, 0] += math.log((1 - rest) / rest * (length - 1))
    q = torch.zeros(length, 1, dim)
    q[:, 0, 0] = dim**0.5
    v = torch.randn(length, 1, dim) + 0.3
    v[0] *= 0.01
    cache.fill(k, v)
    found = cache.attend(q, length)
    stored_k, stored_v = round_kv(k, 64), round_kv(v, 64)
    expected, _ = attention_fp64(q, stored_k, stored_v, dim**-0.5)
    for row in (63, 200, length - 1):
        error = (found[row] - expected[row]).norm() / expected[row].norm()
        assert float(error) < 1e-3, f"row {row}"
        assert torch.equal(cache.attend(q[row : row + 1], row + 1), found[row : row + 1])


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_of_other_sequences_change_nothing(isa, bits):
    lengths = [1, 5, 17, 64, 300, 513, 700]
    shape = {"heads": 4, "kv_heads": 2, "dim": 32, "bits": bits}
    cache = Cache(**shape, tokens=700, sequences=len(lengths))
    k, v = torch.randn(2, len(lengths), 700, 2, 32)
    for i, length in enumerate(lengths):
        cache.fill(k[i, :length], v[i, :length], i, chunk=[7, 100, 1000][i % 3])
    rows = [1, 1, 1, 1, 40, 2, 700]
    q = torch.randn(sum(rows), 4, 32)
    together = cache.op.attend(cache.step(range(len(lengths)), rows, lengths), q)
    threads = native_library.num_threads()
    native_library.set_num_threads(1)
    assert torch.equal(cache.op.attend(cache.step(range(len(lengths)), rows, lengths), q), together)
    native_library.set_num_threads(threads)
    first = 0
    for i, (n, length) in enumerate(zip(rows, lengths, strict=True)):
        part = slice(first, first + n)
        assert torch.equal(cache.attend(q[part], length, i), together[part]), f"sequence {i}"
        first += n


def test_chunks_store_the_same_bytes(isa):
    k, v = torch.randn(2, 100, 2, 48)
    caches = [Cache(heads=2, kv_heads=2, dim=48, tokens=100) for _ in range(3)]
    for cache, chunk in zip(caches, (1000, 1, 7), strict=True):
        cache.fill(k, v, chunk=chunk)
    used = [c.memory[c.address - c.memory.data_ptr() :][: c.range_bytes] for c in caches]
    assert torch.equal(used[0], used[1])
    assert torch.equal(used[0], used[2])


def test_append_rotates_and_touches_nothing_else(isa):
    length, dim = 40, 64
    plain = Cache(heads=2, kv_heads=2, dim=dim, tokens=64)
    turned = Cache(heads=2, kv_heads=2, dim=dim, tokens=64)
    k, v = torch.randn(2, length, 2, dim)
    angle = torch.randn(length, dim // 2)
    rotation = (angle.cos(), angle.sin())
    turned.op.append(turned.step([0], [length], [length]), k, v, rotation)
    plain.fill(REFERENCE.rotary(k, *rotation), v)
    assert torch.equal(plain.memory[64:-64], turned.memory[64:-64])
    first_layer = turned.memory[turned.address - turned.memory.data_ptr() :][
        : turned.tile_bytes // 2
    ]
    assert bool((first_layer == 0x7F).all()), "another layer was written"
    rest = turned.memory[-(turned.tile_bytes // 2) :]  # the last tile holds no token
    assert bool((rest == 0x7F).all())


@pytest.mark.parametrize("group", [g for g in GROUPS if g <= 64])
def test_stored_values_are_within_half_a_step(isa, group):
    """Weights that select one token return its V."""
    cache = Cache(heads=1, kv_heads=1, dim=64, group=group, tokens=16)
    k, v = torch.zeros(1, 1, 64), torch.randn(1, 1, 64) * 5
    cache.fill(k, v)
    out = cache.attend(torch.zeros(1, 1, 64), 1)
    step = v.reshape(-1, group).abs().amax(-1, keepdim=True) / 127
    bound = (0.51 * step + 1e-4 * v.abs().max()).expand(-1, group).reshape(-1)
    assert bool(((out - v).abs().reshape(-1) <= bound).all())


def test_an_empty_step(isa):
    cache = Cache(heads=4, kv_heads=2, dim=64, tokens=16)
    step = cache.step([], [], [])
    nothing = torch.empty(0, 2, 64)
    cache.op.append(step, nothing, nothing, None)
    assert cache.op.attend(step, torch.empty(0, 4, 64)).shape == (0, 4, 64)


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_a_nan_spoils_the_rows_that_see_it(isa, which):
    length, at = 150, 70
    q, k, v = torch.randn(length, 4, 64), torch.randn(length, 2, 64), torch.randn(length, 2, 64)
    clean = Cache(heads=4, kv_heads=2, dim=64, tokens=length)
    clean.fill(k, v)
    expected = clean.attend(q, length)
    {"q": q, "k": k, "v": v}[which][at, 1, 5] = math.nan
    cache = Cache(heads=4, kv_heads=2, dim=64, tokens=length)
    cache.fill(k, v)
    out = cache.attend(q, length)
    spoilt = torch.zeros(length, 4, dtype=torch.bool)
    if which == "q":
        spoilt[at, 1] = True
    else:
        spoilt[at:, 2:] = True  # the second K/V head
    assert not bool(out[spoilt].isfinite().any())
    assert torch.equal(out[~spoilt], expected[~spoilt])
