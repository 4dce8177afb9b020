"""Each queue policy chooses which sequence is next, which returns and which is preempted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serve.config import QUEUE_POLICIES
from serve.scheduler.fair_queue import FairQueue
from serve.scheduler.mlfq_queue import MlfqQueue
from serve.scheduler.srpt_queue import SrptQueue
from serve.scheduler.waiting_queue import PriorityQueue, WaitingQueue, make_queue
from tests.support.engine.fakes import make_request
from tests.support.engine.queue_rig import at_rate, drained, make, name_of, names, seq


@pytest.mark.parametrize(
    ("policy", "arrivals", "expected"),
    [
        ("fcfs", [("a", {}), ("b", {"priority": -1}), ("c", {})], "abc"),
        (
            "priority",
            [("a", {"priority": 1}), ("b", {}), ("c", {"priority": 1}), ("d", {"priority": -5})],
            "dbac",
        ),
        # levels 7, 0, 1, 0 at 1,000 rows a second
        (
            "mlfq",
            [
                ("a", {"num_prompt": 100}),
                ("b", {"num_prompt": 5}),
                ("c", {"num_prompt": 15}),
                ("d", {"num_prompt": 5}),
            ],
            "bdca",
        ),
        (
            "fair",
            [
                ("a", {"client": "x", "num_prompt": 6}),
                ("b", {"client": "x"}),
                ("c", {"client": "y"}),
                ("d", {"client": "y"}),
                ("e", {}),
            ],
            "acedb",
        ),
    ],
)
def test_the_next_sequence(policy, arrivals, expected):
    queue = at_rate(make_queue(policy), 1000)
    for name, settings in arrivals:
        queue.add(seq(name, **settings))
    assert len(queue) == len(arrivals)
    assert drained(queue) == expected


@pytest.mark.parametrize("policy", QUEUE_POLICIES)
def test_a_returned_sequence_precedes_later_arrivals(policy):
    queue = make_queue(policy)
    first, second, third = seq("a"), seq("b"), seq("c")
    for sequence in (first, second, third):
        queue.add(sequence)
    queue.take(first)
    queue.take(second)
    queue.put_back(second)
    queue.put_back(first)
    assert names(queue) == "abc"
    queue.remove(second)
    queue.ended(second)
    assert names(queue) == "ac"


@pytest.mark.parametrize(
    ("policy", "expected"), [("fcfs", "d"), ("priority", "c"), ("mlfq", "b"), ("fair", "c")]
)
def test_the_victim_when_memory_runs_out(policy, expected):
    queue = at_rate(make_queue(policy), 1000)
    running = [
        seq("a", priority=2, client="x"),
        seq("b", num_prompt=100, client="y"),
        seq("c", priority=2, client="x"),
        seq("d", client="z"),
    ]
    for sequence in running:
        queue.add(sequence)
        queue.take(sequence)
    if policy == "fair":
        running[0].token_ids += [1] * 60  # 120 and twice 4 are more than 100
    assert name_of(queue.victim(running)) == expected


def test_levels_of_multi_level_feedback():
    queue = at_rate(MlfqQueue(), 1000)
    short, long = seq("s", num_prompt=10), seq("l", num_prompt=100)
    for sequence in (short, long):
        queue.add(sequence)
    levels = []
    for now_s in (0.0, 0.005, 0.011, 0.029, 0.031, 1.0):
        queue.tick(now_s)
        if now_s == 0.0:
            queue.take(short)
        levels.append(queue.level(short))
    assert levels == [0, 0, 1, 1, 2, 6], "10, 20, 40, 80 ... ms"
    assert queue.level(long) == 4, "160 ms are the first that cover 100"


def test_a_preemption_keeps_the_rest_of_a_level_and_recomputing_is_free():
    queue = at_rate(MlfqQueue(), 1000)
    sequence = seq("a", num_prompt=30)
    queue.add(sequence)
    assert queue.level(sequence) == 2
    queue.take(sequence)
    queue.tick(0.025)  # of 40 ms
    queue.put_back(sequence)
    queue.tick(2.0)
    sequence.num_preemptions = 1
    queue.take(sequence)
    for now_s, level in ((2.044, 2), (2.046, 3)):
        queue.tick(now_s)
        assert queue.level(sequence) == level


def test_a_starving_sequence_is_on_the_first_level_for_as_long_as_it_waited():
    queue = at_rate(MlfqQueue(), 1000)
    long, short = seq("l", num_prompt=100), seq("s", num_prompt=5, arrival_s=5.0)
    queue.add(long)
    queue.tick(5.9)
    queue.add(short)
    assert names(queue) == "sl"
    queue.tick(6.1)  # starves after 3 s plus 30 times its prompt's 0.1 s
    assert names(queue) == "ls"
    queue.take(long)
    queue.tick(12.1)
    assert queue.level(long) == 0
    queue.tick(12.3)
    assert queue.level(long) > 0


def test_a_starving_sequence_preempts_by_its_earned_level():
    queue = at_rate(MlfqQueue(), 1000)
    running = [seq("a", num_prompt=5), seq("b", num_prompt=1000), seq("c", num_prompt=9000)]
    for sequence in running:
        queue.add(sequence)
        queue.take(sequence)
    long = seq("l", num_prompt=100)  # level 4; the others 0, 7, 10
    queue.add(long)
    assert names(queue.victims_for(long, running)) == "bc"
    running[1].token_ids.append(1)
    queue.tick(6.1)
    assert queue.level(long) == 0
    assert names(queue.victims_for(long, running)) == "abc"


def test_a_preemption_must_be_worth_the_recomputing():
    queue = at_rate(MlfqQueue(), 1000)
    sequence = seq("a", num_prompt=100)
    queue.add(sequence)
    queue.take(sequence)
    for now_s, is_worth_it in ((0.9, False), (1.1, True)):
        queue.tick(now_s)
        assert queue.is_worth_preempting(sequence) == is_worth_it


def test_waiting_time_starts_at_arrival():
    """The wait does not count from the last step, which may be long ago."""
    queue = MlfqQueue()
    queue.tick(0.0)
    late = seq("b", num_prompt=100, arrival_s=100.0)
    at_rate(queue, 1000).add(late)
    queue.tick(100.0)
    assert queue.level(late) > 0


def test_an_idle_clients_counter_is_raised():
    queue = FairQueue()
    queue.add(seq("a", num_prompt=50, client="x"))
    queue.add(seq("b", num_prompt=50, client="x"))
    queue.take(next(iter(queue)))
    queue.add(seq("c", client="y"))
    assert queue.counters == {"x": 50, "y": 50}, "the least counter of the waiting clients"
    assert drained(queue) == "bc"
    queue.add(seq("d", client="z"))
    assert queue.counters["z"] == queue.counters["y"] == 54, "of the last waiting client"


def test_output_counts_twice_and_a_prompt_once_for_all_its_samples():
    queue = FairQueue()
    samples = make("a", num_prompt=10, client="x", n=3)
    for sequence in samples:
        queue.add(sequence)
    for sequence in samples:
        queue.take(sequence)
        sequence.token_ids += [1] * 5
    for sequence in samples:
        queue.ended(sequence)
    assert queue.counters == {"x": 10 + 3 * 2 * 5}


def test_the_tokens_of_an_answer_that_goes_on_are_work_as_a_prompt_is():
    """Whoever invents a long answer to go on with has no more of the engine than others."""
    queue = FairQueue()
    going_on, other = seq("a", num_prompt=10, client="x"), seq("b", num_prompt=40, client="y")
    going_on.token_ids += [1] * 30  # of another server
    for sequence in (going_on, other):
        queue.add(sequence)
        queue.take(sequence)
        sequence.token_ids += [1] * 5
        queue.ended(sequence)
    # the second one begins where the first one is
    assert queue.counters == {"x": 10 + 30 + 2 * 5, "y": 50 + 40 + 2 * 5}
    queue = FairQueue()
    sequence = seq("c", num_prompt=10, client="x")
    queue.add(sequence)
    queue.take(sequence)
    sequence.token_ids += [1] * 5
    queue.put_back(sequence)
    sequence.num_preemptions = 1
    queue.take(sequence)
    queue.ended(sequence)
    assert queue.counters == {"x": 10 + 2 * 5}, "preempted, its own tokens are no new work"


def test_idle_clients_are_dropped_when_there_are_many():
    queue = FairQueue()
    queue.MAX_CLIENTS = 100
    for number in range(1000):
        sequence = seq("a", client=f"client-{number}")
        queue.add(sequence)
        if number != 7:
            queue.take(sequence)
            queue.ended(sequence)
    assert len(queue.counters) <= 100
    assert "client-7" in queue.counters, "it waits"


@pytest.mark.parametrize(
    ("policy", "expected"), [("fcfs", 220), ("priority", 120), ("mlfq", 20), ("fair", 20 + 35)]
)
def test_seconds_before(policy, expected):
    """A request of client y with priority 1 and 15 tokens waits this long. Under fair it waits for
    its client's own 20 and for as much of client x as those and its own 15."""
    queue = at_rate(make_queue(policy), 1000)
    for name, client, num_prompt, priority in (
        ("a", "x", 100, 0),
        ("b", "x", 100, 2),
        ("c", "y", 20, 1),
    ):
        sequence = seq(name, num_prompt, client=client, priority=priority)
        sequence.expected_s = num_prompt / 1000
        queue.add(sequence)
    request = replace(make_request(15, "q", priority=1), client="y")
    assert queue.seconds_before(request, 15) == pytest.approx(expected / 1000)


def test_queue_policies_have_names():
    assert [type(make_queue(name)) for name in QUEUE_POLICIES] == [
        WaitingQueue,
        PriorityQueue,
        MlfqQueue,
        FairQueue,
        SrptQueue,
    ]
