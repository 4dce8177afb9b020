"""Random work on a pipeline of any depth gives every sequence the tokens of a run without overlap,
as it does on a device with a queue of any depth (test_overlap_walk.py has depth 2)."""

from __future__ import annotations

import pytest

from serve.config import QUEUE_POLICIES
from serve.request import FinishReason
from serve.scheduler.sequence import PENDING_TOKEN
from tests.serve.engine.test_overlap_walk import Walk

DEPTHS = range(1, 7)


class PipelineWalk(Walk):
    """Checks besides that a sequence has rows behind others of its own only while no token of it
    is pending, so that only its prompt is in several steps. most_steps: the most steps in flight
    with rows of one sequence; num_late: the masks that were late."""

    def __init__(self, seed, depth, queue_policy="fcfs", fails=None, **settings):
        self.most_steps = self.num_late = 0
        super().__init__(
            seed,
            queue_policy,
            fails,
            depth=depth,
            tokens_on_device=False,
            is_late=self._is_late,
            **settings,
        )

    def _is_late(self, sequence):
        is_late = self.rng.random() < 0.05
        self.num_late += is_late
        return is_late

    def check(self):
        super().check()
        assert len(self.scheduler.launched) == len(self.runner.in_flight) < self.runner.depth
        for sequence in self.alive:
            steps = [step for step in self.runner.in_flight if sequence in step.sequences]
            samples = [sequence in step.sampled for step in steps]
            assert not any(samples[:-1]), "a step behind the one that samples"
            is_pending = sequence.num_tokens > 0 and sequence.token_ids[-1] == PENDING_TOKEN
            assert is_pending == any(samples)
            self.most_steps = max(self.most_steps, len(steps))


@pytest.mark.covering(1)
@pytest.mark.parametrize("policy", QUEUE_POLICIES)
@pytest.mark.parametrize("depth", DEPTHS)
def test_tokens_are_those_of_a_run_without_overlap(depth, policy):
    most_steps = num_late = 0
    for seed in range(4):
        walk = PipelineWalk(300 + 10 * depth + seed, depth, policy).walk(25)
        walk.check_end()
        assert not any(reason is FinishReason.ERROR for reason in walk.ended.values())
        assert walk.runner.num_pending == 0
        most_steps, num_late = max(most_steps, walk.most_steps), num_late + walk.num_late
    assert most_steps == depth - 1, "chunks of one prompt fill what is in flight at planning"
    assert num_late > 0


@pytest.mark.covering(1)
@pytest.mark.parametrize("fails", ["launch", "wait"])
@pytest.mark.parametrize("depth", DEPTHS)
def test_failing_sequences_end_alone(depth, fails):
    num_failed = 0
    for seed in range(4):
        policy = QUEUE_POLICIES[seed % len(QUEUE_POLICIES)]
        walk = PipelineWalk(400 + 10 * depth + seed, depth, policy, fails).walk(25)
        walk.check_end()
        failed = {s for s, reason in walk.ended.items() if reason is FinishReason.ERROR}
        assert failed <= set(walk.bad)
        for sequence in walk.bad:
            assert sequence in failed or len(sequence.token_ids) <= walk.bad[sequence]
        num_failed += len(failed)
    assert num_failed > 0


@pytest.mark.covering(1)
@pytest.mark.parametrize("fails", [None, "launch", "wait"])
@pytest.mark.parametrize("depth", [2, 3, 6])
def test_prompt_rows_are_read_once_and_in_order(depth, fails):
    for seed in range(4):
        policy = QUEUE_POLICIES[seed % len(QUEUE_POLICIES)]
        walk = PipelineWalk(500 + 10 * depth + seed, depth, policy, fails, reads=True).walk(30)
        walk.check_end()


@pytest.mark.covering(1)
@pytest.mark.parametrize("fails", [None, "launch", "wait"])
@pytest.mark.parametrize("depth", [1, 3, 4, 6])
def test_a_device_that_keeps_its_tokens_may_have_a_queue_of_any_depth(depth, fails):
    num_pending = 0
    for seed in range(4):
        policy = QUEUE_POLICIES[seed % len(QUEUE_POLICIES)]
        walk = Walk(600 + 10 * depth + seed, policy, fails, depth=depth).walk(25)
        walk.check_end()
        num_pending += walk.runner.num_pending
    assert bool(num_pending) == (depth > 1)
