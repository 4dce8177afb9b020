"""Measures an engine on one stage, and the same model on several, for bench/simulate/stage_check.

Steps of one process with one thread give the time of each stage: its share of the layers, and on
the last stage the last product, whose share of a decode step is that of its weights. The layers are
cut by the engine's own code (serve/group/stages.py). Then an engine with as many processes as
stages, a thread in each, serves the runs, and the times of first and last tokens are noted. Chunks
have the size of the row budget, so no learned time decides. Requests of a run are sent one after
the other: of those sent at once, it would be chance which ones the first step finds, and in which
order.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from bench.plan.shapes import load_shape
from serve import Engine, SamplingParams
from serve.engine.step_trace import TracedStep
from serve.group.stages import layer_stages
from serve.models import read_spec

HOP_S = 0.3e-3  # assumed: shared memory and the other process's wake-up
APART_S = 0.02  # between two requests; shorter than a step, so that they share the next one
_IDS = range(3, 300)


class Sent(NamedTuple):
    """A request of a run: when it is sent, and its numbers of prompt and answer tokens."""

    at_s: float
    prompt: int
    output: int


class Plan(NamedTuple):
    """What is measured: the rows of a step, what a single stage learns from, and the runs."""

    rows: int
    learned: tuple[Sent, ...]
    runs: dict[str, tuple[Sent, ...]]


FULL = Plan(
    128,
    (
        *(Sent(0.0, 1000 + 300 * i, 24) for i in range(3)),
        *(Sent(0.0, 100 + 60 * i, 64) for i in range(6)),
    ),
    {
        "a prompt of 2 k alone": (Sent(0.0, 2048, 8),),
        "4 streams and a prompt": (
            *(Sent(APART_S * i, 64, 48) for i in range(4)),
            Sent(1.0, 1024, 8),
        ),
        "8 streams": tuple(Sent(APART_S * i, 64, 64) for i in range(8)),
    },
)
QUICK = Plan(
    32,
    (Sent(0.0, 200, 16), *[Sent(0.0, 40, 40)] * 3),
    {"a prompt alone": (Sent(0.0, 192, 4),), "2 streams": (Sent(0.0, 16, 8), Sent(0.0, 16, 8))},
)


def measure(model: Path, num_stages: int, plan: Plan = FULL) -> dict[str, Any]:
    """Returns what stage_check.load_measured reads. Raises ConfigError if this engine does not run
    on so many stages."""
    layers, head_share = _cut(model, num_stages)
    _, traced = asyncio.run(_serve(model, 1, plan.rows, [plan.learned]))
    runs, _ = asyncio.run(_serve(model, num_stages, plan.rows, list(plan.runs.values())))
    return {
        "model": model.name,
        "num_stages": num_stages,
        "stage_layers": layers,
        "hop_s": HOP_S if num_stages > 1 else 0.0,
        "steps": stage_steps(traced, layers, head_share),
        "runs": [
            {"name": name, "max_num_batched_tokens": plan.rows} | run
            for name, run in zip(plan.runs, runs, strict=True)
        ],
    }


def _cut(model: Path, num_stages: int) -> tuple[list[int], float]:
    """Returns the layers of each stage, and the share of the last product in all weights."""
    shape = load_shape(str(model))
    head = float(shape.head_parameters)
    cut = layer_stages(read_spec(model), num_stages)
    return [count for _, count in cut], head / (shape.block_parameters + head)


def stage_steps(
    traced: Sequence[TracedStep], layers: Sequence[int], head_share: float
) -> list[dict[str, Any]]:
    """Returns the seconds of each stage for the steps of one stage with all layers."""
    times = [(step.work, step.ended_s - step.began_s) for step in traced]
    decodes = [seconds for work, seconds in times if not work.num_chunks]
    head_s = head_share * statistics.median(decodes) if decodes else 0.0
    steps = []
    for work, seconds in times:
        own_s = min(head_s, seconds) if work.samples else 0.0
        stages = [(seconds - own_s) * count / sum(layers) for count in layers]
        stages[-1] += own_s
        steps.append({"work": asdict(work), "stage_s": stages})
    return steps


async def _serve(
    model: Path, num_stages: int, rows: int, runs: Sequence[Sequence[Sent]]
) -> tuple[list[dict[str, Any]], list[TracedStep]]:
    """Returns the times of each run, and all steps."""
    longest = max(sent.prompt + sent.output for run in runs for sent in run)
    settings: dict[str, Any] = {
        "compute_threads": num_stages,
        "prefix_cache": False,
        "speculation": "off",
        "max_num_batched_tokens": rows,
        "max_num_seqs": min(32, rows),
        "max_model_len": longest + 1,
        "inter_token_factor": inf,
    }
    if num_stages > 1:
        settings["pipeline_parallel_size"] = num_stages
    async with Engine(model, **settings) as engine:
        await _run(engine, [Sent(0.0, rows, 4)])  # memory is touched
        trace = engine.trace_steps()
        found = [await _run(engine, run) for run in runs]
        return found, list(trace.steps)


async def _run(engine: Engine, run: Sequence[Sent]) -> dict[str, Any]:
    began_s = time.perf_counter()
    drawn = random.Random(0)

    async def send(sent: Sent) -> tuple[float, float, float]:
        ids = [drawn.choice(_IDS) for _ in range(sent.prompt)]
        await asyncio.sleep(max(0.0, began_s + sent.at_s - time.perf_counter()))
        sent_s = time.perf_counter() - began_s
        params = SamplingParams(max_tokens=sent.output, ignore_eos=True, temperature=0.0)
        times = [time.perf_counter() - began_s async for _ in engine.stream(ids, params)]
        return sent_s, times[0], times[-1]

    found = await asyncio.gather(*[send(sent) for sent in run])
    return {
        "requests": [
            {"arrival_s": sent_s, "prompt": sent.prompt, "output": sent.output}
            for sent, (sent_s, _, _) in zip(run, found, strict=True)
        ],
        "first_s": [first_s for _, first_s, _ in found],
        "last_s": [last_s for _, _, last_s in found],
    }
