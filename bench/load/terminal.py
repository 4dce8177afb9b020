"""The tables that a run ends with."""

from __future__ import annotations

import math

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.load.confidence import Estimate
from bench.load.document import Measurement
from bench.load.metrics import LABELS, RATES, STATS
from bench.load.redact import redact
from bench.load.summary import RateSummary

MAX_ERRORS = 5
MIN_WIDTH = 96  # for an interval beside each metric


def print_report(console: Console, made: Measurement) -> None:
    for rate in made.rates:
        _print_rate(console, made, rate)
    if len(made.rates) > 1:
        console.print(_rates_table(made))
    if made.search is not None:
        _say(console, str(made.search), style="bold")


def rate_title(rate: RateSummary) -> str:
    offered = "all requests at once" if math.isinf(rate.qps) else f"{rate.qps:g} requests/s"
    runs = len(rate.runs)
    return f"{offered}, {runs} run{'s' if runs > 1 else ''}"


def number(value: float) -> str:
    """Three digits, or a whole number; - for what is not known."""
    if math.isnan(value):
        return "-"
    if math.isinf(value):
        return "∞"
    digits = 0 if abs(value) >= 100 or float(value).is_integer() else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"


def interval(value: Estimate) -> str:
    return "-" if math.isnan(value.low) else f"{number(max(value.low, 0))}-{number(value.high)}"


def with_interval(value: Estimate) -> str:
    between = "" if math.isnan(value.low) else f" ({interval(value)})"
    return number(value.value) + between


def share(value: Estimate) -> str:
    if math.isnan(value.value):
        return "-"
    return f"{100 * value.value:.2f} % ({100 * value.low:.2f}-{100 * value.high:.2f})"


def count_text(counts: dict[str, int]) -> str:
    """How many requests counted, and how they ended."""
    ends = [
        f"{counts[name]:,} {text}"
        for name, text in (
            ("answered", "answered"),
            ("failed", "failed"),
            ("cancelled", "cancelled on purpose"),
            ("incomplete", "not ended in time"),
            ("empty", "without text"),
        )
        if counts[name] or name == "answered"
    ]
    return f"{counts['counted']:,} of {counts['scheduled']:,} requests count: {', '.join(ends)}"


def _print_rate(console: Console, made: Measurement, rate: RateSummary) -> None:
    table = Table(title=f"{redact(rate.runs[0].target)}: {rate_title(rate)}", title_justify="left")
    table.add_column("milliseconds")
    for stat in STATS:
        table.add_column(stat, justify="right")
    is_wide = console.width >= MIN_WIDTH
    if is_wide:
        table.add_column("p99, 95 % interval", justify="right")
    for name, stats in rate.latencies_ms.items():
        cells = [number(stats[stat].value) for stat in STATS]
        cells += [interval(stats["p99"])] if is_wide else []
        table.add_row(LABELS[name], *cells)
    console.print(table)
    lines = [count_text(rate.counts)]
    if math.isfinite(rate.qps):
        lines.append(f"sent {rate.achieved_qps:.4g} of {rate.qps:g} requests/s offered")
    lines += [
        f"{text}: {with_interval(rate.rates[n])}" for n, text in RATES.items() if n in rate.rates
    ]
    if made.slo is not None and rate.attainment is not None and rate.goodput is not None:
        lines.append(
            f"goodput ({made.slo}): {share(rate.attainment)},"
            f" {with_interval(rate.goodput)} requests/s"
        )
    for error, count in list(rate.errors.items())[:MAX_ERRORS]:
        lines.append(f"{count} times: {redact(error)}")
    if len(rate.errors) > MAX_ERRORS:
        lines.append(f"and {len(rate.errors) - MAX_ERRORS} other errors")
    for line in lines:
        _say(console, line)
    for style, texts in verdict_texts(rate).items():
        for text in texts:
            _say(console, text, style=style)


def verdict_texts(rate: RateSummary) -> dict[str, list[str]]:
    """By style: reasons why it is invalid, warnings, notes; each once, whatever run said it."""
    found: dict[str, list[str]] = {"bold red": [], "yellow": [], "dim": []}
    for run in rate.runs:
        found["bold red"] += [f"INVALID: {reason}" for reason in run.verdict.reasons]
        found["yellow"] += [f"warning: {text}" for text in run.verdict.warnings]
        found["dim"] += [f"note: {text}" for text in run.notes]
    return {
        style: [redact(text) for text in dict.fromkeys(texts)] for style, texts in found.items()
    }


def _rates_table(made: Measurement) -> Table:
    table = Table(title="all rates", title_justify="left")
    for name in ("offered/s", "answers/s", "output tokens/s"):
        table.add_column(name, justify="right")
    shown = [(m, p) for m in ("ttft_schedule", "tpot", "e2e_schedule") for p in ("p50", "p99")]
    for metric, stat in shown:
        table.add_column(f"{metric.partition('_')[0].upper()} {stat}", justify="right")
    if made.slo is not None:
        table.add_column("goodput", justify="right")
    for rate in made.rates:
        cells = [number(rate.qps)]
        cells += [
            number(rate.rates[name].value) if name in rate.rates else "-"
            for name in ("requests_per_s", "output_tokens_per_s")
        ]
        cells += [
            number(rate.latencies_ms[metric][stat].value) if metric in rate.latencies_ms else "-"
            for metric, stat in shown
        ]
        if rate.attainment is not None:
            cells.append(f"{100 * rate.attainment.value:.1f} %")
        table.add_row(*cells)
    return table


def _say(console: Console, text: str, *, style: str = "") -> None:
    console.print(Text(text, style=style), soft_wrap=True)
