"""Counters of requests, pools, HTTP and steps, and what counting costs."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from serve import Engine, SamplingParams
from serve.engine.counters import RequestCounters
from serve.engine.output_processor import OutputProcessor, OutputState, RequestTimes, StepRecord
from serve.engine.pools import MAX_COMPILING, JobThreads, PromptPool
from serve.engine.stats import StepCounters
from serve.engine.step_trace import StepTraces
from serve.errors import OverloadedError
from serve.histogram import Histogram
from serve.http.edge.counters import LAG_POLL_S, MAX_REASONS, HttpCounters
from serve.request import FinishReason, Request
from serve.scheduler.sequence import Sequence, make_sequences
from serve.scheduler.step_plan import StepPlan


def test_a_value_counts_in_the_first_bucket_that_holds_it() -> None:
    histogram = Histogram((1.0, 2.0, 5.0))
    for value in (0.0, 1.0, 1.1, 2.0, 5.0, 5.1):
        histogram.observe(value)
    histogram.observe(3.0, 4)
    assert histogram.counts == [2, 2, 5, 1] and histogram.count == 10
    assert histogram.sum == pytest.approx(14.2 + 12.0)


def test_requests_without_output_are_counted() -> None:
    counters = RequestCounters()
    counters.count_end(FinishReason.ABORT, 0, (1.0, None, None, 3.0))
    counters.count_end(FinishReason.ERROR, 0, (1.0, 2.0, None, 3.0))
    counters.count_end(FinishReason.LENGTH, 1, (1.0, 2.0, 2.5, 2.5))
    assert [counters.num_ended[r] for r in FinishReason] == [0, 1, 1, 1]
    assert (counters.e2e_s.count, counters.queue_s.count, counters.inference_s.count) == (3, 2, 2)
    assert (counters.prefill_s.count, counters.decode_s.count, counters.per_token_s.count) == (
        1,
        1,
        0,
    )
    assert counters.e2e_s.sum == pytest.approx(2.0 + 2.0 + 1.5)


def test_tokens_are_timed_from_one_to_the_next() -> None:
    """Two sequences decode together, one of them pauses, and a third one joins later."""
    counters = RequestCounters()
    processor = OutputProcessor(lambda sequence, reason: None, counters)
    a, b, c = _sequences()
    steps = [(0.0, [a, b]), (1.0, [a, b]), (3.0, [a]), (4.0, [a, b, c]), (6.0, [a, b, c])]
    for now_s, sequences in steps:
        processor.process(StepRecord(sequences, [7] * len(sequences), None, [], now_s))
    assert counters.ttft_s.count == 3 and counters.num_generation_tokens == 11
    # a: 1 2 1 2, b: 1 3 2, c: 2
    assert counters.inter_token_s.count == 8 and counters.inter_token_s.sum == pytest.approx(14.0)
    for sequence in (a, b, c):
        sequence.finish_reason = FinishReason.STOP
    processor.process(StepRecord([a], [7], None, [a, b, c], 7.0))
    assert counters.inter_token_s.count == 9 and counters.inter_token_s.sum == pytest.approx(15.0)
    assert counters.generation_tokens.sum == 12 == counters.num_generation_tokens
    assert counters.num_ended[FinishReason.STOP] == 3


def _sequences() -> list[Sequence]:
    """Three sequences of one request that arrived at 0."""
    params = SamplingParams(n=3, max_tokens=9, seed=1)
    request = Request("r", None, (5, 6, 7, 8), params, 0.0)
    detokenizer = SimpleNamespace(push=lambda token: "x", finish=lambda: "")
    factory: Any = SimpleNamespace(make=lambda **options: detokenizer)
    sink: Any = SimpleNamespace(push=lambda delta: None, wake=lambda: None)
    times = RequestTimes()
    sequences = make_sequences(request, frozenset())
    for sequence in sequences:
        sequence.output = OutputState(request, sequence.index, factory, sink, times)
    return sequences


def test_a_pool_counts_jobs_that_fail_too(caplog: pytest.LogCaptureFixture) -> None:
    pool, may_end, done = PromptPool(1), threading.Event(), threading.Event()

    def work() -> None:
        may_end.wait(5)
        time.sleep(0.01)
        raise ValueError("bad")

    def last() -> None:
        assert pool.counters.num_waiting == 0
        done.set()

    pool.submit(work, compiles=False)
    pool.submit(last, compiles=False)
    while pool.counters.num_waiting != 1:  # until the first one has begun
        time.sleep(0.001)
    may_end.set()
    assert done.wait(5)
    pool.shutdown()
    assert pool.counters.busy_s >= 0.01
    assert "a job of mergestep-tokenize_0 failed" in caplog.text


def test_a_pool_ends_after_its_jobs() -> None:
    pool, results = PromptPool(2), []
    for number in range(100):
        pool.submit(lambda number=number: results.append(number), compiles=number % 3 == 0)
    pool.shutdown()
    assert sorted(results) == list(range(100))
    assert isinstance(pool._tokenizing, JobThreads)
    assert not any(thread.is_alive() for thread in pool._tokenizing._threads)


def test_reasons_and_methods_are_bounded() -> None:
    counters = HttpCounters()
    for number in range(2 * MAX_REASONS):
        counters.refuse(f"code_{number}")
        counters.answered("/x", f"METHOD{number}", 204)
    counters.refuse(None)
    assert len(counters.refused) == MAX_REASONS + 1
    assert counters.refused["other"] == MAX_REASONS + 1
    assert counters.answers == {("/x", "other", "2xx"): 2 * MAX_REASONS}


def test_a_blocked_event_loop_is_measured() -> None:
    async def main() -> HttpCounters:
        counters = HttpCounters()
        counters.start(lambda: 3)
        await asyncio.sleep(LAG_POLL_S / 2)
        time.sleep(LAG_POLL_S)  # noqa: ASYNC251
        await asyncio.sleep(LAG_POLL_S / 2)
        counters.stop()
        count = counters.lag_s.count
        await asyncio.sleep(2 * LAG_POLL_S)
        assert counters.lag_s.count == count
        return counters

    counters = asyncio.run(main())
    assert counters.lag_s.sum > LAG_POLL_S / 3 and counters.num_connections() == 3


def test_traces_do_not_disturb_each_other() -> None:
    traces = StepTraces()
    watched, first = traces.watch(4), traces.measure(8)
    second = traces.measure(9)
    assert traces.open == (watched, second) and first not in traces.open
    traces.measure(0)
    assert traces.open == (watched,)
    traces.close(watched)
    traces.close(watched)
    assert traces.open == ()


def test_counting_takes_less_than_a_hundredth_of_a_step() -> None:
    """The embedded model has about the shortest steps that occur."""

    async def step_s(num_sequences: int) -> float:
        async with Engine(max_num_seqs=32) as engine:
            params = SamplingParams(n=num_sequences, max_tokens=48, ignore_eos=True)
            await engine.generate("Once", params)
            seconds = engine.loaded.core.view.steps.seconds
            return seconds.sum / seconds.count

    for num_sequences in (1, 32):
        step = asyncio.run(step_s(num_sequences))
        cost = min(_cost_s(num_sequences) for _ in range(20))
        assert cost < 0.01 * step, f"{1e6 * cost:.2f} us of {1e6 * step:.0f} us"


def _cost_s(num_sequences: int, repeats: int = 200) -> float:
    """Returns the seconds to count a step in which every sequence gets a token."""
    counts, counters = StepCounters(), RequestCounters()
    plan = StepPlan([], [], num_sequences, [], num_sequences)
    states = [SimpleNamespace(last_token_s=0.5, num_output=0) for _ in range(num_sequences)]
    began = time.perf_counter()
    for _ in range(repeats):
        counts.add(plan, 1.0)
        counts.seconds.observe(0.003)
        num_usual = 0
        for state in states:  # as OutputProcessor.process and OutputState.push do
            if state.last_token_s == 0.5:
                num_usual += 1
            state.last_token_s = 0.5
            state.num_output += 1
        counters.num_generation_tokens += num_usual
        counters.inter_token_s.observe(0.003, num_usual)
    return (time.perf_counter() - began) / repeats


def test_large_texts_delay_no_others() -> None:
    pool, may_end, done = PromptPool(1), threading.Event(), threading.Event()
    for _ in range(3):
        pool.submit(may_end.wait, compiles=False, is_large=True)
    pool.submit(may_end.wait, compiles=True, is_large=True)
    pool.submit(done.set, compiles=False)
    compiled = threading.Event()
    pool.submit(compiled.set, compiles=True)
    assert done.wait(5) and compiled.wait(5)
    while pool.counters.num_waiting != 3:
        time.sleep(0.001)
    may_end.set()
    pool.shutdown()
    assert pool.counters.num_waiting == 0


def test_the_compile_queue_is_bounded() -> None:
    """Further requests with a grammar are refused; those without one are tokenized."""
    pool, compile_ends, done = PromptPool(1), threading.Event(), threading.Event()
    for _ in range(MAX_COMPILING):
        pool.check_compile_queue()
        pool.submit(compile_ends.wait, compiles=True)
    with pytest.raises(OverloadedError, match=f"{MAX_COMPILING} requests wait for grammars"):
        pool.check_compile_queue()
    pool.submit(done.set, compiles=False)
    assert done.wait(5)
    compile_ends.set()
    pool.shutdown()
    pool.check_compile_queue()
