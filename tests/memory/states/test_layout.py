"""Records hold the states of all layers; rows are cut into segments where a record is complete."""

from __future__ import annotations

import ctypes
import random
from itertools import pairwise

import pytest
import torch

from memory.attention.seam import AttentionStep
from memory.states.layout import (
    MAX_INTERVAL,
    MIN_INTERVAL,
    StateLayer,
    StateLayout,
    choose_interval,
)
from memory.states.local import LocalStates, segments_of
from ops.reference_states import ReferenceStates
from ops.states import NO_RECORD, Recurrence

CONV = StateLayer((2, 5))
NET = StateLayer((3, 7), (2, 3, 4))


def step_of(*sequences: tuple[int, int, int]) -> AttentionStep:
    """Returns a step of prompt rows: (range start, rows, keys after them) of each sequence."""
    starts, rows, lengths = zip(*sequences, strict=True)
    return AttentionStep(0, starts, rows, lengths)


# ---- the layout


@pytest.mark.parametrize("layers", [[CONV], [NET], [CONV, NET, CONV], [NET] * 5])
def test_states_of_a_record_are_apart_and_begin_at_cache_lines(layers):
    layout = StateLayout(layers, 64)
    taken: list[tuple[int, int]] = []
    for layer, (conv_at, heads_at, _) in zip(layers, layout.offsets, strict=True):
        inputs, channels = layer.conv
        taken.append((conv_at, conv_at + inputs * channels))
        if layer.heads is not None:
            heads, keys, values = layer.heads
            taken.append((heads_at, heads_at + heads * keys * values))
    assert all(begin % 16 == 0 for begin, _ in taken)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(taken))
    assert taken[-1][1] <= layout.record_values


@pytest.mark.parametrize("interval", [1, 24, 64, 512])
def test_a_record_is_the_bytes_of_its_interval(interval):
    layout = StateLayout([CONV, NET], interval)
    group = layout.group()
    assert group.is_state and group.window == 2
    assert group.tile_tokens == group.read_block == interval
    assert group.token_bytes * group.tile_tokens == layout.record_bytes
    assert str(group) == f"a state of {layout.record_bytes} every {interval}"


def test_padding_a_record_moves_no_state():
    layout = StateLayout([CONV, NET], 64)
    before = list(layout.offsets)
    layout.pad(8192)
    assert (layout.record_bytes, layout.offsets) == (8192, before)
    assert layout.group().token_bytes == 8192 // 64
    with pytest.raises(AssertionError):
        layout.pad(4096)  # a record never shrinks


@pytest.mark.parametrize(
    ("record_bytes", "kv_token_bytes", "expected"),
    [
        (1, 1024, MIN_INTERVAL),
        (4 * 64 * 1024, 1024, MIN_INTERVAL),
        (4 * 64 * 1024 + 1, 1024, 2 * MIN_INTERVAL),
        (1 << 30, 1024, MAX_INTERVAL),
    ],
)
def test_the_interval_grows_with_the_record_up_to_a_limit(record_bytes, kv_token_bytes, expected):
    assert choose_interval(record_bytes, kv_token_bytes) == expected


# ---- segments


def test_rows_are_cut_where_records_are_complete():
    found = segments_of(step_of((160, 20, 20), (320, 1, 17), (480, 16, 32)), 16)
    assert found.firsts.tolist() == [0, 16, 20, 21, 37]
    # a fresh sequence has no state; a row at the begin of an interval reads the record before
    assert found.sources.tolist() == [NO_RECORD, 10, 20, 30]
    assert found.targets.tolist() == [10, 11, 21, 31]
    assert found.sequences.tolist() == [0, 2, 3, 4]


def test_decoded_rows_stay_in_their_record_until_it_is_complete():
    records = [
        tuple(int(each) for each in (found.sources, found.targets))
        for length in range(1, 10)
        for found in [segments_of(step_of((8, 1, length)), 4)]
    ]
    first, second, third = 2, 3, 4
    assert records == [
        (NO_RECORD, first),
        *[(first, first)] * 3,
        (first, second),
        *[(second, second)] * 3,
        (second, third),
    ]


def test_segments_of_random_steps_are_the_records_of_their_rows():
    rng = random.Random(3)
    for _ in range(300):
        interval = rng.choice([1, 3, 8, 16])
        sequences = []
        for number in range(rng.randint(1, 5)):
            rows = rng.randint(1, 3 * interval)
            length = rows + rng.choice([0, rng.randint(0, 5 * interval)])
            sequences.append((number * 20 * interval, rows, length))
        found = segments_of(step_of(*sequences), interval)
        firsts, bounds = found.firsts.tolist(), found.sequences.tolist()
        row, segment = 0, 0
        for number, (start, rows, length) in enumerate(sequences):
            assert bounds[number] == segment
            for position in range(length - rows, length):
                if row == firsts[segment + 1]:
                    segment += 1
                assert found.targets[segment] == (start + position) // interval
                if row == firsts[segment]:
                    before = (start + position - 1) // interval if position else NO_RECORD
                    assert found.sources[segment] == before
                row += 1
            segment += 1
        assert row == firsts[-1] and bounds[-1] == segment == len(found.targets)


# ---- states in memory

RULE = Recurrence(
    rates=torch.tensor([0.5, 1.5]),
    bias=torch.tensor([0.1, -0.2]),
    is_delta=True,
    scale=0.5,
    has_unit_keys=True,
)


def compute(states: LocalStates, inputs: list[torch.Tensor], step: AttentionStep) -> torch.Tensor:
    """Returns the outputs of a convolution and a recurrence for the rows of a step."""
    ops, layer = ReferenceStates(), states.plan(step).layer(1)
    assert layer.heads is not None
    x, q, k, v, a = inputs
    weight = torch.arange(28, dtype=torch.float32).view(7, 4) / 28
    mixed = ops.causal_conv(x, weight, None, "silu", layer.conv, layer.segments)
    rows = ops.linear_attention(q, k, v, a, a, RULE, layer.heads, layer.segments)
    return torch.cat((mixed, rows.flatten(1)), 1)


@pytest.mark.parametrize("cuts", [[40], [1] * 40, [5, 3, 8, 24], [16, 16, 8], [7, 33]])
def test_steps_of_any_size_give_the_rows_of_one_step(cuts):
    torch.manual_seed(1)
    shapes = [(40, 7), (40, 1, 3), (40, 1, 3), (40, 2, 4), (40, 2)]
    inputs = [torch.randn(shape) for shape in shapes]
    layout = StateLayout([CONV, NET], 8)
    layout.pad(4096)
    found = []
    for parts in ([1] * 40, cuts):
        memory = (ctypes.c_char * (16 * 4096))()
        states = LocalStates(layout, ctypes.addressof(memory), 16 * 4096)
        states.layers[0][0].fill_(7.0)  # the states of another layer
        outputs, end = [], 0
        for rows in parts:
            begin, end = end, end + rows
            step = step_of((8 * 3, rows, end))  # in the range that begins with record 3
            outputs.append(compute(states, [each[begin:end] for each in inputs], step))
        found.append((torch.cat(outputs), [each.clone() for each in states.layers[1]]))
        assert bool((states.layers[0][0] == 7.0).all())
        assert not any(bool(each[:3].any()) or bool(each[8:].any()) for each in states.layers[1])
    (expected, snapshots), (rows, again) = found
    torch.testing.assert_close(rows, expected)
    # every record is a snapshot of the state at the end of its interval
    torch.testing.assert_close(again, snapshots)
    assert all(bool(each[i].any()) for each in snapshots[:2] for i in range(3, 8))
