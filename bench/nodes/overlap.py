"""The gain of overlap with attention on a memory node, at injected costs or over a real node.

Decode steps run through the real decoder, runner and scheduler in several modes in turn, so that
other work on the machine slows all of them alike. The modes are late q (the node gets q once k and
v are ready), early q (it gets q first), and early q with the step in two micro-batches. Prompts are
not computed, since attention takes as long over whatever the pages hold.

Injected costs (`python -m bench.nodes.overlap`): the embedded model's products sleep for t_q, t_kv
and t_rest (after attention), and its attention takes t_prefix on a "node" behind a link with a
delay in each direction and a bandwidth (injected.py). The node attends over earlier keys as soon as
it has q, and answers when it has k and v, too. Only sleeping counts, so the machine may be busy.
With `link` the delay and the time of the bytes, one layer takes

    late q    t_q + t_kv + link + t_prefix + link + t_rest
    early q   t_q + max(t_kv, t_prefix) + link + link + t_rest

so early q saves layers * min(t_kv, t_prefix) a step. If t_model = t_q + t_kv + t_rest
halves with the rows, one batch takes layers * (t_model + t_attention), where t_attention is its
wait for the node, and two batches take the larger of both in each layer, which is a speedup of 2 at
most. A share of t_model that does not depend on the rows is spent twice by two batches; from some
share on they are slower, and the engine learns not to split.

A real node (`serve bench nodes overlap`): an engine and a node process run on this machine with one
thread each. They share its memory bandwidth, unlike an engine and a node on two machines.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.common.checkpoints import random_checkpoint
from bench.common.node_processes import memory_nodes
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
from memory.attention.seam import (
    Attention,
    AttentionStep,
    Pending,
    PlannedAttention,
    Rotation,
    Ticket,
)
from ops import get_backend
from serve.config import EngineConfig
from serve.loading.runtime import Runtime, load_runtime
from serve.models import StepModel, load_model
from serve.request import Request
from serve.runner.runner import ModelRunner
from serve.sampling_params import SamplingParams
from serve.scheduler.microbatches import LearnedMicrobatches
from serve.scheduler.scheduler import Scheduler
from serve.scheduler.sequence import make_sequences
from serve.scheduler.step_plan import SchedulerLimits

_STEP_ROWS = 256
_LEARNING_STEPS = 20
_PROMPT = 3  # tokens, with injected costs


class FixedMode:
    """A micro-batch policy that splits every step, or none."""

    def __init__(self, is_split: bool) -> None:
        self._is_split = is_split

    def splits(self, num_decodes: int, num_prompt_rows: int) -> bool:
        return self._is_split

    def learn(self, num_decodes: int, num_prompt_rows: int, is_split: bool, seconds: float) -> None:
        """Does nothing."""


class LateQ:
    """Attention that sends q only when k and v are ready."""

    is_remote = True

    def __init__(self, attention: PlannedAttention) -> None:
        self._attention = attention

    def plan(self, step: AttentionStep) -> Attention:
        return _LatePlan(self._attention.plan(step))


class _LatePlan:
    """The plan of a step whose q waits for k and v."""

    def __init__(self, plan: Attention) -> None:
        self._plan = plan

    def begin(self, layer: int, q: Any) -> Ticket:
        return Ticket(layer, q)

    def finish(self, ticket: Ticket, k: Any, v: Any, rotation: Rotation | None) -> Pending:
        return self._plan.finish(self._plan.begin(ticket.layer, ticket.q), k, v, rotation)


def answer_tokens(count: int, context: int, num_steps: int) -> int:
    """Returns how many tokens answers need so that the first sequence still decodes when the last
    prompt has been read, and for num_steps steps after that."""
    return 2 + num_steps + count * context // (_STEP_ROWS - count)


def step_times(
    runtime: Runtime,
    runners: Mapping[str, tuple[ModelRunner, int]],
    count: int,
    context: int,
    num_steps: int,
    now: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Returns the median seconds of a step that decodes `count` sequences after `context` tokens.

    runners: by mode, with the number of steps that precede its num_steps timed ones.
    """
    left = {mode: num_steps + first for mode, (_, first) in runners.items()}
    scheduler = Scheduler(SchedulerLimits(count, _STEP_ROWS, _STEP_ROWS), runtime.kv)
    answer = answer_tokens(count, context, sum(left.values()))
    params = SamplingParams(max_tokens=answer, temperature=0.0, seed=0, ignore_eos=True)
    for number in range(count):
        prompt = tuple((7 * number + 3 * i) % 900 + 300 for i in range(context))
        request = Request(str(number), None, prompt, params, 0.0)
        scheduler.add(make_sequences(request, frozenset())[0])
    times: dict[str, list[float]] = {mode: [] for mode in runners}
    while any(left.values()):
        plan = scheduler.schedule(0.0)
        assert plan is not None, "answers are long enough"
        if plan.num_decodes != count:
            runtime.kv.commit([s.kv_range for s in plan.sequences if s.kv_range is not None])
            scheduler.update(plan, [0] * sum(plan.samples))
            continue
        mode = max(left, key=left.__getitem__)
        began = now()
        result = runners[mode][0].run(plan, lambda: None)
        times[mode].append(now() - began)
        left[mode] -= 1
        scheduler.update(plan, result.tokens)
    for sequence in list(scheduler.running):
        assert sequence.kv_range is not None
        runtime.kv.close(sequence.kv_range)
    return {mode: statistics.median(found[-num_steps:]) for mode, found in times.items()}


# ---- injected costs


@dataclass(frozen=True, slots=True)
class InjectedResult:
    """Seconds a step, by mode: late_s, early_s, two_s (two micro-batches), learned_s (as the
    engine learns to split). ideal_s is two_s where only the injected costs take time;
    predicted_s is what early q saves by the formula."""

    costs: Costs
    predicted_s: float
    ideal_s: float
    late_s: float
    early_s: float
    two_s: float
    learned_s: float

    @property
    def saved_s(self) -> float:
        return self.late_s - self.early_s

    @property
    def error(self) -> float:
        """The relative error of the formula: how far the saving is above it."""
        return self.saved_s / self.predicted_s - 1

    @property
    def speedup(self) -> float:
        """The speedup of two micro-batches over one."""
        return self.early_s / self.two_s


EARLY_Q = [
    *(Costs(delay_s=delay) for delay in (0.1 * MS, 1 * MS, 4 * MS)),
    *(Costs(prefix_s=p, delay_s=0.1 * MS) for p in (0.5 * MS, 2 * MS, 3 * MS, 6 * MS)),
    Costs(delay_s=0.2 * MS, bytes_per_s=20e6),
]
# Attention takes as long as the products; k and v are short, so early q alone hides little of it.
_EQUAL = Costs(q_s=1 * MS, kv_s=0.5 * MS, rest_s=4.5 * MS, prefix_s=6 * MS, delay_s=0.05 * MS)
TWO_BATCHES = [
    *(replace(_EQUAL, prefix_s=prefix_s) for prefix_s in (2 * MS, 4 * MS, 6 * MS, 12 * MS)),
    *(replace(_EQUAL, fixed_share=share) for share in (0.25, 0.5, 1.0)),
    replace(_EQUAL, delay_s=1 * MS),
]


def slowed_decoder(runtime: Runtime, costs: Costs, clock: Clock) -> StepModel:
    """Returns the embedded model, computing q first, with its products at the injected costs."""
    path = EngineConfig().model_path
    model = load_model(path, dtype=torch.float32, backend=get_backend("cpu"), q_first=True)
    slow_down(model, costs, clock)
    return model


def measure_injected(
    clock: Clock,
    num_steps: int,
    cases: Iterable[Costs],
    slowed: Callable[[Runtime, Costs, Clock], StepModel] = slowed_decoder,
    config: EngineConfig | None = None,
) -> list[InjectedResult]:
    """Measures a model in fp32 with ROWS sequences, each figure from num_steps steps.

    slowed makes it from the runtime of an engine with `config`; by default it is the embedded one.
    """
    runtime = load_runtime(
        replace(
            config or EngineConfig(),
            dtype="float32",
            compute_threads=1,  # a thread that sleeps between products would wake a team each time
            max_num_seqs=ROWS,
            kv_cache_bytes=64 << 20,
        )
    )
    memory, spec = runtime.memory, runtime.spec
    found = []
    try:
        for costs in cases:
            times = _injected_times(runtime, slowed, costs, clock, num_steps)
            ideal = _injected_times(runtime, slowed, costs, VirtualClock(), 1)
            predicted = spec.num_layers * min(costs.kv_s, costs.prefix_s)
            found.append(InjectedResult(costs, predicted, ideal["two_s"], **times))
        return found
    finally:
        runtime.kv.close_all()
        del runtime
        memory.close()


def _injected_times(
    runtime: Runtime,
    slowed: Callable[[Runtime, Costs, Clock], StepModel],
    costs: Costs,
    clock: Clock,
    num_steps: int,
) -> dict[str, float]:
    model = slowed(runtime, costs, clock)

    def runner(policy: Any, *, is_late: bool = False) -> ModelRunner:
        node = TimedNode(runtime.attention, costs, clock)
        attention = LateQ(node) if is_late else node
        return ModelRunner(model, runtime.kv, attention, microbatches=policy, clock=clock.now)

    runners = {
        "late_s": (runner(FixedMode(False), is_late=True), 0),
        "early_s": (runner(FixedMode(False)), 0),
        "two_s": (runner(FixedMode(True)), 0),
        "learned_s": (runner(LearnedMicrobatches()), _LEARNING_STEPS),
    }
    return step_times(runtime, runners, ROWS, _PROMPT, num_steps, clock.now)


def report(results: Iterable[InjectedResult]) -> None:
    table = Table(
        *("k, v", "products", "fixed", "prefix", "delay", "MB/s", "late q", "early q"),
        *("saved", "predicted", "off by", "two batches", "ideal", "speedup", "learned"),
        title=f"A step of {ROWS} rows at injected costs, milliseconds",
        caption="fixed: products' time that does not depend on the rows. two batches: with early q",
    )
    for row in results:
        costs = row.costs
        times = (row.late_s, row.early_s, row.saved_s, row.predicted_s)
        table.add_row(
            *(f"{1e3 * seconds:.1f}" for seconds in (costs.kv_s, costs.model_s)),
            f"{costs.fixed_share:.0%}",
            *(f"{1e3 * seconds:.2f}" for seconds in (costs.prefix_s, costs.delay_s)),
            f"{costs.bytes_per_s / 1e6:,.0f}",
            *(f"{1e3 * seconds:.2f}" for seconds in times),
            f"{row.error:+.1%}",
            *(f"{1e3 * seconds:.2f}" for seconds in (row.two_s, row.ideal_s)),
            f"{row.speedup:.2f}x",
            f"{1e3 * row.learned_s:.2f}",
        )
    console = Console()
    console.width = max(console.width, 140)
    console.print(table)


# ---- a real node


def measure_overlap(folder: Path, is_quick: bool) -> tuple[Table, dict[str, Any]]:
    """Returns the milliseconds of a decode step in each mode over one node, and their table."""
    full = [(16, 512), (16, 2048), (64, 4096)]
    shape, cases = ("tiny", [(8, 64)]) if is_quick else ("llama-1b", full)
    num_steps = 4 if is_quick else 12
    model = str(random_checkpoint(shape))
    table = Table(
        "sequences", "context", "late q ms", "early q ms", "saved", "two batches ms", "speedup"
    )
    table.title = f"decode steps over one node (shm), a thread each, {shape}"
    table.caption = "medians of steps in turn; two batches beside early q"
    found: dict[str, Any] = {}
    for count, context in cases:
        with memory_nodes(1, folder, capacity="6G") as urls:
            times = _node_times(model, urls, folder, count, context, num_steps)
        late, early, two = (1e3 * times[mode] for mode in ("late", "early", "two"))
        found[f"{count} x {context}"] = {"late": late, "early": early, "two": two}
        cells = (f"{late:.1f}", f"{early:.1f}", f"{1 - early / late:.1%}", f"{two:.1f}")
        table.add_row(str(count), str(context), *cells, f"{early / two:.2f}x")
    return table, found


def _node_times(
    model: str, urls: list[str], folder: Path, count: int, context: int, num_steps: int
) -> dict[str, float]:
    runtime = load_runtime(
        EngineConfig(
            model=model,
            memory_nodes=tuple(urls),
            memory_node_key_file=folder / "key",
            compute_threads=1,
            max_num_seqs=count,
            max_model_len=context + answer_tokens(count, context, 3 * num_steps),
        )
    )
    memory, remote = runtime.memory, runtime.attention
    try:
        runners = {
            mode: (
                ModelRunner(runtime.model, runtime.kv, attention, microbatches=FixedMode(is_split)),
                0,
            )
            for mode, attention, is_split in (
                ("late", LateQ(remote), False),
                ("early", remote, False),
                ("two", remote, True),
            )
        }
        return step_times(runtime, runners, count, context, num_steps)
    finally:
        runtime.kv.close_all()
        del runtime, remote
        memory.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.nodes.overlap",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=20, help="steps of each figure, a median")
    parser.add_argument("--quick", action="store_true", help="few cases and steps, as a smoke test")
    args = parser.parse_args()
    cases = [EARLY_Q[1], TWO_BATCHES[2]] if args.quick else [*EARLY_Q, *TWO_BATCHES]
    found = measure_injected(RealClock(), 5 if args.quick else args.steps, cases)
    report(found)
    print(json.dumps([asdict(row) | {"error": row.error, "speedup": row.speedup} for row in found]))


if __name__ == "__main__":
    main()
