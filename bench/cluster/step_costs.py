"""What steps cost while two engines work side by side: traced in two processes, and fitted.

The loads are prompts alone, prompts beside streams, and streams of several numbers and contexts.
None of the runs that are predicted from the fit is among them.
"""

from __future__ import annotations

import multiprocessing
import random
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from bench.plan.calibrate import FittedCost, fit_times
from bench.simulate.settings import PoolDelays, SimulationSettings
from memory.pages.layer_groups import LayerGroup
from serve.config import EngineConfig
from serve.engine.loader import LoadedEngine, load_engine
from serve.request import Request, TokenDelta
from serve.sampling_params import SamplingParams
from serve.scheduler.step_time import StepWork

_MOST_STEPS = 1 << 16
_STREAMS = (1, 2, 4, 8, 12)
_TOKENS = 48


@dataclass(frozen=True, slots=True)
class TracedEngine:
    """steps: (work, seconds). The rest is what a simulated engine needs to know of a real one."""

    steps: list[tuple[StepWork, float]]
    groups: tuple[LayerGroup, ...]
    page_bytes: int
    kv_bytes: int

    def settings(self, config: dict[str, Any], delays: PoolDelays) -> SimulationSettings:
        given = config | {"kv_cache_bytes": self.kv_bytes, "kv_page_bytes": self.page_bytes}
        return SimulationSettings(EngineConfig(**given), self.groups, delays)


def traced(config: dict[str, Any], lengths: tuple[int, ...]) -> tuple[FittedCost, TracedEngine]:
    """Runs two engines at the same time and returns the cost of a step of either."""
    context = multiprocessing.get_context("spawn")
    pipes = []
    for seed in (1, 2):
        ours, theirs = context.Pipe()
        work = (config, lengths, seed, theirs)
        context.Process(target=_trace, args=work, daemon=True).start()
        theirs.close()
        pipes.append(ours)
    for pipe in pipes:
        pipe.recv()
    for pipe in pipes:
        pipe.send(True)  # both are loaded: they begin together
    engines: list[TracedEngine] = [pipe.recv() for pipe in pipes]
    return fit_times([step for engine in engines for step in engine.steps]), engines[0]


class _Sink:
    """Waits for the end of a sequence."""

    def __init__(self) -> None:
        self.has_begun, self.has_ended = threading.Event(), threading.Event()

    def accept(self, request: Request) -> None:
        """Nothing is to be done."""

    def push(self, delta: TokenDelta) -> None:
        self.has_begun.set()
        if delta.finish_reason is not None:
            self.has_ended.set()

    def fail(self, error: Exception) -> None:
        raise error

    def wake(self) -> None:
        """Nothing waits."""


def _trace(config: dict[str, Any], lengths: tuple[int, ...], seed: int, pipe: Connection) -> None:
    loaded = load_engine(EngineConfig(**config))
    loaded.core.start()
    try:
        _submit(loaded, random.Random(seed), 64, 8).has_ended.wait()
        pipe.send(True)
        pipe.recv()
        trace = loaded.core.view.traces.measure(_MOST_STEPS)
        _load(loaded, lengths, random.Random(seed))
        kv = loaded.core.kv
        groups = tuple(group.layers for group in kv.layout.groups)
        steps = [(step.work, step.ended_s - step.began_s) for step in trace.steps]
        pipe.send(TracedEngine(steps, groups, kv.page_bytes, kv.num_pages * kv.page_bytes))
    finally:
        loaded.close()


def _load(loaded: LoadedEngine, lengths: tuple[int, ...], rng: random.Random) -> None:
    for length in lengths:
        _submit(loaded, rng, length, 1).has_ended.wait()
    for count in _STREAMS:
        for length in lengths:
            most = max(_TOKENS, 8 * count)
            streams = [_submit(loaded, rng, rng.choice(lengths) // 4, most) for _ in range(count)]
            for stream in streams:
                stream.has_begun.wait()
            prompt = _submit(loaded, rng, length, 1)
            for one in (*streams, prompt):
                one.has_ended.wait()
    time.sleep(0.1)  # the last step is in the trace


def _submit(loaded: LoadedEngine, rng: random.Random, length: int, most: int) -> _Sink:
    sink = _Sink()
    params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
    loaded.core.submit([rng.randrange(10, 1000) for _ in range(length)], params, sink)
    return sink
