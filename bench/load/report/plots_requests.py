"""Pictures of single requests, and of the client processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bench.common.percentiles import tail
from bench.common.plot_style import BLUE, MUTED, ORANGE, SKY, VERMILLION, horizontal
from bench.load.client.record import RunResult
from bench.load.report.plots import Plot
from bench.load.results.columns import Columns, Floats, Ints
from bench.load.results.metrics import concurrency
from bench.load.results.slo import Slo
from bench.load.results.validity import max_lag_s

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

NUM_LANES, MIN_LANES = 120, 40
MAX_LENGTHS = 20  # the lanes span at most this many median answers
NUM_DOTS = 2000


def lanes_plot(name: str, columns: Columns) -> Plot | None:
    """Draws one lane per request: queued, prefill, decoding, and how it ended."""
    count = len(columns.due)
    if not np.isfinite(columns.sent).any():
        return None
    indices = _busiest(columns, NUM_LANES)
    shown = len(indices)
    end_s = columns.end_s
    due, sent, first, last, finished = (
        array[indices]
        for array in (columns.due, columns.sent, columns.first, columns.last, columns.finished)
    )
    queue = np.nan_to_num(columns.queue[indices])
    began = np.where(np.isfinite(sent), sent + queue, end_s)
    done = np.where(np.isfinite(finished), finished, end_s)
    done = np.where(columns.is_answered[indices], last, done)
    text = np.where(np.isfinite(first), first, done)
    began = np.minimum(began, text)

    def draw(figure: FigureBase) -> None:
        axes = figure.subplots()
        lanes = np.arange(shown)
        width = 4.5 if shown <= 40 else 2.6
        for left, right, colour, alpha, label in (
            (due, began, MUTED, 0.4, "queued"),
            (began, text, ORANGE, 1.0, "until the first text"),
            (text, done, BLUE, 1.0, "decoding"),
        ):
            axes.hlines(lanes, left, right, colors=colour, alpha=alpha, linewidth=width)
            axes.plot([], [], color=colour, alpha=alpha, linewidth=5, label=label)
        _marks(axes, columns, indices, done, lanes)
        axes.set_ylim(shown - 0.2, -0.8)
        begin_s, last_s = float(due.min()), float(done.max())
        axes.set_xlim(begin_s, last_s + max(0.005 * (last_s - begin_s), 1e-6))
        axes.grid(axis="y", visible=False)
        axes.set_ylabel("requests, in order of due time")
        axes.set_yticks([])
        axes.set_xlabel("seconds since the start of the schedule")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=6)

    note = "" if shown == count else f"{shown} of {count:,} requests, around the busiest time."
    return Plot(name, "Requests", 1.2 + 0.045 * max(shown, 30), draw, note)


def _marks(axes: Axes, columns: Columns, indices: np.ndarray, done: Floats, lanes: Ints) -> None:
    ends = (
        (columns.is_failed, "x", VERMILLION, "failed"),
        (columns.is_cancelled, "|", MUTED, "cancelled"),
        (
            ~(columns.is_ok | columns.is_failed | columns.is_cancelled),
            ">",
            MUTED,
            "not ended in time",
        ),
    )
    for is_there, marker, colour, label in ends:
        here = is_there[indices]
        if here.any():
            axes.plot(
                done[here], lanes[here], marker, color=colour, label=label, markersize=6, mew=1.8
            )


def _busiest(columns: Columns, limit: int) -> np.ndarray:
    """Returns indices of at most `limit` requests by due time, around the time with the most
    requests in progress; fewer if answers are so short that they would be dots."""
    order = np.argsort(columns.due, kind="stable")
    due = columns.due[order]
    at_s, levels = concurrency(columns.due, columns.finished, columns.end_s)
    middle = int(np.searchsorted(due, at_s[np.argmax(levels)], side="right"))
    taken_s = (columns.finished - columns.due)[np.isfinite(columns.finished)]
    half_s = 0.5 * MAX_LENGTHS * float(np.median(taken_s)) if len(taken_s) else np.inf
    near = int(
        ((due >= at_s[np.argmax(levels)] - half_s) & (due <= due[middle - 1] + half_s)).sum()
    )
    if len(order) > limit:
        limit = min(limit, max(near, MIN_LANES))
    first = max(min(middle - limit // 2, len(order) - limit), 0)
    return order[first : first + limit]


def client_plot(name: str, run: RunResult, columns: Columns, slo: Slo | None) -> Plot | None:
    """Draws how late requests were sent, and whether the clients kept up."""
    begun = np.isfinite(columns.began)
    if not begun.any():
        return None
    due, lag_ms = columns.due[begun], 1000 * (columns.began - columns.due)[begun]
    has_health = bool(run.health)

    def draw(figure: FigureBase) -> None:
        ratios = [3, 1, 1] if has_health else [1]
        parts = figure.subplots(1, len(ratios), squeeze=False, width_ratios=ratios)[0]
        _lags(parts[0], due, lag_ms, slo)
        if has_health:
            names = [str(health.process) for health in run.health]
            cpu = [100 * health.cpu for health in run.health]
            parts[1].bar(names, cpu, color=BLUE, width=0.5)
            parts[1].axhline(100, color=MUTED, linewidth=0.8)
            parts[1].set_title("CPU")
            parts[1].set_ylabel("% of a core")
            high, lags_ms = _loop_lags_ms(run)
            parts[2].bar(names, lags_ms, color=SKY, width=0.5)
            parts[2].set_title(f"Loop lag, {high}")
            parts[2].set_ylabel("milliseconds")
            for axes in parts[1:]:
                axes.set_xlabel("client process")
                axes.grid(axis="x", visible=False)
                axes.set_xlim(-0.8, max(len(names), 2) - 0.2)

    note = "" if len(due) <= NUM_DOTS else f"The {NUM_DOTS:,} latest of {len(due):,} are drawn."
    return Plot(name, "The client", 2.6, draw, note)


def _loop_lags_ms(run: RunResult) -> tuple[str, list[float]]:
    """Returns "p99" or "max", and this figure of each client process."""
    p99 = [1000 * health.loop_lag_p99_s for health in run.health]
    if np.isnan(p99).any():  # the run was too short for it
        return "max", [1000 * health.loop_lag_max_s for health in run.health]
    return "p99", p99


def _lags(axes: Axes, due: Floats, lag_ms: Floats, slo: Slo | None) -> None:
    latest = np.argsort(lag_ms)[-NUM_DOTS:]
    axes.plot(due[latest], lag_ms[latest], ".", color=BLUE, markersize=3.5, alpha=0.6)
    high, bound_ms = tail(lag_ms), 1000 * max_lag_s(slo)
    axes.set_title(f"Dispatch lag ({high.label} {high.value:.2f} ms)")
    axes.set_ylim(0, 1.15 * max(bound_ms, float(lag_ms.max())))
    horizontal(axes, bound_ms, f"bound on p99, {bound_ms:g} ms")
    axes.set_ylabel("milliseconds")
    axes.set_xlabel("seconds since the start of the schedule")
