"""Attention that begins before the rows' own keys are written, on every instruction set."""

from __future__ import annotations

import random

import pytest
import torch

from ops.backend import KeyValues
from ops.cpu import native_library
from ops.cpu.native_plain_attention import begin_decode, decode_attention
from tests.support.memory.int8_kv import Cache
from tests.support.memory.plain_kv import TYPES, Range

pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
    pytest.mark.usefixtures("seeded"),
]
# around the ends of tiles, of the kernels' runs of 64 keys, and of their splits of 512
LENGTHS = [1, 2, 16, 17, 64, 65, 128, 511, 512, 513, 576, 577, 1024, 1025, 1200]
NAN = float("nan")


@pytest.mark.covering(2)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("window", [None, 1, 40, 64, 500, 600])
def test_rows_have_the_same_bits_in_one_call_and_in_two(isa, window, bits):
    """The rows' own keys are written between the calls; a sequence with several rows is among
    them."""
    shape = {"heads": 4, "kv_heads": 2, "dim": 64, "group": 32, "window": window}
    shape["bits"] = bits
    rows = [1] * len(LENGTHS) + [5]
    lengths = [*LENGTHS, 600]
    whole, parts = (Cache(**shape, tokens=1200, sequences=len(rows)) for _ in range(2))
    own = []
    for i, (n, length) in enumerate(zip(rows, lengths, strict=True)):
        k, v = torch.randn(2, length, 2, 64)
        whole.fill(k, v, i)
        parts.fill(k[:-n], v[:-n], i)
        own.append((k[-n:], v[-n:]))
    q = torch.randn(sum(rows), 4, 64)
    lse, again = torch.empty(q.shape[:2]), torch.empty(q.shape[:2])
    expected = whole.op.attend(whole.step(range(len(rows)), rows, lengths), q, lse)
    step = parts.step(range(len(rows)), rows, lengths)
    begun = parts.op.begin(step, q)
    parts.op.append(step, *(torch.cat(x) for x in zip(*own, strict=True)), None)
    assert torch.equal(parts.op.attend(step, q, again, begun), expected)
    assert torch.equal(again, lse)


@pytest.mark.parametrize("threads", [1, 2])
def test_int8_rows_on_any_number_of_threads(isa, threads):
    """A single long row is divided into splits and shares of the heads."""
    before = native_library.num_threads()
    cache = Cache(heads=24, kv_heads=3, dim=80, group=16, tokens=5000)
    k, v = torch.randn(2, 5000, 3, 80)
    cache.fill(k, v)
    q, step = torch.randn(1, 24, 80), cache.step([0], [1], [5000])
    expected = cache.op.attend(step, q)
    native_library.set_num_threads(threads)
    try:
        assert torch.equal(cache.op.attend(step, q, begun=cache.op.begin(step, q)), expected)
    finally:
        native_library.set_num_threads(before)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", TYPES)
def test_plain_rows_have_the_same_bits_in_one_call_and_in_two(isa, dtype):
    pick = random.Random(3)
    kv_heads, group, dim = 3, pick.choice([1, 4, 6]), 64
    whole = [Range(kv_heads, dim, length, dtype) for length in LENGTHS]
    parts = [Range(kv_heads, dim, length, dtype) for length in LENGTHS]
    for one, other in zip(whole, parts, strict=True):
        other.k.copy_(one.k)
        other.v.copy_(one.v)
        other.k[:, :, -1] = other.v[:, :, -1] = NAN  # until it is written
    q = torch.randn(len(LENGTHS), kv_heads * group, dim).to(dtype)
    expected = decode_attention(q, [one.view() for one in whole], 0.1)
    caches: list[KeyValues] = [one.view() for one in parts]
    begun = begin_decode(q, caches, 0.1)
    for one, other in zip(whole, parts, strict=True):
        other.k[:, :, -1], other.v[:, :, -1] = one.k[:, :, -1], one.v[:, :, -1]
    got = decode_attention(q, caches, 0.1, begun)
    assert torch.equal(got.out, expected.out)
    assert torch.equal(got.lse, expected.lse)
