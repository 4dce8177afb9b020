"""Single cases of overlapped steps: late ends, waits and roll-backs."""

from __future__ import annotations

import pytest

from memory.pages.layer_groups import LayerGroup
from serve.request import FinishReason
from serve.scheduler.sequence import PENDING_TOKEN, SequenceStatus, make_sequences
from serve.scheduler.step_plan import SchedulerLimits
from tests.support.cuda.late_runner import EOS, expected_tokens
from tests.support.engine.fakes import make_request
from tests.support.engine.overlap_rig import Bench

DEVICE_S = 0.010


def stopping(num_output, num_prompt=5):
    """Returns parameters of a request that stops with EOS after num_output tokens."""
    for seed in range(10_000):
        prompt = [1000 + seed, *range(40, 39 + num_prompt)]
        request = make_request(prompt=prompt, num_tokens=40)
        (sequence,) = make_sequences(request, frozenset({EOS}))
        if len(expected_tokens(sequence)) == num_prompt + num_output:
            return {"prompt": prompt, "num_tokens": 40, "ignore_eos": False}
    raise AssertionError("no such prompt")


# ---- time


@pytest.mark.timing
@pytest.mark.parametrize("host_s", [0.0005, 0.004, 0.009])
def test_the_device_does_not_wait_for_the_host(host_s):
    bench = Bench(seconds=DEVICE_S, host_s=host_s)
    for number in range(4):
        bench.add(str(number), num_tokens=50)
    bench.run()
    busy_s = bench.device.num_launched * DEVICE_S
    assert bench.device.num_launched == 50
    assert bench.device.idle_s < 0.03 * busy_s
    bench.check_rest()

    one_by_one = Bench(seconds=DEVICE_S, host_s=host_s, overlaps=False)
    for number in range(4):
        one_by_one.add(str(number), num_tokens=50)
    one_by_one.run()
    assert one_by_one.device.idle_s == pytest.approx(49 * host_s)


def test_a_step_is_launched_before_the_previous_one_is_waited_for():
    bench = Bench()
    bench.add(num_tokens=4)
    bench.run()
    kinds = [kind for kind, _ in bench.device.events]
    assert kinds[:2] == ["launch", "launch"]
    assert kinds[2:] == ["begin", "end", "launch", "begin", "end", "launch"] + ["begin", "end"] * 2


def test_steps_are_timed_from_token_to_token():
    bench = Bench(seconds=DEVICE_S, host_s=0.004)
    bench.add(num_tokens=20)
    model = bench.scheduler.chunks.model
    bench.step()
    assert model.last_step_s == 0.0
    bench.step()
    assert model.last_step_s == pytest.approx(0.004 + DEVICE_S), "from its planning"
    for _ in range(5):
        bench.step()
        assert model.last_step_s == pytest.approx(DEVICE_S)
    bench.run()
    bench.steps.pause()
    bench.device.now_s += 100.0
    bench.add(num_tokens=2)
    bench.run()
    assert model.last_step_s == pytest.approx(DEVICE_S), "idle time belongs to no step"


def test_the_model_learns_the_work_as_it_was_at_the_launch():
    bench = Bench(SchedulerLimits(4, 32, 32, inter_token_slo_s=None), seconds=DEVICE_S)
    learned = []
    bench.scheduler.chunks.model.learn = lambda work, seconds: learned.append(work)
    bench.add(num_prompt=7, num_tokens=4)
    bench.run()
    assert [work.num_rows for work in learned] == [7, 1, 1, 1]
    assert [work.num_context for work in learned] == [0, 7, 8, 9]


# ---- ends


def test_length_limits_waste_no_rows():
    bench = Bench()
    sequence = bench.add(num_prompt=5, num_tokens=8)
    rows = []
    while bench.scheduler.has_work():
        plan = bench.step()
        rows.append(plan.num_total_rows if plan else 0)
    assert rows == [5, *[1] * 7, 0]
    assert sequence.finish_reason is FinishReason.LENGTH
    assert sequence.token_ids == expected_tokens(sequence)
    assert bench.steps.counts.num_decode_rows == 7
    bench.check_rest()


def test_a_stop_token_is_seen_one_step_late_and_the_row_in_flight_is_not_counted():
    bench = Bench(policy="predicted", cache=True)
    lengths = []
    bench.scheduler.policy.lengths._predictor.observe = lambda request, length: lengths.append(
        length
    )
    sequence = bench.add(**stopping(6))
    other = bench.add("other", num_tokens=30)
    while not sequence.is_finished:
        bench.step()
    assert sequence.stop_token == EOS and sequence.finish_reason is FinishReason.STOP
    assert lengths == [6] and bench.scheduler.num_finished == 1
    assert sequence in bench.steps._in_flight[-1].plan.sequences, "the token of its row is dropped"
    rows = bench.steps.counts.num_decode_rows
    bench.step()
    assert bench.steps.counts.num_decode_rows == rows + 1, "the row of the other sequence"
    assert bench.records.tokens[sequence] == expected_tokens(sequence)[5:]
    bench.run()
    assert other.token_ids == expected_tokens(other)
    bench.check_rest()


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_an_abort_drops_tokens_in_flight(num_steps):
    bench = Bench(policy="predicted")
    cut = []
    bench.scheduler.policy.lengths._predictor.observe_cut = lambda request, length: cut.append(
        length
    )
    sequence = bench.add(num_tokens=30, ignore_eos=False)
    for _ in range(num_steps):
        bench.step()
    assert sequence.token_ids[-1] == PENDING_TOKEN
    assert bench.scheduler.finish(sequence, FinishReason.ABORT)
    assert sequence.num_output_tokens == num_steps - 1
    assert cut == ([num_steps - 1] if num_steps > 1 else [])
    assert not bench.scheduler.has_work() and bench.steps.drain()
    assert bench.kv.num_in_use == 0
    bench.kv.trim()
    bench.check_rest()


# ---- prefixes


def test_pages_are_cached_once_their_tokens_are_known_and_computed():
    """A page holds 5 tokens and the prompt has 3, so tokens 3 and 4 complete the first page."""
    bench = Bench(cache=True)
    sequence = bench.add(num_prompt=3, num_tokens=20)
    index = bench.kv.prefixes.index
    for _ in range(3):
        bench.step()  # the third step, with token 4, is in flight
    assert sequence.num_computed_tokens == 5 and not index.pages
    assert not sequence.page_keys, "token 4 is not known"
    bench.step()
    assert len(index.pages) == 1
    bench.run()
    follower = bench.add("follower", prompt=expected_tokens(sequence)[:22], num_tokens=3)
    bench.run()
    assert follower.num_cached_tokens == 20
    assert follower.token_ids == expected_tokens(follower)
    bench.check_rest()


def test_prompt_pages_are_cached_when_their_step_has_ended():
    bench = Bench(SchedulerLimits(4, 5, 5), cache=True)
    bench.add(num_prompt=15, num_tokens=2)
    for num_steps in range(4):
        assert len(bench.kv.prefixes.index.pages) == max(0, num_steps - 1)
        bench.step()
    bench.run()
    bench.check_rest()


def test_a_sequence_waits_for_a_common_prefix_in_flight():
    bench = Bench(SchedulerLimits(4, 64, 64), cache=True)
    prompt = list(range(100, 140))
    first = bench.add("first", prompt=prompt, num_tokens=5)
    second = bench.add("second", prompt=prompt, num_tokens=5)
    bench.run()
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 39)
    assert bench.steps.counts.num_prefill_rows == 40
    bench.check_rest()


# ---- memory


def preempt_in_flight(bench, sequence):
    bench.step()
    bench.scheduler._preempt(sequence)
    bench.scheduler.policy.stopped(sequence)
    assert sequence.rows_in_flight and sequence.token_ids[-1] == PENDING_TOKEN


def test_a_preempted_sequence_keeps_the_token_in_flight_and_waits_for_it():
    bench = Bench()
    sequence = bench.add(num_tokens=6)
    preempt_in_flight(bench, sequence)
    assert bench.scheduler.schedule(0.0) is None, "its token is not known yet"
    assert bench.steps.drain()
    assert sequence.token_ids == expected_tokens(sequence)[:6]
    assert bench.step().num_total_rows == 6
    bench.run()
    assert sequence.token_ids == expected_tokens(sequence)
    assert len(bench.records.tokens[sequence]) == 6
    bench.check_rest()


@pytest.mark.parametrize("settings", [{"num_tokens": 1}, stopping(1)], ids=["length", "stop"])
def test_a_preempted_sequence_may_end_with_the_token_in_flight(settings):
    bench = Bench()
    sequence = bench.add(**settings)
    preempt_in_flight(bench, sequence)
    assert bench.steps.drain()
    assert sequence.is_finished and not bench.scheduler.has_work()
    assert sequence.token_ids == expected_tokens(sequence)
    bench.check_rest()


def test_no_sequence_is_preempted_for_memory_that_a_step_in_flight_frees():
    """All 22 pages are in use, and one sequence ends just when the other needs a page."""
    bench = Bench(SchedulerLimits(2, 200, 200), num_pages=2, max_len=100)
    one = bench.add("one", num_prompt=59, num_tokens=4)
    other = bench.add("other", num_prompt=42, num_tokens=20)
    for _ in range(4):
        bench.step()
    assert bench.kv.num_available == 0 and one.rows_in_flight == 1
    bench.run()
    assert bench.scheduler.num_preemptions == 0
    assert one.token_ids == expected_tokens(one)
    assert other.token_ids == expected_tokens(other)
    bench.check_rest()


# ---- failures


@pytest.mark.parametrize("fails", ["fails_launch", "fails_wait"])
@pytest.mark.parametrize("num_tokens", [5, 6, 9])
@pytest.mark.parametrize("device", [{}, {"depth": 4, "tokens_on_device": False}], ids=str)
def test_only_the_sequence_at_fault_ends(fails, num_tokens, device):
    bad = []
    bench = Bench(
        SchedulerLimits(8, 64, 64),
        **device,
        **{fails: lambda s: s in bad and len(s.token_ids) >= num_tokens},
    )
    sequences = [bench.add(str(number), num_tokens=12) for number in range(8)]
    bad.append(sequences[5])
    bench.run()
    assert bench.ended == {sequences[5]: FinishReason.ERROR}
    assert sequences[5].token_ids == expected_tokens(sequences[5])[:num_tokens]
    for sequence in sequences[:5] + sequences[6:]:
        assert sequence.token_ids == expected_tokens(sequence)
    assert bench.scheduler.num_finished == 8
    bench.check_rest()


def test_the_model_does_not_learn_from_a_failed_step():
    bad = []
    bench = Bench(seconds=DEVICE_S, fails_wait=lambda s: s in bad)
    bench.add("good", num_tokens=30)
    bad.append(bench.add("bad", num_tokens=30))
    model = bench.scheduler.chunks.model
    bench.step()
    model.learn = None
    bench.step()
    assert model.last_step_s == 0.0 and len(bench.scheduler.running) == 1
    assert not bench.device.faults


def test_a_fault_reported_at_the_next_launch_ends_only_the_failed_step():
    """A device may report an error at any later call."""
    bad = []
    bench = Bench(fails_wait=lambda s: s in bad, fails_launch=lambda s: bool(bad) and s not in bad)
    bad_one = bench.add("bad", num_prompt=5, num_tokens=1)
    bad.append(bad_one)
    bench.step()
    good = bench.add("good", num_tokens=4)
    bench.step()
    assert bench.ended == {bad_one: FinishReason.ERROR}
    bad.clear()
    bench.run()
    assert good.token_ids == expected_tokens(good)
    bench.check_rest()


@pytest.mark.parametrize("fails", ["fails_launch", "fails_wait"])
def test_the_sequence_at_fault_may_have_ended_meanwhile(fails):
    """The sequence at fault is stopped while the failing step is in flight."""
    bad = []
    bench = Bench(**{fails: lambda s: s in bad})
    good = bench.add("good", num_tokens=12)
    stopped = bench.add("stopped", **stopping(4) if fails == "fails_launch" else {"num_tokens": 12})
    for _ in range(4):
        bench.step()
    bad.append(stopped)
    bench.step()
    if fails == "fails_wait":  # its step was launched just now
        assert not stopped.is_finished
        bench.scheduler.finish(stopped, FinishReason.ABORT)
    bench.run()
    assert good not in bench.ended and good.token_ids == expected_tokens(good)
    bench.check_rest()


def test_a_rolled_back_step_leaves_a_preempted_sequence_consistent():
    """The sixth token, on a second page, was counted but never becomes known."""
    bad = []
    bench = Bench(fails_wait=lambda s: s in bad)
    bad.append(bench.add("bad", num_tokens=3))
    sequence = bench.add("good", num_prompt=5, num_tokens=6)
    preempt_in_flight(bench, sequence)
    assert bench.steps.drain()
    assert bench.ended == {bad[0]: FinishReason.ERROR}
    assert sequence.token_ids == expected_tokens(sequence)[:5]
    assert sequence.status is SequenceStatus.WAITING and not sequence.rows_in_flight
    bench.run()
    assert sequence.token_ids == expected_tokens(sequence)
    bench.check_rest()


def test_pages_behind_a_window_are_kept_for_rows_that_may_be_recomputed():
    """The row of token 15 attends back to token 5, but the row before it, which is still in
    flight, attends to token 4 on the first page."""
    bench = Bench(groups=(LayerGroup(64, window=11, read_block=1),))
    sequence = bench.add(num_prompt=11, num_tokens=12)
    for _ in range(5):
        bench.step()
    assert sequence.num_computed_tokens == 15 and sequence.rows_in_flight == 1
    (part,) = sequence.kv_range.parts
    plan = bench.scheduler.schedule(0.0)
    assert part.num_released == 0 and sequence.kv_range.capacity == 20
    bench.steps.run(plan, 0.0)
    bench.run()
    assert part.num_unmapped == 0 and sequence.token_ids == expected_tokens(sequence)
    bench.check_rest()


def test_a_step_that_needs_known_tokens_waits_for_them():
    bench = Bench(needs=lambda s: True)
    sequences = [bench.add(str(number), **stopping(3 + number)) for number in range(3)]
    bench.run()
    assert bench.runner.num_pending == 0
    for sequence in sequences:
        assert sequence.token_ids == expected_tokens(sequence)
    # no sequence has more rows than it needs
    assert bench.device.num_launched == 5
    bench.check_rest()


def test_the_part_of_a_plan_that_still_runs():
    bench = Bench()
    one, other = bench.add("one"), bench.add("other")
    plan = bench.scheduler.schedule(0.0)
    assert plan.still_running() is plan
    bench.scheduler.finish(one, FinishReason.ABORT)
    assert plan.still_running().sequences == [other]
    bench.scheduler.finish(other, FinishReason.ABORT)
    assert plan.still_running() is None
