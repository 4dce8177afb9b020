"""Segments of a step in a device's buffer: those of segments_of, and padding that does nothing."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("triton")

from memory.attention.seam import AttentionStep
from memory.states.cuda import CudaStates
from memory.states.layout import StateLayer, StateLayout
from memory.states.segments import segments_of
from ops.states import NO_RECORD

INTERVAL, RANGE, MAX_ROWS, MAX_SEQS = 8, 64, 50, 6


def make_states() -> CudaStates:
    layout = StateLayout([StateLayer((2, 16)), StateLayer((3, 8), (2, 4, 4))], INTERVAL)
    flat = torch.zeros(3 + 20 * layout.record_values)[3:]
    return CudaStates(layout, flat, max_rows=MAX_ROWS, max_seqs=MAX_SEQS)


def random_step(rng: random.Random) -> AttentionStep:
    """Returns decoding sequences before prompts, in ranges of their own."""
    num = rng.randrange(1, MAX_SEQS + 1)
    num_decodes = rng.randrange(num + 1)
    room = (MAX_ROWS - num) // num
    rows = [1 if i < num_decodes else 1 + rng.randrange(room + 1) for i in range(num)]
    lens = [count + rng.choice([0, 0, 7, 8, 9, rng.randrange(20)]) for count in rows]
    starts = [RANGE * place for place in rng.sample(range(20), num)]
    return AttentionStep(num_decodes, starts, rows, lens)


@pytest.mark.parametrize("seed", range(60))
def test_a_padded_step_has_the_segments_of_the_step(seed):
    rng = random.Random(seed)
    states = make_states()
    host = torch.full((states.num_words,), 0x5A5A5A5A, dtype=torch.int32)
    for _ in range(10):
        step = random_step(rng)
        num_rows = sum(step.num_rows)
        padded = rng.choice([num_rows, rng.randrange(num_rows, MAX_ROWS + 1), MAX_ROWS])
        states.fill(host, step, padded)
        states.upload(host)
        found, expected = states.segments(padded), segments_of(step, INTERVAL)
        num_segments, num_seqs = len(expected.sources), len(step.starts)
        for column in ("sources", "targets"):
            values = getattr(found, column)
            assert torch.equal(values[:num_segments], getattr(expected, column))
            assert (values[num_segments:] == NO_RECORD).all()
        assert torch.equal(found.firsts[: num_segments + 1], expected.firsts)
        assert (found.firsts[num_segments:] == num_rows).all()
        assert torch.equal(found.sequences[: num_seqs + 1], expected.sequences)
        assert (found.sequences[num_seqs:] == num_segments).all()


def test_what_a_graph_reads_depends_on_the_padded_rows_alone():
    """So that it can be launched again for another step; decode steps have one segment a row."""
    states = make_states()
    for num_rows in range(1, MAX_ROWS + 1):
        one, other = states.segments(num_rows), states.segments(num_rows)
        for a, b in zip(one, other, strict=True):
            assert a.data_ptr() == b.data_ptr() and len(a) == len(b)
            assert a.data_ptr() % 16 == one.firsts.data_ptr() % 16
    assert [len(column) for column in states.segments(4)] == [5, 4, 4, 5]


def test_no_step_has_more_segments_than_there_is_room_for():
    """The worst steps: sequences of two rows that are cut between them."""
    states = make_states()
    host = torch.zeros(states.num_words, dtype=torch.int32)
    for num in range(1, MAX_SEQS + 1):
        for rows in range(2, MAX_ROWS // num + 1):
            starts = [RANGE * i for i in range(num)]
            step = AttentionStep(0, starts, [rows] * num, [INTERVAL - 1 + rows] * num)
            states.fill(host, step, rows * num)
            states.upload(host)
            found = states.segments(rows * num)
            assert torch.equal(
                found.sources[: int(found.sequences[num])], segments_of(step, INTERVAL).sources
            )


def test_records_are_where_the_layout_says():
    states = make_states()
    layout = StateLayout([StateLayer((2, 16)), StateLayer((3, 8), (2, 4, 4))], INTERVAL)
    conv, heads = states.layers[0].conv, states.layers[1].heads
    assert conv.shape == (20, 2, 16) and heads.shape == (20, 2, 4, 4)
    assert heads[5].data_ptr() - conv[0].data_ptr() == 5 * layout.record_bytes + 4 * (
        layout.offsets[1][1] - layout.offsets[0][0]
    )
    assert conv.storage_offset() == 3
