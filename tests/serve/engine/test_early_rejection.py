"""Early rejection: predictions, an overload on a simulated clock, and a real engine."""

from __future__ import annotations

import asyncio
import functools
import random
import time
from dataclasses import replace

import pytest

from bench.common.instant import load_instant
from serve import LLM, Engine, FinishReason, SamplingParams
from serve.config import EngineConfig
from serve.engine.early_rejection import EarlyRejection
from serve.errors import ConfigError, OverloadedError
from serve.scheduler.admission import OraclePolicy
from serve.scheduler.step_time import StepWork
from tests.support.engine.checkpoints import checkpoint
from tests.support.engine.fakes import ScriptedRunner, make_request
from tests.support.engine.queue_rig import Rig


class RejectionRig:
    """Applies early rejection to the requests of a scheduler; a row takes a millisecond."""

    def __init__(self, slo_s, **settings):
        self.scheduled = Rig(settings.pop("queue_policy", "fcfs"), num_pages=2000, **settings)
        self.rejection = EarlyRejection(self.scheduled.scheduler, slo_s)

    def learn_row_time(self):
        self.scheduled.scheduler.chunks.model.learn(StepWork(num_rows=10, num_chunks=1), 0.01)
        return self

    def submit(self, name, num_prompt, **params):
        request = replace(make_request(num_prompt, name, **params), arrival_s=self.scheduled.now_s)
        self.rejection.mark_queued(self.rejection.admit(request, num_prompt))
        return self.scheduled.add(name, num_prompt, **params)


def test_nothing_is_refused_before_the_first_step():
    rig = RejectionRig(1e-6)
    for name in "abc":
        rig.submit(name, 100)
    assert rig.rejection.num_refused == 0
    assert rig.rejection.predicted_s == 0.0


def test_an_idle_engine_refuses_no_request():
    rig = RejectionRig(0.05).learn_row_time()
    rig.submit("a", 200)
    assert rig.rejection.predicted_s == pytest.approx(0.2)
    with pytest.raises(OverloadedError):
        rig.submit("b", 1)
    rig.scheduled.run()
    rig.learn_row_time().submit("c", 200)


def test_waiting_and_running_prompts_count():
    rig = RejectionRig(0.4, budget=100, max_num_seqs=1).learn_row_time()
    rig.submit("a", 200)
    rig.scheduled.step()  # 100 rows of a are left, and a step takes 101 ms
    model = rig.scheduled.scheduler.chunks.model
    assert model.last_step_s == pytest.approx(0.101)
    rig.submit("b", 50)
    row_s = model.prefill_seconds(100) / 100
    assert rig.rejection.predicted_s == pytest.approx(0.101 + 150 * row_s, rel=0.02)
    with pytest.raises(OverloadedError, match=r"later than the 0\.4 s") as refused:
        rig.submit("c", 200)
    predicted_s = rig.rejection.predicted_s
    assert predicted_s == pytest.approx(0.101 + 350 * row_s, rel=0.02)
    assert refused.value.retry_after_s == pytest.approx(predicted_s - 0.4)
    assert rig.rejection.num_refused == 1


def test_lower_priorities_do_not_count():
    rig = RejectionRig(0.1, queue_policy="priority").learn_row_time()
    rig.submit("a", 90, priority=1)
    rig.submit("b", 5, priority=0)
    with pytest.raises(OverloadedError):
        rig.submit("c", 15, priority=1)
    rig.submit("d", 15, priority=0)


def test_admitted_requests_that_are_not_queued_yet_count():
    rig = RejectionRig(0.1).learn_row_time()
    request = make_request(60, "a")
    seconds = rig.rejection.admit(request, 60)
    assert seconds == pytest.approx(0.06)
    with pytest.raises(OverloadedError):
        rig.rejection.admit(request, 60)
    rig.rejection.mark_queued(seconds)
    rig.rejection.admit(request, 60)


def test_cached_tokens_cost_nothing():
    rig = RejectionRig(1.0, budget=64)
    sequence = rig.submit("a", 100)
    prefixes = rig.scheduled.scheduler.prefixes
    assert prefixes.num_missing_rows(sequence.request, sequence.page_keys) == 100
    rig.scheduled.run()
    assert prefixes.num_missing_rows(sequence.request, sequence.page_keys[:20]) == 20
    assert prefixes.num_missing_rows(sequence.request, sequence.page_keys[:25]) == 1
    assert prefixes.num_missing_rows(replace(sequence.request, prompt_token_ids=()), []) == 0


def test_a_retry_after_the_reported_time_is_admitted():
    rig = RejectionRig(0.3, budget=100, max_num_seqs=64).learn_row_time()
    rig.submit("a", 40)
    rig.scheduled.step()
    refused = None
    for number in range(100):
        try:
            rig.submit(f"a{number}", 40)
        except OverloadedError as error:
            refused = error
            break
    assert refused is not None
    until_s = rig.scheduled.now_s + refused.retry_after_s
    while rig.scheduled.now_s < until_s:
        rig.scheduled.step()
    rig.scheduled.step()
    rig.submit("b", 40)


def test_queued_requests_leave_no_rest_in_the_sum():
    rig = RejectionRig(0.05).learn_row_time()
    seconds = [rig.rejection.admit(make_request(n, f"r{n}"), n) for n in (10, 20, 7)]
    for predicted_s in seconds:
        rig.rejection.mark_queued(predicted_s)
    assert rig.rejection.admit(make_request(200, "long"), 200) == pytest.approx(0.2)


def test_requests_from_before_the_first_step_count():
    rig = RejectionRig(1e9, budget=100, max_num_seqs=1)
    for number in range(20):
        rig.submit(f"r{number}", 100)
    rig.scheduled.step()
    rig.submit("last", 100)
    assert rig.rejection.predicted_s == pytest.approx(20 * 0.101, rel=0.15)


def test_slots_count_where_lengths_are_predicted():
    """With two slots and answers of 50 tokens the fifth request starts after two rounds."""
    rig = RejectionRig(1e9, budget=64, max_num_seqs=2)
    scheduler = rig.scheduled.scheduler
    scheduler.policy = OraclePolicy(
        scheduler.kv, lambda sequence: sequence.max_tokens_total - 10, 64
    )
    for number in range(4):
        rig.submit(f"r{number}", 10, num_tokens=50, ignore_eos=True)
    for _ in range(10):
        rig.scheduled.step()
    rig.submit("last", 10, num_tokens=2)
    submitted_s = rig.scheduled.now_s
    predicted_s = rig.rejection.predicted_s
    rig.scheduled.run()
    assert rig.scheduled.first_s["last"] - submitted_s == pytest.approx(predicted_s, rel=0.2)


def overload(slo_s):
    """Offers twice the load that can be served; returns the served requests' TTFT in seconds."""
    rng = random.Random(2)
    rejecting = RejectionRig(slo_s, budget=64, max_num_seqs=64)
    rig, arrived_s = rejecting.scheduled, {}
    arrival_s = [rng.uniform(0, 10.0) for _ in range(400)]
    for number, came_s in enumerate(sorted(arrival_s)):
        while rig.now_s < came_s and rig.scheduler.has_work():
            rig.step()
        rig.now_s = max(rig.now_s, came_s)
        try:
            rejecting.submit(f"a{number}", 45, num_tokens=3)
        except OverloadedError:
            continue
        arrived_s[f"a{number}"] = rig.now_s
    rig.run()
    return [rig.first_s[name] - came_s for name, came_s in arrived_s.items()], rejecting.rejection


def test_admitted_requests_are_served_in_time():
    ttft_s, rejection = overload(1e9)
    assert rejection.num_refused == 0
    assert sum(s > 0.5 for s in ttft_s) > 0.8 * len(ttft_s)
    ttft_s, rejection = overload(0.5)
    assert len(ttft_s) + rejection.num_refused == 400
    assert len(ttft_s) > 0.45 * 400, "nearly all that can be served"
    assert sum(s > 0.55 for s in ttft_s) < 0.05 * len(ttft_s)


def make_engine(**settings):
    def make(kv):
        return ScriptedRunner(kv, before=lambda plan: time.sleep(1e-3 * plan.num_total_rows))

    load = functools.partial(load_instant, make_runner=make)
    return Engine(str(checkpoint("llama")), load=load, max_num_seqs=8, **settings)


def params(num_tokens):
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)


def test_an_engine_refuses_at_once():
    async def main():
        async with make_engine(ttft_slo=0.05) as engine:
            await engine.generate([5] * 20, params(2))
            running = engine.submit([5] * 20, params(60))
            await anext(running)
            refused = engine.submit([5] * 200, params(2))
            with pytest.raises(OverloadedError) as error:
                await refused.accepted()
            assert error.value.retry_after_s > 0
            stats = engine.stats()
            assert (stats.num_refused, stats.num_unfinished) == (1, 1)
            assert stats.predicted_ttft_s > 0.1
            assert [d async for d in running][-1].finish_reason is FinishReason.LENGTH
            await engine.generate([5] * 200, params(2))
            assert engine.stats().num_refused == 1

    asyncio.run(asyncio.wait_for(main(), 20))


@pytest.mark.parametrize("policy", ["priority", "mlfq", "fair"])
def test_an_engine_with_another_queue_policy(policy):
    """The tokens of every request are those under fcfs."""
    prompts = [{"prompt_token_ids": [7, k, *range(3, 20 + k)]} for k in range(3, 9)]
    answers = []
    for name in ("fcfs", policy):
        with LLM(str(checkpoint("llama")), max_num_seqs=2, order=name) as llm:
            settings = [
                SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, priority=-k)
                for k in range(6)
            ]
            outputs = llm.generate(prompts, settings, use_tqdm=False)
            assert llm.stats().pages_in_use == 0
        answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "setting",
    [{"ttft_slo": 0}, {"ttft_slo": True}, {"ttft_slo": float("inf")}, {"order": "lifo"}],
)
def test_invalid_settings_are_refused(setting):
    with pytest.raises(ConfigError, match=next(iter(setting))):
        EngineConfig(**setting)
