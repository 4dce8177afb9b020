"""Measures pipelined pools beside a device that leaves the processor free.

On a processor that also computes the model, tokenizing and detokenizing take processor time in any
thread. Here a scripted device takes a fixed time per step and no processor time
(bench/common/instant.py), so only the pools differ.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import NamedTuple

from bench.ablation.parts import serial_core
from bench.common.instant import InstantRunner, load_instant
from memory.kv_manager import KVManager
from serve import Engine, RequestStream, SamplingParams
from serve.engine.loader import Parts

_DEVICE_S = 5e-3
_NUM_SEQS, _NUM_TOKENS = 256, 80
_PROMPT = list(range(5, 21))


class OnDevice(NamedTuple):
    """The seconds of a step in each round, with pools and in one thread."""

    device_s: float
    num_seqs: int
    pools_s: list[float]
    serial_s: list[float]

    @property
    def gains(self) -> list[float]:
        return [serial / pools for pools, serial in zip(self.pools_s, self.serial_s, strict=True)]


async def measure_pools(rounds: int, advance: Callable[[str], None]) -> OnDevice:
    """Runs the rounds, calling advance(name) before each."""
    step_times: list[list[float]] = [[], []]
    async with AsyncExitStack() as stack:
        engines = []
        for parts in (Parts(), Parts(core=serial_core)):
            engine, runner = _engine(parts)
            engines.append((await stack.enter_async_context(engine), runner))
            await _step_s(engine, runner)
        for _ in range(rounds):
            advance("pools beside a device")
            for seconds, (engine, runner) in zip(step_times, engines, strict=True):
                seconds.append(await _step_s(engine, runner))
    return OnDevice(_DEVICE_S, _NUM_SEQS, *step_times)


def _engine(parts: Parts) -> tuple[Engine, list[InstantRunner]]:
    """Returns an engine, and a list that holds its runner after the engine has started."""
    runners: list[InstantRunner] = []

    def make(kv: KVManager) -> InstantRunner:
        runners.append(InstantRunner(kv, lambda s: 97 + len(s.token_ids) % 26))
        return runners[0]

    load = partial(load_instant, make_runner=make, num_pages=4096, parts=parts)
    batched = _NUM_SEQS * len(_PROMPT)
    return Engine(load=load, max_num_seqs=_NUM_SEQS, max_num_batched_tokens=batched), runners


async def _step_s(engine: Engine, runners: list[InstantRunner]) -> float:
    """Returns the mean seconds of a step from sending the requests to the end of the last one."""

    async def consume(stream: RequestStream) -> None:
        async for _ in stream:
            pass

    (runner,) = runners
    runner.reset(_DEVICE_S)
    params = SamplingParams(max_tokens=_NUM_TOKENS, temperature=0.0, ignore_eos=True)
    began = time.perf_counter()
    streams = [engine.submit(_PROMPT, params) for _ in range(_NUM_SEQS)]
    await asyncio.gather(*map(consume, streams))
    return (time.perf_counter() - began) / len(runner.rows)
