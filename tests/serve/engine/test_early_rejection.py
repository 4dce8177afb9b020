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
from tests.support.engine.order_rig import Rig


class Door:
    """A rig that applies early rejection to its requests. A row takes a millisecond."""

    def __init__(self, slo_s, **settings):
        self.rig = Rig(settings.pop("order", "fcfs"), num_pages=2000, **settings)
        self.rejection = EarlyRejection(self.rig.scheduler, slo_s)

    def know(self):
        self.rig.scheduler.chunks.model.learn(StepWork(num_rows=10, num_chunks=1), 0.01)
        return self

    def ask(self, name, num_prompt, **params):
        request = replace(make_request(num_prompt, name, **params), arrival_s=self.rig.now_s)
        self.rejection.mark_queued(self.rejection.admit(request, num_prompt))
        return self.rig.add(name, num_prompt, **params)


def test_nothing_is_refused_before_anything_is_known():
    door = Door(1e-6)
    for name in "abc":
        door.ask(name, 100)
    assert door.rejection.num_refused == 0
    assert door.rejection.predicted_s == 0.0


def test_an_idle_engine_refuses_nobody():
    door = Door(0.05).know()
    door.ask("a", 200)
    assert door.rejection.predicted_s == pytest.approx(0.2)
    with pytest.raises(OverloadedError):
        door.ask("b", 1)
    door.rig.run()
    door.know().ask("c", 200)


def test_what_waits_and_what_runs_counts():
    door = Door(0.4, budget=100, max_num_seqs=1).know()
    door.ask("a", 200)
    door.rig.step()  # 100 rows of a are left, a step takes 101 ms, a takes one row of 100
    model = door.rig.scheduler.chunks.model
    assert model.last_step_s == pytest.approx(0.101)
    door.ask("b", 50)
    row_s = model.prefill_seconds(100) / 100
    assert door.rejection.predicted_s == pytest.approx(0.101 + 150 * row_s, rel=0.02)
    with pytest.raises(OverloadedError, match=r"later than the 0\.4 s") as refused:
        door.ask("c", 200)
    predicted_s = door.rejection.predicted_s
    assert predicted_s == pytest.approx(0.101 + 350 * row_s, rel=0.02)
    assert refused.value.retry_after_s == pytest.approx(predicted_s - 0.4)
    assert door.rejection.num_refused == 1


def test_urgent_requests_do_not_wait_for_others():
    door = Door(0.1, order="priority").know()
    door.ask("a", 90, priority=1)
    door.ask("b", 5, priority=0)
    with pytest.raises(OverloadedError):
        door.ask("c", 15, priority=1)
    door.ask("d", 15, priority=0)


def test_who_is_on_the_way_to_the_queue_counts():
    door = Door(0.1).know()
    request = make_request(60, "a")
    seconds = door.rejection.admit(request, 60)
    assert seconds == pytest.approx(0.06)
    with pytest.raises(OverloadedError):
        door.rejection.admit(request, 60)
    door.rejection.mark_queued(seconds)
    door.rejection.admit(request, 60)


def test_what_the_prefix_cache_knows_costs_nothing():
    door = Door(1.0, budget=64)
    sequence = door.ask("a", 100)
    prefixes = door.rig.scheduler.prefixes
    assert prefixes.num_missing_rows(sequence.request, sequence.page_keys) == 100
    door.rig.run()
    assert prefixes.num_missing_rows(sequence.request, sequence.page_keys[:20]) == 20
    assert prefixes.num_missing_rows(sequence.request, sequence.page_keys[:25]) == 1
    assert prefixes.num_missing_rows(replace(sequence.request, prompt_token_ids=()), []) == 0


def test_it_fits_a_step_after_the_time_that_was_told():
    door = Door(0.3, budget=100, max_num_seqs=64).know()
    door.ask("a", 40)
    door.rig.step()
    refused = None
    for number in range(100):
        try:
            door.ask(f"a{number}", 40)
        except OverloadedError as error:
            refused = error
            break
    assert refused is not None
    until_s = door.rig.now_s + refused.retry_after_s
    while door.rig.now_s < until_s:
        door.rig.step()
    door.rig.step()
    door.ask("b", 40)


def test_an_idle_engine_refuses_nobody_after_whatever_was_added_up():
    door = Door(0.05).know()
    seconds = [door.rejection.admit(make_request(n, f"r{n}"), n) for n in (10, 20, 7)]
    for taken in seconds:
        door.rejection.mark_queued(taken)
    assert door.rejection.admit(make_request(200, "long"), 200) == pytest.approx(0.2)


def test_who_came_before_anything_was_known_counts():
    door = Door(1e9, budget=100, max_num_seqs=1)
    for number in range(20):
        door.ask(f"r{number}", 100)
    door.rig.step()
    door.ask("asking", 100)
    assert door.rejection.predicted_s == pytest.approx(20 * 0.101, rel=0.15)


def test_slots_count_where_lengths_are_predicted():
    """With two slots and answers of 50 tokens the fifth request starts after two rounds."""
    door = Door(1e9, budget=64, max_num_seqs=2)
    scheduler = door.rig.scheduler
    scheduler.policy = OraclePolicy(
        scheduler.kv, lambda sequence: sequence.max_tokens_total - 10, 64
    )
    for number in range(4):
        door.ask(f"r{number}", 10, num_tokens=50, ignore_eos=True)
    for _ in range(10):
        door.rig.step()
    door.ask("asking", 10, num_tokens=2)
    asked_s = door.rig.now_s
    predicted_s = door.rejection.predicted_s
    door.rig.run()
    assert door.rig.first_s["asking"] - asked_s == pytest.approx(predicted_s, rel=0.2)


def crowd(slo_s):
    """Times to the first token of the served requests, at twice the load that can be served."""
    rng = random.Random(2)
    door = Door(slo_s, budget=64, max_num_seqs=64)
    rig, came = door.rig, {}
    arrival_s = [rng.uniform(0, 10.0) for _ in range(400)]
    for number, came_s in enumerate(sorted(arrival_s)):
        while rig.now_s < came_s and rig.scheduler.has_work():
            rig.step()
        rig.now_s = max(rig.now_s, came_s)
        try:
            door.ask(f"a{number}", 45, num_tokens=3)
        except OverloadedError:
            continue
        came[f"a{number}"] = rig.now_s
    rig.run()
    return [rig.first_s[name] - came_s for name, came_s in came.items()], door.rejection


def test_who_is_served_is_served_in_time():
    late, rejection = crowd(1e9)
    assert rejection.num_refused == 0
    assert sum(s > 0.5 for s in late) > 0.8 * len(late)
    taken, rejection = crowd(0.5)
    assert len(taken) + rejection.num_refused == 400
    assert len(taken) > 0.45 * 400, "nearly all that can be served in that time"
    assert sum(s > 0.55 for s in taken) < 0.05 * len(taken)


def engine(**settings):
    def make(kv):
        return ScriptedRunner(kv, before=lambda plan: time.sleep(1e-3 * plan.num_total_rows))

    load = functools.partial(load_instant, make_runner=make)
    return Engine(str(checkpoint("llama")), load=load, max_num_seqs=8, **settings)


def params(num_tokens):
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)


def test_an_engine_refuses_at_once_and_counts():
    async def main():
        async with engine(ttft_slo=0.05) as made:
            await made.generate([5] * 20, params(2))
            running = made.submit([5] * 20, params(60))
            await anext(running)
            refused = made.submit([5] * 200, params(2))
            with pytest.raises(OverloadedError) as error:
                await refused.accepted()
            assert error.value.retry_after_s > 0
            stats = made.stats()
            assert (stats.num_refused, stats.num_unfinished) == (1, 1)
            assert stats.predicted_ttft_s > 0.1
            assert [d async for d in running][-1].finish_reason is FinishReason.LENGTH
            await made.generate([5] * 200, params(2))
            assert made.stats().num_refused == 1

    asyncio.run(asyncio.wait_for(main(), 20))


@pytest.mark.parametrize("order", ["priority", "mlfq", "fair"])
def test_an_engine_with_another_order(order):
    """A single slot, and the same tokens for every request."""
    prompts = [{"prompt_token_ids": [7, k, *range(3, 20 + k)]} for k in range(3, 9)]
    answers = []
    for name in ("fcfs", order):
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
def test_settings_that_cannot_work(setting):
    with pytest.raises(ConfigError, match=next(iter(setting))):
        EngineConfig(**setting)
