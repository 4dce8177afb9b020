"""Draws the latency distributions of several results into one picture or page."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.common.plot_style import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    VERMILLION,
    WIDTH_IN,
    plain_log,
    require_matplotlib,
    styled,
)
from bench.load.report.comparison import Comparison, overlap_text, ratio_text
from bench.load.report.html import STYLE
from bench.load.report.plots import Plot
from bench.load.report.plots_latency import LOG_FROM, SHARES
from bench.load.report.terminal import number
from bench.load.report.write_pictures import svg
from bench.load.results.columns import Floats
from bench.load.results.summary import nominal
from serve.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import FigureBase

COLOURS = (BLUE, ORANGE, GREEN, PURPLE, VERMILLION)
STYLES = ("-", (0, (4, 1.5)), (0, (1, 1)))
TITLES = {"ttft": "TTFT from schedule", "tpot": "TPOT", "e2e": "E2E from schedule"}


def document_latencies(document: dict[str, Any], qps: Any) -> dict[str, Floats]:
    """Returns sorted milliseconds of all requests at that rate that count and ended well."""
    parts_of: dict[str, list[Floats]] = {name: [] for name in TITLES}
    for run in document["runs"]:
        if nominal(float(run["qps"])) != float(qps):
            continue
        columns = run["requests"]
        low, high = (np.inf if edge == "inf" else float(edge) for edge in run["window"])
        due, first, last, tokens = (
            np.array(columns[name], np.float64)
            for name in ("scheduled_s", "first_chunk_s", "last_chunk_s", "output_tokens")
        )
        chunks = np.array(columns["num_chunks"], np.float64)
        is_ok = np.array([outcome == "ok" for outcome in columns["outcome"]], np.bool_)
        is_used = is_ok & (chunks > 0) & (due >= low) & (due <= high)
        count = np.where(np.isnan(tokens), chunks, tokens) - 1
        has_rate = is_used & (count > 0) & (chunks > 1)
        parts_of["ttft"].append((first - due)[is_used])
        parts_of["e2e"].append((last - due)[is_used])
        parts_of["tpot"].append((last - first)[has_rate] / count[has_rate])
    joined = {name: np.concatenate([[], *parts]) * 1000 for name, parts in parts_of.items()}
    return {name: np.sort(values) for name, values in joined.items() if len(values)}


def overlay_plots(names: Sequence[str], documents: Sequence[dict[str, Any]]) -> list[Plot]:
    """Returns one plot for each rate of the first result."""
    plots = []
    for index, rate in enumerate(documents[0]["rates"]):
        # Results with one rate each are compared whatever these rates are.
        only = all(len(document["rates"]) == 1 for document in documents)
        lines = {
            name: document_latencies(document, document["rates"][0]["qps"] if only else rate["qps"])
            for name, document in zip(names, documents, strict=True)
        }
        if any(lines.values()):
            title = f"Latency distributions, {rate['qps']} requests/s"
            plots.append(Plot(f"overlay{index}", title, 3.3, _drawer(lines)))
    return plots


def _drawer(lines: dict[str, dict[str, Floats]]) -> Any:
    def draw(figure: FigureBase) -> None:
        grid = figure.subplots(1, len(TITLES), sharey=True)
        for axes, (metric, title) in zip(grid, TITLES.items(), strict=True):
            is_log = False
            for index, (name, values) in enumerate(lines.items()):
                if metric not in values:
                    continue
                at = np.quantile(values[metric], SHARES)
                is_log |= bool(at[1] > 0 and at[-2] > LOG_FROM * at[1])
                colour = COLOURS[index % len(COLOURS)]
                style = STYLES[index % len(STYLES)]
                axes.plot(at, 100 * SHARES, color=colour, linestyle=style, label=name)
            if is_log:
                axes.set_xscale("log")
                plain_log(axes.xaxis)
            else:
                axes.set_xlim(left=0)
            axes.set_ylim(0, 101)
            axes.set_title(title)
            axes.set_xlabel("milliseconds")
        grid[0].set_ylabel("% of requests")
        grid[-1].legend(loc="lower right")

    return draw


def write_overlays(
    names: Sequence[str],
    documents: Sequence[dict[str, Any]],
    comparisons: Sequence[Comparison],
    html_file: Path | None,
    png_file: Path | None,
) -> None:
    require_matplotlib()
    plots = overlay_plots(names, documents)
    try:
        if html_file is not None:
            html_file.write_text(_page(names, plots, comparisons), encoding="utf-8")
        if png_file is not None:
            _write_png(png_file, plots)
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be written: {error.strerror}") from error


def _write_png(path: Path, plots: Sequence[Plot]) -> None:
    from matplotlib.figure import Figure

    heights = [plot.height_in + 0.35 for plot in plots] or [1.0]
    with styled():
        figure = Figure(figsize=(WIDTH_IN, sum(heights)), layout="constrained", facecolor="white")
        parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)
        for part, plot in zip(parts[:, 0], plots, strict=False):
            part.suptitle(plot.title, x=0.01, ha="left", fontsize=12, weight="bold")
            plot.draw(part)
        figure.savefig(path, format="png", dpi=110)


def _page(names: Sequence[str], plots: Sequence[Plot], comparisons: Sequence[Comparison]) -> str:
    parts = []
    for comparison in comparisons:
        title = html.escape(f"{comparison.name} against {names[0]}")
        names_of_columns = ("rate", "figure", names[0], comparison.name, "ratio", "intervals")
        head = "".join(f"<th>{html.escape(name)}</th>" for name in names_of_columns)
        rows = "".join(
            f'<tr><th scope="row">{html.escape(row.rate)}</th><td>{html.escape(row.name)}</td>'
            f"<td>{number(row.first.value)}</td><td>{number(row.other.value)}</td>"
            f"<td>{ratio_text(row)}</td><td>{overlap_text(row)}</td></tr>"
            for row in comparison.rows
        )
        notes = "".join(f'<p class="warn">{html.escape(text)}</p>' for text in comparison.warnings)
        parts.append(
            f'<h2>{title}</h2>{notes}<div class="wide"><table><thead><tr>{head}</tr></thead>'
            f"<tbody>{rows}</tbody></table></div>"
        )
    parts += [
        f'<figure><h3>{html.escape(plot.title)}</h3><div class="wide">{svg(plot)}</div></figure>'
        for plot in plots
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>serve bench compare</title>\n<style>{STYLE}</style></head>\n"
        f"<body><main><h1>serve bench compare</h1>{''.join(parts)}</main></body></html>\n"
    )
