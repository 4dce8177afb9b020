"""Draws accuracy and perplexity against the budget, a line for each policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.common.plot_style import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    plain_log,
    styled,
)
from bench.quality.measure import FULL, Row
from bench.quality.tasks import ACCURACIES

COLOURS = (BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY)
TITLES = {
    "needle": "one needle",
    "needles": "one of 96 needles",
    "again": "asked a second time",
    "hops": "4 hops of 80 facts",
    "examples": "a mapping by example",
    "later": "asked after the prompt",
}


def draw(path: Path, rows: Sequence[Row], title: str) -> None:
    """Writes the picture as a PNG file."""
    from matplotlib.figure import Figure

    lines = lines_of(rows)
    (full,) = [row for row in rows if row.policy == FULL]
    with styled():
        figure = Figure(figsize=(12, 6.2), layout="constrained", facecolor="white")
        grid: Any = figure.subplots(2, 4)
        *axes_of_tasks, last = grid.flat
        last.axis("off")
        for axes, task in zip(axes_of_tasks, (*ACCURACIES, "perplexity"), strict=True):
            for (name, found), colour in zip(lines.items(), COLOURS, strict=False):
                budgets = [budget for budget, _ in found]
                values = [_value(row, task) for _, row in found]
                axes.plot(budgets, values, color=colour, marker="o", markersize=3.5, label=name)
            axes.axhline(_value(full, task), color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
            axes.set_title(TITLES.get(task, "perplexity of running text"), loc="left")
            axes.set_xscale("log")
            axes.set_xticks([6, 12, 25, 50, 100], ["6", "12", "25", "50", "100"])
            axes.minorticks_off()
            if task == "perplexity":
                axes.set_yscale("log")
                plain_log(axes.yaxis)
            else:
                axes.set_ylim(-0.03, 1.03)
        for axes in (*grid[1][:3], grid[0][3]):
            axes.set_xlabel("budget, % of the tokens")
        last.legend(*grid[0][0].get_legend_handles_labels(), loc="center left", fontsize=11)
        figure.suptitle(title, fontsize=9, color=MUTED)
        figure.savefig(path, dpi=130)


def lines_of(rows: Sequence[Row]) -> dict[str, list[tuple[float, Row]]]:
    """Returns the rows of each policy with their budgets as a percentage, by rising budget.
    Budgets in tokens have no place on the axis and are left out."""
    lines: dict[str, list[tuple[float, Row]]] = {}
    for row in rows:
        name, _, budget = row.policy.partition(":budget=")
        if budget.endswith("%"):
            lines.setdefault(name, []).append((float(budget[:-1]), row))
    return {name: sorted(found, key=lambda one: one[0]) for name, found in lines.items()}


def _value(row: Row, task: str) -> float:
    return row.perplexity if task == "perplexity" else row.accuracy[task]
