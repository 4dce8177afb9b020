"""Orders by table: who is next, who comes back, who goes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serve.config import QUEUE_POLICIES
from serve.scheduler.fair_queue import FairQueue
from serve.scheduler.mlfq_queue import MlfqQueue
from serve.scheduler.waiting_queue import PriorityQueue, WaitingQueue, make_queue
from tests.support.engine.fakes import make_request
from tests.support.engine.order_rig import at_rate, drained, make, name_of, names, seq

# ---- by table


@pytest.mark.parametrize(
    ("order", "arrivals", "expected"),
    [
        ("fcfs", [("a", {}), ("b", {"priority": -1}), ("c", {})], "abc"),
        (
            "priority",
            [("a", {"priority": 1}), ("b", {}), ("c", {"priority": 1}), ("d", {"priority": -5})],
            "dbac",
        ),
        # 1,000 rows a second: levels 7, 0, 1, 0
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
def test_who_is_next(order, arrivals, expected):
    made = at_rate(make_queue(order), 1000)
    for name, settings in arrivals:
        made.add(seq(name, **settings))
    assert len(made) == len(arrivals)
    assert drained(made) == expected


@pytest.mark.parametrize("order", QUEUE_POLICIES)
def test_who_comes_back_is_before_those_who_came_later(order):
    made = make_queue(order)
    first, second, third = seq("a"), seq("b"), seq("c")
    for sequence in (first, second, third):
        made.add(sequence)
    made.take(first)
    made.take(second)
    made.put_back(second)
    made.put_back(first)
    assert names(made) == "abc"
    made.remove(second)
    made.ended(second)
    assert names(made) == "ac"


@pytest.mark.parametrize(
    ("order", "expected"), [("fcfs", "d"), ("priority", "c"), ("mlfq", "b"), ("fair", "c")]
)
def test_who_goes_when_memory_runs_out(order, expected):
    made = at_rate(make_queue(order), 1000)
    running = [
        seq("a", priority=2, client="x"),
        seq("b", num_prompt=100, client="y"),
        seq("c", priority=2, client="x"),
        seq("d", client="z"),
    ]
    for sequence in running:
        made.add(sequence)
        made.take(sequence)
    if order == "fair":
        running[0].token_ids += [1] * 60  # 120 and twice 4 are more than 100
    assert name_of(made.victim(running)) == expected


def test_levels_of_multi_level_feedback():
    order = at_rate(MlfqQueue(), 1000)
    short, long = seq("s", num_prompt=10), seq("l", num_prompt=100)
    for sequence in (short, long):
        order.add(sequence)
    levels = []
    for now_s in (0.0, 0.005, 0.011, 0.029, 0.031, 1.0):
        order.tick(now_s)
        if now_s == 0.0:
            order.take(short)
        levels.append(order.level(short))
    assert levels == [0, 0, 1, 1, 2, 6], "10, 20, 40, 80 ... ms"
    assert order.level(long) == 4, "160 ms are the first that cover 100"


def test_what_is_left_of_a_level_survives_a_preemption_and_recomputing_is_free():
    order = at_rate(MlfqQueue(), 1000)
    sequence = seq("a", num_prompt=30)
    order.add(sequence)
    assert order.level(sequence) == 2
    order.take(sequence)
    order.tick(0.025)  # of 40 ms
    order.put_back(sequence)
    order.tick(2.0)
    sequence.num_preemptions = 1
    order.take(sequence)
    for now_s, level in ((2.044, 2), (2.046, 3)):
        order.tick(now_s)
        assert order.level(sequence) == level


def test_who_starves_goes_to_the_first_level_for_as_long_as_it_waited():
    order = at_rate(MlfqQueue(), 1000)
    long, short = seq("l", num_prompt=100), seq("s", num_prompt=5, arrival_s=5.0)
    order.add(long)
    order.tick(5.9)
    order.add(short)
    assert names(order) == "sl"
    order.tick(6.1)  # 3 s and 30 times 0.1 s for its prompt
    assert names(order) == "ls"
    order.take(long)
    order.tick(12.1)
    assert order.level(long) == 0
    order.tick(12.3)
    assert order.level(long) > 0


def test_who_starves_outranks_only_those_it_did_before():
    order = at_rate(MlfqQueue(), 1000)
    running = [seq("a", num_prompt=5), seq("b", num_prompt=1000), seq("c", num_prompt=9000)]
    for sequence in running:
        order.add(sequence)
        order.take(sequence)
    long = seq("l", num_prompt=100)  # level 4; the others 0, 7, 10
    order.add(long)
    assert names(order.victims_for(long, running)) == "bc"
    running[1].token_ids.append(1)
    order.tick(6.1)
    assert order.level(long) == 0
    assert names(order.victims_for(long, running)) == "abc"


def test_a_swap_must_be_worth_it_where_its_tokens_would_be_lost():
    order = at_rate(MlfqQueue(), 1000)
    sequence = seq("a", num_prompt=100)
    order.add(sequence)
    order.take(sequence)
    for now_s, is_worth_it in ((0.9, False), (1.1, True)):
        order.tick(now_s)
        assert order.is_worth_preempting(sequence) == is_worth_it


def test_waiting_does_not_begin_before_arrival():
    """The last step may have been long ago."""
    order = MlfqQueue()
    order.tick(0.0)
    late = seq("b", num_prompt=100, arrival_s=100.0)
    at_rate(order, 1000).add(late)
    order.tick(100.0)
    assert order.level(late) > 0


def test_a_client_that_was_away_is_lifted():
    order = FairQueue()
    order.add(seq("a", num_prompt=50, client="x"))
    order.add(seq("b", num_prompt=50, client="x"))
    order.take(next(iter(order)))
    order.add(seq("c", client="y"))
    assert order.counters == {"x": 50, "y": 50}, "the fewest of those who wait"
    assert drained(order) == "bc"
    order.add(seq("d", client="z"))
    assert order.counters["z"] == order.counters["y"] == 54, "the last one that waited"


def test_output_counts_twice_and_a_prompt_once_for_all_its_samples():
    order = FairQueue()
    samples = make("a", num_prompt=10, client="x", n=3)
    for sequence in samples:
        order.add(sequence)
    for sequence in samples:
        order.take(sequence)
        sequence.token_ids += [1] * 5
    for sequence in samples:
        order.ended(sequence)
    assert order.counters == {"x": 10 + 3 * 2 * 5}


def test_idle_clients_are_forgotten_when_there_are_many():
    order = FairQueue()
    order.MAX_CLIENTS = 100
    for number in range(1000):
        sequence = seq("a", client=f"client-{number}")
        order.add(sequence)
        if number != 7:
            order.take(sequence)
            order.ended(sequence)
    assert len(order.counters) <= 100
    assert "client-7" in order.counters, "it waits"


@pytest.mark.parametrize(
    ("order", "expected"), [("fcfs", 220), ("priority", 120), ("mlfq", 20), ("fair", 20 + 35)]
)
def test_seconds_before(order, expected):
    """What a request of client y with priority 1 and 15 tokens has to wait for. In fair its
    client's own 20, and as much of x's as those and its own 15."""
    made = at_rate(make_queue(order), 1000)
    for name, client, num_prompt, priority in (
        ("a", "x", 100, 0),
        ("b", "x", 100, 2),
        ("c", "y", 20, 1),
    ):
        sequence = seq(name, num_prompt, client=client, priority=priority)
        sequence.expected_s = num_prompt / 1000
        made.add(sequence)
    asking = replace(make_request(15, "q", priority=1), client="y")
    assert made.seconds_before(asking, 15) == pytest.approx(expected / 1000)


def test_orders_have_names():
    assert [type(make_queue(name)) for name in QUEUE_POLICIES] == [
        WaitingQueue,
        PriorityQueue,
        MlfqQueue,
        FairQueue,
    ]
