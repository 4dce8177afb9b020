"""Single cases of a pipeline: a full one has a step in each stage, and its last one samples."""

from __future__ import annotations

from collections import Counter

import pytest

from memory.pages.layer_groups import LayerGroup
from serve.request import FinishReason
from serve.scheduler.sequence import PENDING_TOKEN
from serve.scheduler.step_plan import SchedulerLimits
from tests.support.cuda.late_runner import expected_tokens
from tests.support.engine.overlap_rig import Bench

STAGE_S = 0.010


def pipeline(depth, limits=None, **settings):
    return Bench(limits, depth=depth, tokens_on_device=False, **settings)


def fill(bench):
    """Launches as many steps as are in flight when the next one is planned."""
    for _ in range(bench.runner.depth - 1):
        assert bench.step() is not None
    assert len(bench.runner.in_flight) == bench.runner.depth - 1


# ---- density


@pytest.mark.parametrize("depth", range(1, 7))
def test_chunks_of_one_prompt_fill_all_stages(depth):
    bench = pipeline(depth, SchedulerLimits(4, 5, 5), seconds=STAGE_S)
    sequence = bench.add(num_prompt=60, num_tokens=1)
    bench.run()
    kinds = [kind for kind, _ in bench.device.events]
    assert kinds[: depth + 1] == ["launch"] * depth + ["begin"]
    assert bench.device.num_launched == 12 and bench.device.idle_s == 0.0
    assert bench.device.now_s == pytest.approx((12 + depth - 1) * STAGE_S)
    assert sequence.token_ids == expected_tokens(sequence)
    bench.check_rest()


def test_a_sequence_is_not_planned_while_its_token_is_pending():
    bench = pipeline(3)
    sequence = bench.add(num_prompt=5, num_tokens=3)
    assert bench.step().num_total_rows == 5
    assert sequence.token_ids[-1] == PENDING_TOKEN and not bench.device.is_idle
    assert bench.step() is None, "the only step is completed"
    assert sequence.num_tokens == 6 and PENDING_TOKEN not in sequence.token_ids
    bench.run()
    assert bench.device.num_launched == 3 and sequence.token_ids == expected_tokens(sequence)
    bench.check_rest()


def test_only_the_oldest_step_is_completed_if_nothing_can_be_planned():
    bench = pipeline(4)
    one, other = bench.add("one", num_tokens=9), bench.add("other", num_tokens=9)
    bench.step()  # both prompts
    bench.step()
    for sequence in (one, other):
        assert bench.step().sequences == [sequence], "a half of the decodes each"
    assert bench.step() is None
    assert PENDING_TOKEN not in one.token_ids and other.token_ids[-1] == PENDING_TOKEN
    assert len(bench.runner.in_flight) == 1
    bench.run()
    bench.check_rest()


# ---- decodes


@pytest.mark.parametrize(("depth", "num_decodes"), [(4, 8), (4, 4), (3, 9), (6, 12)])
def test_decodes_spread_over_the_stages(depth, num_decodes):
    limits = SchedulerLimits(16, 256, 256)
    bench = pipeline(depth, limits, num_pages=400, seconds=STAGE_S)
    sequences = [bench.add(str(number), num_tokens=60) for number in range(num_decodes)]
    for _ in range(2 * depth + 1):
        bench.step()
    began_s, num_rows = bench.device.now_s, []
    for _ in range(5 * depth):
        num_rows.append(bench.step().num_decodes)
    assert num_rows == [num_decodes // depth] * (5 * depth)
    assert len({s for step in bench.runner.in_flight for s in step.sequences}) == (
        num_decodes - num_decodes // depth
    )
    assert bench.device.now_s - began_s == pytest.approx(5 * depth * STAGE_S), "no stage waits"
    bench.run()
    for sequence in sequences:
        assert sequence.token_ids == expected_tokens(sequence)
    bench.check_rest()


@pytest.mark.parametrize(("depth", "num_decodes"), [(3, 7), (4, 5), (5, 13), (2, 3)])
def test_those_that_have_waited_longest_decode_first(depth, num_decodes):
    bench = pipeline(depth, SchedulerLimits(16, 256, 256), num_pages=400)
    sequences = [bench.add(str(number), num_tokens=60) for number in range(num_decodes)]
    bench.step()
    bench.step()
    for _ in range(20 * depth):
        plan = bench.step()
        assert plan is None or plan.num_decodes <= -(-num_decodes // depth)
        lengths = [sequence.num_tokens for sequence in sequences]
        assert max(lengths) - min(lengths) <= 1
    assert min(lengths) >= 15
    bench.run()
    bench.check_rest()


def test_prompts_and_decodes_share_the_steps():
    """While a long prompt is computed, each step has its share of the decodes and a chunk."""
    bench = pipeline(3, SchedulerLimits(8, 12, 12), num_pages=400)
    for number in range(6):
        bench.add(str(number), num_prompt=2, num_tokens=60)
    bench.step()
    bench.step()
    long = bench.add("long", num_prompt=90, num_tokens=2)
    kinds = Counter()
    while long.num_computed_tokens < 80:
        plan = bench.step()
        kinds[plan.num_decodes, plan.num_total_rows] += 1
    assert kinds[2, 12] >= 6 and sum(kinds.values()) <= 10
    bench.run()
    assert long.token_ids == expected_tokens(long)
    bench.check_rest()


# ---- time


def test_the_model_learns_the_time_of_the_slowest_stage():
    """It does so from an empty pipeline, where a step ends a pass after the one before, and from
    a full one."""
    bench = pipeline(4, SchedulerLimits(8, 64, 64), num_pages=400, seconds=STAGE_S)
    chunks = bench.scheduler.chunks
    bench.add("first", num_tokens=6)
    bench.run()
    assert chunks.model.last_step_s == pytest.approx(STAGE_S)
    assert chunks.last_pass_s == pytest.approx(4 * STAGE_S)
    assert bench.steps.counts.seconds.sum == pytest.approx(6 * 4 * STAGE_S)
    bench.steps.pause()
    for number in range(8):
        bench.add(str(number), num_tokens=20)
    for _ in range(30):
        bench.step()
        assert chunks.model.last_step_s == pytest.approx(STAGE_S)
    bench.run()
    bench.check_rest()


@pytest.mark.parametrize("num_before", [0, 1, 2, 3])
def test_the_model_goes_on_learning_from_decodes(num_before):
    """One sequence is planned at every second call; the model learns from each fourth step."""
    bench = pipeline(4, max_len=400, seconds=STAGE_S)
    bench.scheduler.num_steps = num_before
    bench.add(num_tokens=380)
    model = bench.scheduler.chunks.model
    while not model.knows_decoding:
        bench.step()
    learned = []
    model.learn = lambda work, seconds: learned.append(seconds)
    for _ in range(400):
        bench.step()
    assert learned == pytest.approx([STAGE_S] * 50)


def test_a_device_with_a_queue_has_no_stages():
    bench = Bench(depth=3)
    assert bench.scheduler.num_stages == bench.scheduler.chunks.num_stages == 1
    assert pipeline(3).scheduler.policy.num_stages == 3


# ---- ends and preemptions


def test_an_abort_drops_chunks_in_flight():
    bench = pipeline(4, SchedulerLimits(4, 5, 5))
    sequence = bench.add(num_prompt=60, num_tokens=5)
    other = bench.add("other", num_prompt=30, num_tokens=5)
    fill(bench)
    assert sequence.rows_in_flight == 15
    assert bench.scheduler.finish(sequence, FinishReason.ABORT)
    bench.run()
    assert sequence not in bench.records.tokens and other.token_ids == expected_tokens(other)
    bench.check_rest()


def test_a_preempted_prompt_waits_for_all_its_steps_in_flight():
    bench = pipeline(4, SchedulerLimits(4, 5, 5))
    sequence = bench.add(num_prompt=40, num_tokens=5)
    fill(bench)
    bench.scheduler._preempt(sequence)
    bench.scheduler.policy.stopped(sequence)
    for num_left in (2, 1, 0):
        assert bench.step() is None
        assert len(bench.runner.in_flight) == num_left and sequence.num_computed_tokens == 0
    assert bench.step().num_total_rows == 5
    bench.run()
    assert sequence.token_ids == expected_tokens(sequence)
    bench.check_rest()


def test_a_preempted_sequence_keeps_the_token_in_flight():
    bench = pipeline(3)
    sequence = bench.add(num_tokens=6)
    bench.step()
    bench.scheduler._preempt(sequence)
    bench.scheduler.policy.stopped(sequence)
    assert bench.step() is None
    assert sequence.token_ids == expected_tokens(sequence)[:6]
    assert bench.step().num_total_rows == 6
    bench.run()
    assert sequence.token_ids == expected_tokens(sequence)
    bench.check_rest()


def test_a_sequence_waits_for_a_common_prefix_in_flight():
    """The prefix is in chunks of several steps."""
    bench = pipeline(4, SchedulerLimits(4, 20, 10), cache=True)
    prompt = list(range(100, 140))
    first = bench.add("first", prompt=prompt, num_tokens=5)
    second = bench.add("second", prompt=prompt, num_tokens=5)
    bench.run()
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 39)
    assert bench.steps.counts.num_prefill_rows == 40
    bench.check_rest()


def test_pages_behind_a_window_are_kept_for_all_rows_in_flight():
    bench = pipeline(4, SchedulerLimits(4, 5, 5), groups=(LayerGroup(64, window=6, read_block=1),))
    sequence = bench.add(num_prompt=60, num_tokens=5)
    for _ in range(6):
        bench.step()
    assert (sequence.num_computed_tokens, sequence.rows_in_flight) == (30, 15)
    assert bench.scheduler.schedule(0.0).num_total_rows == 5
    (part,) = sequence.kv_range.parts
    assert part.num_released == 2, "the row of token 15 reads from token 10 on"
    bench.scheduler.finish(sequence, FinishReason.ABORT)
    bench.steps.drain()
    bench.check_rest()


# ---- failures


def test_a_launch_that_fails_completes_the_steps_before_it():
    bad = []
    bench = pipeline(4, SchedulerLimits(8, 6, 5), fails_launch=lambda s: s in bad)
    long = bench.add("long", num_prompt=60, num_tokens=2)
    fill(bench)
    bad.append(bench.add("bad", num_prompt=1, num_tokens=9))
    bench.step()
    assert bench.ended == {bad[0]: FinishReason.ERROR} and not bench.runner.in_flight
    assert (long.num_computed_tokens, long.rows_in_flight) == (20, 0)
    bench.run()
    assert bench.device.num_launched == 12 + 1 and long.token_ids == expected_tokens(long)
    bench.check_rest()


def test_steps_behind_a_failed_one_are_taken_back():
    bad = []
    bench = pipeline(4, SchedulerLimits(8, 6, 5), fails_wait=lambda s: s in bad)
    long = bench.add("long", num_prompt=60, num_tokens=2)
    bad.append(bench.add("bad", num_prompt=1, num_tokens=9))
    fill(bench)
    assert bench.step().sequences == [long]
    assert bench.ended == {bad[0]: FinishReason.ERROR} and not bench.runner.in_flight
    assert (long.num_computed_tokens, long.rows_in_flight) == (5, 0)
    bench.run()
    assert long.token_ids == expected_tokens(long)
    bench.check_rest()


# ---- masks


@pytest.mark.parametrize("num_prompt", [1, 12])
def test_a_token_whose_mask_was_late_is_planned_again(num_prompt):
    late = iter([True, False, True, True, False, False, False])
    bench = pipeline(3, SchedulerLimits(8, 5, 5), is_late=lambda s: next(late))
    sequence = bench.add(num_prompt=num_prompt, num_tokens=4)
    bench.run()
    assert sequence.token_ids == expected_tokens(sequence)
    num_launched = -(-num_prompt // 5) + 6
    assert bench.device.num_launched == num_launched and next(late, None) is None
    bench.check_rest()


def test_a_late_sequence_may_have_ended_or_been_preempted():
    is_late = []
    bench = pipeline(3, is_late=lambda s: bool(is_late))
    ended, preempted = bench.add("ended", num_tokens=6), bench.add("preempted", num_tokens=6)
    bench.step()
    bench.scheduler.finish(ended, FinishReason.ABORT)
    bench.scheduler._preempt(preempted)
    bench.scheduler.policy.stopped(preempted)
    is_late.append(True)
    assert bench.step() is None
    assert preempted.num_tokens == 5 and preempted.num_computed_tokens == 0
    is_late.clear()
    bench.run()
    assert preempted.token_ids == expected_tokens(preempted)
    bench.check_rest()
