"""The sending half of the load generator, against an engine in the same process."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from bench.load.client.record import Outcome, RunResult
from bench.load.client.run import offer
from bench.load.client.targets import EngineTarget
from bench.load.workload.offered_load import LoadOptions
from bench.load.workload.work import Schedule, Work
from serve.engine.step_trace import StepTrace
from serve.errors import ConfigError
from tests.support.http.fake_engine import FakeEngine


def engine_run(engine: Any, schedule: Schedule, options: LoadOptions | None = None) -> RunResult:
    async def run() -> RunResult:
        async with EngineTarget(engine) as target:
            return await offer(schedule, target, options)

    return asyncio.run(run())


@pytest.fixture
def engine() -> Any:
    engine: Any = FakeEngine(repeat=2, step_s=0.001)
    engine.tokenizer.vocab_size = 256
    engine.tokenizer.special_ids = frozenset({0})
    engine.stats = lambda: SimpleNamespace(
        num_running=3, num_waiting=1, pages_in_use=5, pages_total=10
    )
    engine.trace_steps = lambda max_steps=9: StepTrace(max_steps)
    return engine


def test_against_an_engine(engine: Any) -> None:
    works = [Work(token_ids=[40] * 7, max_tokens=20, ignore_eos=True)] * 5
    schedule = Schedule(100, works, [i / 100 for i in range(5)])
    result = engine_run(engine, schedule)
    assert engine.is_stopped
    assert all(record.outcome is Outcome.OK for record in result.records)
    assert all((r.prompt_tokens, r.output_tokens) == (7, 20) for r in result.records)
    assert all(
        sum(r.chunk_tokens) == 20 and len(r.chunks_s) == len(r.chunk_tokens) for r in result.records
    )
    assert result.samples[0].kv_usage == 0.5 and result.samples[0].num_running == 3


def test_an_engine_cannot_be_asked_from_several_processes(engine: Any) -> None:
    with pytest.raises(ConfigError, match="processes"):
        engine_run(engine, Schedule(1, [Work(prompt="x")], [0.0]), LoadOptions(processes=2))
