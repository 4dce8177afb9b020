"""From the records of a load run to percentiles, a table and a file. No clock, no network."""

from __future__ import annotations

import json
import math
import os
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.load.record import Outcome, Record, RunResult

PERCENTILES = (50, 90, 99)
MAX_LAG_P99_S = 0.005


@dataclass(frozen=True, slots=True)
class Summary:
    """latencies_ms: metric -> percentile name -> milliseconds. rates: per second.

    is_valid: the generator kept its schedule, so the latencies mean what they say.
    """

    latencies_ms: dict[str, dict[str, float]]
    rates: dict[str, float]
    counts: dict[str, int]
    lag_ms: dict[str, float]
    errors: dict[str, int]
    is_valid: bool


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the closest ranks; NaN for no values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _is_good(record: Record) -> bool:
    return record.outcome is Outcome.OK and bool(record.chunks_s)


def summarize(result: RunResult) -> Summary:
    """Latency is over answers that ended well; TPOT over those of more than one token."""
    records, qps = result.records, result.qps
    good = [record for record in records if _is_good(record)]
    samples: dict[str, list[float]] = {
        "TTFT from send": [r.chunks_s[0] - r.sent_s for r in good],
        "TTFT from schedule": [r.chunks_s[0] - r.scheduled_s for r in good],
        "TPOT": [
            (r.chunks_s[-1] - r.chunks_s[0]) / ((r.output_tokens or 0) - 1)
            for r in good
            if (r.output_tokens or 0) > 1
        ],
        "ICL": [b - a for r in good for a, b in pairwise(r.chunks_s)],
        "E2E from send": [r.chunks_s[-1] - r.sent_s for r in good],
        "E2E from schedule": [r.chunks_s[-1] - r.scheduled_s for r in good],
    }
    lags = [record.sent_s - record.scheduled_s for record in records]
    lag_ms = {f"p{percent}": 1000 * percentile(lags, percent) for percent in (50, 99)}
    start_s = min(record.scheduled_s for record in records)
    wall_s = max(record.finished_s for record in records) - start_s
    output_tokens = sum(record.output_tokens or 0 for record in good)
    prompt_tokens = sum(record.prompt_tokens or 0 for record in good)
    return Summary(
        latencies_ms={
            name: {f"p{percent}": 1000 * percentile(values, percent) for percent in PERCENTILES}
            for name, values in samples.items()
        },
        rates={
            "offered requests": qps,
            "answered requests": len(good) / wall_s,
            "output tokens": output_tokens / wall_s,
            "prompt tokens": prompt_tokens / wall_s,
        },
        counts={
            "requests": len(records),
            "answered": len(good),
            "failed": len(records) - len(good),
            "prompt tokens": prompt_tokens,
            "output tokens": output_tokens,
            "peak concurrency": peak_concurrency(records),
        },
        lag_ms=lag_ms,
        errors=dict(Counter(r.error or "no text came" for r in records if not _is_good(r))),
        is_valid=math.isinf(qps) or lag_ms["p99"] <= 1000 * MAX_LAG_P99_S,
    )


def peak_concurrency(records: Sequence[Record]) -> int:
    edges = [(record.sent_s, 1) for record in records]
    edges += [(record.finished_s, -1) for record in records]
    running = peak = 0
    for _, change in sorted(edges):
        running += change
        peak = max(peak, running)
    return peak


def print_summary(console: Console, summary: Summary, *, title: str) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column("milliseconds")
    for percent in PERCENTILES:
        table.add_column(f"p{percent}", justify="right")
    for name, values in summary.latencies_ms.items():
        table.add_row(name, *(_number(value) for value in values.values()))
    console.print(table)
    counts, rates = summary.counts, summary.rates
    qps = rates["offered requests"]
    offered = "all sent at once" if math.isinf(qps) else f"of {qps:g}/s offered"
    lines = [
        f"{counts['answered']} of {counts['requests']} answered,"
        f" {rates['answered requests']:.2f}/s {offered},"
        f" at most {counts['peak concurrency']} at once",
        f"{rates['output tokens']:.1f} output tokens/s, {rates['prompt tokens']:.1f} prompt"
        f" tokens/s; {counts['output tokens']} and {counts['prompt tokens']} in all",
        f"dispatch lag p50 {summary.lag_ms['p50']:.2f} ms, p99 {summary.lag_ms['p99']:.2f} ms",
    ]
    lines += [f"failed {count} times: {error}" for error, count in summary.errors.items()]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    if not summary.is_valid:
        console.print(
            f"[bold red]INVALID[/bold red]: the generator fell behind its schedule (lag p99 over"
            f" {1000 * MAX_LAG_P99_S:g} ms); lower the rate or run it on another machine",
            soft_wrap=True,
        )


def write_json(path: Path, result: RunResult, summary: Summary) -> None:
    """One document: on what machine, the summary, every request."""
    document = {
        "machine": {
            "platform": platform.platform(),
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
        },
        "summary": asdict(summary),
        "result": asdict(result),
    }
    path.write_text(json.dumps(_finite(document), indent=1) + "\n")


def _finite(value: Any) -> Any:
    """JSON has neither NaN nor infinity: null and "inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return "inf" if value > 0 else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1f}"
