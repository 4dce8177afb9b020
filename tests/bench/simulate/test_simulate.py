"""The simulator, by clocks computed by hand and by properties of every run."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest

from bench.load.client.record import Outcome
from bench.load.workload.work import Call
from bench.simulate import keep
from bench.simulate.load import LoadSimulation, simulate
from bench.simulate.settings import PoolDelays, SimulationSettings
from memory.pages.layer_groups import LayerGroup
from serve.config import MEMORY_POLICIES, QUEUE_POLICIES, EngineConfig
from serve.errors import ConfigError


class Law:
    """A step takes a second and a hundredth for each of its rows."""

    def seconds(self, work):
        return 1.0 + 0.01 * work.num_rows


def settings(*, pages=4096, page_tokens=4, delays=None, **engine):
    engine = {"max_model_len": 1024, "max_num_seqs": 16, "inter_token_factor": math.inf} | engine
    config = EngineConfig(
        kv_cache_bytes=1024 * pages * page_tokens, kv_page_bytes=1024 * page_tokens, **engine
    )
    return SimulationSettings(config, (LayerGroup(1024),), delays or PoolDelays())


def run(calls, arrivals_s, **options):
    return simulate(calls, arrivals_s, Law(), settings(**options))


def chunks(result, number=0):
    return pytest.approx(result.records[number].chunks_s)


def test_one_request_alone():
    """The prompt takes a step of 100 rows, and each further token a step of one row."""
    result = run([Call(100, 3)], [5.0])
    assert chunks(result) == [7.0, 8.01, 9.02]
    record = result.records[0]
    assert record.outcome is Outcome.OK and record.finish_reason == "stop"
    assert (record.prompt_tokens, record.output_tokens, record.queue_s) == (100, 3, 0.0)
    assert record.finished_s == record.chunks_s[-1] == result.window[1]
    assert [
        (s.num_decodes, s.num_prefill_rows, s.num_context, s.num_pairs) for s in result.steps
    ] == [
        (0, 100, 0, 5000),
        (1, 0, 100, 0),
        (1, 0, 101, 0),
    ]


def test_two_requests_share_steps():
    """The second request arrives during the first one's prompt and is in the next step."""
    result = run([Call(100, 4), Call(50, 2)], [0.0, 0.5])
    assert chunks(result, 0) == [2.0, 3.51, 4.53, 5.54]
    assert chunks(result, 1) == [3.51, 4.53]
    assert result.records[1].queue_s == pytest.approx(1.5)


def test_a_long_prompt_takes_several_steps():
    result = run([Call(600, 1)], [0.0], max_num_batched_tokens=256)
    assert chunks(result) == [3 * 1.0 + 6.0]
    assert [step.num_prefill_rows for step in result.steps] == [256, 256, 88]


def test_a_cut_answer_ends_with_its_limit():
    result = run([Call(10, 5, max_tokens=2)], [0.0])
    record = result.records[0]
    assert (record.output_tokens, record.finish_reason) == (2, "length")


def test_out_of_memory_the_younger_one_computes_again():
    """There are five pages of four tokens. Both requests have two pages for eight tokens. The first
    one gets the fifth page, and the second one is computed again when the first has ended."""
    calls = [Call(7, 6), Call(7, 6)]
    options = {"pages": 5, "max_model_len": 16, "memory_policy": "prompt_only"}
    result = run(calls, [0.0, 0.0], **options)
    assert chunks(result, 0) == [1.14, 2.16, 3.17, 4.18, 5.19, 6.20]
    assert chunks(result, 1) == [1.14, 2.16, 7.29, 8.30, 9.31, 10.32]


def test_an_idle_engine_wakes_up_for_a_message():
    delays = PoolDelays(tokenize_s=0.25, tokenize_token_s=0.01, output_s=0.5)
    result = run([Call(100, 2), Call(100, 1)], [0.0, 10.0], delays=delays)
    assert chunks(result, 0) == [1.25 + 2.0 + 0.5, 1.25 + 3.01 + 0.5]
    assert chunks(result, 1) == [10.0 + 1.25 + 2.0 + 0.5]


def test_equal_runs_are_equal_tokens():
    """The second prompt begins with two of the first one's blocks, the third with none."""
    calls = [Call(40, 1, runs=blocks(5, 6, 7)), Call(40, 1, runs=blocks(5, 6, 8)), Call(40, 1)]
    result = run(calls, [0.0, 10.0, 20.0])
    assert [record.cached_tokens for record in result.records] == [0, 32, 0]
    assert [step.num_prefill_rows for step in result.steps] == [40, 8, 40]
    result = run(calls, [0.0, 10.0, 20.0], prefix_cache=False)
    assert [record.cached_tokens for record in result.records] == [0, 0, 0]


def test_what_cannot_be_served_is_refused():
    """The simulator refuses requests as the engine does: too long, or too many at once."""
    calls = [Call(1024, 1), Call(1000, 1, max_tokens=25), *[Call(10, 50)] * 5]
    result = run(calls, [0.0] * 7, max_num_seqs=1, max_num_waiting=2)
    outcomes = [record.outcome is Outcome.OK for record in result.records]
    assert outcomes == [False, False, True, True, True, False, False]
    assert "overloaded" in result.records[-1].error


def test_a_request_that_would_come_too_late_is_refused():
    result = run([Call(100, 100)] * 40, [0.1 * i for i in range(40)], max_num_seqs=2, ttft_slo=30.0)
    refused = [r for r in result.records if r.outcome is Outcome.FAILED]
    assert 0 < len(refused) < 40
    assert all("is predicted" in r.error or "would come" in r.error for r in refused)


def test_settings_that_do_not_work():
    with pytest.raises(ConfigError, match="needs kv_page_bytes"):
        SimulationSettings(
            EngineConfig(max_model_len=64, kv_cache_bytes=65536), (LayerGroup(1024),)
        )
    with pytest.raises(ConfigError, match="max_model_len 1024"):
        run([Call(1, 1)], [0.0], pages=255)


def blocks(*keys, size=16):
    return tuple((key, size) for key in keys)


def random_calls(seed, count=60):
    """Returns short and long requests of three clients, every third with a shared prefix."""
    rng = random.Random(seed)
    calls, arrivals_s, now_s = [], [], 0.0
    for number in range(count):
        now_s += rng.choice([0.0, 0.3, 2.0, 30.0]) * rng.random()
        prompt = rng.choice([rng.randint(1, 20), rng.randint(20, 120)])
        runs = blocks(*range(number % 5, number % 5 + prompt // 8), size=8)
        output = rng.randint(1, 40)
        calls.append(
            Call(
                prompt,
                output,
                rng.choice([None, 12, 40]),
                client=f"client {number % 4}",
                runs=runs if number % 3 == 0 else (),
            )
        )
        arrivals_s.append(now_s)
    return calls, arrivals_s


@pytest.mark.covering(1)
@pytest.mark.parametrize("order", QUEUE_POLICIES)
@pytest.mark.parametrize("policy", MEMORY_POLICIES)
def test_every_request_ends_and_memory_is_free_again(policy, order):
    calls, arrivals_s = random_calls(f"{policy} {order}")
    options = {"memory_policy": policy, "order": order, "inter_token_slo_ms": 1400.0}
    made = settings(pages=48, max_model_len=180, max_num_batched_tokens=48, **options)
    load = LoadSimulation(calls, arrivals_s, Law(), made)
    load.run()
    result = load.result(1.0, 0)
    for call, record in zip(calls, result.records, strict=True):
        assert record.outcome is Outcome.OK
        assert record.output_tokens == min(call.num_output, call.max_tokens or 1000)
        assert len(record.chunks_s) == record.output_tokens
        assert all(a < b for a, b in pairwise([record.sent_s, *record.chunks_s]))
    kv = load.scheduler.kv
    kv.check_integrity()
    assert kv.num_in_use == 0 and not load.scheduler.has_work()
    again = simulate(calls, arrivals_s, Law(), made, qps=1.0)
    assert again == result


@pytest.mark.covering(2)
@pytest.mark.parametrize("order", QUEUE_POLICIES)
@pytest.mark.parametrize("policy", MEMORY_POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_fast_forward_changes_nothing(policy, order, seed):
    """The clock equals that of single steps, with few and many sequences, scarce memory and
    shared pages."""
    calls, arrivals_s = random_calls(f"forward {seed}", 40)
    if seed == 1:
        calls = [replace(call, runs=()) for call in calls]
    made = settings(
        pages=(48, 120, 400)[seed],
        page_tokens=(4, 16, 8)[seed],
        max_model_len=180,
        max_num_seqs=(16, 3, 16)[seed],
        max_num_batched_tokens=48,
        memory_policy=policy,
        order=order,
    )
    results, states = [], []
    for is_fast in (False, True):
        load = LoadSimulation(calls, arrivals_s, Law(), made)
        load.is_fast = is_fast
        load.run()
        load.scheduler.kv.check_integrity()
        scheduler = load.scheduler
        model = scheduler.chunks.model
        states.append((scheduler.num_steps, scheduler.num_page_steps, model.median_error()))
        results.append(load.result(1.0, 0))
    assert results[0] == results[1] and states[0] == states[1]


def test_fast_forward_is_one_question_for_many_steps(monkeypatch):
    """With one stream the scheduler runs when it needs a page, and for its first and last token."""
    load = LoadSimulation([Call(10, 400)], [0.0], Law(), settings(page_tokens=64))
    asked = []
    schedule = load.scheduler.schedule
    monkeypatch.setattr(load.scheduler, "schedule", lambda now: asked.append(now) or schedule(now))
    load.run()
    assert len(load.result(1.0, 0).steps) == 400 and len(asked) <= 2 * (400 // 64 + 2)


def test_a_long_run_keeps_less(monkeypatch):
    """A large run keeps first and last token, their number, and a histogram of the gaps."""
    calls, arrivals_s = random_calls("long")
    options = {"pages": 48, "max_model_len": 180, "memory_policy": "prompt_only"}
    whole = run(calls, arrivals_s, **options)
    monkeypatch.setattr("bench.simulate.load.MOST_CHUNKS", 10)
    monkeypatch.setattr(keep, "MOST_STEPS", 100)
    monkeypatch.setattr(keep, "MOST_SAMPLES", 50)
    thin = run(calls, arrivals_s, **options)
    gaps = []
    for one, other in zip(whole.records, thin.records, strict=True):
        assert other.chunks_s == [one.chunks_s[0], *one.chunks_s[1:][-1:]]
        assert other.num_chunks == len(one.chunks_s)
        gaps += [b - a for a, b in pairwise(one.chunks_s)]
    assert sum(count for _, count in thin.gaps) == len(gaps)
    flat = [seconds for seconds, count in thin.gaps for _ in range(count)]
    assert flat == pytest.approx(sorted(gaps), rel=0.006)
    assert whole.notes[0] == thin.notes[0] and len(whole.notes) == 1
    assert 100 <= len(thin.steps) < 200 < len(whole.steps)
    assert len(thin.samples) <= 50 and all(0 <= s.kv_usage <= 1 for s in thin.samples)
