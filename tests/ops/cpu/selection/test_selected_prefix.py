"""Rows that read a part of the keys before their step, as a memory node computes them, on every
instruction set: which tiles they read, and what comes of it when it is merged with attention over
the rows' own keys, against float64."""

from __future__ import annotations

import pytest
import torch

from ops.cpu import native_library
from ops.cpu.native_partials import merge_into
from ops.reference import round_kv, round_kv4
from quant.kv import TILE_TOKENS
from tests.support.memory.int8_kv import Cache, out_error, out_error4, rounded_query4, score_error
from tests.support.memory.selected_kv import (
    attention_over,
    chosen_tiles,
    scores_of,
    tiles_of,
    topic_keys,
)

pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
    pytest.mark.usefixtures("seeded"),
]
SHAPE = {"heads": 4, "kv_heads": 2, "dim": 64}
NOTHING = float("-inf")


def read_of_prefix(
    cache: Cache, q: torch.Tensor, past: int, position: int, budget: int, sequence: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns which tiles of the first `past` keys a row at `position` reads, bool [Hk, tiles], and
    of which heads that is clear."""
    complete, num_tiles = past // TILE_TOKENS, -(-past // TILE_TOKENS)
    after = position // TILE_TOKENS + 1 - complete
    read = torch.ones(cache.kv_heads, num_tiles, dtype=torch.bool)
    if budget >= complete + after or not complete:
        return read, torch.ones(cache.kv_heads, dtype=torch.bool)
    scores = scores_of(cache, q, complete, sequence)
    read[:, :complete], is_clear = chosen_tiles(scores, max(budget - after, 0))
    return read, is_clear


@pytest.mark.covering(2)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("sinks", [(), (0.0, 3.0, -5.0, 9.0)], ids=["plain", "sinks"])
def test_rows_and_their_merge_with_their_own_keys(isa, bits, sinks):
    """Prefixes with and without a tile that is not complete, none at all, drafts that cross a
    tile, budgets of their own tile alone and of everything."""
    cases = [
        (700, 1, 6), (704, 1, 6), (330, 5, 4), (15, 1, 1), (0, 1, 1), (0, 20, 1), (40, 1, 100),
        (640, 1, 1), (641, 1, 1), (330, 40, 3),
    ]  # fmt: skip
    cache = Cache(
        **SHAPE, tokens=800, sequences=len(cases), bits=bits, sinks=sinks, has_bounds=True
    )
    own = Cache(**SHAPE, tokens=64, sequences=len(cases), bits=bits, sinks=sinks)
    rows = [n for _, n, _ in cases]
    kv = [(topic_keys(past + n, 2, 64), torch.randn(past + n, 2, 64)) for past, n, _ in cases]
    for i, ((past, _, _), (k, v)) in enumerate(zip(cases, kv, strict=True)):
        cache.fill(k[:past], v[:past], i)
        own.fill(k[past:], v[past:], i)
    q = torch.randn(sum(rows), 4, 64)
    step = cache.step(range(len(cases)), rows, [past for past, _, _ in cases], prefix_only=True)
    step.select(rows, [budget for _, n, budget in cases for _ in range(n)])
    lse, own_lse = torch.empty(sum(rows), 4), torch.empty(sum(rows), 4)
    found = cache.op.attend(step, q, lse)
    merged = own.op.attend(own.step(range(len(cases)), rows, rows), q, own_lse)
    merge_into(merged, own_lse, found, lse)
    first, num_clear, num_heads = 0, 0, 0
    for i, ((past, n, budget), (k, v)) in enumerate(zip(cases, kv, strict=True)):
        stored = round_kv4 if bits == 4 else round_kv
        k, v = stored(k, cache.group), stored(v, cache.group)
        for row in range(n):
            at = first + row
            exact_q = rounded_query4(q[at]) if bits == 4 else q[at]
            read, is_clear = read_of_prefix(cache, q[at], past, past + row, budget, i)
            of_prefix = read.repeat_interleave(TILE_TOKENS, 1)[:, :past]
            of_own = torch.zeros(2, n, dtype=torch.bool)
            of_own[:, : row + 1] = True
            of_score = score_error(exact_q, k, 64**-0.5)
            of_out = 2 * out_error4(v) if bits == 4 else out_error(of_score, v)
            clear = is_clear.repeat_interleave(2)
            whole = torch.cat((of_prefix, of_own), 1)
            for out, out_lse, seen, options in (
                (found[at], lse[at], of_prefix, {}),
                (merged[at], own_lse[at], whole, {"sinks": sinks} if sinks else {}),
            ):
                length = seen.shape[1]
                expected = attention_over(
                    exact_q, k[:length], v[:length], seen, 64**-0.5, **options
                )
                sees = expected.lse > NOTHING
                assert torch.equal(out_lse > NOTHING, sees)
                assert bool((out[~sees] == 0).all())
                error = (out - expected.out).abs().amax(1)
                assert bool((error <= of_out)[clear].all()), f"{past=} {n=} {row=}: {error}"
                off = (out_lse - expected.lse).abs()[clear & sees]
                assert bool((off <= of_score + 1e-3).all()), f"{past=} {n=} {row=}: {off}"
            num_clear, num_heads = num_clear + int(is_clear.sum()), num_heads + 2
        first += n
    assert num_clear >= 0.7 * num_heads, "the reference says too little"


@pytest.mark.parametrize("budget", [1, 2, 9, 100])
@pytest.mark.parametrize("past", [0, 5, 16, 335, 336, 700])
def test_one_row_chooses_the_tiles_that_it_chooses_beside_its_own_keys(isa, past, budget):
    """With the same budget: where the keys of its own tile lie makes no difference."""
    cache = Cache(**SHAPE, tokens=701, has_bounds_beside=True)
    k, v = topic_keys(past + 1, 2, 64), torch.randn(past + 1, 2, 64)
    cache.fill(k, v)
    q = torch.randn(1, 4, 64)
    whole = cache.step([0], [1], [past + 1])
    prefix = cache.step([0], [1], [past], prefix_only=True)
    whole.select([1], [budget]), prefix.select([1], [budget])
    beside_own, before = cache.op.choose(whole, q), cache.op.choose(prefix, q)
    assert torch.equal(before, beside_own[: len(before)])
    assert len(before) == -(-past // TILE_TOKENS)


def test_rows_of_a_prefix_have_the_same_bits_alone_and_in_two_calls(isa):
    pasts, rows, selecting = [330, 700, 90, 512], [3, 1, 30, 2], [3, 1, 0, 1]
    cache = Cache(**SHAPE, tokens=800, sequences=4, has_bounds_beside=True)
    for i, past in enumerate(pasts):
        cache.fill(topic_keys(past, 2, 64), torch.randn(past, 2, 64), i)
    q = torch.randn(sum(rows), 4, 64)
    step = cache.step(range(4), rows, pasts, prefix_only=True)
    step.select(selecting, [5, 6, 7, 8, 9])
    lse, again_lse = torch.empty(sum(rows), 4), torch.empty(sum(rows), 4)
    together = cache.op.attend(step, q, lse)
    is_read = cache.op.choose(step, q)
    for i, part in enumerate(is_read.split([-(-past // TILE_TOKENS) for past in pasts])):
        tiles_of(cache, len(part), i)[part == 0] = 0x7F
    assert torch.equal(cache.op.attend_chosen(step, q, again_lse), together)
    assert torch.equal(again_lse, lse)
    alone = cache.step([1], [1], [700], prefix_only=True)
    alone.select([1], [8])
    assert torch.equal(cache.op.attend(alone, q[3:4]), together[3:4])
    whole = cache.step([2], [30], [90], prefix_only=True)
    assert torch.equal(cache.op.attend(whole, q[4:34]), together[4:34])


def test_keys_appended_after_the_prefix_change_no_choice_of_the_step(isa):
    """Whether the step's own keys are stored before or after attention, though they complete a
    tile and its bounds."""
    cache = Cache(**SHAPE, tokens=400, has_bounds=True)
    k, v = topic_keys(340, 2, 64), torch.randn(340, 2, 64)
    cache.fill(k[:330], v[:330])
    q = torch.randn(10, 4, 64)
    step = cache.step([0], [10], [330], prefix_only=True)
    step.select([10], [4] * 10)
    before = cache.op.attend(step, q)
    cache.op.append(step, k[330:], v[330:], None)
    assert torch.equal(cache.op.attend(step, q), before)
    whole = Cache(**SHAPE, tokens=400, has_bounds=True)
    whole.fill(k, v)
    assert torch.equal(tiles_of(cache, 22), tiles_of(whole, 22)), "bounds of the tile as in one go"
