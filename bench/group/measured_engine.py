"""A process with one engine, which measures what it is told on its standard input.

Each engine has its own process, since threads and their number belong to a process. A line of JSON
names a task; the answer is a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any
from unittest.mock import PropertyMock, patch

from serve import Engine, SamplingParams
from serve.group.runners import PipelineRunner, TensorRunner

_STREAM_PROMPT = list(range(5, 69))
_STREAM_TOKENS = 12  # after which a stream's times are those of decoding
_STREAM_MOST = 1500


@dataclass(frozen=True, slots=True)
class Task:
    """Prompts of `length` tokens that are sent at once, with answers of `answer` tokens. is_dense:
    whether the chunks of a prompt follow each other in a pipeline without waiting. streams: the
    number of sequences that decode meanwhile, after short prompts."""

    column: str
    batch: int
    length: int
    answer: int
    seed: int
    is_dense: bool = True
    streams: int = 0


@dataclass(frozen=True, slots=True)
class Timed:
    """first_s: seconds to the last first token. tokens_per_s: generated while all generate.
    waited_s: of the engine's rank for other tensor ranks, and stage_wait_s for the stage before, in
    `seconds` with `steps` steps and `results` exchanged results. gaps_s: between the tokens of each
    of the streams, from the prompt's arrival to its first token."""

    first_s: float
    tokens_per_s: float
    seconds: float
    waited_s: float
    stage_wait_s: float
    results: int
    steps: int
    gaps_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Counts:
    """What the engine's rank has counted since it started."""

    waited_s: float
    stage_wait_s: float
    results: int
    steps: int

    @classmethod
    def of(cls, engine: Engine) -> Counts:
        runner, steps = engine.loaded.core._runner, engine.stats().num_steps
        if not isinstance(runner, TensorRunner):
            return cls(0.0, 0.0, 0, steps)
        exchange, previous = runner._group.own.exchange, runner._group._previous
        return cls(
            exchange.waited_s if exchange else 0.0,
            previous.waited_s if previous else 0.0,
            exchange.num_completed if exchange else 0,
            steps,
        )


def prompts_of(task: Task, vocab_size: int) -> list[list[int]]:
    """Returns the same prompts for all engines with the same vocabulary."""
    rng = random.Random(f"{task.column} {task.seed}")
    return [[rng.randrange(2, vocab_size) for _ in range(task.length)] for _ in range(task.batch)]


async def measure(engine: Engine, task: Task) -> Timed:
    """Sends a task's requests and measures until all have ended."""
    params = SamplingParams(max_tokens=task.answer, temperature=0.0, ignore_eos=True)
    times: list[list[float]] = [[] for _ in range(task.batch)]

    async def consume(number: int, prompt: list[int]) -> None:
        async for delta in engine.submit(prompt, params):
            times[number] += [time.perf_counter()] * len(delta.token_ids)

    prompts = prompts_of(task, engine.loaded.limits.vocab_size)
    async with Streams(engine, task.streams) as streams:
        before, began_s = Counts.of(engine), time.perf_counter()
        with _dense(task.is_dense):
            await asyncio.gather(*(consume(number, each) for number, each in enumerate(prompts)))
        after, ended_s = Counts.of(engine), time.perf_counter()
    start, end = max(each[0] for each in times), min(each[-1] for each in times)
    count = sum(start < at <= end for each in times for at in each)
    if task.answer > 1 and not count:
        raise RuntimeError(f"{task.column}: no token came while all requests generated")
    return Timed(
        start - began_s,
        count / (end - start) if end > start else 0.0,
        ended_s - began_s,
        after.waited_s - before.waited_s,
        after.stage_wait_s - before.stage_wait_s,
        after.results - before.results,
        after.steps - before.steps,
        streams.gaps_s(began_s, start),
    )


class Streams:
    """Sequences that decode as long as the block runs, which begins when all do."""

    def __init__(self, engine: Engine, count: int) -> None:
        self._engine = engine
        self._times: list[list[float]] = [[] for _ in range(count)]
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Streams:
        self._tasks = [asyncio.create_task(self._decode(each)) for each in self._times]
        while not all(len(each) >= _STREAM_TOKENS for each in self._times):
            await asyncio.sleep(0.01)
            for task in self._tasks:
                if task.done():
                    task.result()
        return self

    async def _decode(self, times: list[float]) -> None:
        params = SamplingParams(max_tokens=_STREAM_MOST, temperature=0.0, ignore_eos=True)
        stream = self._engine.submit(_STREAM_PROMPT, params)
        try:
            async for delta in stream:
                times += [time.perf_counter()] * len(delta.token_ids)
        finally:
            stream.abort()

    async def __aexit__(self, *exception: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def gaps_s(self, began_s: float, end_s: float) -> list[float]:
        """Returns the seconds between the tokens of each stream, of which the latter came in this
        time."""
        return [
            after - before
            for times in self._times
            for before, after in pairwise(times)
            if began_s < after <= end_s
        ]


@contextmanager
def _dense(is_dense: bool) -> Iterator[None]:
    """Lets a pipeline have one step in flight only, unless is_dense."""
    if is_dense:
        yield
        return
    with patch.object(PipelineRunner, "depth", PropertyMock(return_value=1)):
        yield


async def serve(settings: dict[str, Any]) -> None:
    """settings: of the engine; "exchange": "gloo" replaces the arena (gloo.py)."""
    if settings.pop("exchange", None) == "gloo":
        from bench.group.gloo import use_gloo

        use_gloo(tempfile.mktemp(prefix="mergestep-bench-gloo-"))
    async with Engine(**settings) as engine:
        print(json.dumps({"ready": True}), flush=True)
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            timed = await measure(engine, Task(**json.loads(line)))
            print(json.dumps(asdict(timed)), flush=True)


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.argv[1])))
