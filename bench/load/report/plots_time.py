"""Pictures of a run over time: its load, and its merged steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from bench.common.plot_style import BLUE, GREEN, GRID, ORANGE, PAPER, PURPLE, SKY, VERMILLION
from bench.load.client.record import RunResult
from bench.load.report.plots import Plot
from bench.load.results.columns import Columns, Floats
from bench.load.results.metrics import concurrency, level_at

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

NUM_BINS = 200
NUM_ZOOMED = 60
IDLE_S = 1e-4
HEADROOM = 1.25  # leaves room for the legend
_LINE: Any = {"linewidth": 1.2, "drawstyle": "steps-post"}


def timeline_plot(name: str, run: RunResult, columns: Columns) -> Plot | None:
    end_s = columns.end_s
    if end_s <= 0 or not len(columns.due):
        return None
    panels = [_requests, _sequences, _tokens]
    if run.steps or any(sample.kv_usage is not None for sample in run.samples):
        panels.append(_memory)

    def draw(figure: FigureBase) -> None:
        grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False)
        for axes, panel in zip(grid[:, 0], panels, strict=True):
            panel(axes, run, columns)
            axes.set_xlim(0, end_s)
            axes.set_ylim(0, HEADROOM * max(axes.get_ylim()[1], 1e-9))
            _shade_outside(axes, columns)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(loc="upper left", ncols=4)
        grid[-1, 0].set_xlabel("seconds since the start of the schedule")

    low, high = columns.due_span
    note = f"The requests due from {low:.1f} to {high:.1f} s count; other times are shaded."
    return Plot(name, "Timeline", 1.55 * len(panels) + 0.3, draw, note)


def _shade_outside(axes: Axes, columns: Columns) -> None:
    low, high = columns.due_span
    for left, right in ((0.0, low), (high, columns.end_s)):
        if right > left and high > low:
            axes.axvspan(left, right, color=GRID, alpha=0.55, linewidth=0, zorder=0)


def _bins(columns: Columns) -> Floats:
    """Returns the edges of bins of a second. A short run with enough requests has shorter bins."""
    end_s = columns.end_s
    count = min(NUM_BINS, max(10, int(np.ceil(end_s)), min(40, len(columns.due) // 5)))
    return np.linspace(0, end_s, count + 1)


def _rate(at_s: Floats, edges: Floats, weights: Floats | None = None) -> Floats:
    keep = np.isfinite(at_s)
    counts = np.histogram(at_s[keep], edges, weights=None if weights is None else weights[keep])[0]
    return counts / np.diff(edges)


def _requests(axes: Axes, run: RunResult, columns: Columns) -> None:
    edges = _bins(columns)
    answered = columns.last[columns.is_answered]
    axes.stairs(_rate(columns.due, edges), edges, color=BLUE, label="offered", linewidth=1.4)
    axes.stairs(_rate(answered, edges), edges, color=GREEN, label="answered", linewidth=1.4)
    failed = columns.finished[columns.is_failed]
    if len(failed):
        axes.stairs(_rate(failed, edges), edges, color=VERMILLION, label="failed", linewidth=1.4)
    axes.set_ylabel("requests/s")


def _sequences(axes: Axes, run: RunResult, columns: Columns) -> None:
    """Draws the requests in progress: the client's view, and the server's own figures over it."""
    times = np.linspace(0, columns.end_s, 4 * NUM_BINS)
    in_progress = level_at(times, *concurrency(columns.due, columns.finished, columns.end_s))
    decoding = level_at(times, *concurrency(columns.first, columns.finished, columns.end_s))
    axes.fill_between(times, in_progress, step="post", color=SKY, alpha=0.45, linewidth=0)
    axes.fill_between(times, decoding, step="post", color=BLUE, alpha=0.45, linewidth=0)
    axes.plot([], [], color=SKY, alpha=0.6, linewidth=6, label="no text yet")
    axes.plot([], [], color=BLUE, alpha=0.6, linewidth=6, label="decoding")
    if run.steps:
        running, waiting = _engine_levels(run, times)
        axes.plot(times, running, color=GREEN, label="running (engine)", **_LINE)
        axes.plot(times, waiting, color=ORANGE, label="waiting (engine)", **_LINE)
    elif run.samples:
        at = [sample.at_s for sample in run.samples]
        running_s = [sample.num_running for sample in run.samples]
        waiting_s = [sample.num_waiting for sample in run.samples]
        axes.plot(at, running_s, color=GREEN, label="running (server)", linewidth=1.2)
        axes.plot(at, waiting_s, color=ORANGE, label="waiting (server)", linewidth=1.2)
    axes.set_ylabel("requests")


def _engine_levels(run: RunResult, times: Floats) -> tuple[Floats, Floats]:
    """Returns running and waiting requests at each of times; 0 between steps with an idle gap."""
    start = np.array([step.start_s for step in run.steps])
    end = np.array([step.end_s for step in run.steps])
    is_idle = np.append(start[1:] - end[:-1] > IDLE_S, True)
    at_s = np.concatenate([start, end[is_idle]])
    order = np.argsort(at_s, kind="stable")
    counts = []
    for name in ("num_running", "num_waiting"):
        levels = np.array([getattr(step, name) for step in run.steps], np.int64)
        levels = np.concatenate([levels, np.zeros(int(is_idle.sum()), np.int64)])
        counts.append(level_at(times, at_s[order], levels[order]))
    return counts[0], counts[1]


def _tokens(axes: Axes, run: RunResult, columns: Columns) -> None:
    edges = _bins(columns)
    output = _rate(columns.chunk_at, edges, columns.chunk_tokens)
    axes.stairs(output, edges, color=BLUE, label="output", linewidth=1.4)
    if np.isfinite(columns.prompt_tokens).any():
        prompts = np.nan_to_num(columns.prompt_tokens)
        prefilled = _rate(columns.first, edges, prompts)
        axes.stairs(prefilled, edges, color=ORANGE, label="input, at first text", linewidth=1.4)
    axes.set_ylabel("tokens/s")


def _memory(axes: Axes, run: RunResult, columns: Columns) -> None:
    known = [sample for sample in run.samples if sample.kv_usage is not None]
    if known:
        usage = [100 * (sample.kv_usage or 0.0) for sample in known]
        axes.plot([sample.at_s for sample in known], usage, color=PURPLE, linewidth=1.4)
        axes.set_ylabel("K/V use, %")
        return
    stride = max(1, len(run.steps) // (4 * NUM_BINS))
    kept = run.steps[::stride]
    pages = [step.pages_in_use for step in kept]
    axes.plot([step.end_s for step in kept], pages, color=PURPLE, linewidth=1.4)
    axes.set_ylabel("K/V pages")


def steps_plot(name: str, run: RunResult) -> Plot | None:
    """Draws the rows of the merged steps over the whole run, and step by step over a part of it."""
    steps = run.steps
    if not steps:
        return None
    start = np.array([step.start_s for step in steps])
    end = np.array([step.end_s for step in steps])
    decodes = np.array([step.num_decodes for step in steps], np.float64)
    prefills = np.array([step.num_prefill_rows for step in steps], np.float64)
    both = (decodes > 0) & (prefills > 0)
    busy_s = float((end - start).sum())
    part = _zoomed(both)

    def draw(figure: FigureBase) -> None:
        whole, zoomed = figure.subplots(2, 1, height_ratios=[2, 3])
        edges = np.linspace(float(start[0]), float(end[-1]), min(NUM_BINS, len(steps)) + 1)
        rows = [_rows_in(edges, start, end, values) for values in (decodes, prefills)]
        _stack(whole, edges, rows)
        whole.set_title("The whole run")
        whole.set_ylabel("rows/s")
        whole.legend(loc="upper left", ncols=2)
        left, width = start[part], (end - start)[part]
        zoomed.bar(left, decodes[part], width, align="edge", color=BLUE, **_BAR)
        zoomed.bar(
            left, prefills[part], width, bottom=decodes[part], align="edge", color=ORANGE, **_BAR
        )
        zoomed.set_title(f"{len(left)} steps, each as wide as its duration")
        zoomed.set_xlim(left[0], left[-1] + width[-1])
        zoomed.set_ylabel("rows of a step")
        zoomed.set_xlabel("seconds since the start of the schedule")

    share = 100 * float(both.sum()) / len(steps)
    note = (
        f"{len(steps):,} steps, {share:.0f} % of them with both decode and prefill rows, mean"
        f" {1000 * busy_s / len(steps):.2f} ms."
    )
    return Plot(name, "Merged steps", 4.6, draw, note)


_BAR: Any = {"linewidth": 0.4, "edgecolor": PAPER}


def _rows_in(edges: Floats, start: Floats, end: Floats, rows: Floats) -> Floats:
    """Returns rows per second between edges; a step's rows are spread over its duration."""
    at_s = np.column_stack([start, end]).ravel()
    done = np.cumsum(rows)
    so_far = np.column_stack([done - rows, done]).ravel()
    return np.diff(np.interp(edges, at_s, so_far)) / np.diff(edges)


def _stack(axes: Axes, edges: Floats, rows: list[Floats]) -> None:
    bottom = np.zeros(len(edges) - 1)
    for values, colour, label in zip(rows, (BLUE, ORANGE), ("decode", "prefill"), strict=True):
        top = bottom + values
        axes.stairs(top, edges, baseline=bottom, fill=True, color=colour, label=label)
        bottom = top
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, HEADROOM * max(float(bottom.max()), 1e-9))


def _zoomed(both: np.ndarray) -> slice:
    """Returns the range of steps in which most have both kinds of rows."""
    count = min(NUM_ZOOMED, len(both))
    sums = np.convolve(both, np.ones(count), "valid")
    first = int(np.argmax(sums))
    return slice(first, first + count)
