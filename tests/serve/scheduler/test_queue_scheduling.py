"""Orders in the scheduler: who gives way, and prefixes that several need."""

from __future__ import annotations

import pytest

from serve.config import QUEUE_POLICIES
from serve.request import FinishReason
from tests.serve.scheduler.test_scheduler import rows
from tests.support.engine.order_rig import Rig, at_rate, names


def test_a_lower_priority_gives_way_when_slots_are_few():
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


def test_nobody_gives_way_who_is_not_in_the_way():
    rig = Rig("priority", max_num_seqs=3)
    rig.add("a", priority=1)
    rig.add("b", priority=1)
    rig.step()
    rig.add("c", priority=0)
    rig.add("d", priority=1)
    rig.step()
    assert names(rig.scheduler.running) == "abc"
    assert rig.run().scheduler.num_preemptions == 0


def test_nobody_gives_way_when_it_does_not_help():
    """c has priority over b, but a's memory is what it needs."""
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


def test_only_who_is_in_the_same_memory_gives_way():
    """c fits into neither of two memories, although both together have room for two of it."""
    rig = Rig("priority", num_pages=64, budget=512, num_memories=2)
    first, second = (rig.add(name, num_prompt=100, num_tokens=5, priority=0) for name in "ab")
    third = rig.add("x", num_prompt=20, num_tokens=30, priority=2)
    rig.step()
    homes = [rig.kv.partition_of(s.kv_range) for s in (first, second, third)]
    assert homes[0] != homes[1]
    rig.add("c", num_prompt=240, num_tokens=5, priority=1)
    for _ in range(3):
        rig.step()
    assert names(rig.scheduler.running) == "abx"
    assert rig.scheduler.num_priority_preemptions == 0
    rig.run()
    assert set(rig.finished_s) == {*"abxc"}


def test_a_long_prompt_gives_its_rows_to_a_request_of_a_higher_rank():
    """It goes on in the same step with what is left, and computes nothing again."""
    for order in ("priority", "mlfq"):
        rig = Rig(order, budget=16)
        at_rate(rig.order, 1000)
        long = rig.add("l", num_prompt=200, priority=1)
        for _ in range(3):
            rig.step()
        rig.add("s", num_prompt=6, priority=0)
        assert rows(rig.step()) == [("s", 6), ("l", 10)], order
        assert long.num_computed_tokens == 3 * 16 + 10
        assert rig.run().scheduler.num_preemptions == 0
        assert rig.num_rows == 200 + 3 + 6 + 3


def test_a_decode_row_that_is_taken_back_is_had_by_another():
    rig = Rig("priority", max_num_seqs=4, budget=4)
    for name in "abcd":
        rig.add(name, num_prompt=4, num_tokens=20, priority=1)
    for _ in range(8):
        rig.step()
    assert rows(rig.step()) == [(name, 1) for name in "abcd"]
    rig.add("u", num_prompt=4, priority=0)
    assert rows(rig.step()) == [("a", 1), ("b", 1), ("c", 1), ("u", 1)]


def test_who_gave_way_goes_on_with_what_it_had():
    """Only the page that was not complete is computed again."""
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


def test_rows_are_not_taken_for_ever():
    """Every seventeenth step at least is the prompt's own."""
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


def test_the_order_chooses_the_victim_when_memory_runs_out():
    rig = Rig("priority", num_pages=20, max_num_seqs=3, budget=64)
    for name, priority in (("a", 1), ("b", 0), ("c", 0)):
        rig.add(name, num_prompt=16, num_tokens=20, priority=priority)
    rig.run()
    assert rig.scheduler.num_priority_preemptions == 0
    assert list(rig.finished_s)[-1] == "a"


def test_giving_way_does_not_count_as_a_wrong_prediction():
    from serve.scheduler.admission import PredictedPeak

    rig = Rig("priority", max_num_seqs=1)
    policy = rig.scheduler.policy = PredictedPeak(rig.kv, 16)
    rig.add("a", priority=1)
    rig.step()
    rig.add("b", priority=0)
    rig.step()
    assert rig.scheduler.num_priority_preemptions == 1
    assert policy.reserve == 0.05
    rig.run()
    assert not policy._members


@pytest.mark.parametrize("order", QUEUE_POLICIES)
def test_samples_of_one_prompt_compute_it_once(order):
    rig = Rig(order, num_pages=200, max_num_seqs=8, budget=32)
    rig.add("a", num_prompt=121, num_tokens=5, n=8)
    rig.step()
    assert len(rig.scheduler.running) == 1
    rig.run()
    last_page = 121 - 120
    assert rig.num_rows <= 121 + 7 * last_page + 8 * 4
    assert rig.kv.prefixes.stats.num_hit_tokens == 7 * 120


def test_who_waits_for_a_prefix_is_passed_by_others():
    rig = Rig("fcfs", max_num_seqs=8, budget=24, chunk=16)
    prompt = tuple(range(100, 160))
    rig.add("a", num_prompt=60, tokens=prompt)
    rig.add("b", num_prompt=60, tokens=prompt)
    rig.add("c", num_prompt=30)
    plan = rig.step()
    assert rows(plan) == [("a", 16), ("c", 8)]
    rig.run()
    assert rig.num_rows <= 60 + 4 + 30 + 3 * 3


def test_unlike_prompts_do_not_wait_for_each_other():
    rig = Rig("fcfs", budget=64)
    for name in "abc":
        rig.add(name, num_prompt=20)
    assert rows(rig.step()) == [("a", 20), ("b", 20), ("c", 20)]


def test_only_so_many_are_looked_at():
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


def test_the_wait_ends_when_the_one_that_computes_goes():
    rig = Rig("fcfs", budget=16)
    first = rig.add("a", num_prompt=60, n=2)
    rig.step()
    rig.scheduler.finish(first, FinishReason.ABORT)
    plan = rig.step()
    assert rows(plan) == [("a", 16)]
    rig.run()
