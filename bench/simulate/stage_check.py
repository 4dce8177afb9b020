"""Compares the simulated pipeline with measured runs of real stages.

A file (JSON) has the seconds in which each stage was busy with steps, measured one stage at a time
or together, and runs of all stages together:

    {"num_stages": 2, "hop_s": 0.0004,
     "steps": [{"chunks": [[128, 0]], "decodes": [640, 900], "samples": 2, "stage_s": [0.09, 0.1]}],
     "runs": [{"name": "8 k alone", "max_num_batched_tokens": 512,
               "requests": [{"arrival_s": 0.0, "prompt": 8192, "output": 4}],
               "first_s": [5.9], "last_s": [6.2], "inter_token_slo_ms": null}]}

chunks are [rows, context], decodes contexts; "work" with the fields of StepWork may stand for both.
first_s and last_s are the seconds from the start of the run to each request's first and last token.
Without inter_token_slo_ms, only the row budget bounds a step. bench/simulate/measure_stages.py
writes such a file. The cost of each stage is fitted to its steps
(bench/plan/calibrate.py), the real scheduler runs the requests on it, and every time to the first
token and to the last one is compared. Nothing is fitted to the runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from bench.load.workload.work import Call
from bench.plan.calibrate import FittedCost, fit_times
from bench.plan.grid import GridWork
from bench.plan.pipeline import StageCost
from bench.simulate.load import simulate
from bench.simulate.settings import SimulationSettings
from memory.pages.layer_groups import LayerGroup
from serve.config import EngineConfig
from serve.errors import ConfigError, reason
from serve.regular_file import open_regular
from serve.scheduler.step_time import StepWork

TOLERANCE = 0.15
_TOKEN_BYTES, _PAGE_TOKENS = 256, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """Requests as (arrival in seconds, prompt, output), and when each had its first and its last
    token, in seconds from the start."""

    name: str
    requests: tuple[tuple[float, int, int], ...]
    first_s: tuple[float, ...]
    last_s: tuple[float, ...]
    max_num_batched_tokens: int = 512
    inter_token_slo_ms: float | None = None


class FittedStages:
    """The cost of each stage, fitted to its measured steps."""

    def __init__(self, stages: Sequence[FittedCost], hop_s: float) -> None:
        self.stages, self.hop_s = stages, hop_s

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    def stage_seconds(self, work: GridWork) -> list[float]:
        step = step_work(work)
        return [stage.seconds(step) for stage in self.stages]

    def hop_seconds(self, rows: int) -> float:
        return self.hop_s


@dataclass(frozen=True, slots=True)
class Comparison:
    """One time of a run in seconds: `what` is first (token) or last."""

    run: str
    request: int
    what: str
    measured_s: float
    simulated_s: float

    @property
    def error(self) -> float:
        return self.simulated_s / self.measured_s - 1

    @property
    def is_within(self) -> bool:
        return abs(self.error) <= TOLERANCE


def step_work(work: GridWork) -> StepWork:
    """Returns the work as sums."""
    step = StepWork(samples=work.samples > 0)
    for context in work.decodes:
        step.add(1, context)
    for rows, context in work.chunks:
        step.add(rows, context)
    return step


def compare(cost: StageCost, runs: Iterable[MeasuredRun]) -> list[Comparison]:
    """Simulates each run on the stages and returns its times beside those measured."""
    found = []
    for run in runs:
        result = simulate(
            [Call(prompt, output, max_tokens=output) for _, prompt, output in run.requests],
            [arrival_s for arrival_s, _, _ in run.requests],
            cost,
            _settings(run),
        )
        for number, record in enumerate(result.records):
            if record.error is not None:
                raise ConfigError(f"run {run.name}: request {number}: {record.error}")
            times = (("first", run.first_s, 0), ("last", run.last_s, -1))
            for what, measured, index in times:
                simulated_s = record.chunks_s[index]
                found.append(Comparison(run.name, number, what, measured[number], simulated_s))
    return found


def _settings(run: MeasuredRun) -> SimulationSettings:
    """Returns settings with memory for all requests."""
    longest = max(prompt + output for _, prompt, output in run.requests)
    pages = sum(-(-(prompt + output) // _PAGE_TOKENS) + 1 for _, prompt, output in run.requests)
    config = EngineConfig(
        max_model_len=longest,
        max_num_seqs=max(16, len(run.requests)),
        max_num_batched_tokens=run.max_num_batched_tokens,
        inter_token_slo_ms=run.inter_token_slo_ms,
        inter_token_factor=inf,
        kv_cache_bytes=(pages + 16) * _PAGE_TOKENS * _TOKEN_BYTES,
        kv_page_bytes=_PAGE_TOKENS * _TOKEN_BYTES,
        prefix_cache=False,
    )
    return SimulationSettings(config, (LayerGroup(_TOKEN_BYTES),))


def load_measured(file: Path) -> tuple[FittedStages, list[MeasuredRun]]:
    """Returns the fitted stages and the runs of a file. Raises ConfigError that names what is
    wrong with it."""
    try:
        with open_regular(file) as opened:
            values: dict[str, Any] = json.loads(opened.read())
        number = int(values["num_stages"])
        steps = [(_work(step), [float(s) for s in step["stage_s"]]) for step in values["steps"]]
        runs = [_run(run) for run in values["runs"]]
        hop_s = float(values["hop_s"])
    except OSError as error:
        raise ConfigError(f"check {file}: {reason(error)}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"check {file} has no measured stages: {error!r}") from error
    for index, (_, seconds) in enumerate(steps):
        if len(seconds) != number:
            raise ConfigError(
                f"check {file}: steps[{index}].stage_s has {len(seconds)} of {number} stages"
            )
    for run in runs:
        if not len(run.requests) == len(run.first_s) == len(run.last_s):
            raise ConfigError(f"check {file}: run {run.name} needs first_s and last_s per request")
    return fit_stages(steps, hop_s), runs


def fit_stages(steps: Sequence[tuple[StepWork, Sequence[float]]], hop_s: float) -> FittedStages:
    """Fits the cost of each stage to steps with the seconds of all stages. Raises ConfigError if
    there are too few."""
    if not steps:
        raise ConfigError("a fit of stages needs steps")
    stages = [
        fit_times([(work, seconds[index]) for work, seconds in steps])
        for index in range(len(steps[0][1]))
    ]
    return FittedStages(stages, hop_s)


def _work(step: Mapping[str, Any]) -> StepWork:
    if "work" in step:
        return StepWork(**step["work"])
    chunks = tuple((int(rows), int(context)) for rows, context in step.get("chunks", ()))
    decodes = tuple(int(context) for context in step.get("decodes", ()))
    return step_work(GridWork(chunks, decodes, int(step.get("samples", 0))))


def _run(run: Mapping[str, Any]) -> MeasuredRun:
    requests = tuple(
        (float(one["arrival_s"]), int(one["prompt"]), int(one["output"])) for one in run["requests"]
    )
    return MeasuredRun(
        name=str(run["name"]),
        requests=requests,
        first_s=tuple(float(s) for s in run["first_s"]),
        last_s=tuple(float(s) for s in run["last_s"]),
        max_num_batched_tokens=int(run.get("max_num_batched_tokens", 512)),
        inter_token_slo_ms=run.get("inter_token_slo_ms"),
    )


def show_fits(cost: FittedStages, out: Callable[[str], object] = print) -> None:
    """Prints how well each stage's steps are fitted; a machine on which steps stall is busy with
    something else, and its runs cannot be predicted."""
    for number, stage in enumerate(cost.stages):
        out(
            f"stage {number}: a fit of {stage.num_steps} steps, median error"
            f" {stage.median_error:.1%}; steps that stalled took {stage.stalled_share:.0%} of the"
            " time"
        )


def show(found: Sequence[Comparison], out: Callable[[str], object] = print) -> None:
    """Prints a line for each time, and how many are within TOLERANCE."""
    out(f"{'run':24} {'request':>7} {'token':6} {'measured':>10} {'simulated':>10} {'error':>8}")
    for one in found:
        out(
            f"{one.run:24} {one.request:7} {one.what:6} {one.measured_s:8.3f} s"
            f" {one.simulated_s:8.3f} s {one.error:+8.1%}{'' if one.is_within else ' NOT REACHED'}"
        )
    within = sum(one.is_within for one in found)
    out(f"{within} of {len(found)} times are within {TOLERANCE:.0%}")
