"""The whole engine, in real time, on a device whose steps take a known time."""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
import time

import pytest

from bench.common.instant import InstantRunner, load_instant
from bench.load.results.metrics import percentile
from serve import LLM, Engine, EngineConfig, SamplingParams
from serve.errors import ConfigError
from serve.scheduler.step_time import StepWork
from tests.support.engine.checkpoints import checkpoint

NUM_STREAMS, NUM_PROMPTS, ROWS = 4, 8, 256


class PacedRunner(InstantRunner):
    """A step takes 8 ms, or 0.5 ms for each row."""

    def run(self, plan, launched):
        self._device_s = max(8e-3, 0.5e-3 * StepWork.of(plan).num_rows)
        return super().run(plan, launched)


async def gaps_beside_prompts(**settings):
    """Returns the seconds between tokens of streams while prompts arrive one after the other."""
    load = functools.partial(load_instant, make_runner=lambda kv: PacedRunner(kv, lambda s: 97))
    gaps = []

    def params(num_tokens):
        return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)

    async def read(stream):
        times = [time.perf_counter() async for _ in stream]
        gaps.extend(b - a for a, b in itertools.pairwise(times))

    async with Engine(load=load, max_num_batched_tokens=ROWS, **settings) as engine:
        tasks = []
        for _ in range(NUM_STREAMS):
            tasks.append(asyncio.create_task(read(engine.submit([5] * 16, params(250)))))
        await asyncio.sleep(0.5)
        for _ in range(NUM_PROMPTS):
            async for _ in engine.submit([6] * ROWS, params(1)):
                pass
            await asyncio.sleep(0.1)
        await asyncio.gather(*tasks)
    return gaps


@pytest.mark.timing
@pytest.mark.parametrize(
    ("settings", "is_smooth"), [({}, True), ({"inter_token_factor": math.inf}, False)]
)
def test_the_time_between_tokens_beside_prompts(settings, is_smooth):
    """By default its 99th percentile is at most 4 times the median; with whole steps it is 16
    times the median."""
    gaps = asyncio.run(gaps_beside_prompts(**settings))
    assert len(gaps) > 800
    assert (percentile(gaps, 99) <= 4 * percentile(gaps, 50)) == is_smooth


@pytest.mark.parametrize("factor", [0, 1, 1.0, -3, math.nan, True, "3", None])
def test_a_factor_must_be_above_one(factor):
    with pytest.raises(ConfigError, match="inter_token_factor must be a number above 1"):
        EngineConfig(inter_token_factor=factor)


def test_only_an_engine_limits_its_steps_by_default():
    """An LLM has no such limit, since its callers get whole answers."""
    assert EngineConfig().inter_token_factor == 3.0
    with LLM(str(checkpoint("llama"))) as llm:
        assert llm.config.inter_token_factor == math.inf
    with LLM(str(checkpoint("llama")), inter_token_factor=2) as llm:
        assert llm.config.inter_token_factor == 2
