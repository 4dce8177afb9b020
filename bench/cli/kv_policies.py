"""`serve eval --kv-policy`: turns options into exercises under K/V policies, and prints a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.common import tables
from bench.common.plot_style import require_matplotlib
from bench.quality import measure, picture, vocabulary
from bench.quality.tasks import ACCURACIES, MAX_FOLLOWING, make_exercises
from serve.checkpoint_json import read_json
from serve.config import DEFAULT_MODEL
from serve.errors import ConfigError, ModelLoadError

BUILT = Path(__file__).parents[1] / "quality" / "model"
HOW = "python -m bench.quality.train DIRECTORY makes one"
LEAST_CONTEXT = 1024


def run_kv_policies(
    model: str,
    policies: Sequence[str],
    *,
    context: int,
    exercises: int,
    seed: int,
    on_reference: bool,
    json_file: Path | None,
    png_file: Path | None,
) -> None:
    """Measures each policy and prints the table. model: a directory of bench.quality.train, or
    "default" for the one in the source tree. exercises: of each task. on_reference: in torch
    instead of on the engine. Raises ConfigError before anything runs."""
    if exercises < 1:
        raise ConfigError("exercises must be at least 1")
    if seed < 0:
        raise ConfigError("seed must be at least 0")
    chosen = measure.all_policies(policies)
    tables.check_file(json_file)
    tables.check_file(png_file, "--png")
    if png_file is not None:
        require_matplotlib()
    path = BUILT if model == DEFAULT_MODEL else Path(model)
    most = _most_context(path)
    if not LEAST_CONTEXT <= context <= most - MAX_FOLLOWING:
        raise ConfigError(
            f"context must be between {LEAST_CONTEXT} and {most - MAX_FOLLOWING}, not {context}"
        )
    made = make_exercises(context, exercises, seed)
    run = measure.by_reference if on_reference else measure.by_engine
    with Console(stderr=True).status("loading") as status:
        found = run(path, chosen, made, lambda line: status.update(line))
    rows = list(measure.rows_of(made, found))
    where = "torch" if on_reference else "engine"
    head = tables.Head.now(f"K/V policies, {context} tokens, {exercises} exercises a task, {where}")
    console = tables.console()
    console.print(str(head), highlight=False, soft_wrap=True)
    console.print(_table(rows))
    tables.write(json_file, head, {"context": context, "rows": [asdict(row) for row in rows]})
    if png_file is not None:
        title = f"{context} tokens, {exercises} exercises a task; dashed: all K/V"
        picture.draw(png_file, rows, title)


def _most_context(path: Path) -> int:
    """Returns the model's most tokens. Raises ConfigError for a model that cannot do the tasks, and
    ModelLoadError for none."""
    if not path.is_dir():
        raise ModelLoadError(f"model directory {path} does not exist: {HOW}")
    file = path / "config.json"
    if not file.is_file():
        raise ConfigError(f"{path} is no model of K/V policies: {HOW}")
    config = read_json(file)
    if config.get("vocab_size") != vocabulary.VOCAB_SIZE:
        raise ConfigError(f"{path} does not know the words of the tasks: {HOW}")
    return int(config["max_position_embeddings"])


def _table(rows: Sequence[measure.Row]) -> Table:
    has_time = any(math.isfinite(row.step_ms) for row in rows)
    columns = ["policy", *ACCURACIES, "perplexity", "held", "read"]
    table = Table(*columns, *(["ms"] if has_time else []))
    table.columns[0].no_wrap = True
    table.caption = "K/V held after a text's last token, and read by each"
    table.caption += "; ms of a decoded token" if has_time else ""
    for row in rows:
        cells = [row.policy, *(f"{row.accuracy[task]:.2f}" for task in ACCURACIES)]
        cells.append(f"{row.perplexity:.3f}")
        cells += [_size(share * row.kv_bytes) for share in (row.held, row.read)]
        table.add_row(*cells, *([f"{row.step_ms:.2f}"] if has_time else []))
    return table


def _size(num_bytes: float) -> str:
    return "" if math.isnan(num_bytes) else f"{num_bytes / 1e3:,.0f} kB"
