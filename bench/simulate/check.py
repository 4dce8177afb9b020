"""The simulator beside a real run: the embedded model in this process, its default settings, its
mixed requests.

A run of everything at once says what the engine can do. Then runs at some shares of that. The cost
model of each (bench/plan/calibrate.py, resampled.py) is made from the steps in every other SLICE_S
of the run itself, and of the burst: the generator shares the machine, others may, and its speed
drifts, so that two real runs at the same rate differ, by what is printed last. The run's requests
(times at which they were handed over, prompts' tokens, answers' lengths) then go through the
simulator: who runs with whom in which step, who waits, and for how long, is its own. Medians of
TTFT and TPOT should be those of the real run within TOLERANCE.

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

from bench.load.client.record import Record, RunResult, StepRow
from bench.load.client.run import offer
from bench.load.client.targets import EngineTarget
from bench.load.workload.datasets import DatasetSettings
from bench.load.workload.options import LoadOptions
from bench.load.workload.schedule import ArrivalSettings, make_schedule
from bench.load.workload.work import Call, Work
from bench.plan.calibrate import FittedCost, fit_times
from bench.simulate.load import simulate
from bench.simulate.resampled import ResampledCost
from bench.simulate.settings import PoolDelays, SimulationSettings
from serve import Engine
from serve.config import EngineConfig
from serve.engine.chat_prompt import encode_chat, make_chat_template
from serve.scheduler.step_time import StepWork

TOLERANCE = 0.15
SHARES = (0.2, 0.4, 0.6)
ROUNDS = 4
SLICE_S = 0.25
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


@dataclass(frozen=True, slots=True)
class Calibration:
    """Of runs at one rate. factor: of the steps' times to the fitted ones, on average."""

    fitted: FittedCost
    cost: ResampledCost
    factor: float
    delays: PoolDelays


def calibrate(run: RunResult, burst: RunResult) -> Calibration:
    """burst: a run with larger steps, which those of the run grow into now and then.

    The mixed requests' prompts are computed in one step, so a request's first token comes with the
    end of the step that it was first scheduled for. What happened before that step's messages
    were taken, and after the one before, is only known to lie between the two.
    """
    known = [step for step in run.steps if int(step.start_s / SLICE_S) % 2 == 0]
    times = [(_work(step), step.end_s - step.start_s) for step in (*known, *burst.steps)]
    fitted = fit_times(times)
    factor = sum(s for _, s in times) / sum(fitted.seconds(work) for work, _ in times)
    before_s, output_s = [], []
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
    return Calibration(fitted, ResampledCost(fitted, times), factor, delays)


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
        kv = self._engine.loaded.core.kv
        config = EngineConfig(
            max_model_len=kv.max_model_len,
            kv_cache_bytes=kv.num_pages * kv.page_bytes,
            kv_page_bytes=kv.page_bytes,
        )
        groups = tuple(group.layers for group in kv.layout.groups)
        return SimulationSettings(config, groups, delays)


@dataclass(frozen=True, slots=True)
class Shown:
    """At one rate. calibration: of the first run. repeated: the medians of TTFT and TPOT in the
    later half of the real runs over those in the earlier half."""

    calibration: Calibration
    compared: list[Compared]
    repeated: list[float]


async def check(seconds: float, seed: int = 0) -> tuple[float, list[Shown]]:
    """seconds: of real runs at each of SHARES of the capacity, in ROUNDS parts. The capacity in
    requests/s, and what was found."""
    shown: list[Shown] = []
    async with EngineTarget(engine := Engine()) as target:
        rig = Rig(engine, target)
        await rig.run(math.inf, 64, seed)  # memory is touched
        count = max(64, int(40 * seconds))
        burst, _ = await rig.run(math.inf, count, seed + 1)
        capacity = count / burst.window[1]
        seeds = itertools.count(seed + 2)
        for share in SHARES:
            qps = share * capacity
            many = max(16, int(qps * seconds / ROUNDS))
            real = [await rig.run(qps, many, next(seeds)) for _ in range(ROUNDS)]
            shown.append(_show_rate(share, real, burst, rig))
    return capacity, shown


def _show_rate(
    share: float, real: Sequence[tuple[RunResult, list[Call]]], burst: RunResult, rig: Rig
) -> Shown:
    calibrations = [calibrate(run, burst) for run, _ in real]
    simulated = [
        simulate(calls, [record.sent_s for record in run.records], found.cost, settings)
        for (run, calls), found in zip(real, calibrations, strict=True)
        for settings in [rig.settings(found.delays)]
    ]
    runs, middle = [run for run, _ in real], len(real) // 2
    again = compare(share, runs[:middle], runs[middle:])
    return Shown(calibrations[0], compare(share, runs, simulated), [1 + row.error for row in again])


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


def show(capacity: float, found: Sequence[Shown]) -> None:
    print(f"capacity {capacity:.1f} requests/s")
    for share, shown in zip(SHARES, found, strict=True):
        fitted, delays = shown.calibration.fitted, shown.calibration.delays
        print(
            f"{share:5.0%} fit of {fitted.num_steps} steps: median error"
            f" {100 * fitted.median_error:.1f} %, on average {shown.calibration.factor:.2f} times"
            f" as long; {1e3 * delays.tokenize_s:.2f} ms before,"
            f" {1e3 * delays.output_s:.2f} ms after"
        )
    print(
        f"{'load':>5} {'requests':>8} {'':5} {'p50':>15} {'p90':>15} {'p99':>15} {'error':>7}"
        f" {'real again':>10}"
    )
    for shown in found:
        for row, repeated in zip(shown.compared, shown.repeated, strict=True):
            pairs = [
                f"{one:7.2f}/{other:7.2f}"
                for one, other in zip(row.real_ms, row.simulated_ms, strict=True)
            ]
            print(
                f"{row.share:5.0%} {row.requests:8} {row.metric:5} {' '.join(pairs)}"
                f" {100 * row.error:+6.1f} % {100 * (repeated - 1):+7.1f} %"
                f"{'' if abs(row.error) <= TOLERANCE else ' NOT REACHED'}"
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
    capacity, found = uvloop.run(check(seconds, args.seed))
    show(capacity, found)
    print(
        json.dumps(
            {
                "capacity": capacity,
                "fits": [asdict(shown.calibration.fitted) for shown in found],
                "compared": [asdict(row) for shown in found for row in shown.compared],
                "repeated": [shown.repeated for shown in found],
            }
        )
    )


if __name__ == "__main__":
    main()
