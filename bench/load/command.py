"""`serve bench` without a further name: from its options to a run, a table and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.load.arrivals import count_requests, parse_qps
from bench.load.datasets import DatasetSettings
from bench.load.record import RunResult
from bench.load.report import print_summary, summarize, write_json
from bench.load.run import run_load
from bench.load.schedule import ArrivalSettings, make_schedule, make_warm_up
from bench.load.targets import EngineTarget, ServerTarget, Target
from bench.load.work import Schedule, Work
from serve import Engine
from serve.errors import ConfigError
from serve.evaluate_cli import check_writable


def run(
    *,
    model: str,
    qps: str,
    url: str | None,
    requests: int | None,
    duration: float | None,
    input_len: int | None,
    output_len: int | None,
    seed: int,
    warmup: int,
    json_file: Path | None,
    **engine_settings: Any,
) -> bool:
    """Whether the run is valid."""
    rates = parse_qps(qps)
    if len(rates) != 1:
        raise ConfigError(f"qps must be one rate, not {qps!r}")
    rate = rates[0]
    count = count_requests(rate, requests, duration)
    for name, value in (("requests", count), ("input_len", input_len), ("output_len", output_len)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}")
    if warmup < 0:
        raise ConfigError(f"warmup must not be negative, not {warmup}")
    if json_file is not None:
        check_writable(json_file)
    target: Target = (
        EngineTarget(Engine(model, **engine_settings)) if url is None else ServerTarget(url)
    )

    dataset = DatasetSettings(
        "mixed" if input_len is None else "random",
        input_len=None if input_len is None else str(input_len),
        output_len=None if output_len is None else str(output_len),
    )

    async def load() -> RunResult:
        async with target:
            tokens = target.prompt_tokens
            schedule, _ = make_schedule(
                dataset, ArrivalSettings(), qps=rate, requests=count, seed=seed, tokens=tokens
            )
            works = make_warm_up(dataset, warmup, seed, tokens)
            return await _with_progress(target, schedule, works, seed, Console(stderr=True))

    result = uvloop.run(load())
    summary = summarize(result)
    print_summary(Console(), summary, title=target.name)
    if json_file is not None:
        write_json(json_file, result, summary)
    return summary.is_valid


async def _with_progress(
    target: Target, schedule: Schedule, warmup: list[Work], seed: int, console: Console
) -> RunResult:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("sent {task.fields[sent]}, failed {task.fields[failed]}"),
        TimeElapsedColumn(),
    )
    # Redrawn seldom: the generator shares its core with what draws.
    with Progress(
        *columns,
        console=console,
        refresh_per_second=2,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        name = f"{schedule.qps:g} requests/s"
        bar = progress.add_task(name, total=len(schedule.works), sent=0, failed=0)
        return await run_load(
            target,
            schedule,
            seed=seed,
            warmup=warmup,
            on_change=lambda sent, done, failed: progress.update(
                bar, completed=done, sent=sent, failed=failed
            ),
        )
