"""Reports a measurement: turns the records of its runs into tables and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from bench.load.client.record import RunResult
from bench.load.report.terminal import print_report
from bench.load.results import document
from bench.load.results.columns import Columns
from bench.load.results.search import SearchResult
from bench.load.results.slo import Slo
from bench.load.results.summary import summarize_rates


def check_files(
    *,
    json_file: Path | None = None,
    jsonl_file: Path | None = None,
    html_file: Path | None = None,
    png_file: Path | None = None,
) -> None:
    """Raises ConfigError, before anything is sent, for files that could not be written."""
    document.check_writable(json=json_file, jsonl=jsonl_file, html=html_file, png=png_file)
    if html_file is not None or png_file is not None:
        from bench.common.plot_style import require_matplotlib

        require_matplotlib()


def report(
    runs: list[RunResult],
    settings: dict[str, Any],
    *,
    slo: Slo | None = None,
    console: Console | None = None,
    json_file: Path | None = None,
    jsonl_file: Path | None = None,
    html_file: Path | None = None,
    png_file: Path | None = None,
    search: SearchResult | None = None,
) -> bool:
    """Prints the report and writes the files. Returns whether the figures may be used.

    settings are the user's, and may have `command`, the command line; secrets are removed from
    them. search is the result of find_max_qps, if the runs are its own. Raises ConfigError."""
    check_files(json_file=json_file, jsonl_file=jsonl_file, html_file=html_file, png_file=png_file)
    columns = [Columns.of(run) for run in runs]
    rates = summarize_rates(runs, slo, columns=columns)
    measurement = document.measurement(runs, columns, rates, settings, slo, search)
    if json_file is not None:
        document.write_json(json_file, measurement)
    if jsonl_file is not None:
        document.write_jsonl(jsonl_file, runs)
    if html_file is not None:
        from bench.load.report.html import write_html

        write_html(html_file, measurement)
    if png_file is not None:
        from bench.load.report.write_pictures import write_png

        write_png(png_file, measurement)
    if console is not None:  # printed last, as the pipe may be closed
        print_report(console, measurement)
        written = [str(f) for f in (json_file, jsonl_file, html_file, png_file) if f is not None]
        if written:
            console.print(f"written: {', '.join(written)}", markup=False, highlight=False)
    return measurement.is_valid
