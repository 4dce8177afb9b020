"""Early q and two batches over a real node process, interleaved (bench.nodes.memory_nodes overlap).

One engine with one thread and one node with one thread on the same machine: steps of each way in
turn, so that whatever else the machine does meets all of them alike. Prompts are not computed: the
K/V is what the pages hold, which takes as long to attend over. Both processes share the machine's
memory bandwidth, which machines of their own would not.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.common.checkpoints import random_checkpoint
from bench.common.node_processes import memory_nodes
from bench.nodes.overlap import Fixed
from memory.attention.seam import (
    Attention,
    AttentionStep,
    Pending,
    PlannedAttention,
    Rotation,
    Ticket,
)
from serve.config import EngineConfig
from serve.loading.runtime import Runtime, load_runtime
from serve.request import Request
from serve.runner.runner import ModelRunner
from serve.sampling_params import SamplingParams
from serve.scheduler.scheduler import Scheduler
from serve.scheduler.sequence import make_sequences
from serve.scheduler.step_plan import SchedulerLimits, StepPlan

_STEP_ROWS = 256


class LateQ:
    """The same attention, with q sent only when k and v are there."""

    is_remote = True

    def __init__(self, attention: PlannedAttention) -> None:
        self._attention = attention

    def plan(self, step: AttentionStep) -> Attention:
        return _LatePlan(self._attention.plan(step))


class _LatePlan:
    def __init__(self, plan: Attention) -> None:
        self._plan = plan

    def begin(self, layer: int, q: Any) -> Ticket:
        return Ticket(layer, q)

    def finish(self, ticket: Ticket, k: Any, v: Any, rotation: Rotation | None) -> Pending:
        return self._plan.finish(self._plan.begin(*ticket), k, v, rotation)


def measure_overlap(folder: Path, is_quick: bool) -> tuple[Table, dict[str, Any]]:
    """Time of a decode step, each way."""
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
    for count, length in cases:
        with memory_nodes(1, folder, capacity="6G") as urls:
            late, early, two = _steps(model, urls, folder, count, length, num_steps)
        cells = (f"{late:.1f}", f"{early:.1f}", f"{1 - early / late:.1%}", f"{two:.1f}")
        found[f"{count} x {length}"] = {"late": late, "early": early, "two": two}
        table.add_row(str(count), str(length), *cells, f"{early / two:.2f}x")
    return table, found


def _steps(
    model: str, urls: list[str], folder: Path, count: int, length: int, num_steps: int
) -> list[float]:
    """Milliseconds with late q, early q, and early q in two batches."""
    runtime = load_runtime(
        EngineConfig(
            model=model,
            memory_nodes=tuple(urls),
            memory_node_key_file=folder / "key",
            compute_threads=1,
            max_num_seqs=count,
            max_model_len=length + _answer(count, length, num_steps),
        )
    )
    try:
        return _alternate(runtime, count, length, num_steps)
    finally:
        memory = runtime.memory
        runtime.kv.close_all()
        del runtime
        memory.close()


def _alternate(runtime: Runtime, count: int, length: int, num_steps: int) -> list[float]:
    attention = runtime.attention
    ways = [
        ModelRunner(runtime.model, runtime.kv, LateQ(attention), stagger=Fixed(False)),
        ModelRunner(runtime.model, runtime.kv, attention, stagger=Fixed(False)),
        ModelRunner(runtime.model, runtime.kv, attention, stagger=Fixed(True)),
    ]
    scheduler = Scheduler(SchedulerLimits(count, _STEP_ROWS, _STEP_ROWS), runtime.kv)
    answer = _answer(count, length, num_steps)
    params = SamplingParams(max_tokens=answer, temperature=0.0, seed=0, ignore_eos=True)
    for number in range(count):
        prompt = tuple((7 * number + 3 * i) % 900 + 300 for i in range(length))
        request = Request(str(number), None, prompt, params, 0.0)
        scheduler.add(make_sequences(request, frozenset())[0])
    times: list[list[float]] = [[], [], []]
    while (plan := scheduler.schedule(0.0)) is not None and len(times[2]) < num_steps:
        if not _all_decode(plan, count):
            runtime.kv.commit([s.kv_range for s in plan.sequences if s.kv_range is not None])
            scheduler.update(plan, [0] * sum(plan.samples))
            continue
        number = min(range(3), key=lambda i: len(times[i]))
        began = time.perf_counter()
        result = ways[number].run(plan, lambda: None)
        times[number].append((time.perf_counter() - began) * 1e3)
        scheduler.update(plan, result.tokens)
    for sequence in list(scheduler.running):
        assert sequence.kv_range is not None
        runtime.kv.close(sequence.kv_range)
    return [statistics.median(found) for found in times]


def _answer(count: int, length: int, num_steps: int) -> int:
    """Tokens, so that the first sequence still decodes when the last one has been read for long."""
    return 4 * num_steps + count * length // (_STEP_ROWS - count)


def _all_decode(plan: StepPlan, count: int) -> bool:
    return plan.num_decodes == count
