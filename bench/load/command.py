"""`serve bench` without a further name: from its options to a run, a table and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.load.arrivals import arrival_times, count_requests, parse_qps
from bench.load.datasets import mixed, random_tokens
from bench.load.record import RunResult
from bench.load.report import print_summary, summarize, write_json
from bench.load.run import run_load
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
    rate = parse_qps(qps)
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

    def works(count: int, seed: int) -> list[Work]:
        if input_len is None:
            return mixed(count, seed, output_len)
        return random_tokens(count, seed, input_len, output_len or 128, target.prompt_tokens)

    async def load() -> RunResult:
        async with target:
            schedule = Schedule(rate, works(count, seed), arrival_times(rate, count, seed))
            return await _with_progress(
                target, schedule, works(warmup, seed + 1_000_003), seed, Console(stderr=True)
            )

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
