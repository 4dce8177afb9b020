"""In a pipeline the scheduler keeps the time between tokens, which is that of a pass through all
stages, and reckons throughput by the slowest stage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory.pages.layer_groups import LayerGroup
from serve.engine.early_rejection import predicted_ttft_s
from serve.scheduler.admission import OraclePolicy
from serve.scheduler.chunking import ChunkPolicy
from serve.scheduler.scheduler import Scheduler
from serve.scheduler.step_plan import SchedulerLimits
from serve.scheduler.step_time import StepWork, stage_seconds
from tests.support.engine.fakes import make_kv, make_request, make_seq
from tests.support.engine.overlap_rig import Bench


def run_pipeline(seconds, depth):
    """Returns the interval and the pass of steps that take so many seconds in each of `depth`
    stages, when a step is launched as soon as one ends."""
    free_s, ended_s, found = [0.0] * depth, [], []
    for number, step_s in enumerate(seconds):
        launched_s = time_s = ended_s[number - depth] if number >= depth else 0.0
        for stage, free_at_s in enumerate(free_s):
            free_s[stage] = time_s = max(time_s, free_at_s) + step_s
        found.append((time_s - (ended_s[-1] if ended_s else launched_s), time_s - launched_s))
        ended_s.append(time_s)
    return found


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 6))
def test_a_stage_is_never_taken_for_faster_than_it_is(seconds, depth):
    times = zip(seconds, run_pipeline([float(each) for each in seconds], depth), strict=True)
    for step_s, (interval_s, pass_s) in times:
        assert stage_seconds(interval_s, pass_s, depth) >= step_s * (1 - 1e-12)


@pytest.mark.parametrize("depth", [1, 2, 4, 6])
@pytest.mark.parametrize(
    "pattern", [[3.0], [1.0, 9.0], [9.0, 1.0, 1.0, 1.0], [2.0] * 30 + [5.0] * 30]
)
def test_unequal_steps_do_not_blur_the_time_of_a_stage(pattern, depth):
    """The times are right where bubbles and waits are not both in a step's way: in nearly all."""
    seconds = (pattern * 40)[:120]
    found = run_pipeline(seconds, depth)
    pairs = zip(seconds, found, strict=True)
    num_right = sum(
        stage_seconds(interval_s, pass_s, depth) == pytest.approx(step_s)
        for step_s, (interval_s, pass_s) in pairs
    )
    assert num_right >= 0.9 * len(seconds)


def test_a_step_alone_in_the_pipeline_takes_a_share_of_its_pass():
    assert stage_seconds(interval_s=4.0, pass_s=4.0, num_stages=4) == 1.0


def learned_policy(num_stages, slo_s):
    """Returns a policy that has learned steps of a millisecond a row."""
    policy = ChunkPolicy(SchedulerLimits(64, 4096, 4096, inter_token_slo_s=slo_s))
    policy.num_stages = num_stages
    for rows in (32, 64, 128, 256, 512, 48, 96, 192) * 20:
        work = StepWork(4, 40, 4, samples=True)
        work.add(rows, 0)
        policy.model.learn(work, 0.001 * work.num_rows)
        policy.model.learn(StepWork(4, 40, 4, samples=True), 0.004)
    policy.model.margin = 0.0
    return policy


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_the_slo_is_for_a_pass(num_stages):
    policy = learned_policy(num_stages, slo_s=0.4)
    budget = policy.begin([], [make_seq() for _ in range(4)], 4000, 0.0)
    assert budget.rows_for_one() == pytest.approx(400 / num_stages - 4, abs=16)


def test_prompts_are_slowed_down_by_a_steps_share_of_the_decodes():
    decodes = [make_seq() for _ in range(64)]
    alone = learned_policy(1, slo_s=None)
    spread = learned_policy(4, slo_s=None)
    assert spread.slowdown(decodes) == pytest.approx(alone.slowdown(decodes[:16]))
    assert spread.slowdown(decodes) < alone.slowdown(decodes)


@pytest.mark.parametrize(("depth", "num_decodes"), [(2, 8), (4, 8), (2, 1), (4, 1), (6, 4)])
def test_the_time_between_tokens_stays_within_the_slo_beside_long_prompts(depth, num_decodes):
    """This includes steps without decodes, behind which those of other steps wait."""
    slo_s = 0.4
    bench = Bench(
        SchedulerLimits(16, 512, 512, inter_token_slo_s=slo_s),
        num_pages=2000,
        max_len=2000,
        groups=(LayerGroup(64, window=9, read_block=4),),
        seconds=0.002,
        row_s=0.001,
        depth=depth,
        tokens_on_device=False,
    )
    decodes = [bench.add(str(number), num_tokens=400) for number in range(num_decodes)]
    gaps, seen, rows = [], {}, []
    for number in range(6):
        bench.add(f"long {number}", num_prompt=1900, num_tokens=1)
    while len(bench.scheduler.running) > num_decodes or bench.scheduler.waiting:
        plan = bench.step()
        if plan is not None:
            rows.append(plan.num_total_rows)
        for sequence in decodes:
            reported = len(bench.records.tokens[sequence])
            last, time_s = seen.get(sequence, (0, bench.device.now_s))
            if reported > last:
                gaps.append(bench.device.now_s - time_s)
                seen[sequence] = reported, bench.device.now_s
    settled = sorted(gaps[len(gaps) // 3 :])
    assert settled[int(0.95 * len(settled))] <= slo_s
    assert settled[len(settled) // 2] > 0.6 * slo_s, "prompts get what the SLO leaves"
    assert sum(rows[-20:]) / 20 < 1000 * slo_s / depth


@pytest.mark.parametrize("depth", [2, 4])
def test_a_forecast_counts_passes(depth):
    """With known lengths it knows when each sequence ends, in passes through the pipeline."""
    limits = SchedulerLimits(32, 64, 64)
    bench = Bench(limits, num_pages=400, depth=depth, tokens_on_device=False)
    scheduler = bench.scheduler
    scheduler.policy = policy = OraclePolicy(bench.kv, lambda s: 50 + s.seed, 64)
    scheduler.use_pipeline(depth)
    sequences = [
        bench.add(str(i), num_prompt=30, num_tokens=50 + i, seed=i) for i in range(2 * depth)
    ]
    for _ in range(20 * depth):
        bench.step()
    assert not scheduler.waiting and all(s.num_output_tokens > 10 for s in sequences)
    left = sorted(s.max_tokens_total - s.num_tokens for s in sequences)
    assert policy.steps_left(scheduler.num_passes) == pytest.approx(left, abs=3)


def test_a_forecast_knows_that_a_pass_has_a_chunk_in_every_stage():
    """88 rows in chunks of 8 take 11 steps, which are 3 passes."""
    bench = Bench(SchedulerLimits(4, 8, 8), depth=4, tokens_on_device=False)
    scheduler = bench.scheduler
    scheduler.policy = policy = OraclePolicy(bench.kv, lambda s: 8, 8)
    scheduler.use_pipeline(4)
    bench.add(num_prompt=88, num_tokens=8)
    bench.step()
    assert policy.steps_left(scheduler.num_passes) == pytest.approx([3 + 8 - 1], abs=1)
    bench.run()
    bench.check_rest()


def test_the_first_token_of_an_arrival_comes_after_a_pass_that_is_under_way():
    kv, _ = make_kv()
    scheduler = Scheduler(SchedulerLimits(8, 32, 32), kv)
    scheduler.running.append(make_seq(1))
    scheduler.chunks.model.last_step_s = 0.5
    request = make_request(3)
    alone_s = predicted_ttft_s(scheduler, request, 3, 0.0, 0)
    scheduler.use_pipeline(4)
    assert predicted_ttft_s(scheduler, request, 3, 0.0, 0) == pytest.approx(alone_s + 1.5)
