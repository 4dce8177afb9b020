"""`serve bench startup`: turns options into starts, and their times into tables and a file."""

from __future__ import annotations

import re
import statistics
import textwrap
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.common import tables
from bench.common.checkpoints import model_directory
from bench.offline.startup import Start, import_seconds, measure
from serve.config import EngineConfig
from serve.errors import ConfigError
from serve.models import read_spec
from serve.units import format_memory

_ACCESS = " id=req_"  # in lines of the access log
_DIGITS = re.compile(r"[0-9][0-9.,]*")


def startup(
    model: str | None = None,
    *,
    repeats: int | None = None,
    cold: bool = True,
    dtype: str = "auto",
    compute_threads: int | None = None,
    packed_cache: str = "auto",
    limit_s: float = 600.0,
    json_file: Path | None = None,
    quick: bool = False,
) -> dict[str, Any]:
    """Runs `serve run` in fresh processes to its first token, and prints where the time goes.

    model is a directory, "random:SHAPE", or None for the embedded model. cold also starts with the
    model's files out of memory. packed_cache is the setting of `serve run`. limit_s is the most
    seconds for one start. Returns what is written to json_file. Raises ConfigError before anything
    runs, MergestepError if a start fails.
    """
    tables.check_file(json_file)
    num_repeats = repeats or (1 if quick else 5)
    if num_repeats < 1 or not limit_s > 0:
        raise ConfigError("repeats and limit_s must be positive")
    path = model_directory(model)
    config = EngineConfig.from_settings(
        path, dtype=dtype, compute_threads=compute_threads, packed_cache=packed_cache
    )
    read_spec(config.model_path)
    options = ["--dtype", dtype, "--packed-cache", packed_cache]
    if compute_threads is not None:
        options += ["--compute-threads", str(compute_threads)]
    head = tables.Head.now(f"startup, {config.model_name}")
    is_cold = cold and not quick
    with tables.progress() as bar:
        task = bar.add_task("starting", total=num_repeats * (1 + is_cold))
        starts, was_dropped, rates = measure(
            path,
            config.model_path,
            repeats=num_repeats,
            is_cold=is_cold,
            options=options,
            limit_s=limit_s,
            advance=lambda name: bar.update(task, description=name, advance=1),
        )
    imports = import_seconds()
    console = tables.console()
    console.print(str(head), highlight=False, soft_wrap=True)
    _show(starts, imports, console)
    if is_cold and not was_dropped:
        console.print(
            "the model's files could not be dropped from memory: the cold starts were warm"
        )
    if rates:
        _show_rates(starts, rates, console)
    result = {
        "starts": {name: [asdict(start) for start in each] for name, each in starts.items()},
        "was_cold": is_cold and was_dropped,
        "import_seconds": imports,
        "disk_bytes_per_s": rates,
    }
    tables.write(json_file, head, result)
    return result


def _show_rates(starts: dict[str, list[Start]], rates: list[float], console: Console) -> None:
    """Compares cold starts with the time that the disk takes to read the packed weights."""
    file = starts["warm"][-1].packed_file
    assert file is not None, "of which the rates are"
    num_bytes, rate = file.stat().st_size, statistics.median(rates)
    read_s = num_bytes / rate
    cold_s = statistics.median(start.at_s["first token"] for start in starts["cold"])
    console.print(
        f"the disk reads {format_memory(num_bytes)} of packed weights in {read_s:.2f} s "
        f"({rate / 1e9:.2f} GB/s), {read_s / cold_s:.0%} of a cold start's time",
        highlight=False,
        soft_wrap=True,
    )


def _show(starts: dict[str, list[Start]], imports: dict[str, float], console: Console) -> None:
    table = Table("seconds since the spawn", *starts, title="medians and ranges")
    table.title_justify = "left"
    for mark in starts["warm"][0].at_s:
        cells = [tables.spread([start.at_s[mark] for start in each]) for each in starts.values()]
        table.add_row(mark, *cells)
    sizes = [tables.spread([start.rss_bytes / 2**20 for start in each]) for each in starts.values()]
    table.add_row("resident when ready, MiB", *sizes)
    console.print(table)
    for since, begin in (("the command", ""), ("listening", "listening")):
        times = {
            name: [start.at_s["first token"] - start.at_s.get(begin, 0.0) for start in each]
            for name, each in starts.items()
        }
        medians = ", ".join(f"{name} {statistics.median(row):.2f} s" for name, row in times.items())
        console.print(f"from {since} to the first streamed token: {medians}", highlight=False)
    phases = ", ".join(_phases(starts["warm"]))
    console.print(f"phases of warm starts, from the log: {phases}", highlight=False, soft_wrap=True)
    packages = ", ".join(f"{name} {seconds:.2f}" for name, seconds in imports.items())
    console.print(f"seconds of imports: {packages}", highlight=False, soft_wrap=True)


def _phases(starts: list[Start]) -> list[str]:
    """Returns the median seconds between lines of the log until the server is ready, as texts.
    Lines that only some of the starts have, such as those of progress, are left out."""
    logs: list[dict[str, tuple[float, str]]] = []
    for start in starts:
        lines: dict[str, tuple[float, str]] = {}
        for at_s, line in start.lines:
            if at_s <= start.at_s["/ready"] and _ACCESS not in line:
                text = line.partition(":")[2].strip() or line
                lines.setdefault(_DIGITS.sub("#", text), (at_s, _short(text)))
        logs.append(lines)
    common = [name for name in logs[0] if all(name in lines for lines in logs)]
    times = [[lines[name][0] for name in common] for lines in logs]
    gaps = [[later - earlier for earlier, later in pairwise([0.0, *row])] for row in times]
    medians = [statistics.median(column) for column in zip(*gaps, strict=True)]
    ends = zip(starts, times, strict=True)
    last = statistics.median(start.at_s["/ready"] - (row or [0.0])[-1] for start, row in ends)
    phases = [
        f'{seconds:.2f} to "{logs[0][name][1]}"'
        for seconds, name in zip(medians, common, strict=True)
    ]
    return [*phases, f"{last:.2f} to ready"]


def _short(text: str) -> str:
    return textwrap.shorten(text, 48, placeholder=" ...")
