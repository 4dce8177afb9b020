"""The simulator beside a real run: the embedded model in this process, its default settings, its
mixed requests.

First a run apart, with another seed: everything at once, then Poisson arrivals. It says what the
engine can do, and the cost model is fitted to its steps (bench/plan/calibrate.py); the delays of
the pools are those of requests that came when nothing was computed. Then for some shares of the
capacity a real run, and the same requests (times at which they were handed over, prompts' tokens,
answers' lengths) through the simulator. Real medians of TTFT and TPOT should be met within
TOLERANCE. The generator and the engine share the machine, in the calibration as in the runs.

Run: python -m bench.simulate.check [--quick]
"""

from __future__ import annotations

import argparse
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
PERCENTS = (50, 90, 99)


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
class ScaledCost:
    """A fit is made to steps that nothing disturbed. Answers have all of them: factor is what the
    steps of the paced run took, over what the fit says."""

    fitted: FittedCost
    factor: float

    def seconds(self, work: StepWork) -> float:
        return self.factor * self.fitted.seconds(work)


@dataclass(frozen=True, slots=True)
class Calibration:
    """capacity: requests/s with everything there at once."""

    capacity: float
    cost: ScaledCost
    delays: PoolDelays


def calibrate(burst: RunResult, paced: RunResult) -> Calibration:
    """burst: all at once. paced: with pauses, so that some requests met an idle engine."""
    steps = [*burst.steps, *paced.steps]
    fitted = fit_times([(_work(step), step.end_s - step.start_s) for step in steps])
    real_s = sum(step.end_s - step.start_s for step in paced.steps)
    cost = ScaledCost(fitted, real_s / sum(fitted.seconds(_work(step)) for step in paced.steps))
    ends = [step.end_s for step in paced.steps]
    starts = [step.start_s for step in paced.steps]
    alone_s, output_s = [], []
    for record in paced.records:
        place = bisect_right(starts, record.sent_s)
        if record.queue_s is not None and (place == 0 or ends[place - 1] < record.sent_s):
            alone_s.append(record.queue_s)
        for at_s in record.chunks_s:
            last = bisect_right(ends, at_s)
            output_s += [at_s - ends[last - 1]] if last else []
    lengths = [record.prompt_tokens or 0 for record in paced.records]
    delays = PoolDelays(
        tokenize_token_s=statistics.median(alone_s) / statistics.median(lengths),
        output_s=statistics.median(output_s),
    )
    return Calibration(len(burst.records) / burst.window[1], cost, delays)


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


async def check(seconds: float, seed: int = 0) -> tuple[Calibration, list[Compared]]:
    """seconds: of each run."""
    engine = Engine()
    found: list[Compared] = []
    async with EngineTarget(engine) as target:
        rig = Rig(engine, target)
        await rig.run(math.inf, 16, seed + 1)  # memory is touched
        count = max(32, int(4 * seconds))
        burst, _ = await rig.run(math.inf, count, seed + 2)
        rate = 0.5 * count / burst.window[1]
        paced, _ = await rig.run(rate, max(32, int(rate * seconds / 2)), seed + 3)
        calibration = calibrate(burst, paced)
        settings = rig.settings(calibration.delays)
        for number, share in enumerate(SHARES):
            qps = share * calibration.capacity
            real, calls = await rig.run(qps, max(16, int(qps * seconds)), seed + 4 + number)
            sent_s = [record.sent_s for record in real.records]
            simulated = simulate(calls, sent_s, calibration.cost, settings, qps=qps)
            found += compare(share, real, simulated)
    return calibration, found


def compare(share: float, real: RunResult, simulated: RunResult) -> list[Compared]:
    found = []
    for metric, of in (("TTFT", _ttft), ("TPOT", _tpot)):
        values = [
            sorted(value for record in run.records if (value := of(record)) is not None)
            for run in (real, simulated)
        ]
        one, other = ([1e3 * _quantile(v, percent) for percent in PERCENTS] for v in values)
        error = other[0] / one[0] - 1
        found.append(Compared(share, real.qps, len(real.records), metric, one, other, error))
    return found


def _ttft(record: Record) -> float | None:
    return record.chunks_s[0] - record.sent_s if record.chunks_s else None


def _tpot(record: Record) -> float | None:
    count = record.output_tokens or 0
    return (record.chunks_s[-1] - record.chunks_s[0]) / (count - 1) if count > 1 else None


def _quantile(values: Sequence[float], percent: float) -> float:
    return values[min(len(values) - 1, int(percent / 100 * len(values)))]


def show(calibration: Calibration, rows: Sequence[Compared]) -> None:
    cost, delays = calibration.cost, calibration.delays
    print(
        f"capacity {calibration.capacity:.1f} requests/s; fit of {cost.fitted.num_steps} steps:"
        f" median error {100 * cost.fitted.median_error:.1f} %,"
        f" p90 {100 * cost.fitted.p90_error:.1f} %, times {cost.factor:.2f};"
        f" {1e6 * delays.tokenize_token_s:.1f} us to tokenize a token,"
        f" {1e3 * delays.output_s:.2f} ms until it is with the client"
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
    calibration, rows = uvloop.run(check(2.0 if args.quick else args.seconds, args.seed))
    show(calibration, rows)
    print(
        json.dumps({"calibration": asdict(calibration), "compared": [asdict(row) for row in rows]})
    )


if __name__ == "__main__":
    main()
