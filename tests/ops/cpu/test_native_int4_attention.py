"""Attention on int4 K/V on every instruction set, against float64 and against itself."""

from __future__ import annotations

import math

import pytest
import torch

from ops.cpu import native_library
from ops.reference import ReferenceBackend, attention_fp64, hadamard, round_kv4
from tests.support.memory.int8_kv import Cache, out_error4, rounded_query4

pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
    pytest.mark.usefixtures("seeded"),
]
REFERENCE = ReferenceBackend()
LEVELS = torch.tensor([-64, -50, -39, -30, -23, -16, -9, -3, 3, 9, 16, 23, 30, 39, 50, 64.0])
CASES = [
    {"heads": 4, "kv_heads": 2, "dim": 64, "length": 37},
    {"heads": 8, "kv_heads": 2, "dim": 64, "length": 560},
    {"heads": 4, "kv_heads": 4, "dim": 128, "length": 530, "group": 64},
    {"heads": 4, "kv_heads": 1, "dim": 32, "length": 65, "group": 16},
    {"heads": 4, "kv_heads": 2, "dim": 16, "length": 200},
    {"heads": 6, "kv_heads": 2, "dim": 80, "length": 200},
    {"heads": 14, "kv_heads": 2, "dim": 96, "length": 130},
    {"heads": 24, "kv_heads": 2, "dim": 256, "length": 70, "group": 256},
    {"heads": 8, "kv_heads": 2, "dim": 64, "length": 300, "window": 100},
    {"heads": 8, "kv_heads": 2, "dim": 64, "length": 90, "soft_cap": 2.0},
    {"heads": 4, "kv_heads": 2, "dim": 64, "length": 150, "slopes": [0.5, 0.25, 0.1, 0.01]},
    {"heads": 4, "kv_heads": 2, "dim": 64, "length": 150, "sinks": [0.0, 3.0, -5.0, 60.0]},
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(f"{k}{v}" for k, v in c.items()))
def test_attention(isa, case):
    case = dict(case)
    length, heads, kv_heads, dim = (case.pop(x) for x in ("length", "heads", "kv_heads", "dim"))
    group = case.pop("group", 32)
    shape = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "group": group}
    cache = Cache(**shape, bits=4, tokens=length, **case)
    q = torch.randn(length, heads, dim)
    k, v = torch.randn(2, length, kv_heads, dim)
    cache.fill(k, v)
    lse = torch.empty(length, heads)
    whole = cache.attend(q, length, lse=lse)
    stored_k, stored_v = round_kv4(k, cache.group), round_kv4(v, cache.group)
    rounded = rounded_query4(q)
    expected, expected_lse = attention_fp64(rounded, stored_k, stored_v, dim**-0.5, **case)
    assert float((whole - expected).abs().max()) <= out_error4(stored_v)
    assert float((whole - expected).norm() / expected.norm()) < 0.02
    assert float((lse - expected_lse).abs().max()) <= 2e-4
    # any division of the rows gives the same bits
    for first in (length - 1, length - 3, length // 2):
        assert torch.equal(cache.attend(q[first:], length), whole[first:]), f"from {first}"
    for last in (1, length // 3, length // 2 + 1):
        assert torch.equal(cache.attend(q[last - 1 : last], last), whole[last - 1 : last])


def stored(cache: Cache, length: int) -> torch.Tensor:
    """Decodes K and V of the only K/V head: [2, length, D]."""
    dim, groups = cache.dim, cache.dim // cache.group
    blocks = -(-dim // 32)
    tiles = cache.used().reshape(-1, 2, cache.tile_bytes // 2)[:, 1]
    scales, k, v = tiles.split([64 * groups, 8 * dim, 256 * blocks], dim=1)
    scale = scales.contiguous().view(torch.float16).reshape(-1, 2, groups, 16).float()
    k = torch.stack((k & 15, k >> 4), 1).reshape(-1, 2, dim // 8, 16, 4)
    v = torch.stack((v & 15, v >> 4), 1).reshape(-1, 2, blocks, 4, 16, 4)
    k = k.permute(0, 3, 2, 1, 4).reshape(-1, dim)[:length]
    v = v.permute(0, 3, 5, 2, 1, 4).reshape(-1, 32 * blocks)[:length, :dim]
    scale = scale.permute(1, 0, 3, 2).reshape(2, -1, groups)[:, :length]
    levels = LEVELS[torch.stack((k, v)).long()].reshape(2, length, groups, -1)
    values = (levels * scale[..., None]).reshape(2, length, dim)
    return hadamard(values) / (dim & -dim)


@pytest.mark.parametrize(("dim", "group"), [(64, 32), (80, 16), (16, 16), (96, 32), (128, 32)])
def test_the_stored_values_are_those_of_the_reference(isa, dim, group):
    cache = Cache(heads=1, kv_heads=1, dim=dim, group=group, bits=4, tokens=50)
    k, v = torch.randn(2, 50, 1, dim) * torch.logspace(-6, 3, 50)[:, None, None]
    k[3], v[4] = 0, 0
    cache.fill(k, v, chunk=7)
    expected = torch.stack([round_kv4(x, group)[:, 0] for x in (k, v)])
    assert torch.equal(stored(cache, 50), expected)


def test_rounding_is_as_exact_as_4_bits_allow():
    """The error of normal numbers is below that of 16 even steps between a group's least and
    largest number, which take another half bit for each value, and outliers do not change that."""
    x = torch.randn(2000, 64)
    x[:, 5] *= 100
    error = (round_kv4(x, 32) - x).norm() / x.norm()
    assert float(error) < 0.08


def test_a_row_that_sees_one_token_returns_its_value(isa):
    cache = Cache(heads=2, kv_heads=1, dim=80, bits=4, tokens=40, window=1)
    k, v = torch.randn(2, 40, 1, 80)
    cache.fill(k, v)
    out = cache.attend(torch.randn(40, 2, 80), 40)
    assert torch.allclose(out, round_kv4(v, 16).expand(40, 2, 80), atol=1e-4)


def test_small_weights_beside_a_large_one_keep_their_sum(isa):
    """63 weights of a third of a rounding step each are a twelfth of all weight."""
    cache = Cache(heads=1, kv_heads=1, dim=64, group=32, bits=4, tokens=64)
    k = torch.zeros(64, 1, 64)
    k[0] = 1.0
    stored_k = round_kv4(k, 32)
    q = torch.full((64, 1, 64), math.log(254 * 3) / 8 / float(stored_k[0].mean()))
    v = torch.randn(1, 1, 64).repeat(64, 1, 1)
    v[0] *= -1
    cache.fill(k, v)
    out = cache.attend(q, 64)[-1]
    expected = attention_fp64(rounded_query4(q), stored_k, round_kv4(v, 32), 64**-0.5)[0][-1]
    assert float((out - expected).norm() / expected.norm()) < 0.03  # 0.09 if they are left out


@pytest.mark.parametrize("rest", [0.1, 0.01, 0.001])
def test_a_sink_with_small_values_leaves_the_others_their_part(isa, rest):
    """One token has nearly all the weight and a hundredth of the others' values."""
    length, dim = 256, 64
    cache = Cache(heads=1, kv_heads=1, dim=dim, group=32, bits=4, tokens=length)
    k = torch.full((length, 1, dim), 1e-7)
    k[0, 0, 0] += math.log((1 - rest) / rest * (length - 1))
    q = torch.zeros(length, 1, dim)
    q[:, 0, 0] = dim**0.5
    v = torch.randn(length, 1, dim) + 0.3
    v[0] *= 0.01
    cache.fill(k, v)
    found = cache.attend(q, length)
    stored_k, stored_v = round_kv4(k, 32), round_kv4(v, 32)
    expected, _ = attention_fp64(rounded_query4(q), stored_k, stored_v, dim**-0.5)
    for row in (63, 200, length - 1):
        error = (found[row] - expected[row]).norm() / expected[row].norm()
        assert float(error) < 0.03, f"row {row}"


@pytest.mark.parametrize("dim", [48, 64])
def test_chunks_and_instruction_sets_store_the_same_bytes(dim):
    k, v = torch.randn(2, 100, 2, dim)
    kept, before = [], native_library.instruction_set()
    for name in native_library.library().instruction_sets():
        native_library.library().choose_instruction_set(name)
        for chunk in (1000, 1, 7):
            cache = Cache(heads=2, kv_heads=2, dim=dim, bits=4, tokens=100)
            cache.fill(k, v, chunk=chunk)
            kept.append(cache.used())
    native_library.library().choose_instruction_set(before)
    assert all(torch.equal(one, kept[0]) for one in kept)


def test_instruction_sets_with_fused_sums_compute_the_same_bits():
    cache = Cache(heads=12, kv_heads=2, dim=80, bits=4, tokens=600)
    k, v = torch.randn(2, 600, 2, 80)
    cache.fill(k, v)
    q, found, before = torch.randn(90, 12, 80), [], native_library.instruction_set()
    for name in native_library.library().instruction_sets():
        if name == "portable":
            continue
        native_library.library().choose_instruction_set(name)
        found.append(cache.attend(q, 600))
    native_library.library().choose_instruction_set(before)
    assert all(torch.equal(one, found[0]) for one in found)


def test_append_rotates_and_touches_nothing_else(isa):
    length, dim = 40, 64
    plain = Cache(heads=2, kv_heads=2, dim=dim, bits=4, tokens=64)
    turned = Cache(heads=2, kv_heads=2, dim=dim, bits=4, tokens=64)
    k, v = torch.randn(2, length, 2, dim)
    angle = torch.randn(length, dim // 4)  # of a half of the dimensions
    rotation = (angle.cos(), angle.sin())
    turned.op.append(turned.step([0], [length], [length]), k, v, rotation)
    plain.fill(REFERENCE.rotary(k, *rotation), v)
    assert torch.equal(plain.memory[64:-64], turned.memory[64:-64])
    tiles = turned.used().reshape(-1, 2, turned.tile_bytes // 2)
    assert bool((tiles[:, 0] == 0x7F).all()), "another layer was written"
    assert bool((tiles[3] == 0x7F).all()), "the last tile holds no token"


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_a_nan_spoils_the_rows_that_see_it(isa, which):
    length, at = 150, 70
    q, k, v = torch.randn(length, 4, 64), torch.randn(length, 2, 64), torch.randn(length, 2, 64)
    clean = Cache(heads=4, kv_heads=2, dim=64, bits=4, tokens=length)
    clean.fill(k, v)
    expected = clean.attend(q, length)
    {"q": q, "k": k, "v": v}[which][at, 1, 5] = math.nan
    cache = Cache(heads=4, kv_heads=2, dim=64, bits=4, tokens=length)
    cache.fill(k, v)
    out = cache.attend(q, length)
    spoilt = torch.zeros(length, 4, dtype=torch.bool)
    if which == "q":
        spoilt[at, 1] = True
    else:
        spoilt[at:, 2:] = True  # the second K/V head
    assert not bool(out[spoilt].isfinite().any())
    assert torch.equal(out[~spoilt], expected[~spoilt])


def test_an_empty_step(isa):
    cache = Cache(heads=4, kv_heads=2, dim=64, bits=4, tokens=16)
    step = cache.step([], [], [])
    nothing = torch.empty(0, 2, 64)
    cache.op.append(step, nothing, nothing, None)
    assert cache.op.attend(step, torch.empty(0, 4, 64)).shape == (0, 4, 64)
