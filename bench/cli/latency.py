"""`serve bench latency`: turns options into measurements, and these into a table and a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from bench.common import tables
from bench.common.ceilings import MAX_DRIFT, Ceiling
from bench.common.checkpoints import model_directory
from bench.offline.latency import Shape, Tally, measure, needs_peer_shape
from bench.offline.peers import parse_peers
from serve import Engine
from serve.errors import ConfigError
from serve.models import read_spec

BATCHES, PREFILLS = (1, 2, 4, 8, 16, 32, 64), (128, 512)
_MIXED_TOKENS = 640


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
    json_file: Path | None = None,
    quick: bool = False,
) -> dict[str, Any]:
    """Measures a model's steps at several batches and prompts of several lengths; prints a table.

    model is a directory, "random:SHAPE" (bench.common.checkpoints.SHAPES), or None for the embedded
    model. None for batches or prefills takes BATCHES or PREFILLS. peers are NAME=COMMAND, run in
    every round. Returns what is written to json_file. Raises ConfigError before anything runs.
    """
    tables.check_file(json_file)
    commands = parse_peers(peers)
    if batches is None:
        batches = (1, 4) if quick else BATCHES
    if prefills is None:
        prefills = (64,) if quick else PREFILLS
    num_rounds = rounds or (1 if quick else 3)
    for name, values in (
        ("batches", batches),
        ("prefills", prefills),
        ("context, steps and rounds", (context, steps, num_rounds)),
    ):
        if any(value < 1 for value in values):
            raise ConfigError(f"{name} must be positive, not {', '.join(map(str, values))}")
    path = model_directory(model)
    engine = Engine(
        path,
        dtype=dtype,
        compute_threads=compute_threads,
        backend=backend,
        max_num_seqs=max(batches, default=16),
        prefix_cache=False,
    )
    longest = read_spec(engine.config.model_path).max_model_len
    has_mixed = bool(commands) or (not quick and longest >= _MIXED_TOKENS)
    shape = Shape(tuple(batches), context, steps, tuple(prefills), 3, has_mixed)
    if shape.most_tokens > longest:
        raise ConfigError(
            f"context {context} and {steps} steps at these batches, or the longest of prefills,"
            f" need {shape.most_tokens} tokens; the model's context is {longest}"
        )
    if commands and not needs_peer_shape(shape):
        raise ConfigError("peers decode 32 steps from a context of 256: leave both as they are")
    head = tables.Head.now(f"latency, {engine.model_name}")
    with tables.progress() as bar:
        task = bar.add_task("loading", total=num_rounds * (len(shape.columns) + len(commands)))
        tally, start_s = uvloop.run(
            measure(
                engine,
                shape,
                rounds=num_rounds,
                peers=commands,
                advance=lambda what: bar.update(task, description=what, advance=1),
            )
        )
    result = {"model": engine.model_name, "start_s": start_s, **tally.summary()}
    console = tables.console()
    console.print(str(head), highlight=False, soft_wrap=True)
    _show(tally, result, shape, console)
    tables.write(json_file, head, result)
    return result


def _show(tally: Tally, result: dict[str, Any], shape: Shape, console: Console) -> None:
    title = f"decoding from context {shape.context}; medians and ranges over the rounds"
    names = [name for name in result["tokens_per_s"] if name != "ours"]
    table = Table("", "tokens/s", "ms p50", "p99", "share of the bound", title=title)
    table.title_justify = "left"
    for name in names:
        table.add_column(f"{name}, tokens/s")
    if names:
        table.add_column("over the best")
    for column in shape.columns:
        ms, share = result["ms"][column], result["share_of_bound"][column]
        note = " (unreliable)" if column in result["unreliable"] else ""
        cells = [column.replace("_", " "), tables.spread(tally.rates["ours"][column])]
        cells += [
            tables.number(ms["p50"]),
            tables.number(ms["p99"]),
            f"{share:.0%}{note}" if share else "",
        ]
        rates = [result["tokens_per_s"][name].get(column) for name in names]
        cells += ["" if rate is None else tables.number(rate) for rate in rates]
        best = max((rate for rate in rates if rate), default=None)
        if names:
            ours = result["tokens_per_s"]["ours"][column]
            cells.append("" if best is None else f"{ours / best:.2f}x")
        table.add_row(*cells)
    console.print(table)
    console.print(f"first token {result['start_s']:.1f} s after the start, without imports")
    _show_ceilings(result["ceilings"], console)


def _show_ceilings(ceilings: dict[str, dict[str, float]], console: Console) -> None:
    """Prints the ceilings beside each peer, since figures at different ceilings do not compare."""
    ours = Ceiling(**ceilings["ours"])
    for name, values in ceilings.items():
        line = f"beside {name}: {Ceiling(**values)}"
        if ours.drift(Ceiling(**values)) > MAX_DRIFT:
            line += "  [yellow]differ from ours by more than 15 %: compare with care[/yellow]"
        console.print(line, highlight=False, soft_wrap=True)
