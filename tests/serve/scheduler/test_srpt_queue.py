"""The queue policy srpt: shortest predicted work first, bounded preemption, and no starvation."""

from __future__ import annotations

import random
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.request import FinishReason
from serve.scheduler.srpt_queue import SrptQueue
from tests.support.engine.queue_rig import Rig, drained, name_of, names, seq

STEP_S = 0.01


def queue_with(**lengths):
    """A queue that expects these lengths of sequences by their names."""
    queue = SrptQueue()
    queue.expected_length = lambda sequence: lengths[name_of(sequence)]
    queue.prefill_seconds = lambda num_tokens, num_cached: (num_tokens - num_cached) * 1e-4
    queue.step_s = STEP_S
    return queue


def waiting(name, num_tokens=4000, **kwargs):
    return seq(name, num_tokens=num_tokens, **kwargs)


def run_with(queue, sequence, num_output):
    """Takes a sequence that waits, and gives it output tokens."""
    queue.take(sequence)
    sequence.token_ids += [9] * num_output
    return sequence


def test_the_shortest_predicted_answer_is_next():
    queue = queue_with(a=500, b=20, c=3000, d=20)
    for name in "abcd":
        queue.add(waiting(name))
    assert drained(queue) == "bdac"


def test_steps_count_where_drafts_give_several_tokens_a_step():
    queue = queue_with(a=500, b=200, c=20)
    queue.tokens_per_step = lambda sequence: {"a": 8.0, "b": 1.0, "c": 1.0}[name_of(sequence)]
    for name in "abc":
        queue.add(waiting(name))
    assert drained(queue) == "cab"


@pytest.mark.parametrize(("speed", "victims"), [(1.0, "long"), (50.0, "")])
def test_fast_answers_are_not_preempted(speed, victims):
    """A long answer whose drafts agree has as little left to do as a short one."""
    queue = queue_with(long=2000, short=20)
    queue.tokens_per_step = lambda sequence: speed if name_of(sequence) == "long" else 1.0
    long, short = waiting("long", num_prompt=10), waiting("short")
    queue.add(long)
    run_with(queue, long, 10)
    queue.add(short)
    assert names(queue.victims_for(short, [long])) == victims


def test_a_long_prompt_is_work_too():
    queue = queue_with(a=20, b=30)
    queue.add(waiting("a", num_prompt=4000))
    queue.add(waiting("b", num_prompt=4))
    assert drained(queue) == "ba", "4,000 rows take 40 steps"


def test_lengths_are_asked_for_again_when_they_are_outgrown():
    lengths = {"a": 10}
    queue = queue_with(**lengths)
    queue.expected_length = lambda sequence: max(lengths["a"], 2 * sequence.num_output_tokens)
    sequence = waiting("a")
    queue.add(sequence)
    run_with(queue, sequence, 8)
    assert queue._remaining(sequence) == 2
    sequence.token_ids += [9] * 32
    assert queue._remaining(sequence) == 40


def preemption(**changed):
    """Returns the victims for a short sequence among one that runs, with some of its facts."""
    facts = {"length": 2000, "done": 10, "preempted": 0, "prompt": 10, "short": 20} | changed
    queue = queue_with(long=facts["length"], short=facts["short"])
    long = waiting("long", num_prompt=facts["prompt"])
    queue.add(long)
    run_with(queue, long, facts["done"])
    long.num_preemptions = facts["preempted"]
    short = waiting("short")
    queue.add(short)
    return names(queue.victims_for(short, [long]))


def test_a_much_longer_one_is_preempted():
    assert preemption() == "long"


@pytest.mark.parametrize(
    "changed",
    [
        {"short": 600},  # not much shorter
        {"length": 60},  # saves too little
        {"done": 1700},  # nearly done
        {"preempted": 3},  # often enough
        {"prompt": 20_000},  # too expensive to compute again
    ],
)
def test_preemption_is_bounded(changed):
    assert preemption(**changed) == ""


def test_a_starving_sequence_goes_first_and_is_preempted_no_more():
    queue = queue_with(long=1000, short=10, other=10)
    long, short = waiting("long"), waiting("short")
    queue.add(long)
    patience_s = queue.STARVING_S + queue.STARVING_SHARE * 1001 * STEP_S
    queue.tick(0.99 * patience_s)
    queue.step_s = STEP_S
    queue.add(short)
    assert names(queue) == "shortlong"
    queue.tick(1.01 * patience_s)
    assert names(queue) == "longshort"
    queue.take(long)
    other = waiting("other")
    queue.add(other)
    assert queue.victims_for(other, [long]) == []
    queue.put_back(long)
    assert names(queue) == "longshortother", "it stays first"


def wrong_length(sequence, factor):
    """Returns a prediction that is wrong by this factor."""
    predicted = int(factor * sequence.request.params.max_tokens)
    return max(sequence.num_output_tokens + 1, predicted)


class Watched(SrptQueue):
    """Notes whether a sequence was taken while an earlier one starved; steps take 17 ms at most."""

    STARVING_S = 0.2
    STARVING_SHARE = 2.0

    def __init__(self):
        super().__init__()
        self.overtaken = []
        self.began = {}

    def take(self, sequence):
        number = self._arrivals[sequence]
        self.overtaken += [
            (name_of(sequence), name_of(other))
            for level, arrival, other in self._waiting
            if level < 0 and arrival < number
        ]
        super().take(sequence)


@settings(deadline=None, max_examples=10)
@pytest.mark.property
@given(seed=st.integers(0, 10**6), slots=st.integers(1, 4), pages=st.sampled_from([20, 64]))
def test_nobody_starves_beside_a_flood_of_short_requests(seed, slots, pages):
    """From when a sequence starves on, none that arrived later is admitted before it, so it waits
    for those that starve already and for one answer of a running sequence at most."""
    rng = random.Random(seed)
    rig = Rig(Watched(), num_pages=pages, max_num_seqs=slots, cache=rng.random() < 0.5)
    queue = rig.queue
    queue.expected_length = lambda sequence: wrong_length(sequence, rng.uniform(0.2, 3))
    longs = [rig.add(f"l{i}", rng.choice([4, 40]), rng.randint(20, 40)) for i in range(3)]
    number = 0
    while rig.now_s < 8.0 and not all(s.is_finished for s in longs):
        while len(rig.scheduler.waiting) < 4:
            number += 1
            rig.add(f"s{number}", 4, rng.randint(1, 4))
        if rng.random() < 0.02:
            rig.scheduler.finish(next(iter(rig.scheduler.waiting)), FinishReason.ABORT)
        rig.step()
    assert all(s.is_finished for s in longs)
    assert queue.overtaken == []
    assert max(s.num_preemptions for s in longs) <= 12, "also for lack of memory"
    rig.run()
    assert not queue._jobs and not queue._arrivals
    rig.kv.check_integrity()


def completions(policy, predicted=None):
    """Serves long and short requests that arrive together at two slots."""
    rig = Rig(policy, num_pages=200, max_num_seqs=2)
    if predicted is not None:
        rig.queue.expected_length = predicted
    rng = random.Random(1)
    for number in range(40):
        rig.add(str(number), 4, 60 if rng.random() < 0.2 else 5)
    rig.run()
    return list(rig.finished_s.values())


def test_predictions_shorten_the_mean_time_to_completion():
    fcfs, known = fmean(completions("fcfs")), fmean(completions("srpt"))
    rng = random.Random(2)
    guess = fmean(
        completions("srpt", lambda sequence: wrong_length(sequence, rng.lognormvariate(0, 0.4)))
    )
    assert known < 0.75 * fcfs
    assert known <= guess < 0.85 * fcfs
