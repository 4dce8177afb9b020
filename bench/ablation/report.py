"""The report of an ablation: tables, the rows of its JSON, and a bar chart."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.ablation.pools import OnDevice
from bench.ablation.run import AblationResult
from bench.ablation.variants import OURS, SHORT, Variant
from bench.common import percentiles, tables
from bench.common.percentiles import Latencies


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of a variant; lists have a value per round.

    gain is the requests per second of the variant `against` over those of this one in the same
    round; above 1 the optimisation pays. at_once is the same ratio of the mean numbers of running
    sequences. same_tokens is the share of the answers that equal those of "ours". Latencies are
    milliseconds over all rounds; None if they are not measured."""

    name: str
    optimisation: str
    against: str
    claim: str
    requests_per_s: list[float]
    tokens_per_s: list[float]
    gain: list[float]
    at_once: list[float]
    running_mean: float
    running_most: int
    preemptions: float
    steps: float
    same_tokens: float
    is_exact: bool
    ttft_ms: Latencies
    tpot_ms: Latencies


def rows_of(variants: Sequence[Variant], result: AblationResult) -> list[Row]:
    """Returns a row for each variant."""
    answers = result.rounds[OURS][0].saturated.tokens
    rows = []
    for variant in variants:
        rounds = result.rounds[variant.name]
        runs = [r.saturated for r in rounds]
        baselines = [r.saturated for r in result.rounds[variant.against]]
        pairs = list(zip(baselines, runs, strict=True))
        ttft = [seconds for r in rounds for seconds in r.ttft_s]
        tpot = [seconds for r in rounds for seconds in r.tpot_s]
        rows.append(
            Row(
                variant.name,
                variant.optimisation,
                variant.against,
                variant.claim,
                [run.requests_per_s for run in runs],
                [run.tokens_per_s for run in runs],
                [other.requests_per_s / own.requests_per_s for other, own in pairs],
                [other.running_mean / own.running_mean for other, own in pairs],
                statistics.median(run.running_mean for run in runs),
                max(run.running_most for run in runs),
                statistics.median(run.num_preemptions for run in runs),
                statistics.median(len(run.steps) for run in runs),
                statistics.mean(_share_alike(run.tokens, answers) for run in runs),
                variant.is_exact,
                percentiles.document(ttft, 1e3),
                percentiles.document(tpot, 1e3),
            )
        )
    return rows


def _share_alike(tokens: list[list[int]], answers: list[list[int]]) -> float:
    alike = [a == b for a, b in zip(tokens, answers, strict=True)]
    return sum(alike) / len(alike)


def show(rows: Sequence[Row], result: AblationResult, max_num_seqs: int, console: Console) -> None:
    """Prints the tables of throughput and latency, and what they mean."""
    console.print(_throughput(rows))
    if timed := [row for row in rows if row.ttft_ms["n"]]:
        console.print(_latency(timed, result.qps))
    lines = [
        f"saturated: all requests at once, at most {max_num_seqs} sequences; a request has"
        f" {result.tokens_per_request:.0f} tokens on average; medians over the rounds and their"
        " 90 % intervals; gains are computed within a round"
    ]
    if SHORT in result.rounds:
        tokens = result.short_bytes / result.kv_bytes_per_token
        mib = result.short_bytes / 2**20
        lines.append(f"{SHORT}: {mib:.2f} MiB of K/V, {tokens:,.0f} tokens in int8")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def show_device(device: OnDevice, console: Console) -> None:
    """Prints the gain of the pools when the processor is free during a step."""
    console.print(
        f"pipelined pools beside a scripted device without a model ({1e3 * device.device_s:.0f} ms"
        f" per step, {device.num_seqs} sequences):"
        f" {tables.spread([1e3 * s for s in device.pools_s])} ms per step, in one thread"
        f" {tables.spread([1e3 * s for s in device.serial_s])}: gain"
        f" {tables.spread([100 * (gain - 1) for gain in device.gains], '{:+.0f}'.format)} %",
        highlight=False,
        soft_wrap=True,
    )


def _throughput(rows: Sequence[Row]) -> Table:
    columns = ("off", "replaced by", "requests/s", "gain", "claimed", "at once")
    table = Table(*columns, "preempted", "tokens", title="saturated", title_justify="left")
    for row in rows:
        table.add_row(
            row.optimisation,
            row.name if row.optimisation else f"[bold]{row.name}[/bold]",
            tables.spread(row.requests_per_s),
            "" if row.name == row.against else _gain(row),
            row.claim,
            f"{row.running_mean:.1f}" + (f", {_less(row)}" if row.against == SHORT else ""),
            f"{row.preemptions:.0f}",
            "same" if row.same_tokens == 1.0 else f"{row.same_tokens:.0%} same",
        )
    return table


def _gain(row: Row) -> str:
    return tables.spread([100 * (gain - 1) for gain in row.gain], "{:+.0f}".format) + " %"


def _less(row: Row) -> str:
    return f"1/{statistics.median(row.at_once):.1f}"


def _latency(rows: Sequence[Row], qps: float) -> Table:
    title = f"milliseconds at {qps:.1f} requests/s (Poisson); TTFT from when a request is due"
    columns = ("", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99")
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        cells = [text for ms in (row.ttft_ms, row.tpot_ms) for text in percentiles.cells(ms)]
        table.add_row(row.name, *cells)
    return table


def draw(path: Path, rows: Sequence[Row], title: str) -> None:
    """Draws a bar for each optimisation: requests per second with it over those without it."""
    from matplotlib.figure import Figure

    bars = [row for row in rows if row.name != row.against and row.name != SHORT]
    medians = [statistics.median(row.gain) for row in bars]
    ends = [tables.interval(row.gain) for row in bars]
    low = [median - end[0] for median, end in zip(medians, ends, strict=True)]
    high = [end[1] - median for median, end in zip(medians, ends, strict=True)]
    figure = Figure(figsize=(9, 0.6 * len(bars) + 1.6), layout="constrained")
    axes: Any = figure.subplots()
    names = [f"{row.optimisation}\n(off: {row.name})" for row in bars]
    colours = ["#2b7a78" if median >= 1 else "#b5543a" for median in medians]
    axes.barh(names, medians, xerr=[low, high], color=colours, capsize=3)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel("requests/s with it over requests/s without it; median and 90 % interval")
    axes.set_title(textwrap.fill(title, 100), fontsize=9)
    figure.savefig(path, dpi=130)
