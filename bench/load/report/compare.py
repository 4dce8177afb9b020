"""`serve bench compare`: sets results of `serve bench --json` beside each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.load.report.comparison import Comparison, Row, overlap_text, ratio_text
from bench.load.report.plots_compare import document_latencies, write_overlays
from bench.load.report.terminal import number
from bench.load.results.confidence import Estimate
from bench.load.results.document import check_writable, estimate, read_json
from bench.load.results.metrics import LABELS, RATES
from serve.errors import ConfigError

SAME_RATE = 0.01
LATENCIES = [
    (name, stat)
    for name in ("ttft_schedule", "ttft_send", "tpot", "itl", "icl", "e2e_schedule", "e2e_send")
    for stat in ("p50", "p99")
]
MORE_IS_BETTER = ("requests_per_s", "output_tokens_per_s", "attainment", "max_qps")
NAMES = {
    **RATES,
    "failed_share": "share that failed",
    "attainment": "share within the SLO",
    "max_qps": "max requests/s",
}
_OWN_SETTINGS = ("json", "jsonl", "html", "png")


def parse_share(text: str) -> float:
    """Returns the share that `10%` or `0.1` means. Raises ConfigError."""
    number_text, percent, rest = text.strip().partition("%")
    try:
        value = float(number_text) / (100 if percent else 1)
    except ValueError:
        value = math.nan
    if rest or not 0 <= value < math.inf:
        raise ConfigError(f"fail-over must be a share such as 10% or 0.1, not {text!r}")
    return value


def compare(
    files: Sequence[Path],
    *,
    fail_over: str | None = None,
    console: Console | None = None,
    html_file: Path | None = None,
    png_file: Path | None = None,
) -> bool:
    """Prints every figure of the later files beside the first file's, and draws the latency
    distributions to html_file and png_file.

    With fail_over, returns False if a result is invalid, or if a figure is worse by more than that
    share and the intervals do not overlap (or are unknown). Raises ConfigError."""
    if len(files) < 2:
        raise ConfigError("compare needs at least two files")
    limit = None if fail_over is None else parse_share(fail_over)
    check_writable(html=html_file, png=png_file)
    is_drawn = html_file is not None or png_file is not None
    documents = [_whole(read_json(path), path, is_drawn) for path in files]
    first_name, *names = _names(files)
    comparisons = [
        compared(documents[0], document, name, math.inf if limit is None else limit)
        for document, name in zip(documents[1:], names, strict=True)
    ]
    if console is not None:
        for comparison in comparisons:
            _print(console, first_name, comparison, limit)
    if is_drawn:
        write_overlays([first_name, *names], documents, comparisons, html_file, png_file)
    return limit is None or all(c.is_usable and not c.regressions for c in comparisons)


def compared(
    first: dict[str, Any], other: dict[str, Any], name: str, fail_over: float
) -> Comparison:
    warnings = _differences(first, other)
    pairs = _pairs(first["rates"], other["rates"], warnings)
    rows = [row for pair in pairs for row in _rows(*pair)]
    if first.get("search") and other.get("search"):
        rates = [document["search"]["max_qps"] for document in (first, other)]
        row = _row("search", "max_qps", *(Estimate(float(rate)) for rate in rates))
        rows.append(row)
    usable = bool(pairs) and all(rate["is_valid"] for pair in pairs for rate in pair)
    if not pairs:
        warnings.append("the results have no rate in common, so that nothing is compared")
    elif not usable:
        warnings.append("a result is INVALID, and its figures must not be used")
    regressions = [row for row in rows if row.is_regression(fail_over)]
    return Comparison(name, rows, warnings, usable, regressions)


def _whole(document: dict[str, Any], path: Path, is_drawn: bool) -> dict[str, Any]:
    """Returns the document. Raises ConfigError if a figure to compare or draw cannot be read."""
    try:
        compared(document, document, "itself", math.inf)
        if is_drawn:
            for rate in document["rates"]:
                document_latencies(document, rate["qps"])
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        what = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{path} is no complete result of serve bench: {what}") from error
    return document


def _names(files: Sequence[Path]) -> list[str]:
    """Returns short and distinct names."""
    stems = [path.stem for path in files]
    if len(set(stems)) == len(stems):
        return stems
    return [f"{stem} ({number})" for number, stem in enumerate(stems, 1)]


def _pairs(
    first: list[dict[str, Any]], other: list[dict[str, Any]], warnings: list[str]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    if len(first) == len(other) == 1:
        a, b = _qps(first[0]), _qps(other[0])
        if not _is_same(a, b):
            warnings.insert(
                0,
                f"THE LOADS DIFFER: {a:.4g} and {b:.4g} requests/s were offered, so that latencies"
                " belong to different loads and throughput is not compared",
            )
        return [(first[0], other[0])]
    pairs = [(a, b) for a in first for b in other if _is_same(_qps(a), _qps(b))]
    left = len(first) + len(other) - 2 * len(pairs)
    if left:
        warnings.append(f"{left} rates are in one of the results only")
    return pairs


def _qps(rate: dict[str, Any]) -> float:
    return float(rate["qps"])


def _is_same(first: float, other: float) -> bool:
    return first == other or abs(first - other) <= SAME_RATE * min(first, other)


def _rows(first: dict[str, Any], other: dict[str, Any]) -> list[Row]:
    rate = "all at once" if math.isinf(_qps(first)) else f"{_qps(first):g}/s"
    rows = []
    for metric, stat in LATENCIES:
        sides = [side["latencies_ms"].get(metric) for side in (first, other)]
        if all(sides):
            values = [estimate(stats[stat]) for stats in sides]
            shown = stat
            if any(math.isnan(value.value) for value in values):  # too few values for it
                shown, values = "max", [estimate(stats["max"]) for stats in sides]
            rows.append(_row(rate, f"{LABELS[metric].replace(' from', '')} {shown}", *values))
    is_same = _is_same(_qps(first), _qps(other))
    for name in ("requests_per_s", "output_tokens_per_s"):
        if is_same and name in first["rates"] and name in other["rates"]:
            values = [estimate(side["rates"][name]) for side in (first, other)]
            rows.append(_row(rate, name, *values))
    if first.get("failed_share") and other.get("failed_share"):
        values = [estimate(side["failed_share"]) for side in (first, other)]
        rows.append(_row(rate, "failed_share", *values))
    if first["attainment"] and other["attainment"]:
        values = [estimate(side["attainment"]) for side in (first, other)]
        rows.append(_row(rate, "attainment", *values))
    return rows


def _row(rate: str, name: str, first: Estimate, other: Estimate) -> Row:
    ratio = other.value / first.value if first.value else math.nan
    is_known = not any(math.isnan(bound) for bound in (first.low, other.low))
    worse_by = 1 - ratio if name in MORE_IS_BETTER else ratio - 1
    if not first.value:  # any growth from 0 is infinite
        worse_by = 0.0 if name in MORE_IS_BETTER or not other.value > 0 else math.inf
    differs = not first.overlaps(other) if is_known else None
    return Row(rate, NAMES.get(name, name), first, other, ratio, differs, worse_by)


def _differences(first: dict[str, Any], other: dict[str, Any]) -> list[str]:
    warnings = []
    for part in ("settings", "slo", "machine"):
        a, b = (document.get(part) or {} for document in (first, other))
        keys = [key for key in {**a, **b} if a.get(key) != b.get(key)]
        keys = [key for key in keys if key.split("_")[0] not in _OWN_SETTINGS and key != "commit"]
        missing = "the default" if part == "settings" else "nothing"
        for key in keys:
            values = [missing if side.get(key) is None else side[key] for side in (a, b)]
            warnings.append(f"{part}: {key} is {values[0]} and {values[1]}")
    return warnings


def _print(console: Console, first_name: str, comparison: Comparison, limit: float | None) -> None:
    title = Text(f"{comparison.name} against {first_name} (milliseconds, per second)")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("rate")
    table.add_column("figure")
    for name in (first_name, comparison.name, "ratio"):
        table.add_column(Text(name), justify="right")
    table.add_column("intervals")
    for row in comparison.rows:
        style = ""
        if row.differs and row.worse_by:
            style = "red" if row.worse_by > 0 else "green"
        table.add_row(
            Text(row.rate),
            Text(row.name),
            number(row.first.value),
            number(row.other.value),
            Text(ratio_text(row), style=style),
            overlap_text(row),
        )
    for warning in comparison.warnings:
        console.print(Text(f"warning: {warning}", style="yellow"), soft_wrap=True)
    console.print(table)
    for row in comparison.regressions:
        text = f"REGRESSION: {row.rate} {row.name} {_worse_text(row)}"
        console.print(Text(text, style="bold red"), soft_wrap=True)
    if limit is not None and not comparison.regressions and comparison.is_usable:
        console.print(f"nothing is more than {100 * limit:g} % worse", highlight=False)


def _worse_text(row: Row) -> str:
    if math.isinf(row.worse_by):
        return f"was 0 and is {number(row.other.value)}"
    return f"is {100 * row.worse_by:.1f} % worse"
