"""How pictures look: colours, matplotlib's settings, limits and ticks on an axis.

matplotlib is optional and is imported only inside the functions that use it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from serve.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The colours of Okabe and Ito, which colour-blind people can tell apart. In a page they are
# variables, with brighter values in dark mode.
INK, MUTED, GRID, PAPER = "#1f2328", "#59636e", "#d8dee4", "#fefefe"
BLUE, ORANGE, GREEN = "#0072b2", "#e69f00", "#009e73"
VERMILLION, PURPLE, SKY = "#d55e00", "#b8578f", "#56b4e9"
VARIABLES = {
    INK: "ink",
    MUTED: "muted",
    GRID: "grid",
    PAPER: "paper",
    BLUE: "blue",
    ORANGE: "orange",
    GREEN: "green",
    VERMILLION: "vermillion",
    PURPLE: "purple",
    SKY: "sky",
}
WIDTH_IN = 10.0
MIN_TICK_GAP = 0.07  # as a fraction of the axis
_STYLE: Any = {  # Any, as matplotlib's type names every key
    "svg.fonttype": "none",
    "svg.hashsalt": "serve bench",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlecolor": INK,
    "axes.labelsize": 9.5,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "text.color": INK,
    "text.parse_math": False,  # a $ in a name is no formula
    "legend.facecolor": PAPER,
    "legend.edgecolor": "none",
    "legend.framealpha": 0.8,
    "legend.borderpad": 0.2,
    "legend.fontsize": 9,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
    "figure.facecolor": "none",
    "path.simplify": True,
}


def require_matplotlib() -> None:
    """Raises ConfigError where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "plots need matplotlib: pip install 'mergestep[plots]' (--json and --jsonl do not)"
        ) from error


@contextlib.contextmanager
def styled() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context(cast("Any", _STYLE)):
        yield


def vertical(axes: Axes, x: float, text: str, colour: str = VERMILLION) -> None:
    """Draws a limit and names it above the picture; outside the axis it is only named."""
    low, high = axes.get_xlim()
    if low <= x <= high:
        axes.axvline(x, color=colour, linewidth=1.2, linestyle=(0, (5, 2)))
    else:
        text += f": {'right' if x > high else 'left'} of this plot"
    axes.set_title(text, loc="right", color=colour, fontsize=9, fontweight="normal")


def horizontal(axes: Axes, y: float, text: str, colour: str = VERMILLION) -> None:
    """Draws a limit and names it on its line; outside the axis it is only named, in the corner."""
    low, high = axes.get_ylim()
    at_y, offset, side = y, 3, "bottom"
    if low <= y <= high:
        axes.axhline(y, color=colour, linewidth=1.2, linestyle=(0, (5, 2)))
    else:
        text += f": {'above' if y > high else 'below'} this plot"
        at_y, offset, side = (high, -3, "top") if y > high else (low, 3, "bottom")
    axes.annotate(
        text,
        (1.0, at_y),
        xycoords=("axes fraction", "data"),
        xytext=(-2, offset),
        textcoords="offset points",
        ha="right",
        va=side,
        fontsize=8.5,
        color=colour,
    )


def rate_ticks(axes: Axes, rates: Sequence[float]) -> None:
    """Sets ticks at the rates, as far as there is room for their labels."""
    low, high = min(rates), max(rates)
    kept: list[float] = []
    for qps in sorted(rates):
        if not kept or qps - kept[-1] >= MIN_TICK_GAP * (high - low):
            kept.append(qps)
    axes.set_xticks(kept, [f"{qps:.3g}" for qps in kept])


def plain_log(axis: Any, *, most: float = 150.0) -> None:
    """Labels a logarithmic axis with plain numbers. An axis whose ends have a ratio below `most`
    has room for more labels than powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    steps: tuple[float, ...] = (1.0, 2.0, 5.0) if high < most * low else (1.0,)
    if high < 10 * low:
        steps = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
    axis.set_major_locator(LogLocator(subs=steps, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())
