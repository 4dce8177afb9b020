"""`serve bench stalls`: streams beside prompts that arrive, with default chunks and static ones.

One engine serves the same requests at the same times (Poisson) with each setting in turn; the
order of the settings rotates from round to round. "default" is the engine's rule
(docs/step-time.md). A number is the most prompt rows of a step beside streams, however long they
take; without streams all settings take whole steps. The last rate, "all at once", shows what small
chunks cost where only throughput counts.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from bench.common import tables
from bench.common.checkpoints import model_directory
from bench.common.static_chunks import SwitchedChunks, switched_scheduler
from bench.engine.long_prompt import other_cpu_s
from bench.load.client.record import RunResult
from bench.load.client.run import offer
from bench.load.client.targets import EngineTarget
from bench.load.results.stalls import Stalls, stalls_of, stalls_table
from bench.load.workload.arrivals import parse_qps
from bench.load.workload.datasets import DatasetSettings
from bench.load.workload.offered_load import LoadOptions
from bench.load.workload.schedule import ArrivalSettings, make_schedule
from serve import Engine
from serve.engine.loader import Parts, load_engine
from serve.errors import ConfigError

CHUNKS = (32, 64, 128, 256)
SHARES = (0.25, 0.5, 0.7, 0.9)  # of the capacity
_WARM_UP = 4
_BURST = 24
_LEAST_REQUESTS = 8
_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class StallPlan:
    """What is measured. input_len, output_len: tokens of each request. seconds: for which each run
    offers requests. settings: the most prompt rows of a step beside streams, None for the default.
    shares: of the capacity, where no rates are given."""

    input_len: int
    output_len: int
    seconds: float
    rounds: int
    settings: Sequence[int | None]
    shares: Sequence[float]
    seed: int

    def count(self, qps: float) -> int:
        """Returns the requests of a run."""
        return max(_LEAST_REQUESTS, _BURST if math.isinf(qps) else round(qps * self.seconds))


class StallBench:
    """A running engine and its load. chunks switch its rule.

    seconds is the time of all runs, others_s what other processes computed meanwhile."""

    def __init__(self, target: EngineTarget, chunks: SwitchedChunks, plan: StallPlan) -> None:
        self._target = target
        self._chunks = chunks
        self._plan = plan
        self.seconds = self.others_s = 0.0
        self._dataset = DatasetSettings(
            "random",
            input_len=str(plan.input_len),
            output_len=str(plan.output_len),
            max_model_len=target.max_model_len,
        )

    async def run(self, static_rows: int | None, qps: float, count: int, seed: int) -> RunResult:
        """Offers `count` requests at a rate, infinity for all at once."""
        schedule, _ = make_schedule(
            self._dataset,
            ArrivalSettings("inf" if math.isinf(qps) else "poisson"),
            qps=qps,
            requests=count,
            seed=seed,
            tokens=self._target.prompt_tokens,
        )
        self._chunks.static_rows = static_rows
        began_s, others_s = time.perf_counter(), other_cpu_s()
        result = await offer(schedule, self._target, LoadOptions(seed=seed))
        self.others_s += other_cpu_s() - others_s
        self.seconds += time.perf_counter() - began_s
        await asyncio.sleep(_PAUSE_S)
        return result

    async def warm_up(self) -> None:
        await self.run(None, math.inf, _WARM_UP, self._plan.seed)

    async def capacity(self) -> float:
        """Returns the requests per second of a burst."""
        burst = await self.run(None, math.inf, _BURST, self._plan.seed + 1)
        return _BURST / burst.window[1]

    async def compare(self, qps: float) -> dict[str, Stalls]:
        """Returns the figures of each setting; each runs once in every round. Raises MergestepError
        if a request fails."""
        settings, count = self._plan.settings, self._plan.count(qps)
        results: dict[int | None, list[RunResult]] = {rows: [] for rows in settings}
        for number in range(self._plan.rounds):
            first, seed = number % len(settings), self._plan.seed + 2 + number
            for rows in (*settings[first:], *settings[:first]):
                results[rows].append(await self.run(rows, qps, count, seed))
        return {setting_name(rows): stalls_of(of) for rows, of in results.items()}


def setting_name(static_rows: int | None) -> str:
    return "default" if static_rows is None else f"{static_rows} rows"


def load_name(qps: float) -> str:
    return "all at once" if math.isinf(qps) else f"{qps:.3g} requests/s"


def stalls(
    model: str | None = None,
    *,
    dtype: str = "auto",
    qps: str | None = None,
    chunks: Sequence[int] = (),
    input_len: int | None = None,
    output_len: int | None = None,
    seconds: float | None = None,
    rounds: int | None = None,
    seed: int = 0,
    json_file: Path | None = None,
    quick: bool = False,
) -> dict[str, Any]:
    """Measures all settings at each rate, prints their figures, writes them to json_file and
    returns them as {rate: {setting: figures}}.

    qps has rates as in `serve bench`; by default SHARES of the capacity, which a burst measures
    first, and inf. seconds is the time for which each run offers requests. The file is written
    after each rate. Raises ConfigError before anything runs, and MergestepError if a request fails.
    """
    tables.check_file(json_file)
    rates = [] if qps is None else parse_qps(qps)
    if any(rows < 1 for rows in chunks):
        raise ConfigError("chunks must be positive")
    num_rounds = 1 if rounds is None else rounds
    if num_rounds < 1 or (seconds is not None and not seconds > 0):
        raise ConfigError("rounds and seconds must be positive")
    plan = StallPlan(
        input_len or (64 if quick else 256),
        output_len or (16 if quick else 64),
        seconds or (1.0 if quick else 20.0),
        num_rounds,
        (None, *(chunks or (CHUNKS[-1:] if quick else CHUNKS))),
        SHARES[1:2] if quick else SHARES,
        seed,
    )
    made: list[SwitchedChunks] = []
    engine = Engine(
        model_directory(model),
        load=functools.partial(load_engine, parts=Parts(scheduler=switched_scheduler(made))),
        dtype=dtype,
        prefix_cache=False,
        speculation="off",
        seed=0,
    )
    head = tables.Head.now(f"stalls, {engine.model_name}")
    console = tables.console()
    console.print(str(head), highlight=False, soft_wrap=True)
    found: dict[str, Any] = {}

    async def measure() -> None:
        async with EngineTarget(engine) as target:
            bench = StallBench(target, made[0], plan)
            async for name, figures in _measure(bench, plan, rates, console):
                found[name] = {setting: of.as_json() for setting, of in figures.items()}
                tables.write(json_file, head, found)  # a later rate may fail

    uvloop.run(measure())
    return found


async def _measure(
    bench: StallBench, plan: StallPlan, rates: Sequence[float], console: Console
) -> AsyncIterator[tuple[str, dict[str, Stalls]]]:
    """Prints and yields the figures of each rate, by default shares of the capacity and inf."""
    await bench.warm_up()
    if not rates:
        capacity = await bench.capacity()
        lengths = f"{plan.input_len} + {plan.output_len}"
        console.print(f"a burst: {capacity:.3g} requests/s of {lengths}")
        rates = [*(share * capacity for share in plan.shares), math.inf]
    for rate in rates:
        figures = await bench.compare(rate)
        count = plan.rounds * plan.count(rate)
        title = f"{load_name(rate)}, {count} requests for each setting"
        console.print(stalls_table(title, figures))
        others = bench.others_s / bench.seconds
        console.print(f"other processes used {others:.2f} cores so far", highlight=False)
        yield load_name(rate), figures
