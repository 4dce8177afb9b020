"""Pictures of latencies: their distribution, and their growth with the rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from bench.common.plot_style import (
    BLUE,
    GREEN,
    ORANGE,
    PAPER,
    PURPLE,
    VERMILLION,
    horizontal,
    plain_log,
    rate_ticks,
    vertical,
)
from bench.load.client.record import RunResult
from bench.load.report.plots import Plot
from bench.load.results.columns import Columns, Floats
from bench.load.results.confidence import Estimate
from bench.load.results.metrics import latencies
from bench.load.results.search import SearchResult
from bench.load.results.slo import Slo
from bench.load.results.summary import RateSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

# the tail has finer steps
SHARES = np.concatenate([np.linspace(0, 0.9, 91), np.linspace(0.9, 1.0, 201)[1:]])
LOG_FROM = 20.0  # the ratio of p99 to p1 from which an axis is logarithmic
PANELS = (
    ("TTFT", "ttft", ("ttft_schedule", "ttft_send")),
    ("TPOT", "tpot", ("tpot",)),
    ("E2E", "e2e", ("e2e_schedule", "e2e_send")),
)
_LINES = {
    "schedule": (BLUE, "-", "from schedule"),
    "send": (ORANGE, (0, (4, 1.5)), "from send"),
    "tpot": (GREEN, "-", "per request"),
}


def pooled(runs: Sequence[RunResult], columns: Sequence[Columns]) -> dict[str, Floats]:
    """Returns the latencies of all runs together, in sorted milliseconds."""
    parts_of: dict[str, list[Floats]] = {}
    for run, of_run in zip(runs, columns, strict=True):
        for name, samples in latencies(run, of_run).items():
            parts_of.setdefault(name, []).append(samples.values)
    return {name: np.sort(np.concatenate(parts)) * 1000 for name, parts in parts_of.items()}


def cdf_plot(name: str, values: dict[str, Floats], slo: Slo | None) -> Plot | None:
    """Draws the distributions of the metrics in PANELS. values are sorted milliseconds."""
    panels = [panel for panel in PANELS if any(metric in values for metric in panel[2])]
    if not panels:
        return None

    def draw(figure: FigureBase) -> None:
        grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)
        for axes, (title, limit, metrics) in zip(grid[0], panels, strict=True):
            _cdf(axes, {m: values[m] for m in metrics if m in values})
            axes.set_title(title)
            axes.set_xlabel("milliseconds")
            limit_ms = None if slo is None else slo.limits_ms.get(limit)
            if limit_ms is not None:
                vertical(axes, limit_ms, f"SLO {limit_ms:g} ms")
            if len(metrics) > 1:
                axes.legend(loc="lower right")
        grid[0][0].set_ylabel("% of requests")

    note = "The share of requests that were at most this slow. Where lines part, requests waited in"
    return Plot(name, "Latency distributions", 3.3, draw, f"{note} the client.")


def _cdf(axes: Axes, lines: dict[str, Floats]) -> None:
    is_log = False
    for metric, sorted_ms in lines.items():
        colour, style, label = _LINES[metric.rpartition("_")[2]]
        at = np.quantile(sorted_ms, SHARES)
        axes.plot(at, 100 * SHARES, color=colour, linestyle=style, label=label)
        low, high = at[1], at[-2]
        is_log |= bool(low > 0 and high > LOG_FROM * low)
    if is_log:
        axes.set_xscale("log")
        plain_log(axes.xaxis)
    else:
        axes.set_xlim(left=0)
    axes.set_ylim(0, 101)


def rates_plot(
    name: str, rates: Sequence[RateSummary], slo: Slo | None, search: SearchResult | None
) -> Plot | None:
    """Draws latency against the offered rate, and the speed of one user against that of all."""
    finite = [rate for rate in rates if math.isfinite(rate.qps)]
    if len(finite) < 2:
        return None

    def draw(figure: FigureBase) -> None:
        (ttft, tpot), (e2e, pareto) = figure.subplots(2, 2)
        for axes, (title, limit, metrics) in zip((ttft, tpot, e2e), PANELS, strict=True):
            _against_rate(axes, finite, metrics[0])
            axes.set_title(title + (" from schedule" if len(metrics) > 1 else ""))
            limit_ms = None if slo is None else slo.limits_ms.get(limit)
            if limit_ms is not None:
                horizontal(axes, limit_ms, f"SLO {limit_ms:g} ms")
            if search is not None and search.max_qps:
                axes.axvline(
                    search.max_qps,
                    color=PURPLE,
                    linestyle=(0, (5, 2)),
                    linewidth=1.2,
                    label=f"max {search.max_qps:.3g}/s",
                )
            axes.set_xlabel("offered requests/s")
            axes.set_ylabel("milliseconds")
            axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, borderaxespad=0.2)
            rate_ticks(axes, [rate.qps for rate in finite])
        _pareto(pareto, finite)

    note = "Bars are 95 % intervals. An empty mark is a rate with invalid runs."
    return Plot(name, "Latency and speed against the rate", 6.2, draw, note)


def _against_rate(axes: Axes, rates: Sequence[RateSummary], metric: str) -> None:
    measured = [rate for rate in rates if metric in rate.latencies_ms]
    top = []
    tails = [rate.tail_ms(metric) for rate in measured]
    high = "max" if any(tail.is_maximum for tail in tails) else "p99"
    for stat, colour in (("p50", BLUE), (high, ORANGE)):
        found = [rate.latencies_ms[metric][stat] for rate in measured]
        qps = [rate.qps for rate in measured]
        values = [estimate.value for estimate in found]
        top += values
        axes.errorbar(
            qps, values, yerr=_bars(found), color=colour, label=stat, capsize=2.5, elinewidth=1
        )
        for rate, value in zip(measured, values, strict=True):
            face = colour if rate.is_valid else PAPER
            axes.plot(
                rate.qps, value, "o", markersize=4.5, color=colour, markerfacecolor=face, zorder=5
            )
    if top and max(top) > LOG_FROM * max(min(top), 1e-9):
        axes.set_yscale("log")
        plain_log(axes.yaxis)
    else:
        axes.set_ylim(bottom=0)


def _bars(estimates: Sequence[Estimate]) -> list[list[float]]:
    """Returns the bars' lengths below and above. An unknown interval has no bar, and no bar goes
    below a tenth of its value."""
    below = [min(e.value - e.low, 0.9 * e.value) for e in estimates]
    above = [e.high - e.value for e in estimates]
    return [[0.0 if math.isnan(v) else max(v, 0.0) for v in part] for part in (below, above)]


def _pareto(axes: Axes, rates: Sequence[RateSummary]) -> None:
    names = ("tokens_per_s_per_user", "output_tokens_per_s")
    measured = [rate for rate in rates if all(name in rate.rates for name in names)]
    per_user, total = ([rate.rates[name] for rate in measured] for name in names)
    axes.errorbar(
        [e.value for e in per_user],
        [e.value for e in total],
        xerr=_bars(per_user),
        yerr=_bars(total),
        color=GREEN,
        fmt="-",
        capsize=2.5,
        elinewidth=1,
    )
    for rate, x, y in zip(measured, per_user, total, strict=True):
        face = GREEN if rate.is_valid else PAPER
        axes.plot(
            x.value, y.value, "o", markersize=4.5, color=GREEN, markerfacecolor=face, zorder=5
        )
        axes.annotate(
            f"{rate.qps:.3g}/s",
            (x.value, y.value),
            xytext=(5, 5),
            textcoords="offset points",
            fontsize=8.5,
            color=GREEN if rate.is_valid else VERMILLION,
        )
    axes.set_title("Speed of one user, and of all")
    axes.set_xlabel("output tokens/s for a user (1 / median TPOT)")
    axes.set_ylabel("output tokens/s in all")
    axes.margins(0.12)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
