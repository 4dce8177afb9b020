"""Compares queue policies by the time to completion in real runs of the embedded model.

Its steps are so short that the load generator and other programs weigh as much. --idle-layers
appends layers that add nothing: answers and hidden states stay the same, and a step takes longer.
--pace K lets each step take K times what simulated_orders says, however busy the machine is: the
model has computed it long before, and the engine waits.

Half of its mixed requests teach the predictors, the other half are measured. A burst of the first
half finds the capacity with fcfs and max_num_seqs slots. In each pass every order serves the second
half once, in new engines whose predictors have seen the first half: a pass has rounds, in which the
orders serve the same requests with the same Poisson arrivals one after the other, in another
sequence each time, so that what disturbs the machine for longer disturbs all of them.

"gain" is the share of fcfs's mean that an order saves, "of oracle" the share of what srpt with
known lengths saves, both with the 95 % interval of a bootstrap over the rounds.

Run: python -m bench.prediction.orders [--max-num-seqs 4] [--idle-layers 60] [--pace 3]
[--speculation off] [--shares 0.6,0.8,0.95] [--passes 1] [--rounds 2] [--quick]
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import uvloop

from bench.common.checkpoints import with_idle_layers
from bench.load.client.record import Outcome, RunResult
from bench.load.client.run import offer
from bench.load.client.targets import EngineTarget
from bench.load.workload.arrivals import arrival_times
from bench.load.workload.offered_load import LoadOptions
from bench.load.workload.work import Schedule, Work
from bench.prediction.order_results import Result, Rounds, results_of
from bench.prediction.paced import pace
from bench.prediction.requests import GREEDY, Oracle, halves, known_lengths, taught_history
from serve import LLM, Engine
from serve.config import DEFAULT_MODEL

SHARES = (0.6, 0.8, 0.95)
WARM_UP = 100  # requests that each new engine serves first, for its predicted step times


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured. pace: 0 lets steps take what they take. count: the requests of each half
    at most."""

    slots: int = 4
    idle_layers: int = 0
    pace: float = 0.0
    speculation: str = "off"
    shares: tuple[float, ...] = SHARES
    passes: int = 1
    rounds: int = 2
    count: int = 1 << 20


@dataclass(frozen=True, slots=True)
class Measured:
    """capacity: requests/s of a burst with fcfs; step_s: the mean of its steps' times."""

    capacity: float
    step_s: float
    results: dict[float, list[Result]]


@dataclass(slots=True)
class Server:
    """Makes the engines to compare, in a folder of its own. The model's answers to the requests to
    learn from have taught the predictors of each."""

    folder: Path
    plan: Plan
    model: str
    learn: dict[tuple[int, ...], int]
    test: dict[tuple[int, ...], int]
    num_made: int = 0

    @property
    def _taught(self) -> Path:
        return self.folder / "lengths.safetensors"

    def teach(self, works: Sequence[Work]) -> None:
        """Writes the file of lengths that the learned predictor begins with."""
        conversations = [work.messages for work in works if work.messages is not None]
        with LLM(self.model, max_num_seqs=64, length_predictor_file=self._taught) as llm:
            llm.chat(conversations, GREEDY, use_tqdm=False)

    def engines(self) -> dict[str, Engine]:
        """Returns an engine for each order to compare."""
        self.num_made += 1
        own = self.folder / f"lengths-{self.num_made}.safetensors"  # it is written at the end
        shutil.copy(self._taught, own)
        oracle = Oracle(self.learn | self.test)
        return {
            "fcfs": self._engine("fcfs", length_predictor=taught_history(self.learn)),
            "mlfq": self._engine("mlfq", length_predictor=taught_history(self.learn)),
            "srpt, learned": self._engine("srpt", length_predictor_file=own),
            "srpt, oracle": self._engine("srpt", length_predictor=oracle),
        }

    def _engine(self, order: str, **settings: Any) -> Engine:
        plan = self.plan
        return Engine(
            self.model,
            order=order,
            max_num_seqs=plan.slots,
            speculation=plan.speculation,
            seed=0,
            **settings,
        )


async def run(target: EngineTarget, works: list[Work], times: list[float]) -> RunResult:
    """Offers the requests at these times."""
    qps = len(times) / times[-1] if times[-1] else math.inf
    result = await offer(Schedule(qps, works, times), target, LoadOptions(seed=0))
    assert all(record.outcome is Outcome.OK for record in result.records), "all must be answered"
    return result


async def start(engine: Engine, plan: Plan, stack: AsyncExitStack) -> EngineTarget:
    target = await stack.enter_async_context(EngineTarget(engine))
    if plan.pace:
        pace(engine, plan.pace)
    return target


async def find_capacity(engine: Engine, works: list[Work], plan: Plan) -> tuple[float, float]:
    """Returns the requests per second of a burst, and the mean seconds of its steps."""
    async with AsyncExitStack() as stack:
        target = await start(engine, plan, stack)
        await run(target, works[:WARM_UP], [0.0] * len(works[:WARM_UP]))
        burst = await run(target, works, [0.0] * len(works))
    busy_s = math.fsum(step.end_s - step.start_s for step in burst.steps)
    return len(works) / burst.window[1], busy_s / len(burst.steps)


async def serve_pass(
    engines: dict[str, Engine],
    works: list[Work],
    learn: list[Work],
    plan: Plan,
    qps: float,
    seed: int,
) -> list[dict[str, list[float]]]:
    """Returns, for each round, the seconds from when each request was due to its end, by order."""
    rng, rounds = random.Random(f"arrivals-{seed}"), []
    async with AsyncExitStack() as stack:
        targets = {}
        for name, engine in engines.items():
            targets[name] = await start(engine, plan, stack)
            await run(targets[name], learn[:WARM_UP], [0.0] * len(learn[:WARM_UP]))
        for number in range(plan.rounds):
            part = works[number :: plan.rounds]
            times = arrival_times("poisson", qps, len(part), rng.randrange(1 << 30))
            found: dict[str, list[float]] = {name: [] for name in engines}
            for name in rng.sample(list(engines), len(engines)):
                records = (await run(targets[name], part, times)).records
                found[name] = [each.finished_s - each.scheduled_s for each in records]
            rounds.append(found)
    return rounds


async def measure(plan: Plan, folder: Path) -> Measured:
    """Measures each share of the capacity; folder is for the model and what predictors learn."""
    learn, test = (half[: plan.count] for half in halves())
    model = DEFAULT_MODEL
    if plan.idle_layers:
        model = str(with_idle_layers(folder, plan.idle_layers))
    server = Server(folder, plan, model, known_lengths(learn), known_lengths(test))
    server.teach(learn)
    capacity, step_s = await find_capacity(server.engines()["fcfs"], learn, plan)
    rounds: dict[float, Rounds] = {share: [] for share in plan.shares}
    for number in range(plan.passes):
        works = random.Random(f"orders-{number}").sample(test, len(test))
        for share in plan.shares:
            engines = server.engines()
            rounds[share] += await serve_pass(engines, works, learn, plan, share * capacity, number)
    return Measured(capacity, step_s, {share: results_of(rounds[share]) for share in plan.shares})


def show(plan: Plan, found: Measured) -> None:
    """Prints a table for each share of the capacity."""
    print(
        f"{plan.slots} slots, {plan.idle_layers} idle layers, pace {plan.pace:g},"
        f" speculation {plan.speculation}:"
        f" steps of {1e3 * found.step_s:.1f} ms,"
        f" capacity {found.capacity:.1f} requests/s (a burst, fcfs); seconds to completion"
    )
    for share, rows in found.results.items():
        count, rounds = rows[0].count, plan.passes * plan.rounds
        qps = share * found.capacity
        print(f"\n{share:.0%} of it, {qps:.1f} requests/s: {count} requests in {rounds} rounds")
        print(
            f"  {'order':14} {'mean':>7} {'p50':>7} {'p99':>7} {'gain':>8} {'':14} {'of oracle':>9}"
        )
        for row in rows:
            gain = f"{row.gain:+8.1%} {f'[{row.gain_low:+.1%}, {row.gain_high:+.1%}]':16}"
            share_text = f"{row.of_oracle:6.0%} [{row.of_oracle_low:.0%}, {row.of_oracle_high:.0%}]"
            print(
                f"  {row.name:14} {row.mean_s:7.3f} {row.p50_s:7.3f} {row.p99_s:7.2f}"
                f" {gain} {share_text}"
            )


def _shares(text: str) -> tuple[float, ...]:
    """Parses "0.6,0.8". argparse shows the error."""
    found = tuple(float(part) for part in text.split(","))
    if not all(0 < share < 1 for share in found):
        raise argparse.ArgumentTypeError("shares of the capacity are between 0 and 1")
    return found


def _pace(text: str) -> float:
    if not 0.0 <= float(text) <= 1000.0:
        raise argparse.ArgumentTypeError("a pace is from 0 to 1000")
    return float(text)


def _at_least(least: int) -> Any:
    def parse(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"it must be at least {least}")
        return int(text)

    return parse


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--max-num-seqs", type=_at_least(1), default=4)
    parser.add_argument("--idle-layers", type=_at_least(0), default=0)
    parser.add_argument("--pace", type=_pace, default=0.0, help="0: steps take what they take")
    parser.add_argument("--speculation", choices=("off", "lookup"), default="off")
    parser.add_argument("--shares", type=_shares, default=SHARES, help="of the capacity")
    parser.add_argument("--passes", type=_at_least(1), default=1)
    parser.add_argument("--rounds", type=_at_least(1), default=2, help="of each pass")
    parser.add_argument("--quick", action="store_true", help="a short run, for tests")
    args = parser.parse_args(argv)
    slots, layers = args.max_num_seqs, args.idle_layers
    plan = Plan(slots, layers, args.pace, args.speculation, args.shares, args.passes, args.rounds)
    if args.quick:
        plan = replace(plan, passes=1, rounds=2, count=40)
    machine = platform.processor() or platform.machine()
    print(f"machine: {machine}, Python {platform.python_version()}")
    began_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        found = uvloop.run(measure(plan, Path(folder)))
    show(plan, found)
    tables = {f"{share:g}": [asdict(row) for row in rows] for share, rows in found.results.items()}
    seconds = time.perf_counter() - began_s
    print(json.dumps({"capacity": found.capacity, "seconds": seconds, "results": tables}))


if __name__ == "__main__":
    main()
