"""What overlap with attention elsewhere is worth, at injected costs: `python -m
bench.nodes.overlap`.

The embedded model runs through the real decoder, runner and scheduler. Its products take the
seconds they are told to (t_q, t_kv, and t_rest for what follows attention), and its attention is
"on a node": it takes t_past there, behind a link with a delay each way and a bandwidth. All of
that is sleeping, so the machine may be busy.

Early q. One layer takes, with `link` the delay and the time of its bytes:

    late q    t_q + t_kv + link + t_past + link + t_rest
    early q   t_q + max(t_kv, link + t_past + link) + t_rest

so a step saves layers * min(t_kv, link + t_past + link).

Two batches. With t_model = t_q + t_kv + t_rest for all rows and half of it for half of them, one
batch takes layers * (t_model + t_attention), with t_attention what it then waits, and two take the
larger of both in each layer: at most 2x. Where a share of t_model is spent whatever the rows,
two batches spend it twice; from some share on they lose, and the engine does not split.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.nodes.injected import (
    MS,
    ROWS,
    Clock,
    Costs,
    RealClock,
    TimedNode,
    VirtualClock,
    slow_down,
)
from ops import get_backend
from serve.config import EngineConfig
from serve.loading.runtime import Runtime, load_runtime
from serve.models import load_model
from serve.request import Request
from serve.runner.runner import ModelRunner
from serve.sampling_params import SamplingParams
from serve.scheduler.microbatches import MicrobatchPolicy, StaggerChoice
from serve.scheduler.scheduler import Scheduler
from serve.scheduler.sequence import make_sequences
from serve.scheduler.step_plan import SchedulerLimits


class Fixed:
    """Always split, or never."""

    def __init__(self, is_split: bool) -> None:
        self._is_split = is_split

    def splits(self, num_decodes: int, num_prompt_rows: int) -> bool:
        return self._is_split

    def learn(self, num_decodes: int, num_prompt_rows: int, is_split: bool, seconds: float) -> None:
        """It stays as it is."""


@dataclass(slots=True)
class Bench:
    """The embedded model in fp32, and how many steps each figure is the median of."""

    runtime: Runtime
    clock: Clock
    num_steps: int

    @property
    def num_layers(self) -> int:
        return self.runtime.spec.num_layers

    def step_s(self, costs: Costs, *, q_first: bool, stagger: MicrobatchPolicy) -> float:
        """A step that decodes ROWS sequences; the median of the last steps."""
        runtime, clock = self.runtime, self.clock
        model = load_model(
            EngineConfig().model_path,
            dtype=torch.float32,
            backend=get_backend("cpu"),
            q_first=q_first,
        )
        slow_down(model, costs, clock)
        node = TimedNode(runtime.attention, costs, clock)
        runner = ModelRunner(model, runtime.kv, node, stagger=stagger, clock=clock.now)
        scheduler = Scheduler(SchedulerLimits(ROWS, 8 * ROWS, 8), runtime.kv)
        num_steps = self.num_steps if isinstance(stagger, Fixed) else 20 + self.num_steps
        params = SamplingParams(max_tokens=num_steps + 1, temperature=0.0, seed=0, ignore_eos=True)
        for number in range(ROWS):
            request = Request(str(number), None, (3, 4, 5 + number), params, 0.0)
            scheduler.add(make_sequences(request, frozenset())[0])
        times: list[float] = []
        while (plan := scheduler.schedule(0.0)) is not None:
            began = clock.now()
            result = runner.run(plan, lambda: None)
            if plan.num_decodes == ROWS:
                times.append(clock.now() - began)
            scheduler.update(plan, result.tokens)
        runtime.kv.close_all()
        return statistics.median(times[-self.num_steps :])


@dataclass(frozen=True, slots=True)
class EarlyQ:
    """Seconds a step. saved_s beside predicted_s, by the formula."""

    costs: Costs
    late_s: float
    early_s: float
    saved_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        return self.saved_s / self.predicted_s - 1


def early_q(bench: Bench, cases: Iterable[Costs]) -> list[EarlyQ]:
    found = []
    spec = bench.runtime.spec
    num_bytes = 4 * ROWS * spec.num_heads * spec.head_dim
    for costs in cases:
        late, early = (
            bench.step_s(costs, q_first=q_first, stagger=Fixed(False)) for q_first in (False, True)
        )
        round_trip = 2 * (costs.delay_s + num_bytes / costs.bytes_per_s) + costs.past_s
        predicted = bench.num_layers * min(costs.kv_s, round_trip)
        found.append(EarlyQ(costs, late, early, late - early, predicted))
    return found


@dataclass(frozen=True, slots=True)
class TwoBatches:
    """Seconds a step with one batch, with two, with two if only the costs took time, and as the
    engine learns to do it."""

    costs: Costs
    one_s: float
    two_s: float
    ideal_s: float
    learned_s: float

    @property
    def speedup(self) -> float:
        return self.one_s / self.two_s


def two_batches(bench: Bench, cases: Iterable[Costs]) -> list[TwoBatches]:
    ideal = replace(bench, clock=VirtualClock(), num_steps=1)
    found = []
    for costs in cases:
        one, two = (
            bench.step_s(costs, q_first=True, stagger=Fixed(is_split)) for is_split in (False, True)
        )
        ideal_s = ideal.step_s(costs, q_first=True, stagger=Fixed(True))
        learned = bench.step_s(costs, q_first=True, stagger=StaggerChoice())
        found.append(TwoBatches(costs, one, two, ideal_s, learned))
    return found


EARLY_Q = [
    *(Costs(delay_s=delay) for delay in (0.1 * MS, 0.5 * MS, 1 * MS, 4 * MS)),
    *(Costs(past_s=past, delay_s=0.1 * MS) for past in (2 * MS, 6 * MS)),
    Costs(delay_s=0.2 * MS, bytes_per_s=20e6),
]
# attention as long as the products; k and v are short, so that early q alone hides little of it
_EQUAL = Costs(q_s=1 * MS, kv_s=0.5 * MS, rest_s=4.5 * MS, past_s=6 * MS, delay_s=0.05 * MS)
TWO_BATCHES = [
    *(replace(_EQUAL, past_s=past) for past in (2 * MS, 4 * MS, 6 * MS, 12 * MS)),
    *(replace(_EQUAL, fixed_share=share) for share in (0.25, 0.5, 1.0)),
    replace(_EQUAL, delay_s=1 * MS),
]


def measure(
    clock: Clock, num_steps: int, early: Iterable[Costs], two: Iterable[Costs]
) -> tuple[list[EarlyQ], list[TwoBatches]]:
    runtime = load_runtime(
        EngineConfig(
            dtype="float32",
            compute_threads=1,  # who sleeps between products wakes a team each time
            max_num_seqs=ROWS,
            kv_cache_bytes=64 << 20,
        )
    )
    memory = runtime.memory
    try:
        bench = Bench(runtime, clock, num_steps)
        return early_q(bench, early), two_batches(bench, two)
    finally:
        del runtime, bench
        memory.close()


def report(early: list[EarlyQ], two: list[TwoBatches]) -> None:
    table = Table(
        *("k, v ms", "past ms", "delay ms", "MB/s", "late q ms", "early q ms"),
        *("saved ms", "predicted", "off by"),
        title=f"Early q: a step of {ROWS} rows",
    )
    for row in early:
        costs = row.costs
        given = (costs.kv_s, costs.past_s, costs.delay_s)
        table.add_row(
            *(f"{1e3 * seconds:.1f}" for seconds in given),
            f"{costs.bytes_per_s / 1e6:,.0f}",
            *(f"{1e3 * s:.2f}" for s in (row.late_s, row.early_s, row.saved_s, row.predicted_s)),
            f"{row.error:+.1%}",
        )
    console = Console()
    console.width = max(console.width, 110)
    console.print(table)
    table = Table(
        *("products ms", "fixed share", "past ms", "delay ms", "one batch ms", "two ms"),
        *("ideal", "speedup", "learned ms"),
        title=f"Two batches in flight: a step of {ROWS} rows",
    )
    for other in two:
        costs = other.costs
        table.add_row(
            f"{1e3 * costs.model_s:.1f}",
            f"{costs.fixed_share:.0%}",
            f"{1e3 * costs.past_s:.1f}",
            f"{1e3 * costs.delay_s:.2f}",
            *(f"{1e3 * seconds:.2f}" for seconds in (other.one_s, other.two_s, other.ideal_s)),
            f"{other.speedup:.2f}x",
            f"{1e3 * other.learned_s:.2f}",
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.nodes.overlap",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=20, help="each figure is the median of these")
    parser.add_argument("--quick", action="store_true", help="few cases and steps, for tests")
    args = parser.parse_args()
    early, two = EARLY_Q, TWO_BATCHES
    if args.quick:
        early, two = EARLY_Q[1:2], TWO_BATCHES[2:3]
    found = measure(RealClock(), 5 if args.quick else args.steps, early, two)
    report(*found)
    result: dict[str, Any] = {
        "early_q": [asdict(row) | {"error": row.error} for row in found[0]],
        "two_batches": [asdict(row) | {"speedup": row.speedup} for row in found[1]],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
