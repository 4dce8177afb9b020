"""Curves of throughput against the time between tokens. matplotlib is imported here alone."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from pathlib import Path

from bench.plan.capacity import max_sequences
from bench.plan.cost import MachineCost
from bench.plan.serving import MAX_BATCH, Load, Slo, serve
from serve.errors import ConfigError

MAX_CURVES = 10


def require_matplotlib() -> None:
    """ConfigError where it is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("png needs matplotlib: pip install 'mergestep[plots]'") from error


def curve(cost: MachineCost, load: Load) -> list[tuple[float, float]]:
    """(seconds between tokens, tokens a second), from one sequence to what memory holds."""
    points = []
    for batch in _batches(min(MAX_BATCH, max_sequences(cost, load.context))):
        found = serve(cost, load, Slo(), batch)
        if isinstance(found, str):
            break
        points.append((found.step_s, found.tokens_per_s))
    return points


def _batches(most: int) -> list[int]:
    """Up to the most, each about a quarter larger than the one before."""
    found, batch = [], 1
    while batch < most:
        found.append(batch)
        batch += max(1, batch // 4)
    return [*found, most] if most else []


def plot(
    costs: Sequence[MachineCost],
    bound: MachineCost | None,
    load: Load,
    slo: Slo,
    file: Path,
) -> None:
    """A curve for each machine; bound: of the only one, dashed. ConfigError where the file cannot
    be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.add_subplot()
    for cost in costs[:MAX_CURVES]:
        points = curve(cost, load)
        if points:
            x, y = [1e3 * point[0] for point in points], [point[1] for point in points]
            axes.plot(x, y, marker=".", label=cost.machine.name)
    if bound is not None and (points := curve(bound, load)):
        x, y = [1e3 * point[0] for point in points], [point[1] for point in points]
        axes.plot(x, y, linestyle="--", color="grey", label="bound")
    if slo.tpot_s < inf:
        axes.axvline(1e3 * slo.tpot_s, color="black", linestyle=":", label="SLO")
    axes.set(xscale="log", yscale="log", xlabel="ms between tokens", ylabel="tokens/s")
    axes.set_title(
        f"{costs[0].shape.name} {costs[0].precision.weights}, {load.prompt} + {load.output} tokens"
    )
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend()
    try:
        figure.savefig(file, dpi=120, format="png")
    except OSError as error:
        raise ConfigError(f"png {file}: {error.strerror or error}") from error
