"""Compares the simulator with real runs of the embedded model in this process.

The engine has its default settings and serves its mixed requests. A burst of all requests at once
measures the capacity, and ROUNDS runs at each of SHARES of that rate follow. The requests of every
run (arrival times, prompt tokens and answer lengths) are simulated twice, with two cost models
(bench/plan/calibrate.py, resampled.py):

    held out  is fitted to the other runs at the same rate and to the burst, without a step of the
              simulated run. Medians of TTFT and TPOT should be within TOLERANCE
    fitted    is fitted to the steps in every other SLICE_S of the run itself and to the burst. It
              shows the error that remains when the machine's speed is known

The machine's speed drifts, since the load generator and other processes share it. Two real runs at
the same rate therefore differ as well, and the last column shows by how much. The simulator decides
in both cases which sequences run together in a step, which wait, and for how long.

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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import uvloop

from bench.load.client.record import Record, RunResult, StepRow
from bench.load.client.run import offer
from bench.load.client.targets import EngineTarget
from bench.load.workload.datasets import DatasetSettings
from bench.load.workload.offered_load import LoadOptions
from bench.load.workload.schedule import ArrivalSettings, make_schedule
from bench.load.workload.work import Call, Work
from bench.plan.calibrate import FittedCost, fit_times
from bench.simulate.load import simulate
from bench.simulate.resampled import ResampledCost
from bench.simulate.settings import PoolDelays, SimulationSettings
from serve import Engine
from serve.config import EngineConfig
from serve.engine.chat_prompt import encode_chat
from serve.scheduler.step_time import StepWork

TOLERANCE = 0.15
SHARES = (0.2, 0.4, 0.6)
ROUNDS = 4
SLICE_S = 0.25
PERCENTS = (50, 90, 99)
_IDLE_S = 1e-4  # a longer gap between two steps means that the engine was idle


@dataclass(frozen=True, slots=True)
class Comparison:
    """One metric at one rate, in milliseconds at PERCENTS. error is the relative error of the
    simulated median."""

    share: float
    qps: float
    requests: int
    metric: str
    real_ms: list[float]
    simulated_ms: list[float]
    error: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """The cost model and the delays of runs at one rate. factor is the ratio of the steps' total
    time to the total of the fitted times."""

    fitted: FittedCost
    cost: ResampledCost
    factor: float
    delays: PoolDelays


def calibrate(
    runs: Sequence[RunResult], burst: RunResult, *, every_other_slice: bool = False
) -> Calibration:
    """Fits the steps of runs at one rate, or only those in every other SLICE_S.

    burst is a run with larger steps, such as a simulated run may have now and then.

    The prompt of a mixed request is computed in one step, so its first token comes at the end of
    the step that first schedules it. The time at which the loop got the request is only known to
    lie between the start of that step and the start of the previous one.
    """
    fitted_steps = [
        step
        for run in runs
        for step in run.steps
        if not every_other_slice or int(step.start_s / SLICE_S) % 2 == 0
    ]
    times = [(_work(step), step.end_s - step.start_s) for step in (*fitted_steps, *burst.steps)]
    fitted = fit_times(times)
    factor = sum(s for _, s in times) / sum(fitted.seconds(work) for work, _ in times)
    before_s, output_s = [], []
    for run in runs:
        starts = [step.start_s for step in run.steps]
        for record in run.records:
            if record.queue_s is None or not record.chunks_s:
                continue
            index = max(0, bisect_right(starts, record.sent_s + record.queue_s) - 1)
            output_s.append(record.chunks_s[0] - run.steps[index].end_s)
            earliest_s = record.queue_s
            if index and starts[index] - run.steps[index - 1].end_s < _IDLE_S:
                earliest_s = max(0.0, starts[index - 1] - record.sent_s)
            before_s.append((min(earliest_s, record.queue_s) + record.queue_s) / 2)
    delays = PoolDelays(
        tokenize_s=statistics.median(before_s), output_s=statistics.median(output_s)
    )
    return Calibration(fitted, ResampledCost(fitted, times), factor, delays)


def calibrate_without(index: int, runs: Sequence[RunResult], burst: RunResult) -> Calibration:
    """Fits all runs except runs[index]."""
    return calibrate([run for other, run in enumerate(runs) if other != index], burst)


def _work(step: StepRow) -> StepWork:
    """Returns a step's work. A prompt of a mixed request fits into a step, so each step samples."""
    return StepWork(
        step.num_decodes,
        step.num_context,
        step.num_decodes + step.num_prefill_rows,
        step.num_pairs,
        step.num_chunks,
        samples=True,
    )


class Rig:
    """A running engine, and the settings with which the simulator imitates it."""

    def __init__(self, engine: Engine, target: EngineTarget) -> None:
        self._engine = engine
        self._target = target
        template = engine.loaded.template
        assert template is not None, "the embedded model has a chat template"
        self._template = template

    async def run(self, qps: float, count: int, seed: int) -> tuple[RunResult, list[Call]]:
        """Offers `count` requests at a rate. Returns the run and its calls with their actual
        lengths."""
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
        kv = self._engine.loaded.core.kv
        config = EngineConfig(
            max_model_len=kv.max_model_len,
            kv_cache_bytes=kv.num_pages * kv.page_bytes,
            kv_page_bytes=kv.page_bytes,
        )
        groups = tuple(group.layers for group in kv.layout.groups)
        return SimulationSettings(config, groups, delays)


@dataclass(frozen=True, slots=True)
class RateResult:
    """The comparisons at one rate. calibration is that of the first run itself. held_out uses cost
    models of the other runs, fitted those of each run itself. repeated has the medians of TTFT and
    TPOT in the later half of the real runs over those in the earlier half."""

    calibration: Calibration
    held_out: list[Comparison]
    fitted: list[Comparison]
    repeated: list[float]


async def check(seconds: float, seed: int = 0) -> tuple[float, list[RateResult]]:
    """Runs the real engine for `seconds` at each of SHARES of its capacity, in ROUNDS parts.
    Returns the capacity in requests per second and a result for each share."""
    results: list[RateResult] = []
    async with EngineTarget(engine := Engine(speculation="off")) as target:
        rig = Rig(engine, target)
        await rig.run(math.inf, 64, seed)  # warms up: memory is touched
        count = max(64, int(40 * seconds))
        burst, _ = await rig.run(math.inf, count, seed + 1)
        capacity = count / burst.window[1]
        seeds = itertools.count(seed + 2)
        for share in SHARES:
            qps = share * capacity
            per_run = max(16, int(qps * seconds / ROUNDS))
            real = [await rig.run(qps, per_run, next(seeds)) for _ in range(ROUNDS)]
            results.append(compare_rate(share, real, burst, rig.settings))
    return capacity, results


def compare_rate(
    share: float,
    real: Sequence[tuple[RunResult, list[Call]]],
    burst: RunResult,
    settings: Callable[[PoolDelays], SimulationSettings],
) -> RateResult:
    """Simulates each run with a fit to the other runs and with a fit to itself."""
    runs, middle = [run for run, _ in real], len(real) // 2

    def simulated(calibrations: Sequence[Calibration]) -> list[RunResult]:
        return [
            simulate(
                calls, [record.sent_s for record in run.records], one.cost, settings(one.delays)
            )
            for (run, calls), one in zip(real, calibrations, strict=True)
        ]

    fitted = [calibrate([run], burst, every_other_slice=True) for run in runs]
    held_out = [calibrate_without(index, runs, burst) for index in range(len(runs))]
    again = compare(share, runs[:middle], runs[middle:])
    return RateResult(
        fitted[0],
        compare(share, runs, simulated(held_out)),
        compare(share, runs, simulated(fitted)),
        [1 + row.error for row in again],
    )


def compare(
    share: float, real: Sequence[RunResult], simulated: Sequence[RunResult]
) -> list[Comparison]:
    """Returns a comparison for TTFT and one for TPOT."""
    comparisons = []
    for metric, seconds in (("TTFT", _ttft), ("TPOT", _tpot)):
        values = [
            sorted(
                s for run in runs for record in run.records if (s := seconds(record)) is not None
            )
            for runs in (real, simulated)
        ]
        one, other = ([1e3 * _quantile(v, percent) for percent in PERCENTS] for v in values)
        count = sum(len(run.records) for run in real)
        error = other[0] / one[0] - 1
        comparisons.append(Comparison(share, real[0].qps, count, metric, one, other, error))
    return comparisons


def _ttft(record: Record) -> float | None:
    return record.chunks_s[0] - record.sent_s if record.chunks_s else None


def _tpot(record: Record) -> float | None:
    count = record.output_tokens or 0
    return (record.chunks_s[-1] - record.chunks_s[0]) / (count - 1) if count > 1 else None


def _quantile(values: Sequence[float], percent: float) -> float:
    return values[min(len(values) - 1, int(percent / 100 * len(values)))]


def show(capacity: float, results: Sequence[RateResult]) -> None:
    """Prints the fits and the comparisons of all rates."""
    print(f"capacity {capacity:.1f} requests/s")
    for share, result in zip(SHARES, results, strict=True):
        fitted, delays = result.calibration.fitted, result.calibration.delays
        print(
            f"{share:5.0%} fit of {fitted.num_steps} steps: median error"
            f" {100 * fitted.median_error:.1f} %, steps take {result.calibration.factor:.2f} times"
            f" the fit; delays: {1e3 * delays.tokenize_s:.2f} ms before the first step,"
            f" {1e3 * delays.output_s:.2f} ms after a step"
        )
    print(
        f"{'load':>5} {'requests':>8} {'':5} {'p50':>15} {'p90':>15} {'p99':>15} {'held out':>8}"
        f" {'fitted':>8} {'repeated':>10}"
    )
    for result in results:
        rows = zip(result.held_out, result.fitted, result.repeated, strict=True)
        for row, own, repeated in rows:
            pairs = [
                f"{one:7.2f}/{other:7.2f}"
                for one, other in zip(row.real_ms, row.simulated_ms, strict=True)
            ]
            print(
                f"{row.share:5.0%} {row.requests:8} {row.metric:5} {' '.join(pairs)}"
                f" {100 * row.error:+6.1f} % {100 * own.error:+6.1f} %"
                f" {100 * (repeated - 1):+7.1f} %"
                f"{'' if abs(row.error) <= TOLERANCE else ' NOT REACHED'}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="short runs, for tests")
    parser.add_argument(
        "--seconds", type=float, default=40.0, help="duration of the runs at each rate"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    machine = platform.processor() or platform.machine()
    print(
        f"machine: {machine}, Python {platform.python_version()}; milliseconds, real/simulated"
        " with the held-out fit; repeated: later over earlier real runs"
    )
    seconds = 2.0 if args.quick else args.seconds
    capacity, results = uvloop.run(check(seconds, args.seed))
    show(capacity, results)
    print(
        json.dumps(
            {
                "capacity": capacity,
                "fits": [asdict(result.calibration.fitted) for result in results],
                "held_out": [asdict(row) for result in results for row in result.held_out],
                "fitted": [asdict(row) for result in results for row in result.fitted],
                "repeated": [result.repeated for result in results],
            }
        )
    )


if __name__ == "__main__":
    main()
