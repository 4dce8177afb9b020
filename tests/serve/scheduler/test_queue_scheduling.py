"""Queue policies in the scheduler: preemption by priority, and shared prefixes."""

from __future__ import annotations

import pytest

from serve.config import QUEUE_POLICIES
from serve.request import FinishReason
from tests.serve.scheduler.test_scheduler import rows
from tests.support.engine.queue_rig import Rig, at_rate, names


def test_a_lower_priority_is_preempted_when_slots_are_few():
    rig = Rig("priority", max_num_seqs=2)
    low, lower = rig.add("a", priority=1), rig.add("b", priority=2)
    rig.step()
    rig.add("c", priority=1)
    rig.add("d", priority=0)
    rig.step()
    assert names(rig.scheduler.running) == "ad"
    assert lower.num_preemptions == rig.scheduler.num_priority_preemptions == 1
    assert low.num_preemptions == 0
    rig.run()
    assert list(rig.finished_s) == ["a", "d", "c", "b"]


def test_no_sequence_is_preempted_without_need():
    rig = Rig("priority", max_num_seqs=3)
    rig.add("a", priority=1)
    rig.add("b", priority=1)
    rig.step()
    rig.add("c", priority=0)
    rig.add("d", priority=1)
    rig.step()
    assert names(rig.scheduler.running) == "abc"
    assert rig.run().scheduler.num_preemptions == 0


def test_no_sequence_is_preempted_when_that_frees_too_little():
    """Sequence c has priority over b, but needs the memory of a."""
    rig = Rig("priority", num_pages=66, max_num_seqs=3, budget=256)
    rig.add("a", num_prompt=150, num_tokens=5, priority=0)
    rig.add("b", num_prompt=20, num_tokens=30, priority=2)
    rig.step()
    rig.add("c", num_prompt=240, priority=1)
    rig.step()
    assert rig.scheduler.num_preemptions == 0
    for _ in range(5):
        rig.step()
    assert names(rig.scheduler.running) == "c"
    assert rig.scheduler.num_priority_preemptions == 1
    rig.run()


def test_only_a_sequence_in_the_same_partition_is_preempted():
    """Sequence c fits into neither partition, although both together have room for two of it."""
    rig = Rig("priority", num_pages=64, budget=512, num_memories=2)
    first, second = (rig.add(name, num_prompt=100, num_tokens=5, priority=0) for name in "ab")
    third = rig.add("x", num_prompt=20, num_tokens=30, priority=2)
    rig.step()
    partitions = [rig.kv.partition_of(s.kv_range) for s in (first, second, third)]
    assert partitions[0] != partitions[1]
    rig.add("c", num_prompt=240, num_tokens=5, priority=1)
    for _ in range(3):
        rig.step()
    assert names(rig.scheduler.running) == "abx"
    assert rig.scheduler.num_priority_preemptions == 0
    rig.run()
    assert set(rig.finished_s) == {*"abxc"}


def test_a_long_prompt_gives_its_rows_to_a_request_of_higher_priority():
    """It continues in the same step with the remaining rows, and recomputes nothing."""
    for policy in ("priority", "mlfq"):
        rig = Rig(policy, budget=16)
        at_rate(rig.queue, 1000)
        long = rig.add("l", num_prompt=200, priority=1)
        for _ in range(3):
            rig.step()
        rig.add("s", num_prompt=6, priority=0)
        assert rows(rig.step()) == [("s", 6), ("l", 10)], policy
        assert long.num_computed_tokens == 3 * 16 + 10
        assert rig.run().scheduler.num_preemptions == 0
        assert rig.num_rows == 200 + 3 + 6 + 3


def test_an_urgent_prompt_takes_the_row_of_a_preempted_decode():
    rig = Rig("priority", max_num_seqs=4, budget=4)
    for name in "abcd":
        rig.add(name, num_prompt=4, num_tokens=20, priority=1)
    for _ in range(8):
        rig.step()
    assert rows(rig.step()) == [(name, 1) for name in "abcd"]
    rig.add("u", num_prompt=4, priority=0)
    assert rows(rig.step()) == [("a", 1), ("b", 1), ("c", 1), ("u", 1)]


def test_a_preempted_sequence_resumes_from_its_cached_pages():
    """Only the incomplete page is computed again."""
    rig = Rig("priority", max_num_seqs=1)
    low = rig.add("a", num_prompt=61, num_tokens=20, priority=1)
    for _ in range(10):
        rig.step()
    computed = low.num_computed_tokens
    assert computed == 67
    rig.add("b", num_prompt=9, num_tokens=3, priority=0)
    rig.run()
    assert low.num_preemptions == 1
    assert rig.num_rows == 61 + 19 + computed % 4 + 9 + 2


def test_a_long_prompt_does_not_starve():
    """At least every seventeenth step computes its rows."""
    rig = Rig("priority", num_pages=1000, max_num_seqs=64, budget=16)
    long = rig.add("l", num_prompt=200, priority=1)
    rig.step()
    for number in range(200):
        rig.add(f"s{number}", num_prompt=32, num_tokens=1)
    done = []
    for _ in range(100):
        rig.step()
        done.append(long.num_computed_tokens)
    pauses = [done.count(n) - 1 for n in set(done) if n < 200]
    assert max(pauses) == 16
    assert rig.run().scheduler.num_preemptions == 0


def test_the_queue_policy_chooses_the_victim_when_memory_runs_out():
    rig = Rig("priority", num_pages=20, max_num_seqs=3, budget=64)
    for name, priority in (("a", 1), ("b", 0), ("c", 0)):
        rig.add(name, num_prompt=16, num_tokens=20, priority=priority)
    rig.run()
    assert rig.scheduler.num_priority_preemptions == 0
    assert list(rig.finished_s)[-1] == "a"


def test_a_preemption_by_priority_is_not_a_wrong_prediction():
    from serve.scheduler.admission import PredictedPolicy

    rig = Rig("priority", max_num_seqs=1)
    policy = rig.scheduler.policy = PredictedPolicy(rig.kv, 16)
    rig.add("a", priority=1)
    rig.step()
    rig.add("b", priority=0)
    rig.step()
    assert rig.scheduler.num_priority_preemptions == 1
    assert policy.reserve == 0.05
    rig.run()
    assert not policy._members


@pytest.mark.parametrize("policy", QUEUE_POLICIES)
def test_samples_of_one_prompt_compute_it_once(policy):
    rig = Rig(policy, num_pages=200, max_num_seqs=8, budget=32)
    rig.add("a", num_prompt=121, num_tokens=5, n=8)
    rig.step()
    assert len(rig.scheduler.running) == 1
    rig.run()
    last_page = 121 - 120
    assert rig.num_rows <= 121 + 7 * last_page + 8 * 4
    assert rig.kv.prefixes.stats.num_hit_tokens == 7 * 120


def test_a_sequence_that_waits_for_a_prefix_is_overtaken():
    rig = Rig("fcfs", max_num_seqs=8, budget=24, chunk=16)
    prompt = tuple(range(100, 160))
    rig.add("a", num_prompt=60, tokens=prompt)
    rig.add("b", num_prompt=60, tokens=prompt)
    rig.add("c", num_prompt=30)
    plan = rig.step()
    assert rows(plan) == [("a", 16), ("c", 8)]
    rig.run()
    assert rig.num_rows <= 60 + 4 + 30 + 3 * 3


def test_different_prompts_do_not_wait_for_each_other():
    rig = Rig("fcfs", budget=64)
    for name in "abc":
        rig.add(name, num_prompt=20)
    assert rows(rig.step()) == [("a", 20), ("b", 20), ("c", 20)]


def test_only_the_first_sixteen_waiting_sequences_are_examined():
    rig = Rig("fcfs", max_num_seqs=32, budget=64, chunk=16)
    rig.add("a", num_prompt=60, n=17)
    rig.add("b", num_prompt=20)
    rig.step()
    assert names(rig.scheduler.running) == "a"
    rig = Rig("fcfs", max_num_seqs=32, budget=64, chunk=16)
    rig.add("a", num_prompt=60, n=16)
    rig.add("b", num_prompt=20)
    rig.step()
    assert names(rig.scheduler.running) == "ab"


def test_the_wait_for_a_prefix_ends_when_its_computation_is_aborted():
    rig = Rig("fcfs", budget=16)
    first = rig.add("a", num_prompt=60, n=2)
    rig.step()
    rig.scheduler.finish(first, FinishReason.ABORT)
    plan = rig.step()
    assert rows(plan) == [("a", 16)]
    rig.run()
