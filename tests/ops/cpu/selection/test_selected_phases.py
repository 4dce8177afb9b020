"""Attention to a part of the K/V in two calls: the first one before the rows' own k and v are
there, with the bits of one call, on every instruction set."""

from __future__ import annotations

import pytest
import torch

from ops.cpu import native_library
from quant.kv import TILE_TOKENS
from tests.support.memory.int8_kv import Cache
from tests.support.memory.selected_kv import topic_keys

pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
    pytest.mark.usefixtures("seeded"),
]

LENGTHS = (5, 70, 129, 700, 704, 1041, 1300, 2100)
"""The keys of the sequences, own ones included, on both sides of borders of tiles and of runs of
the kernel."""
BUDGETS = (1, 2, 9, 44, 43, 9, 20, 70)
"""In tiles; the first sequence and the fourth read everything."""
RUN_TOKENS = 64
SWITCHES = ({}, {"soft_cap": 2.0}, {"sinks": [0.0, 3.0, -5.0, 9]})
SHAPE = {"heads": 4, "kv_heads": 2, "dim": 32, "tokens": 2100, "has_bounds": True}


def filled(bits, **switches):
    """Returns a cache without the last key of each sequence, and k and v of these keys."""
    cache = Cache(**SHAPE, bits=bits, sequences=len(LENGTHS), **switches)
    last = []
    for number, length in enumerate(LENGTHS):
        k, v = topic_keys(length, 2, 32), torch.randn(length, 2, 32)
        cache.fill(k[:-1], v[:-1], number)
        last.append((k[-1:], v[-1:]))
    k, v = (torch.cat(x) for x in zip(*last, strict=True))
    return cache, k, v


def step_of(cache):
    step = cache.step(range(len(LENGTHS)), [1] * len(LENGTHS), LENGTHS)
    step.select([1] * len(LENGTHS), list(BUDGETS))
    return step


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_two_calls_have_the_bits_of_one(isa, bits, switches):
    cache, k, v = filled(bits, **switches)
    q = torch.randn(len(LENGTHS), 4, 32)
    step = step_of(cache)
    begun = cache.op.begin(step, q)
    cache.op.append(step, k, v, None)
    lse, expected_lse = torch.empty(2, len(LENGTHS), 4)
    found = cache.op.attend(step, q, lse, begun=begun)
    expected = cache.op.attend(step_of(cache), q, expected_lse)
    assert torch.equal(found, expected)
    assert torch.equal(lse, expected_lse)
    for number, (length, budget) in enumerate(zip(LENGTHS, BUDGETS, strict=True)):
        everything = cache.attend(q[number : number + 1], length, number)[0]
        reads_all = budget * TILE_TOKENS >= length
        assert torch.equal(found[number], everything) == reads_all, f"sequence {number}"


def test_the_first_call_does_what_can_be_done(isa):
    """Of the tiles that a row chose, the second call reads those after the last whole run alone,
    and no bounds."""
    cache, k, v = filled(8)
    q = torch.randn(len(LENGTHS), 4, 32)
    step = step_of(cache)
    cache.op.append(step, k, v, None)
    expected = cache.op.attend(step_of(cache), q)
    begun = cache.op.begin(step, q)
    before = BUDGETS[-1] * TILE_TOKENS // RUN_TOKENS * RUN_TOKENS // TILE_TOKENS
    first = (len(LENGTHS) - 1) * cache.range_bytes
    cache.used()[first : first + before * cache.tile_bytes] = 0x7F  # what is read gives NaN
    last = cache.op.attend(step, q, begun=begun)[-1]
    assert torch.equal(last, expected[-1])
    assert cache.op.attend(step_of(cache), q)[-1].isnan().any(), "one call reads it"


def test_a_choice_for_another_step_between_the_calls_changes_nothing(isa):
    cache, k, v = filled(8)
    other, *_ = filled(8)
    q = torch.randn(len(LENGTHS), 4, 32)
    step, between = step_of(cache), step_of(other)
    begun = cache.op.begin(step, q)
    other.op.begin(between, torch.randn(len(LENGTHS), 4, 32))
    cache.op.append(step, k, v, None)
    found = cache.op.attend(step, q, begun=begun)
    assert torch.equal(found, cache.op.attend(step_of(cache), q))


def test_several_rows_of_a_sequence_do_not_begin():
    cache, *_ = filled(8)
    step = cache.step([3], [2], [700])
    assert step.can_begin, "nothing selects"
    step.select([0], [])
    assert step.can_begin
    step.select([2], [3, 3])
    assert not step.can_begin
    with pytest.raises(AssertionError, match="single rows"):
        cache.op.begin(step, torch.randn(2, 4, 32))
