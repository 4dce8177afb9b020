"""The simulator beside a real run: the embedded model in this process, its default settings, its
mixed requests.

A run of everything at once says what the engine can do. Then for some shares of that runs in turn:
one for the calibration, a real one, and again. The cost model is fitted to the steps of the
former (bench/plan/calibrate.py), which have other requests; the delays of the pools and how much
longer than fitted the steps took one after the other are theirs, too: the generator shares the
machine, others may, and its speed drifts. Then the real runs' requests (times at which they were
handed over, prompts' tokens, answers' lengths) go through the simulator. Real medians of TTFT and
TPOT should be met within TOLERANCE.

Run: python -m bench.simulate.check [--quick]
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import uvloop

from bench.load.calls import Call
from bench.load.datasets import DatasetSettings
from bench.load.options import LoadOptions
from bench.load.record import Record, RunResult, StepRow
from bench.load.run import offer
from bench.load.schedule import ArrivalSettings, make_schedule
from bench.load.targets import EngineTarget
from bench.load.work import Work
from bench.plan.calibrate import FittedCost, fit_times
from bench.simulate.load import simulate
from bench.simulate.settings import PoolDelays, SimulationSettings
from serve import Engine
from serve.config import EngineConfig
from serve.engine import encode_chat, make_chat_template
from serve.step_time import StepWork

TOLERANCE = 0.15
SHARES = (0.3, 0.6, 0.85)
ROUNDS = 4
PERCENTS = (50, 90, 99)
_IDLE_S = 1e-4  # between two steps: nothing was computed


@dataclass(frozen=True, slots=True)
class Compared:
    """Milliseconds at PERCENTS, and by how much the simulated median is off."""

    share: float
    qps: float
    requests: int
    metric: str
    real_ms: list[float]
    simulated_ms: list[float]
    error: float


class PlayedCost:
    """A fit is made to steps that nothing disturbs. Here some step in the calibration took so many
    times what the fit says, and the next ones, in their order, do so too: who shares the machine
    stops it for longer or shorter."""

    def __init__(self, fitted: FittedCost, ratios: Sequence[float]) -> None:
        self._fitted = fitted
        self._ratios = itertools.cycle(ratios)

    def seconds(self, work: StepWork) -> float:
        return self._fitted.seconds(work) * next(self._ratios)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Of runs at one rate. ratios: of the steps' times to the fitted ones."""

    fitted: FittedCost
    ratios: list[float]
    delays: PoolDelays


def calibrate(runs: Sequence[RunResult]) -> Calibration:
    """The mixed requests' prompts are computed in one step, so a request's first token comes with
    the end of the step that it was first scheduled for. What happened before that step's
    messages were taken, and after the one before, is only known to lie between the two."""
    times = [(_work(step), step.end_s - step.start_s) for run in runs for step in run.steps]
    fitted = fit_times(times)
    ratios = [seconds / fitted.seconds(work) for work, seconds in times]
    before_s, output_s = [], []
    for run in runs:
        starts = [step.start_s for step in run.steps]
        for record in run.records:
            if record.queue_s is None or not record.chunks_s:
                continue
            place = max(0, bisect_right(starts, record.sent_s + record.queue_s) - 1)
            output_s.append(record.chunks_s[0] - run.steps[place].end_s)
            earliest_s = record.queue_s
            if place and starts[place] - run.steps[place - 1].end_s < _IDLE_S:
                earliest_s = max(0.0, starts[place - 1] - record.sent_s)
            before_s.append((min(earliest_s, record.queue_s) + record.queue_s) / 2)
    delays = PoolDelays(
        tokenize_s=statistics.median(before_s), output_s=statistics.median(output_s)
    )
    return Calibration(fitted, ratios, delays)


def _work(step: StepRow) -> StepWork:
    """The mixed requests' prompts fit into a step, so each of them samples."""
    return StepWork(
        step.num_decodes,
        step.num_context,
        step.num_decodes + step.num_prefill_rows,
        step.num_pairs,
        step.num_chunks,
        samples=True,
    )


class Rig:
    """A running engine, and what the simulator has to know of it."""

    def __init__(self, engine: Engine, target: EngineTarget) -> None:
        self._engine = engine
        self._target = target
        template = make_chat_template(engine.tokenizer)
        assert template is not None, "the embedded model has one"
        self._template = template

    async def run(self, qps: float, count: int, seed: int) -> tuple[RunResult, list[Call]]:
        """The run, and its calls as they turned out."""
        schedule, _ = make_schedule(
            DatasetSettings("mixed", max_model_len=self._engine.max_model_len),
            ArrivalSettings("poisson" if qps < float("inf") else "inf"),
            qps=qps,
            requests=count,
            seed=seed,
            tokens=self._target.prompt_tokens,
        )
        result = await offer(schedule, self._target, LoadOptions(seed=seed))
        records = result.records
        return result, [
            self._call(work, record) for work, record in zip(schedule.works, records, strict=True)
        ]

    def _call(self, work: Work, record: Record) -> Call:
        assert work.messages is not None and record.output_tokens, f"{record}"
        engine = self._engine
        tokens = encode_chat(self._template, engine.tokenizer, work.messages, engine.loaded.limits)
        return Call(
            len(tokens),
            record.output_tokens,
            work.max_tokens,
            client=work.client,
            runs=tuple((token, 1) for token in tokens),
        )

    def settings(self, delays: PoolDelays) -> SimulationSettings:
        books = self._engine.loaded.core.books
        config = EngineConfig(
            max_model_len=books.max_model_len,
            kv_cache_bytes=books.num_pages * books.page_bytes,
            kv_page_bytes=books.page_bytes,
        )
        groups = tuple(group.layers for group in books.layout.groups)
        return SimulationSettings(config, groups, delays)


async def check(seconds: float, seed: int = 0) -> tuple[float, list[Calibration], list[Compared]]:
    """seconds: of real runs at each rate, in ROUNDS parts; between them half of that for the
    calibration. The capacity in requests/s, and what was found at each of SHARES of it."""
    engine = Engine()
    calibrations: list[Calibration] = []
    found: list[Compared] = []
    async with EngineTarget(engine) as target:
        rig = Rig(engine, target)
        await rig.run(math.inf, 64, seed)  # memory is touched
        count = max(64, int(40 * seconds))
        burst, _ = await rig.run(math.inf, count, seed + 1)
        capacity = count / burst.window[1]
        seeds = itertools.count(seed + 2)
        for share in SHARES:
            qps = share * capacity
            many = max(16, int(qps * seconds / ROUNDS))
            apart, real = [], []
            for _ in range(ROUNDS):
                apart.append((await rig.run(qps, many // 2, next(seeds)))[0])
                real.append(await rig.run(qps, many, next(seeds)))
            calibration = calibrate(apart)
            cost = PlayedCost(calibration.fitted, calibration.ratios)
            settings = rig.settings(calibration.delays)
            simulated = [
                simulate(calls, [record.sent_s for record in run.records], cost, settings)
                for run, calls in real
            ]
            calibrations.append(calibration)
            found += compare(share, [run for run, _ in real], simulated)
    return capacity, calibrations, found


def compare(
    share: float, real: Sequence[RunResult], simulated: Sequence[RunResult]
) -> list[Compared]:
    found = []
    for metric, of in (("TTFT", _ttft), ("TPOT", _tpot)):
        values = [
            sorted(
                value for run in runs for record in run.records if (value := of(record)) is not None
            )
            for runs in (real, simulated)
        ]
        one, other = ([1e3 * _quantile(v, percent) for percent in PERCENTS] for v in values)
        count = sum(len(run.records) for run in real)
        error = other[0] / one[0] - 1
        found.append(Compared(share, real[0].qps, count, metric, one, other, error))
    return found


def _ttft(record: Record) -> float | None:
    return record.chunks_s[0] - record.sent_s if record.chunks_s else None


def _tpot(record: Record) -> float | None:
    count = record.output_tokens or 0
    return (record.chunks_s[-1] - record.chunks_s[0]) / (count - 1) if count > 1 else None


def _quantile(values: Sequence[float], percent: float) -> float:
    return values[min(len(values) - 1, int(percent / 100 * len(values)))]


def show(capacity: float, calibrations: Sequence[Calibration], rows: Sequence[Compared]) -> None:
    print(f"capacity {capacity:.1f} requests/s")
    for share, calibration in zip(SHARES, calibrations, strict=True):
        fitted, delays = calibration.fitted, calibration.delays
        mean = statistics.fmean(calibration.ratios)
        print(
            f"{share:5.0%} fit of {fitted.num_steps} steps: median error"
            f" {100 * fitted.median_error:.1f} %, on average {mean:.2f} times as long;"
            f" {1e3 * delays.tokenize_s:.2f} ms before,"
            f" {1e3 * delays.output_s:.2f} ms after"
        )
    print(f"{'load':>5} {'requests':>8} {'':5} {'p50':>15} {'p90':>15} {'p99':>15} {'error':>7}")
    for row in rows:
        pairs = [
            f"{one:7.2f}/{other:7.2f}"
            for one, other in zip(row.real_ms, row.simulated_ms, strict=True)
        ]
        print(
            f"{row.share:5.0%} {row.requests:8} {row.metric:5} {' '.join(pairs)}"
            f" {100 * row.error:+6.1f} %{'' if abs(row.error) <= TOLERANCE else ' NOT REACHED'}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="short runs, for tests")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each run")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    machine = platform.processor() or platform.machine()
    print(f"machine: {machine}, Python {platform.python_version()}; milliseconds, real/simulated")
    seconds = 2.0 if args.quick else args.seconds
    capacity, calibrations, rows = uvloop.run(check(seconds, args.seed))
    show(capacity, calibrations, rows)
    print(
        json.dumps(
            {
                "capacity": capacity,
                "fits": [asdict(calibration.fitted) for calibration in calibrations],
                "compared": [asdict(row) for row in rows],
            }
        )
    )


if __name__ == "__main__":
    main()
