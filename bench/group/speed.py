"""How fast groups are beside one process: python -m bench.group [--smoke].

One process with one and with two threads, two tensor ranks and two stages (one thread each) compute
the same tasks in turn, round by round. Each has a process of its own and random weights in int8.

    prefill    tokens per second of a prompt, until its first token
    decode     tokens per second while all sequences of a batch decode
    first      seconds to the first token of a long prompt; "alone" has one step of the pipeline in
               flight at a time, so that a chunk waits for the one before it
    waits      share of the time that the engine's rank waits for the other tensor ranks, or for the
               stage before
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.common import tables
from bench.common.checkpoints import model_directory
from bench.group.measured_engine import Task, Timed
from bench.group.message_cost import message_cost

ONE, TWO, TENSOR, STAGES = "1 thread", "2 threads", "tensor 2", "stages 2"
VARIANTS: dict[str, dict[str, int]] = {
    ONE: {"compute_threads": 1},
    TWO: {"compute_threads": 2},
    TENSOR: {"compute_threads": 2, "tensor_parallel_size": 2},
    STAGES: {"compute_threads": 2, "pipeline_parallel_size": 2},
}
_CONTEXTS = (1024, 1 << 20)
_SEQUENCES = 256

Readings = dict[tuple[str, str], list[Timed]]  # by variant and column


@dataclass(frozen=True, slots=True)
class Sizes:
    """prefill, long: tokens of prompts. steps: tokens of answers."""

    model: str = "random:llama-1b"
    prefill: int = 512
    long: int = 8000
    context: int = 128
    steps: int = 64
    rounds: int = 5

    def tasks(self, number: int) -> list[Task]:
        """Returns the tasks of a round."""
        prefill, long = f"prefill {self.prefill}", f"first of {self.long}"
        return [
            Task(prefill, 1, self.prefill, 1, number),
            Task("decode 1", 1, self.context, self.steps, number),
            Task("decode 16", 16, self.context, self.steps, number),
            Task(long, 1, self.long, 1, number),
            Task(f"{long}, alone", 1, self.long, 1, number, is_dense=False),
        ]


SMOKE = Sizes("random:tiny", 64, 300, 16, 100, 1)


class EngineProcess:
    """An engine in a process (measured_engine.py)."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.group.measured_engine", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def await_ready(self) -> None:
        assert self._read()["ready"]

    def measure(self, task: Task) -> Timed:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(task)) + "\n")
        self._process.stdin.flush()
        return Timed(**self._read())

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine ended with status {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """Ends the engine and its workers."""
        self._process.communicate()


def measure(model: str, sizes: Sizes, variants: list[str]) -> Readings:
    """Returns the readings of each round; all engines are loaded at once, and take turns."""
    readings: Readings = defaultdict(list)
    common = {
        "model": model,
        "dtype": "int8",
        "max_num_seqs": 16,
        "max_model_len": max(sizes.long, sizes.context + sizes.steps) + 8,
        "kv_cache_bytes": 1 << 30,
        "prefix_cache": False,
        "inter_token_factor": 1e9,  # no stream is read token by token
    }
    with ExitStack() as undo:
        engines = {}
        for name in variants:
            engines[name] = EngineProcess(common | VARIANTS[name])
            undo.callback(engines[name].close)
            engines[name].await_ready()
        for number in range(-1, sizes.rounds):  # the first one warms up
            for task in sizes.tasks(number):
                for name, engine in engines.items():
                    if task.is_dense or name == STAGES:
                        timed = engine.measure(task)
                        if number >= 0:
                            readings[name, task.column].append(timed)
    return readings


def figure(column: str, timed: Timed) -> float:
    """Returns the figure of a column: a rate, or seconds."""
    if column.startswith("prefill"):
        return int(column.split()[1]) / timed.first_s
    return timed.tokens_per_s if column.startswith("decode") else timed.first_s


def medians(readings: Readings) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for (name, column), timed in readings.items():
        found[column][name] = statistics.median(figure(column, each) for each in timed)
    return dict(found)


def ratios(readings: Readings, one: str, other: str) -> dict[str, float]:
    """Returns how many times as fast as the other one is, the median of the rounds."""
    found = {}
    for name, column in readings:
        if name != one or (other, column) not in readings:
            continue
        pairs = zip(readings[one, column], readings[other, column], strict=True)
        faster = [figure(column, mine) / figure(column, theirs) for mine, theirs in pairs]
        is_rate = not column.startswith("first")
        found[column] = statistics.median(each if is_rate else 1 / each for each in faster)
    return found


def waits(readings: Readings, name: str) -> dict[str, dict[str, float]]:
    """Returns what the engine's rank waits for in each column."""
    found = {}
    for (variant, column), timed in readings.items():
        if variant == name:
            found[column] = {
                "waits": statistics.median(
                    (each.waited_s + each.stage_wait_s) / each.seconds for each in timed
                ),
                "results a step": statistics.median(
                    each.results / max(1, each.steps) for each in timed
                ),
            }
    return found


def table(readings: Readings, variants: list[str]) -> Table:
    made = Table(title="medians of the rounds", title_justify="left")
    for name in ("", *variants):
        made.add_column(name, justify="right" if name else "left")
    for column, by_name in medians(readings).items():
        unit = "s" if column.startswith("first") else "tokens/s"
        cells = [tables.number(by_name[name]) if name in by_name else "-" for name in variants]
        made.add_row(f"{column}, {unit}", *cells)
    return made


def print_ratios(console: Console, readings: Readings) -> dict[str, dict[str, float]]:
    found = {}
    for one, other in ((TENSOR, TWO), (TENSOR, ONE), (STAGES, TWO), (STAGES, ONE), (TWO, ONE)):
        by_column = ratios(readings, one, other)
        if by_column:
            found[f"{one} / {other}"] = by_column
            text = ", ".join(f"{column} {value:.2f}x" for column, value in by_column.items())
            console.print(f"{one} beside {other}: {text}", highlight=False, soft_wrap=True)
    figures = medians(readings)
    for column in [each for each in figures if each.endswith(", alone")]:
        dense = figures[column.removesuffix(", alone")][STAGES]
        ratio = figures[column][STAGES] / dense
        found["dense chunks"] = {column: ratio}
        console.print(f"dense chunks: {ratio:.2f}x as fast as one step in flight", highlight=False)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--smoke", action="store_true", help="a tiny model, as a smoke test")
    parser.add_argument("--model", help="a directory or random:SHAPE")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--long", type=int, help="tokens of the long prompt")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="with commas")
    parser.add_argument("--json", type=Path, dest="json_file")
    options = parser.parse_args()
    base = SMOKE if options.smoke else Sizes()
    sizes = Sizes(
        options.model or base.model,
        base.prefill,
        options.long or base.long,
        base.context,
        base.steps,
        options.rounds or base.rounds,
    )
    variants = options.variants.split(",")
    if not set(variants) <= set(VARIANTS):
        parser.error(f"--variants: {', '.join(VARIANTS)}")
    tables.check_file(options.json_file)
    model = model_directory(sizes.model)
    assert model is not None, "a model of its own"
    head = tables.Head.now(f"groups, {sizes.model}, int8, {sizes.rounds} rounds")
    readings = measure(model, sizes, variants)
    console = tables.console()
    console.print(str(head), highlight=False, soft_wrap=True)
    console.print(table(readings, variants))
    waited = {name: waits(readings, name) for name in variants if name in (TENSOR, STAGES)}
    result = {
        "medians": medians(readings),
        "ratios": print_ratios(console, readings),
        "waits": waited,
        "message": print_messages(console),
    }
    for name, by_column in waited.items():
        text = ", ".join(
            f"{column} {100 * each['waits']:.0f} % ({each['results a step']:.0f} results a step)"
            for column, each in by_column.items()
        )
        console.print(f"{name} waits: {text}", highlight=False, soft_wrap=True)
    tables.write(options.json_file, head, result)
    print(json.dumps(result))


def print_messages(console: Console) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for context in _CONTEXTS:
        cost = message_cost(_SEQUENCES, context)
        console.print(
            f"a step's message, {_SEQUENCES} sequences of {context:,} tokens: {cost.num_bytes:,}"
            f" bytes, packed in {cost.pack_us:.0f} us, read in {cost.read_us:.0f} us",
            highlight=False,
        )
        found[str(context)] = asdict(cost)
    return found


if __name__ == "__main__":
    main()
