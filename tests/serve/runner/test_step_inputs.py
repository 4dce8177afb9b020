"""The input tensors of a step, and the captured size that it takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from memory.policies.setting import parse_kv_policy
from serve.runner.batch import make_batch
from serve.runner.graph_shapes import StepShape, StepShapes
from serve.runner.step_inputs import NUM_FIELDS, block_bytes, fields, fill
from serve.scheduler.sequence import PENDING_TOKEN, Sequence
from serve.scheduler.step_plan import StepPlan
from tests.support.engine.fakes import make_kv, make_seq


def make_plan(*rows_of: tuple[Sequence, int]) -> StepPlan:
    """Makes a plan; rows_of: sequences with their rows, those with one row first."""
    sequences = [sequence for sequence, _ in rows_of]
    num_rows = [rows for _, rows in rows_of]
    samples = [s.num_computed_tokens + n == len(s.token_ids) for s, n in rows_of]
    return StepPlan(sequences, num_rows, num_rows.count(1), samples, sum(num_rows))


@pytest.fixture
def sequences() -> list[Sequence]:
    """Four sequences with prompt tokens 10 to 14, in ranges of their own."""
    kv, _ = make_kv()
    made = [make_seq(5, request_id=str(i)) for i in range(4)]
    for sequence in made:
        sequence.kv_range = kv.open(8)
    return made


def test_rows_of_a_merged_step(sequences):
    one, other, prompt, part = sequences
    one.token_ids.append(99)
    one.num_computed_tokens = 5
    other.token_ids.append(PENDING_TOKEN)
    other.num_computed_tokens = 5
    part.num_computed_tokens = 1
    pinned = torch.full((block_bytes(16),), 7, dtype=torch.uint8)
    plan = make_plan((one, 1), (other, 1), (prompt, 5), (part, 2))
    fill(pinned, plan, 12)
    assert block_bytes(12) == NUM_FIELDS * 12 * 8 and bool((pinned[block_bytes(12) :] == 7).all())
    tokens, positions, slots, sampled = fields(pinned, 12)
    assert tokens.tolist() == [99, PENDING_TOKEN, 10, 11, 12, 13, 14, 11, 12, 0, 0, 0]
    assert positions.tolist() == [5, 5, 0, 1, 2, 3, 4, 1, 2, 0, 0, 0]
    ranges = [s.kv_range.index for s in (one, other, *[prompt] * 5, part, part)]
    assert slots.tolist() == [*ranges, 0, 0, 0]
    assert sampled.tolist() == [0, 1, 6] + [0] * 9, "an incomplete prompt samples no token"


def test_rows_of_a_request_that_reads_everything_select_on_no_back_end(sequences):
    """Those of other requests do so after their prompts."""
    pytest.importorskip("triton")
    from serve.runner.cuda_runner import _attention_step

    _, other, *_ = sequences
    _say(other, "off")
    plan = make_plan(*[(sequence, 5) for sequence in sequences])
    expected = [5, other.max_tokens_total, 5, 5]
    for step in (make_batch(plan, selects=True).attention, _attention_step(plan, selects=True)):
        assert step.prompt_lens == expected and step.policies is None
    assert _attention_step(plan, selects=False).prompt_lens is None


def test_rows_of_a_request_with_a_budget_of_its_own_have_it(sequences):
    pytest.importorskip("triton")
    from serve.runner.cuda_runner import _attention_step

    _, other, third, _ = sequences
    _say(other, "quest:budget=50%")
    _say(third, "off")
    plan = make_plan(*[(sequence, 5) for sequence in sequences])
    policies = [None, parse_kv_policy("quest:budget=50%"), None, None]
    for step in (make_batch(plan, selects=True).attention, _attention_step(plan, selects=True)):
        assert step.policies == policies
        assert step.prompt_lens == [5, 5, third.max_tokens_total, 5]
    assert make_batch(plan).attention.policies is None


def _say(sequence, kv_policy):
    params = replace(sequence.request.params, kv_policy=kv_policy)
    sequence.request = replace(sequence.request, params=params)


def test_rows_without_padding(sequences):
    pinned = torch.zeros(block_bytes(5), dtype=torch.uint8)
    fill(pinned, make_plan((sequences[0], 5)), 5)
    tokens, _, _, sampled = fields(pinned, 5)
    assert tokens.tolist() == sequences[0].token_ids
    assert sampled[0] == 4


@pytest.mark.parametrize("max_seqs", [1, 3, 64, 100, 256, 300])
def test_every_decode_step_has_a_captured_size(max_seqs):
    shapes = StepShapes(512, max_seqs)
    captured = set(shapes.captured)
    for rows in range(1, max_seqs + 1):
        plan = StepPlan([], [], rows, [], rows)
        shape = shapes.of(plan)
        assert shape in captured
        assert shape.rows == shape.decodes >= rows and not shape.has_prompts
        smaller = [s.rows for s in captured if not s.has_prompts and rows <= s.rows < shape.rows]
        assert not smaller
    padding = [shapes.of(StepPlan([], [], n, [], n)).rows / n for n in range(1, max_seqs + 1)]
    assert float(np.mean(padding)) < 1.35


def test_merged_steps_are_captured_while_they_are_small():
    shapes = StepShapes(2048, 64)
    assert shapes.of(StepPlan([], [], 3, [], 20)) == StepShape(32, 32, True, True)
    assert shapes.of(StepPlan([], [], 64, [], 400)) == StepShape(512, 64, True, True)
    assert shapes.of(StepPlan([], [], 64, [], 513)) == StepShape(513, 64, True, False)
    assert shapes.of(StepPlan([], [], 64, [], 2048)).rows == 2048
    rows = [shape.rows for shape in shapes.captured if shape.has_prompts]
    assert rows == sorted(rows, reverse=True) and rows[0] == 512


def test_sizes_that_are_not_captured_are_warmed_up():
    """Each power of two of rows is covered, since kernels are chosen by it."""
    shapes = StepShapes(2048, 100)
    assert [shape.rows for shape in shapes.eager] == [512, 1024, 2048]
    assert not any(shape.is_captured for shape in shapes.eager)
    assert shapes.sampled == [1, 2, 4, 8, 16, 32, 64, 100]


def test_without_graphs_every_step_has_its_own_size():
    shapes = StepShapes(128, 8, captures=False)
    assert shapes.captured == []
    assert shapes.of(StepPlan([], [], 3, [], 3)) == StepShape(3, 3, False, False)
    assert shapes.of(StepPlan([], [], 3, [], 9)) == StepShape(9, 3, True, False)
    assert [shape.rows for shape in shapes.eager] == [1, 2, 4, 8, 16, 32, 64, 128]
