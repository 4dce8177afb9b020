"""Overlapped steps of sequences with states, whose rows cannot be computed again: what a failed
step and those behind it may have changed is not used."""

from __future__ import annotations

import pytest

from memory.pages.layer_groups import LayerGroup
from serve.request import FinishReason
from tests.support.cuda.late_runner import expected_tokens
from tests.support.engine.overlap_rig import Bench

WITH_STATES = (LayerGroup(64), LayerGroup(40, 8, window=2, read_block=8, is_state=True))


def decoding(**settings):
    """Returns a bench on which two sequences decode and no step is in flight."""
    bench = Bench(groups=WITH_STATES, **settings)
    pair = [bench.add(name, num_prompt=5, num_tokens=20) for name in ("a", "b")]
    for _ in range(4):
        bench.step()
    bench.steps.drain()
    return bench, *pair


def check_end(bench, *sequences):
    bench.run()
    bench.check_rest()
    for sequence in sequences:
        assert sequence.token_ids == expected_tokens(sequence), sequence.request.request_id


def test_a_sequence_of_the_step_behind_a_failed_one_begins_again():
    """It has no row in the failed step, and one in the next, which the device has computed."""
    bad = []
    bench, failing, other = decoding(fails_wait=lambda s: s in bad)
    bad.append(failing)
    plan = bench.scheduler.schedule(0.0)
    bench.steps.run(plan.subset([plan.sequences.index(failing)]), 0.0)
    bench.step()
    assert bench.ended == {failing: FinishReason.ERROR}
    assert other.num_preemptions == 1
    check_end(bench, other)


def test_sequences_of_a_failed_step_run_apart_until_they_are_beyond_it():
    bad = []
    bench, failing, other = decoding(fails_wait=lambda s: s in bad)
    third = bench.add("c", num_prompt=5, num_tokens=20)
    bench.step()
    bench.steps.drain()
    bad.append(failing)
    bench.step()
    bench.steps.drain()
    assert all(s.num_preemptions == 1 for s in (failing, other, third)) and not bench.ended
    plans = []
    launch = bench.runner.launch
    bench.runner.launch = lambda plan, launched: (
        plans.append(list(plan.sequences)),
        launch(plan, launched),
    )[1]
    check_end(bench, other, third)
    assert bench.ended == {failing: FinishReason.ERROR}
    assert all(len(plan) == 1 for plan in plans[: plans.index([failing]) + 1])
    assert [other, third] in plans, "they run together again, and overlap"


@pytest.mark.parametrize("fails", ["fails_launch", "fails_wait"])
def test_the_others_begin_again_where_the_sequence_at_fault_has_ended(fails):
    bad = []
    bench, failing, other = decoding(**{fails: lambda s: s in bad})
    if fails == "fails_launch":
        bench.step()
    bad.append(failing)
    plan = bench.scheduler.schedule(0.0)
    if fails == "fails_launch":  # it ends with the step in flight, which completes first
        complete = bench.steps._complete

        def ends(launched):
            done = complete(launched)
            bench.scheduler.finish(failing, FinishReason.ABORT)
            return done

        bench.steps._complete = ends
    bench.steps.run(plan, 0.0)
    if fails == "fails_wait":
        bench.scheduler.finish(failing, FinishReason.ABORT)
        bench.steps.drain()
    assert other.num_preemptions == 1 and not bench.ended
    check_end(bench, other)
