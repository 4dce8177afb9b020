"""Prints a measurement on the terminal, and formats its figures, verdict and headline."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.common.percentiles import least_samples
from bench.load.client.redact import redact
from bench.load.results.confidence import Estimate
from bench.load.results.document import Measurement
from bench.load.results.metrics import LABELS, PERCENTS, RATES, STATS, count_notes, plural
from bench.load.results.summary import RateSummary, qps_text

MAX_ERRORS = 5
MIN_FAILED_SHARE = 0.01  # a smaller share does not appear in the verdict
MIN_WIDTH = 96  # columns from which each metric has its interval


def print_report(console: Console, measurement: Measurement) -> None:
    for rate in measurement.rates:
        _print_rate(console, measurement, rate)
    if len(measurement.rates) > 1:
        console.print(_rates_table(measurement))
    if measurement.search is not None:
        _print_line(console, str(measurement.search), style="bold")


def verdict(measurement: Measurement) -> tuple[str, str]:
    """Returns ("valid", "warned" or "invalid", the verdict as a text)."""
    bad = sum(not rate.is_valid for rate in measurement.rates)
    failed = failures(measurement)
    if not measurement.is_valid:
        words = f"INVALID: {bad} of {len(measurement.rates)} rates must not be used"
        return "invalid", f"{words}; {failed}" if failed else words
    if failed:
        return "warned", f"Valid, but {failed}"
    if any(run.verdict.warnings for rate in measurement.rates for run in rate.runs):
        return "warned", "Valid, with warnings"
    return "valid", "Valid: the load was offered as planned"


def failures(measurement: Measurement) -> str:
    """Returns how many requests failed, or an empty text if no rate exceeds MIN_FAILED_SHARE."""
    if not any(rate.failed_share.value > MIN_FAILED_SHARE for rate in measurement.rates):
        return ""
    verdicts = [run.verdict for rate in measurement.rates for run in rate.runs]
    lost, total = sum(v.num_lost for v in verdicts), sum(v.num_asked for v in verdicts)
    return f"{lost:,} of {total:,} requests failed"


def headline(measurement: Measurement) -> str:
    """Returns the target, the load, the machine and the time of a measurement as one line."""
    target = redact(measurement.rates[0].runs[0].target) if measurement.rates else "nothing"
    rates = [rate.qps for rate in measurement.rates]
    offered = ", ".join("all at once" if math.isinf(qps) else f"{number(qps)}/s" for qps in rates)
    if len(rates) > 4:
        offered = f"{len(rates)} rates from {number(rates[0])} to {number(rates[-1])}/s"
    return f"{target} · {offered} · {measurement.machine['cpu']} · {measurement.created}"


def rate_title(rate: RateSummary) -> str:
    offered = "all requests at once" if math.isinf(rate.qps) else f"{qps_text(rate.qps)} requests/s"
    runs = len(rate.runs)
    return f"{offered}, {runs} {plural('run', runs)}"


def number(value: float) -> str:
    """Formats a value with three digits or as a whole number; - if it is unknown."""
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
    """Returns how many requests count, and how they ended."""
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
    scheduled = f"{counts['scheduled']:,} {plural('request', counts['scheduled'])}"
    verb = "counts" if counts["counted"] == 1 else "count"
    return f"{counts['counted']:,} of {scheduled} {verb}: {', '.join(ends)}"


def _print_rate(console: Console, measurement: Measurement, rate: RateSummary) -> None:
    table = Table(title=f"{redact(rate.runs[0].target)}: {rate_title(rate)}", title_justify="left")
    table.add_column("milliseconds")
    table.add_column("n", justify="right")
    for stat in STATS:
        table.add_column(stat, justify="right")
    is_wide = console.width >= MIN_WIDTH
    if is_wide:
        table.add_column("p99, 95 % interval", justify="right")
    for name, stats in rate.latencies_ms.items():
        cells = [f"{stats['count'].value:,.0f}", *(number(stats[stat].value) for stat in STATS)]
        cells += [interval(stats["p99"])] if is_wide else []
        table.add_row(LABELS[name], *cells)
    console.print(table)
    lines = [count_text(rate.counts)]
    if math.isfinite(rate.qps):
        lines.append(f"sent {rate.achieved_qps:.4g} of {rate.qps:.4g} requests/s offered")
    lines += [
        f"{text}: {with_interval(rate.rates[n])}" for n, text in RATES.items() if n in rate.rates
    ]
    if measurement.slo is not None and rate.attainment is not None and rate.goodput is not None:
        lines.append(
            f"goodput ({measurement.slo}): {share(rate.attainment)},"
            f" {with_interval(rate.goodput)} requests/s"
        )
    for error, count in list(rate.errors.items())[:MAX_ERRORS]:
        lines.append(f"{count} {plural('time', count)}: {redact(error)}")
    if len(rate.errors) > MAX_ERRORS:
        left = len(rate.errors) - MAX_ERRORS
        lines.append(f"and {left} other {plural('error', left)}")
    for line in lines:
        _print_line(console, line)
    for style, texts in verdict_texts(rate).items():
        for text in texts:
            _print_line(console, text, style=style)


def verdict_texts(rate: RateSummary) -> dict[str, list[str]]:
    """Returns, by style, the reasons why a rate is invalid, its warnings and its notes. Texts of
    several runs that differ only in their numbers appear once, with the runs' seeds."""
    by_style: dict[str, list[str]] = {"bold red": [], "yellow": [], "dim": []}
    by_style["dim"] += [f"note: {text}" for text in (*count_notes(rate.counts), *few_notes(rate))]
    runs = rate.runs
    by_style["bold red"] += _by_kind("INVALID", [(run.seed, run.verdict.reasons) for run in runs])
    by_style["yellow"] += _by_kind("warning", [(run.seed, run.verdict.warnings) for run in runs])
    by_style["dim"] += _by_kind("note", [(run.seed, run.notes) for run in runs])
    return {style: [redact(text) for text in texts] for style, texts in by_style.items()}


def few_notes(rate: RateSummary) -> list[str]:
    """Returns a note if a metric has too few values for a percentile."""
    lacking = [
        percent
        for percent in PERCENTS
        if any(math.isnan(stats[f"p{percent}"].value) for stats in rate.latencies_ms.values())
    ]
    if not lacking:
        return []
    needs = ", ".join(f"p{percent} {least_samples(percent)}" for percent in lacking)
    return [f"a percentile needs enough values ({needs}); of fewer, the maximum is shown"]


def tail_text(rate: RateSummary, metric: str, stat: str) -> str:
    """Returns a figure for a table without a column of maxima."""
    if metric not in rate.latencies_ms:
        return "-"
    if stat == "p50":
        return number(rate.latencies_ms[metric][stat].value)
    return rate.tail_ms(metric, int(stat[1:])).text(number)


def _by_kind(name: str, runs: Sequence[tuple[int, Sequence[str]]]) -> list[str]:
    """Merges the texts of runs, given as (seed, texts). A text that all runs have has no seed."""
    kinds: dict[str, list[tuple[int, str]]] = {}
    for seed, texts in runs:
        for text in dict.fromkeys(texts):
            kinds.setdefault(re.sub(r"[\d.,]*\d", "#", text), []).append((seed, text))
    lines = []
    for kind in kinds.values():
        seed, text = kind[0]
        other_seeds = ", ".join(str(other) for other, _ in kind[1:])
        is_common = len(kind) == len(runs) and len({text for _, text in kind}) == 1
        where = f" (seed {seed}{f'; also {other_seeds}' if other_seeds else ''})"
        lines.append(f"{name}: {text}{'' if is_common else where}")
    return lines


def _rates_table(measurement: Measurement) -> Table:
    """Returns a table of all rates that fits into 80 columns."""
    title = "all rates: requests/s, output tokens/s, milliseconds from schedule"
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    for name in ("offered", "answers", "tokens"):
        table.add_column(name, justify="right")
    shown = [(m, p) for m in ("ttft_schedule", "tpot", "e2e_schedule") for p in ("p50", "p99")]
    for metric, stat in shown:
        table.add_column(f"{metric.partition('_')[0].upper()}\n{stat}", justify="right")
    if measurement.slo is not None:
        table.add_column("SLO\n%", justify="right")
    for rate in measurement.rates:
        cells = [number(rate.qps) if rate.is_valid else f"INVALID {number(rate.qps)}"]
        cells += [
            number(rate.rates[name].value) if name in rate.rates else "-"
            for name in ("requests_per_s", "output_tokens_per_s")
        ]
        cells += [tail_text(rate, metric, stat) for metric, stat in shown]
        if rate.attainment is not None:
            cells.append(f"{100 * rate.attainment.value:.1f}")
        table.add_row(*cells, style="" if rate.is_valid else "red")
    return table


def _print_line(console: Console, text: str, *, style: str = "") -> None:
    console.print(Text(text, style=style), soft_wrap=True)
