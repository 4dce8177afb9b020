"""Compares queue policies by the time to completion in real runs of the embedded model.

Half of its mixed requests teach the predictors, the other half are measured. A burst of them finds
the capacity with max_num_seqs slots; then each order serves the same Poisson arrivals at shares of
that rate, in turn, in an engine that stays the same over the rates. "of oracle" is the share of
what srpt with known lengths gains over fcfs in the mean, at the same rate.

Run: python -m bench.prediction.orders [--seconds 20] [--max-num-seqs 8] [--rounds 3] [--quick]
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import statistics
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from typing import Any

import uvloop

from bench.load.client.record import Outcome, RunResult
from bench.load.client.run import offer
from bench.load.client.targets import EngineTarget
from bench.load.workload.arrivals import arrival_times
from bench.load.workload.offered_load import LoadOptions
from bench.load.workload.work import Schedule, Work
from bench.prediction.requests import Oracle, halves, known_lengths
from serve import Engine

SHARES = (0.6, 0.8, 0.95)


@dataclass(frozen=True, slots=True)
class Case:
    """An engine's settings. order fcfs with history is what the others are compared with."""

    name: str
    order: str
    predictor: Any


@dataclass(frozen=True, slots=True)
class Result:
    """Seconds from arrival to the last token. of_oracle: see above."""

    name: str
    mean_s: float
    p50_s: float
    p99_s: float
    of_oracle: float


def make_cases(lengths: dict[tuple[int, ...], int]) -> list[Case]:
    """Returns the orders to compare."""
    return [
        Case("fcfs", "fcfs", "history"),
        Case("mlfq", "mlfq", "history"),
        Case("srpt, history", "srpt", "history"),
        Case("srpt, learned", "srpt", "learned"),
        Case("srpt, oracle", "srpt", Oracle(lengths)),
    ]


def chosen(works: Sequence[Work], count: int, seed: int) -> list[Work]:
    """Returns `count` of the requests in a random order."""
    rng = random.Random(f"prediction-{seed}")
    found: list[Work] = []
    while len(found) < count:
        found += rng.sample(list(works), len(works))
    return found[:count]


async def run(target: EngineTarget, works: list[Work], qps: float, seed: int) -> RunResult:
    """Offers the requests with Poisson arrivals, or at once if qps is infinite."""
    times = [0.0] * len(works)
    if math.isfinite(qps):
        times = arrival_times("poisson", qps, len(works), seed)
    return await offer(Schedule(qps, works, times), target, LoadOptions(seed=seed))


def completion_s(result: RunResult) -> list[float]:
    """Returns the seconds from when each request was due until its answer ended."""
    assert all(record.outcome is Outcome.OK for record in result.records), "all must be answered"
    return [record.finished_s - record.scheduled_s for record in result.records]


async def measure(
    seconds: float, slots: int, rounds: int
) -> tuple[float, dict[float, list[Result]]]:
    """Returns the capacity in requests/s, and the results for each share of it."""
    learn, test = halves()
    cases = make_cases(known_lengths(test))
    times: dict[float, dict[str, list[float]]] = {share: {} for share in SHARES}
    async with AsyncExitStack() as stack:
        targets = {}
        for case in cases:
            engine = Engine(
                order=case.order, length_predictor=case.predictor, max_num_seqs=slots, seed=0
            )
            targets[case.name] = await stack.enter_async_context(EngineTarget(engine))
            # at a rate that lets the predictor see each request's end before others arrive
            await run(targets[case.name], learn[: int(60 * seconds)], 100.0, 1)
        rates = []
        for name in ("fcfs", "srpt, learned", "fcfs"):
            burst = await run(targets[name], chosen(test, int(20 * seconds), 2), math.inf, 2)
            rates.append(len(burst.records) / burst.window[1])
        capacity = statistics.median(rates)
        for number in range(rounds):
            for share in SHARES:
                qps = share * capacity
                works = chosen(test, max(32, int(qps * seconds / rounds)), 10 + number)
                for case in cases:
                    found = await run(targets[case.name], works, qps, 10 + number)
                    times[share].setdefault(case.name, []).extend(completion_s(found))
    return capacity, {share: results_of(by_case) for share, by_case in times.items()}


def results_of(times: dict[str, list[float]]) -> list[Result]:
    """Returns a result for each case, from the seconds of its requests."""
    means = {name: statistics.fmean(values) for name, values in times.items()}
    gain_s = means["fcfs"] - means["srpt, oracle"]
    results = []
    for name, values in times.items():
        values = sorted(values)
        share = (means["fcfs"] - means[name]) / gain_s if gain_s else math.nan
        p50, p99 = values[len(values) // 2], values[int(0.99 * (len(values) - 1))]
        results.append(Result(name, means[name], p50, p99, share))
    return results


def show(capacity: float, slots: int, results: dict[float, list[Result]]) -> None:
    """Prints a table for each share of the capacity."""
    print(f"capacity with {slots} slots: {capacity:.1f} requests/s; seconds to completion")
    for share, rows in results.items():
        print(f"\n{share:.0%} of the capacity, {share * capacity:.1f} requests/s")
        print(f"  {'order':14} {'mean':>9} {'p50':>9} {'p99':>9} {'of oracle':>10}")
        for row in rows:
            print(
                f"  {row.name:14} {1e3 * row.mean_s:6.1f} ms {1e3 * row.p50_s:6.1f} ms"
                f" {1e3 * row.p99_s:6.0f} ms {100 * row.of_oracle:8.0f} %"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of each order at each rate")
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a short run, for tests")
    args = parser.parse_args()
    machine = platform.processor() or platform.machine()
    print(f"machine: {machine}, Python {platform.python_version()}")
    seconds, rounds = (1.0, 1) if args.quick else (args.seconds, args.rounds)
    capacity, results = uvloop.run(measure(seconds, args.max_num_seqs, rounds))
    show(capacity, args.max_num_seqs, results)
    tables = {f"{share:g}": [asdict(row) for row in rows] for share, rows in results.items()}
    print(json.dumps({"capacity": capacity, "results": tables}))


if __name__ == "__main__":
    main()
