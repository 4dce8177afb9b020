"""Overlapped steps of random work give every sequence the tokens of a run without overlap, write
no K/V of another sequence, count nothing twice and leave nothing behind."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from memory.pages.layer_groups import LayerGroup
from serve.config import MEMORY_POLICIES, QUEUE_POLICIES
from serve.engine.overlapped_executor import OverlappedExecutor
from serve.pooling import PoolingParams
from serve.request import FinishReason
from serve.scheduler.sequence import PENDING_TOKEN, make_sequences
from serve.scheduler.step_plan import SchedulerLimits
from tests.support.cuda.late_runner import EOS, check_prompt_rows, expected_tokens
from tests.support.engine.fakes import check_mapping, make_request
from tests.support.engine.overlap_rig import Bench

MAX_LEN = 96
GROUPS = [
    (LayerGroup(64),),
    (LayerGroup(64),),
    (LayerGroup(64), LayerGroup(80, window=9, read_block=4)),
    (LayerGroup(80, window=20, read_block=4),),
]
WITH_STATES = (
    LayerGroup(64),
    LayerGroup(40, 8, window=2, read_block=8, is_state=True),  # a record takes one page
)


class Walk(Bench):
    """Random work on a late device. fails: steps of some sequences fail at the launch or the wait;
    `bad` has the number of tokens from which on they fail. reads: some requests ask for prompt
    logprobs or embeddings."""

    def __init__(self, seed, queue_policy="fcfs", fails=None, groups=None, reads=False, **settings):
        self.rng = rng = random.Random(seed)
        budget = rng.choice([2, 7, 16, 64])
        limits = SchedulerLimits(rng.choice([1, 3, 8]), budget, rng.choice([1, 5, budget]))
        groups = groups or rng.choice(GROUPS)
        self.policy = rng.choice(MEMORY_POLICIES)
        self.bad = {}
        self.fails = fails
        self.reads = reads
        needs_tokens = rng.random() < 0.3
        super().__init__(
            limits,
            num_pages=rng.choice([0, 1, 8, 100]),
            max_len=MAX_LEN,
            groups=groups,
            cache=rng.random() < 0.7,
            queue_policy=queue_policy,
            policy=self.policy,
            fails_launch=lambda s: fails == "launch" and self._fails(s),
            fails_wait=lambda s: fails == "wait" and self._fails(s),
            needs=lambda s: needs_tokens and s.seed % 5 == 0,
            **settings,
        )
        assert isinstance(self.steps, OverlappedExecutor)
        self.prefixes = [[rng.randrange(10, 1000) for _ in range(60)] for _ in range(3)]
        self.all = []
        self.alive = []

    def _fails(self, sequence):
        return sequence in self.bad and len(sequence.token_ids) >= self.bad[sequence]

    def arrive(self, number):
        rng = self.rng
        length = rng.choice([1, 2, 5, 17, 40, 70])
        shared = rng.choice(self.prefixes)[: rng.randrange(60)]
        prompt = (shared + [rng.randrange(10, 1000) for _ in range(70)])[:length]
        longest = min(rng.choice([1, 2, 5, 20, 60]), MAX_LEN - length)
        request = make_request(
            prompt=prompt,
            request_id=str(number),
            num_tokens=longest,
            min_tokens=rng.choice([0, 0, min(4, longest)]),
            n=rng.choice([1, 1, 1, 3]),
            priority=rng.randrange(3),
            ignore_eos=rng.random() < 0.3,
            seed=number,
        )
        request = replace(request, arrival_s=self.device.now_s, client=rng.choice(["x", "y", None]))
        if self.reads:
            request = self.reading(request)
        for sequence in make_sequences(request, frozenset({EOS})):
            if self.fails and rng.random() < 0.1:
                self.bad[sequence] = length + rng.randrange(6)
            self.scheduler.add(sequence)
            self.all.append(sequence)
            self.alive.append(sequence)

    def reading(self, request):
        """Some requests ask for prompt outputs too, or only for those."""
        rng, params = self.rng, request.params
        kind = rng.choice(["none", "scores", "only scores", "mean", "last"])
        if kind in ("scores", "only scores"):
            params = replace(params, prompt_logprobs=2)
        if kind in ("only scores", "mean", "last"):
            params = replace(params, max_tokens=0, min_tokens=0)
        pooling = None
        if kind in ("mean", "last"):
            pooling = PoolingParams(kind=kind, normalize=False)
            params = replace(params, n=1)
        return replace(request, params=params, pooling=pooling)

    def step(self):
        rng = self.rng
        self.device.now_s += 0.01
        plan = self.scheduler.schedule(self.device.now_s)
        self.check()
        if plan is not None:
            self.device.run_some(rng.choice([0, 0, 1]))
            self.steps.run(plan, self.device.now_s)
        else:
            is_loading = self.kv.prefixes.is_transferring
            can_continue = self.steps.complete_oldest() or self.scheduler.running or is_loading
            assert can_continue, "nothing can be scheduled"
        self.device.run_some(rng.choice([0, 0, 0, 1, 2]))
        if rng.random() < 0.05 and self.alive:  # a stop string or an abort
            sequence = rng.choice(self.alive)
            reason = rng.choice([FinishReason.STOP, FinishReason.ABORT])
            if self.scheduler.finish(sequence, reason):
                self.ended[sequence] = reason
        self.alive = [sequence for sequence in self.alive if not sequence.is_finished]

    def check(self):
        self.kv.check_integrity()
        for sequence in self.scheduler.waiting:
            assert sequence.kv_range is None and sequence.num_computed_tokens == 0
        for sequence in self.alive:
            num_pending = sequence.token_ids.count(PENDING_TOKEN)
            runner = self.runner
            assert num_pending <= (len(runner.in_flight) if runner.tokens_on_device else 1)
            assert num_pending <= sequence.rows_in_flight

    def walk(self, num_requests):
        num_arrived = 0
        for _ in range(20_000):
            has_work = self.scheduler.has_work()
            if num_arrived < num_requests and (not has_work or self.rng.random() < 0.25):
                self.arrive(num_arrived)
                num_arrived += 1
            elif has_work:
                self.step()
            else:
                self.steps.drain()
                self.kv.trim()
                if num_arrived == num_requests:
                    return self
        raise AssertionError("a sequence never ends")

    def check_end(self):
        self.check_rest()
        by_step = set(self.records.ended)
        assert len(by_step) == len(self.records.ended), "a sequence ended twice"
        for sequence in self.all:
            expected = expected_tokens(sequence)
            tokens = sequence.token_ids
            assert sequence.is_finished and PENDING_TOKEN not in tokens
            assert tokens == expected[: len(tokens)], sequence.request.request_id
            assert sequence in self.records.tokens or not sequence.num_output_tokens
            assert (sequence in by_step) != (sequence in self.ended)
            has_answer = len(tokens) > sequence.num_prompt_tokens
            if sequence.prompt_outputs is not None and (has_answer or sequence in by_step):
                check_prompt_rows(sequence)
            if sequence in by_step:
                assert len(tokens) == len(expected)
                is_stop = tokens[-1] in sequence.stop_ids and (
                    has_answer and len(tokens) > sequence.min_tokens_total
                )
                assert sequence.finish_reason is (
                    FinishReason.STOP if is_stop else FinishReason.LENGTH
                )
        scheduler = self.scheduler
        assert scheduler.num_finished == len(self.all)
        check_mapping(self.kv, self.memory)
        if self.policy == "predicted":
            assert not scheduler.policy.steps_left(0) and not scheduler.policy._prefilling


@pytest.mark.covering(1)
@pytest.mark.parametrize("policy", QUEUE_POLICIES)
@pytest.mark.parametrize("seed", range(12))
def test_tokens_are_those_of_a_run_without_overlap(policy, seed):
    walk = Walk(seed, policy).walk(30)
    walk.check_end()
    assert not any(reason is FinishReason.ERROR for reason in walk.ended.values())
    assert walk.runner.num_pending or walk.scheduler.limits.max_num_seqs == 1


@pytest.mark.covering(1)
@pytest.mark.parametrize("fails", ["launch", "wait"])
@pytest.mark.parametrize("seed", range(16))
def test_failing_sequences_end_alone(fails, seed):
    walk = Walk(100 + seed, QUEUE_POLICIES[seed % len(QUEUE_POLICIES)], fails).walk(30)
    walk.check_end()
    failed = {s for s, reason in walk.ended.items() if reason is FinishReason.ERROR}
    assert failed <= set(walk.bad)
    for sequence in walk.bad:
        # it failed at this number of tokens, unless it was stopped before
        assert sequence in failed or len(sequence.token_ids) <= walk.bad[sequence]
        assert len(sequence.token_ids) <= max(walk.bad[sequence], sequence.num_prompt_tokens)


@pytest.mark.covering(1)
@pytest.mark.parametrize("fails", [None, "launch", "wait"])
@pytest.mark.parametrize("seed", range(12))
def test_prompt_rows_are_read_once_and_in_order(fails, seed):
    """This holds under preemptions, failures, shared prompts and prefix hits."""
    walk = Walk(200 + seed, QUEUE_POLICIES[seed % len(QUEUE_POLICIES)], fails, reads=True).walk(40)
    walk.check_end()


@pytest.mark.covering(1)
@pytest.mark.parametrize("fails", [None, "launch", "wait"])
@pytest.mark.parametrize("seed", range(16))
def test_a_row_is_applied_to_a_state_once(fails, seed):
    """This holds under preemptions, prefix hits, late ends and failures. Rows that were taken back
    are computed from a state before them; a sequence at fault still ends alone."""
    policy = QUEUE_POLICIES[seed % len(QUEUE_POLICIES)]
    walk = Walk(300 + seed, policy, fails, WITH_STATES).walk(40)
    walk.check_end()
    failed = {s for s, reason in walk.ended.items() if reason is FinishReason.ERROR}
    assert failed <= set(walk.bad)
