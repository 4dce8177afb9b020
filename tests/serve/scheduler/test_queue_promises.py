"""Queue policies prevent starvation, share fairly and serve short requests first."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from serve.config import QUEUE_POLICIES
from serve.request import FinishReason
from serve.scheduler.fair_queue import FairQueue
from serve.scheduler.mlfq_queue import MlfqQueue
from tests.support.engine.queue_rig import Rig


@pytest.mark.covering(1)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("policy", QUEUE_POLICIES)
def test_every_sequence_finishes_in_a_random_walk(policy, seed):
    """No sequence or page is lost under arrivals, aborts and a shortage of memory."""
    rng = random.Random(seed)
    rig = Rig(policy, num_pages=40, max_num_seqs=rng.choice([3, 8]), budget=24)
    live, total = [], 0
    for number in range(1200):
        if rng.random() < 0.3 and len(live) < 30:
            sequence = rig.add(
                str(number),
                rng.choice([3, 12, 60]),
                rng.randint(1, 60),
                client=rng.choice(["x", "y", None]),
                priority=rng.randint(0, 2),
            )
            live.append(sequence)
            total += 1
        if live and rng.random() < 0.03:
            rig.scheduler.finish(live.pop(rng.randrange(len(live))), FinishReason.ABORT)
        if rig.scheduler.has_work():
            assert rig.step() is not None
        live = [s for s in live if not s.is_finished]
        queued = {id(s) for s in rig.scheduler.waiting} | {id(s) for s in rig.scheduler.running}
        assert queued == {id(s) for s in live}, "a sequence was lost"
        assert len(rig.scheduler.waiting) == len(list(rig.scheduler.waiting))
    assert rig.scheduler.num_preemptions > 0
    rig.run()
    assert rig.scheduler.num_finished == total > 150
    assert not rig.queue._arrivals
    if isinstance(rig.queue, MlfqQueue):
        assert not rig.queue._jobs and not rig.queue._running
    if isinstance(rig.queue, FairQueue):
        assert not rig.queue._queues and not rig.queue._charged
    rig.kv.check_integrity()


def run_beside_short_requests(policy):
    """Runs a long request for 20 s beside short urgent ones that could take every slot."""
    rig = Rig(policy, max_num_seqs=1)
    long = rig.add("long", num_prompt=100, num_tokens=20, priority=1, client="x")
    number = 0
    while rig.now_s < 20.0:
        while len(rig.scheduler.waiting) < 3:
            number += 1
            rig.add(f"s{number}", num_prompt=4, num_tokens=3, client="y")
        rig.step()
    return long


@pytest.mark.parametrize(
    ("policy", "is_finished"), [("fcfs", True), ("mlfq", True), ("fair", True), ("priority", False)]
)
def test_a_request_starves_only_under_priority(policy, is_finished):
    assert run_beside_short_requests(policy).is_finished == is_finished


def served(sequences):
    """Returns the tokens of each client, weighted as the counters weigh them."""
    totals = {}
    for s in sequences:
        if s.first_scheduled_s is not None:
            tokens = s.num_prompt_tokens + 2 * s.num_output_tokens
            totals[s.request.client] = totals.get(s.request.client, 0) + tokens
    return totals


def backlog(policy):
    """Serves ten requests of client x for each of y's. Returns the served tokens after each step
    while both have requests waiting, and the most that a prompt or a full batch weighs."""
    rng = random.Random(5)
    rig = Rig(policy, num_pages=200, max_num_seqs=4, budget=32)
    sequences = []
    for number in range(440):
        client = "y" if number % 11 == 10 else "x"
        sizes = rng.randint(1, 40), rng.randint(1, 40)
        sequences.append(rig.add(str(number), *sizes, client=client))
    history = []
    while len({s.request.client for s in rig.scheduler.waiting}) == 2:
        rig.step()
        history.append(served(sequences))
    return history, max(40, 4 * 2 * 40)


def test_the_fairness_bound_of_the_token_counters():
    """The paper's theorem bounds the difference between backlogged clients by twice the larger of
    a prompt's and a batch's weight, for any time and any demand."""
    history, most = backlog("fair")
    differences = [abs(totals.get("x", 0) - totals.get("y", 0)) for totals in history]
    assert max(differences) <= 2 * most
    final = history[-1]
    assert final["y"] > 2000
    assert 0.8 < final["x"] / final["y"] < 1.25
    final = backlog("fcfs")[0][-1]
    assert 7 < final["x"] / final["y"] < 14


def latencies(policy):
    """Serves twelve long requests and 60 short ones that arrive while those run. Returns the
    seconds from arrival to end of the short ones and of all, and when the last one ended."""
    rng = random.Random(3)
    rig = Rig(policy, num_pages=700, max_num_seqs=4, budget=32)
    arrivals = [(rng.uniform(0, 3.0), f"s{number}") for number in range(60)]
    arrivals = sorted([*arrivals, *((0.0, f"l{number}") for number in range(12))])
    arrived = {}
    while arrivals or rig.scheduler.has_work():
        while arrivals and arrivals[0][0] <= rig.now_s:
            came_s, name = arrivals.pop(0)
            arrived[name] = came_s
            rig.add(name, *((90, 100) if name[0] == "l" else (8, 6)))
        if rig.step() is None:
            rig.now_s = arrivals[0][0]
    latency_s = {name: rig.finished_s[name] - came_s for name, came_s in arrived.items()}
    return [t for n, t in latency_s.items() if n[0] == "s"], list(latency_s.values()), rig.now_s


def test_short_requests_do_not_wait_behind_long_ones_in_mlfq():
    short, all_s, end_s = latencies("mlfq")
    short_before, all_before, end_before_s = latencies("fcfs")
    assert fmean(short) < 0.2 * fmean(short_before)
    assert fmean(all_s) < 0.6 * fmean(all_before)
    assert end_s < 1.05 * end_before_s, "little is recomputed"
