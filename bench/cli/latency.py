"""`serve bench latency`: turns options into measurements, and these into a table and a file."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.common import tables
from bench.common.ceilings import MAX_DRIFT, Ceiling
from bench.common.checkpoints import model_directory
from bench.common.percentiles import tail
from bench.offline.latency import Keep, Rounds
from bench.offline.peers import parse_peers
from bench.offline.tally import OURS, Tally
from bench.offline.tasks import Shape
from serve import Engine
from serve.errors import ConfigError
from serve.loading.footprint import weight_bytes
from serve.loading.precision import resolve_precision
from serve.machine import total_memory
from serve.models import read_spec
from serve.models.open_checkpoint import open_checkpoint

BATCHES, PREFILLS = (1, 2, 4, 8, 16, 32, 64), (128, 512)
_MIXED_TOKENS = 640
# Of the memory, for weights that stay loaded while peers run. A peer that packs the same weights
# takes up to three times as much while it starts.
_MOST_BESIDE_A_PEER = 0.25


def latency(
    model: str | None = None,
    *,
    batches: Sequence[int] | None = None,
    context: int = 256,
    steps: int = 32,
    prefills: Sequence[int] | None = None,
    rounds: int | None = None,
    peers: Sequence[str] = (),
    dtype: str = "auto",
    compute_threads: int | None = None,
    backend: str = "auto",
    packed_cache: str = "off",
    mixed: bool | None = None,
    json_file: Path | None = None,
    quick: bool = False,
) -> dict[str, Any]:
    """Measures a model's steps at several batches and prompts of several lengths; prints a table.

    model is a directory, "random:SHAPE" (bench.common.checkpoint_shapes.SHAPES), or None for the
    embedded model. None for batches or prefills takes BATCHES or PREFILLS, and None for mixed runs
    the 16 mixed requests with peers, or if the context holds them. peers are NAME=COMMAND
    (bench/offline/peers.py), run in every round. packed_cache is the setting of `serve run`; the
    first start with one writes its file while steps are measured. Returns what is written to
    json_file after each round. Raises ConfigError before anything runs.
    """
    tables.check_file(json_file)
    commands = parse_peers(peers)
    if batches is None:
        batches = (1, 4) if quick else BATCHES
    if prefills is None:
        prefills = (64,) if quick else PREFILLS
    num_rounds = rounds or (1 if quick else 3)
    _check_positive("batches", batches)
    _check_positive("prefills", prefills)
    _check_positive("context, steps and rounds", (context, steps, num_rounds))
    path = model_directory(model)

    def make() -> Engine:
        return Engine(
            path,
            dtype=dtype,
            compute_threads=compute_threads,
            backend=backend,
            packed_cache=packed_cache,
            max_num_seqs=max(batches, default=16),
            prefix_cache=False,
            speculation="off",  # steps of one token each are measured
            inter_token_factor=math.inf,  # as peers do; `serve bench stalls` has smaller chunks
        )

    engine = make()
    longest = read_spec(engine.config.model_path).max_model_len
    has_mixed = bool(commands) or (not quick and longest >= _MIXED_TOKENS)
    if mixed is not None:
        has_mixed = mixed
    shape = Shape(tuple(batches), context, steps, tuple(prefills), has_mixed)
    _check_fits(shape, longest)
    head = tables.Head.now(f"latency, {engine.model_name}")
    result: dict[str, Any] = {"model": engine.model_name}

    def keep(tally: Tally, start_s: float) -> None:
        result.update(start_s=start_s, **tally.summary())
        tables.write(json_file, head, result)

    are_apart = bool(commands) and _share_of_memory(engine) > _MOST_BESIDE_A_PEER
    tally = _with_progress(make, shape, num_rounds, commands, keep, are_apart=are_apart)
    console = tables.console()
    console.print(str(head), highlight=False, soft_wrap=True)
    _show(tally, result, shape, console)
    return result


def _check_positive(name: str, values: Sequence[int]) -> None:
    if any(value < 1 for value in values):
        raise ConfigError(f"{name} must be positive, not {', '.join(map(str, values))}")


def _check_fits(shape: Shape, longest: int) -> None:
    if shape.most_tokens > longest:
        raise ConfigError(
            f"context {shape.context} and {shape.steps} steps at these batches, or the longest of"
            f" prefills, need {shape.most_tokens} tokens; the model's context is {longest}"
        )


def _share_of_memory(engine: Engine) -> float:
    """Returns how much of the memory the weights take."""
    config, spec = engine.config, read_spec(engine.config.model_path)
    precision = resolve_precision(config, spec)
    checkpoint = None if spec.packed is None else open_checkpoint(config.model_path, spec)
    return weight_bytes(config, spec, precision, checkpoint).total / total_memory()


def _with_progress(
    make: Callable[[], Engine],
    shape: Shape,
    rounds: int,
    peers: dict[str, str],
    keep: Keep,
    *,
    are_apart: bool,
) -> Tally:
    """Runs the rounds and shows what is measured."""
    with tables.progress() as bar:
        task = bar.add_task("loading", total=None)

        def advance(what: str) -> None:
            bar.update(task, description=what, advance=1)

        measured = Rounds(make, shape, peers, advance, are_apart=are_apart)
        uvloop.run(measured.run_all(rounds, keep))
        return measured.tally


def _show(tally: Tally, result: dict[str, Any], shape: Shape, console: Console) -> None:
    title = f"decoding from context {shape.context}; medians and ranges over the rounds"
    names = [*dict.fromkeys((*(name for name in tally.rates if name != OURS), *tally.errors))]
    table = Table("", "tokens/s", "ms p50", "p99", "share of the bound", title=title)
    table.title_justify = "left"
    for name in names:
        table.add_column(f"{name}, tokens/s")
    if names:
        table.add_column("over the best")
    for column in shape.columns:
        table.add_row(column.replace("_", " "), *_cells(tally, result, column, names))
    console.print(table)
    console.print(f"first token {result['start_s']:.1f} s after the start, without imports")
    _show_experts(result["experts"], console)
    for name in names:
        console.print(f"{name}: {tally.titles.get(name, 'not started')}", highlight=False)
        for where, error in tally.errors.get(name, {}).items():
            text = f"{name} failed: {error}" if not where else f"{name} failed at {where}: {error}"
            console.print(f"[yellow]{escape(text)}[/yellow]", highlight=False, soft_wrap=True)
    _show_ceilings(result["ceilings"], console)


def _cells(tally: Tally, result: dict[str, Any], column: str, names: list[str]) -> list[str]:
    ours = tally.best(OURS, column)
    assert ours is not None, "ours has measured every column"
    seconds, share = tally.seconds[column], result["share_of_bound"][column]
    note = " (unreliable)" if column in result["unreliable"] else ""
    cells = [
        tables.spread(ours.rates),
        tables.number(1e3 * statistics.median(seconds)),
        tail([1e3 * each for each in seconds]).text(tables.number),
        f"{share:.0%}{note}" if share else "",
    ]
    best = [tally.best(name, column) for name in names]
    for name, found in zip(names, best, strict=True):
        if found is None:
            cells.append("failed" if name in tally.errors else "")
            continue
        note = " (unreliable)" if column in tally.unreliable(name) else ""
        mode = f", {found.mode}" if found.mode else ""
        cells.append(f"{tables.spread(found.rates)}{mode}{note}")
    if names:
        highest = max((found.rate for found in best if found is not None), default=None)
        cells.append("" if highest is None else f"{ours.rate / highest:.2f}x")
    return cells


def _show_experts(experts: dict[str, dict[str, float]], console: Console) -> None:
    """Prints how many experts the bound of a mixture's decode steps counts."""
    if not experts:
        return
    found = ", ".join(
        f"{column.replace('_', ' ')}: {each['drawn']:.1f} (evenly {each['even']:.1f})"
        for column, each in experts.items()
    )
    text = f"different experts of a layer in a step, whose bytes the bound counts: {found}"
    console.print(text, highlight=False, soft_wrap=True)


def _show_ceilings(ceilings: dict[str, dict[str, float]], console: Console) -> None:
    """Prints the ceilings beside each peer, since figures at different ceilings do not compare."""
    ours = Ceiling(**ceilings["ours"])
    for name, values in ceilings.items():
        line = f"beside {name}: {Ceiling(**values)}"
        if ours.drift(Ceiling(**values)) > MAX_DRIFT:
            line += "  [yellow]differ from ours by more than 15 %: compare with care[/yellow]"
        console.print(line, highlight=False, soft_wrap=True)
