"""Draws curves of throughput against the time between tokens with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from bench.common.plot_style import (
    BLUE,
    GREEN,
    MUTED,
    ORANGE,
    PURPLE,
    SKY,
    WIDTH_IN,
    plain_log,
    styled,
    vertical,
)
from bench.plan.capacity import max_sequences
from bench.plan.cost import MachineCost
from bench.plan.serving import MAX_BATCH, Load, Slo, serve
from serve.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_CURVES = 10
_NOT_DRIVEN = {"cuda": "back end never run", "none": "no back end"}
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY)  # then again with crosses


def curve(cost: MachineCost, load: Load) -> list[tuple[float, float]]:
    """Returns pairs (seconds between tokens, tokens per second), from a batch of one sequence to
    the largest that fits into memory."""
    points = []
    for batch in _batches(min(MAX_BATCH, max_sequences(cost, load.context))):
        serving = serve(cost, load, Slo(), batch)
        if isinstance(serving, str):
            break
        points.append((serving.step_s, serving.tokens_per_s))
    return points


def _batches(most: int) -> list[int]:
    """Returns batch sizes up to `most`, each about a quarter larger than the one before."""
    batches, batch = [], 1
    while batch < most:
        batches.append(batch)
        batch += max(1, batch // 4)
    return [*batches, most] if most else []


def plot(
    costs: Sequence[MachineCost],
    bound: MachineCost | None,
    load: Load,
    slo: Slo,
    file: Path,
) -> None:
    """Draws a curve for each machine and a dashed one for the bound. Raises ConfigError if the file
    cannot be written."""
    from matplotlib.figure import Figure

    title = (
        f"{costs[0].shape.name} {costs[0].precision.weights}, {load.prompt} + {load.output} tokens"
    )
    with styled():
        figure = Figure(figsize=(WIDTH_IN, 6), layout="constrained", facecolor="white")
        axes = figure.add_subplot()
        _draw_curves(axes, costs, bound, load)
        if slo.tpot_s < inf:
            vertical(axes, 1e3 * slo.tpot_s, f"SLO {1e3 * slo.tpot_s:g} ms")
        axes.set(xscale="log", yscale="log", xlabel="ms between tokens", ylabel="tokens/s")
        axes.set_title(title)
        for axis in (axes.xaxis, axes.yaxis):
            plain_log(axis, most=2000)
        figure.legend(loc="outside right upper")
        try:
            figure.savefig(file, dpi=120, format="png")
        except OSError as error:
            raise ConfigError(f"png {file}: {error.strerror or error}") from error


def _label(cost: MachineCost) -> str:
    """Returns the machine's name and, below it, what about its curve is not measured."""
    doubts = ["assumed"] * cost.is_assumed
    if (backend := cost.machine.device.backend) in _NOT_DRIVEN:
        doubts.append(_NOT_DRIVEN[backend])
    return f"{cost.machine.name}\n{', '.join(doubts)}" if doubts else cost.machine.name


def _draw_curves(
    axes: Axes, costs: Sequence[MachineCost], bound: MachineCost | None, load: Load
) -> None:
    for number, cost in enumerate(costs[:MAX_CURVES]):
        if points := curve(cost, load):
            x, y = [1e3 * point[0] for point in points], [point[1] for point in points]
            label = _label(cost)
            colour, marker = COLOURS[number % len(COLOURS)], ".x"[number // len(COLOURS)]
            axes.plot(x, y, color=colour, marker=marker, label=label)
    if bound is not None and (points := curve(bound, load)):
        x, y = [1e3 * point[0] for point in points], [point[1] for point in points]
        axes.plot(x, y, linestyle="--", color=MUTED, label="bound")
