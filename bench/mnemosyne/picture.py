"""The picture: time to the first token over the context, and between tokens over the holders."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.common.plot_style import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    WIDTH_IN,
    horizontal,
    plain_log,
    require_matplotlib,
    styled,
)
from bench.mnemosyne.paper import LARGE, MILLION, SERVER, SMALL, decode_s, grid_cost
from bench.mnemosyne.rows import MAX_CHUNK, TBT_S, TTFT_S
from bench.plan.pipeline import estimated_prefill_s, fixed_chunks
from serve.errors import ConfigError, reason

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MILLIONS = (0.25, 0.5, 1, 2, 4, 10)
_STAGES = ((1, BLUE), (4, ORANGE), (16, GREEN))
_HOLDERS = (1, 2, 4, 8)
_CONTEXTS = ((1, BLUE), (2, ORANGE), (4, GREEN), (10, PURPLE))


def draw(file: Path) -> None:
    """Writes an SVG picture. Raises ConfigError without matplotlib and if it cannot be written."""
    require_matplotlib()
    from matplotlib.figure import Figure

    with styled():
        figure = Figure(figsize=(WIDTH_IN, 4.2), layout="constrained", facecolor="white")
        left, right = figure.subplots(1, 2)
        _draw_prompts(left)
        _draw_decode(right)
        try:
            figure.savefig(file, format="svg", metadata={"Date": None})
        except OSError as error:
            raise ConfigError(f"svg {file}: {reason(error)}") from error


def _draw_prompts(axes: Axes) -> None:
    for model, style in ((SMALL, "-"), (LARGE, "--")):
        for spp, colour in _STAGES:
            cost = grid_cost(model, spp)
            seconds = [
                estimated_prefill_s(cost, int(m * MILLION), fixed_chunks(MAX_CHUNK))
                for m in _MILLIONS
            ]
            label = f"{_short(model)}, {SERVER * spp} GPUs"
            axes.plot(_MILLIONS, seconds, style, color=colour, marker=".", label=label)
    axes.set(xscale="log", yscale="log", xlabel="context, million tokens", ylabel="seconds")
    axes.set_title("Time to the first token, tp 8, spp 1 to 16")
    _finish(axes, TTFT_S, "30 s")


def _draw_decode(axes: Axes) -> None:
    for model, style in ((SMALL, "-"), (LARGE, "--")):
        for millions, colour in _CONTEXTS:
            ms = [1e3 * decode_s(model, millions * MILLION, 4, kvp) for kvp in _HOLDERS]
            label = f"{_short(model)}, {millions} M"
            axes.plot(_HOLDERS, ms, style, color=colour, marker=".", label=label)
    axes.set(xscale="log", yscale="log", xlabel="holders of K/V (kvp)", ylabel="ms")
    axes.set_title("Time between tokens, tp 8, spp 4")
    _finish(axes, 1e3 * TBT_S, "30 ms")


def _finish(axes: Axes, limit: float, name: str) -> None:
    horizontal(axes, limit, name)
    axis: Any
    for axis in (axes.xaxis, axes.yaxis):
        plain_log(axis, most=2000)
    axes.legend(ncols=2, fontsize=7.5)


def _short(model: str) -> str:
    return model.rpartition("-")[2].upper()
