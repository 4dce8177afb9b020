"""How fast groups are beside one process: python -m bench.group [--smoke].

One process with one and with two threads, two tensor ranks and two stages (one thread each) compute
the same tasks in turn, round by round. Each has a process of its own and random weights in int8.

    prefill    tokens per second of a prompt, until its first token
    decode     tokens per second while all sequences of a batch decode
    first      seconds to the first token of a long prompt; "alone" has one step of the pipeline in
               flight at a time, so that a chunk waits for the one before it; "beside 3" has three
               sequences decode meanwhile, the times between whose tokens are measured, too
    waits      share of the time that the engine's rank waits for the other tensor ranks, or for the
               stage before

All of it takes long, so --parts names some of it, and --readings adds the rounds of this call to
those of earlier calls in a file; what is printed is of all of them. "gloo 2" among --variants is
two tensor ranks that exchange by gloo's all-gather instead of shared memory (gloo.py), and --peer
adds another engine, as in `serve bench latency`, for instance

    --parts short --variants "tensor 2,gloo 2" --peer "vllm=VLLM/bin/python bench/peers/run_vllm.py
    W8A8 --ranks 2 --mode eager"
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.common import tables
from bench.common.checkpoints import model_directory
from bench.group import readings as kept
from bench.group.measured_engine import Task
from bench.group.message_cost import message_cost
from bench.group.readings import Readings, medians, ratios, waits
from bench.group.variants import (
    GLOO,
    ONE,
    STAGES,
    TENSOR,
    TWO,
    VARIANTS,
    EngineProcess,
    Measured,
    OtherEngine,
)
from bench.offline.peers import parse_peers

SHORT, LONG, BESIDE = PARTS = ("short", "long", "beside")
_CONTEXTS = (1024, 1 << 20)
_SEQUENCES = 256
_WARM_LONG, _WARM_STEPS = 600, 12
_BATCH = 16
_STREAMS = 1600  # tokens that a stream beside a prompt may have


@dataclass(frozen=True, slots=True)
class Sizes:
    """prefill, long: tokens of prompts. steps: tokens of answers. slo_ms: between two tokens of
    streams beside a prompt."""

    model: str = "random:llama-1b"
    prefill: int = 512
    long: int = 8000
    context: int = 32
    steps: int = 48
    slo_ms: float = 250.0

    def tasks(self, parts: list[str], number: int) -> list[Task]:
        """Returns the tasks of a round; that of number -1 warms up with shorter ones."""
        is_warm_up = number < 0
        length = min(_WARM_LONG, self.long) if is_warm_up else self.long
        long, found = f"first of {self.long}", []
        if SHORT in parts and is_warm_up:  # its prompts make chunks as large as any
            found.append(Task(f"decode {_BATCH}", _BATCH, self.context, _WARM_STEPS, number))
        elif SHORT in parts:
            found += [
                Task(f"prefill {self.prefill}", 1, self.prefill, 1, number),
                Task("decode 1", 1, self.context, self.steps, number),
                Task(f"decode {_BATCH}", _BATCH, self.context, self.steps, number),
            ]
        if LONG in parts:
            found.append(Task(long, 1, length, 1, number))
            found.append(Task(f"{long}, alone", 1, length, 1, number, is_dense=False))
        if BESIDE in parts:
            found.append(Task(f"{long}, beside 3", 1, length, 1, number, streams=3))
        return found

    def settings(self, model: Path, parts: list[str]) -> dict[str, Any]:
        """Returns the settings that all our engines have. Only beside streams do tokens keep to an
        SLO; otherwise no stream is read token by token."""
        pace = {"inter_token_slo_ms": self.slo_ms} if parts == [BESIDE] else {}
        return {
            "model": str(model),
            "dtype": "int8",
            "max_num_seqs": _BATCH,
            "max_model_len": max(self.long, self.context + self.steps, _STREAMS) + 8,
            "kv_cache_bytes": 1 << 30,
            "prefix_cache": False,
            "speculation": "off",
        } | (pace or {"inter_token_factor": 1e9})


SMOKE = Sizes("random:tiny", 64, 300, 16, 100)


def measure(
    sizes: Sizes,
    model: Path,
    parts: list[str],
    variants: list[str],
    peers: Mapping[str, str],
    rounds: int,
    readings: Readings,
    keep: Callable[[], object],
) -> None:
    """Adds the readings of some rounds, and calls keep after each; all engines are loaded at once,
    and take turns."""
    settings = sizes.settings(model, parts)
    with ExitStack() as undo:
        engines: dict[str, Measured] = {}
        for name in variants:
            engines[name] = EngineProcess(name, settings)
            undo.callback(engines[name].close)
        for name, command in peers.items():
            tokens = max(sizes.prefill, sizes.context + 2 * sizes.steps) + 64
            engines[name] = OtherEngine(command, model, _BATCH, tokens)
            undo.callback(engines[name].close)
        first = min((len(each) for each in readings.values()), default=0)  # prompts of its own
        for number in (-1, *range(first, first + rounds)):
            for task in sizes.tasks(parts, number):
                for name, engine in engines.items():
                    timed = engine.measure(task)
                    if timed is not None and number >= 0:
                        readings[name, task.column].append(timed)
            if number >= 0:
                keep()


def table(readings: Readings, variants: list[str]) -> Table:
    made = Table(title="medians of the rounds", title_justify="left")
    for name in ("", *variants):
        made.add_column(name, justify="right" if name else "left")
    for column, by_name in medians(readings).items():
        unit = "s" if column.startswith("first") else "tokens/s"
        cells = [tables.number(by_name[name]) if name in by_name else "-" for name in variants]
        made.add_row(f"{column}, {unit}", *cells)
    return made


def print_ratios(
    console: Console, readings: Readings, peers: Mapping[str, str]
) -> dict[str, dict[str, float]]:
    found = {}
    pairs = [(TENSOR, TWO), (TENSOR, ONE), (STAGES, TWO), (STAGES, ONE), (TWO, ONE), (TENSOR, GLOO)]
    pairs += [(TENSOR, name) for name in peers]
    for one, other in pairs:
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


def print_gaps(console: Console, readings: Readings, slo_ms: float) -> None:
    for column, by_name in kept.gaps(readings).items():
        for name, (middle, p95, p99, most) in by_name.items():
            console.print(
                f"{name}, {column}: {1e3 * middle:.0f} ms between the streams' tokens (median),"
                f" {1e3 * p95:.0f} (p95), {1e3 * p99:.0f} (p99), {1e3 * most:.0f} (most); the SLO"
                f" is {slo_ms:.0f}",
                highlight=False,
                soft_wrap=True,
            )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="a tiny model, as a smoke test")
    parser.add_argument("--model", help="a directory or random:SHAPE")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--long", type=int, help="tokens of the long prompt")
    parser.add_argument("--parts", default="short,long", help=f"of {','.join(PARTS)}")
    parser.add_argument(
        "--variants", default=",".join((ONE, TWO, TENSOR, STAGES)), help=f"of {','.join(VARIANTS)}"
    )
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--readings", type=Path, help="a file of rounds to which these are added")
    parser.add_argument("--json", type=Path, dest="json_file")
    return parser


def main() -> None:
    parser = _parser()
    options = parser.parse_args()
    base = SMOKE if options.smoke else Sizes()
    sizes = Sizes(
        options.model or base.model,
        base.prefill,
        options.long or base.long,
        base.context,
        base.steps,
    )
    parts, variants = options.parts.split(","), options.variants.split(",")
    if not set(variants) <= set(VARIANTS):
        parser.error(f"--variants: {', '.join(VARIANTS)}")
    if not set(parts) <= set(PARTS) or (BESIDE in parts and len(parts) > 1):
        parser.error(f"--parts: {SHORT} and {LONG}, or {BESIDE} alone, which has another SLO")
    rounds = options.rounds or (1 if options.smoke else 3)
    peers = parse_peers(options.peer)
    tables.check_file(options.json_file)
    found = model_directory(sizes.model)
    assert found is not None, "a model of its own"
    model = Path(found)
    what = asdict(sizes) | {"parts": parts}
    readings = kept.load(options.readings, what)

    def keep() -> None:
        if options.readings is not None:
            kept.save(options.readings, what, readings)

    measure(sizes, model, parts, variants, peers, rounds, readings, keep)
    names = list(dict.fromkeys(name for name, _ in readings))
    num_rounds = max(len(each) for each in readings.values())
    head = tables.Head.now(f"groups, {sizes.model}, int8, {num_rounds} rounds")
    console = tables.console()
    console.print(str(head), highlight=False, soft_wrap=True)
    console.print(table(readings, names))
    waited = {name: waits(readings, name) for name in names if name in (TENSOR, STAGES, GLOO)}
    result = {
        "medians": medians(readings),
        "ratios": print_ratios(console, readings, peers),
        "waits": waited,
        "gaps": kept.gaps(readings),
        "message": print_messages(console),
    }
    print_gaps(console, readings, sizes.slo_ms)
    for name, by_column in waited.items():
        text = ", ".join(
            f"{column} {100 * each['waits']:.1f} % ({each['results a step']:.0f} results a step)"
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
