"""Attention over segments in local memory: the fold of its parts, and nothing else below a
segment."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from memory.attention.local import LocalPlan
from memory.attention.seam import AttentionStep
from memory.attention.segmented import SegmentedPlan
from memory.attention.segments import Piece, cut, in_order
from ops import get_backend
from ops.backend import Partial
from tests.support.nodes.remote_rig import layers_of
from tests.support.nodes.segment_rig import LENGTH, MAX_LEN, Segmented


def test_a_step_is_cut_at_the_ends_of_segments():
    step = AttentionStep(1, [0, 1000], [1, 30], [8, 35])
    assert cut(step, 10) == [
        Piece(0, 1, 0, 0, 8, True),
        Piece(1, 5, 1000, 0, 10, True),
        Piece(6, 25, 1000, 0, 10, False),
        Piece(6, 10, 1000, 1, 10, True),
        Piece(16, 15, 1000, 1, 10, False),
        Piece(16, 10, 1000, 2, 10, True),
        Piece(26, 5, 1000, 2, 10, False),
        Piece(26, 5, 1000, 3, 5, True),
    ]


@pytest.mark.parametrize("length", [10, 11, 20, 21, 57])
@pytest.mark.parametrize("num_rows", [1, 2, 9, 10])
def test_each_row_sees_its_segments_in_order_and_its_own_last(length, num_rows):
    step = AttentionStep(0, [0, 500], [num_rows, 1], [length, 4])
    seen: list[list[int]] = [[] for _ in range(num_rows + 1)]
    for pieces in in_order(cut(step, 10)):
        sizes = [piece.num_rows > 1 for piece in pieces.items]
        assert sizes == sorted(sizes), "pieces of one row come first"
        for row in pieces.rows:
            assert pieces.begins == (not seen[row])
            seen[row].append(pieces.segment)
    for row in range(num_rows):
        position = length - num_rows + row
        assert seen[row] == list(range(position // 10 + 1))
    assert seen[num_rows] == [0]


def inputs_of(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, heads, 32, generator=generator) for heads in (8, 4, 4)]


@pytest.mark.parametrize("kv_dtype", ["int8", "int4", "float32"])
def test_attention_is_the_fold_of_its_segments_in_order(kv_dtype):
    rig, backend = Segmented(layers_of(1), kv_dtype), get_backend("cpu")
    q, k, v = inputs_of(400, 1)
    rig.step([(0, 399, 399)], [(q[:399], k[:399], v[:399])])
    [out] = rig.step([(0, 1, 400)], [(q[399:], k[399:], v[399:])])
    partial = rig.attention._partial
    parts = [
        partial.prefix(AttentionStep(1, [segment * LENGTH], [1], [LENGTH])).attend(0, q[399:])
        for segment in range(3)
    ]
    own = partial.own(AttentionStep(1, [3 * LENGTH], [1], [400 - 3 * LENGTH]))
    parts.append(own.finish(own.begin(0, q[399:]), None, None, None))
    total = Partial(parts[0].out.clone(), parts[0].lse.clone())
    for part in parts[1:]:
        backend.merge_into(total, part)
    assert torch.equal(out, total.out)


def test_below_a_segment_the_plan_is_that_of_local_attention():
    rig = Segmented(layers_of(1), "float32")
    step = AttentionStep(1, [0, MAX_LEN], [1, 20], [LENGTH, LENGTH])
    assert type(rig.attention.plan(step)) is LocalPlan
    assert type(rig.attention.plan(replace(step, kv_lens=[LENGTH + 1, 20]))) is SegmentedPlan


def test_a_short_sequence_has_the_same_bits_beside_a_long_one():
    alone, beside = Segmented(layers_of(1), "int8"), Segmented(layers_of(1), "int8")
    q, k, v = inputs_of(300, 2)
    short = slice(0, 60)
    [expected] = alone.step([(1, 60, 60)], [(q[short], k[short], v[short])])
    [found] = beside.step([(1, 60, 60), (0, 240, 240)], [(q, k, v)])
    assert torch.equal(found[short], expected)
