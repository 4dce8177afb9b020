"""How pictures look, and their way into a page (SVG) or a file (PNG). What they show is drawn by
plots_latency.py, plots_time.py and plots_requests.py. matplotlib is imported only when it is used.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from serve.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

    from bench.load.results.document import Measurement

# Okabe and Ito's colours, which colour-blind people can tell apart; in a page they are variables
# with brighter values in the dark.
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
MIN_TICK_GAP = 0.07  # of the axis
_STYLE: Any = {  # matplotlib spells out all keys in its types
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
    "text.parse_math": False,  # a $ in a name is a $
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


@dataclass(frozen=True, slots=True)
class Plot:
    """height_in: of a picture WIDTH_IN wide. note: what was left out, or how to read it."""

    name: str
    title: str
    height_in: float
    draw: Callable[[FigureBase], None]
    note: str = ""


def require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "plots need matplotlib: pip install 'mergestep[plots]' (--json and --jsonl do not)"
        ) from error


def svg(plot: Plot) -> str:
    """An <svg> element for a page: its colours are the page's variables, its ids its own."""
    from matplotlib.figure import Figure

    with styled():
        figure = Figure(figsize=(WIDTH_IN, plot.height_in), layout="constrained")
        plot.draw(figure)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r'\s(?:xmlns(?::\w+)?|width|height|version)="[^"]*"(?=[^<]*?viewBox)', "", text)
    text = re.sub(r'(<svg[^>]*?)\sxmlns(?::\w+)?="[^"]*"', r"\1", text)
    text = re.sub(r'(<svg[^>]*?)\sxmlns(?::\w+)?="[^"]*"', r"\1", text)
    text = text.replace("xlink:href=", "href=")
    text = re.sub(r'\bid="', f'id="{plot.name}-', text)
    text = re.sub(r'(url\(|href=")#', rf"\1#{plot.name}-", text)
    for colour, name in VARIABLES.items():
        text = text.replace(colour, f"var(--{name})")
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(plot.title)}"', 1)


def write_png(path: Path, made: Measurement) -> None:
    """The measurement's pictures below each other, under its verdict; of one rate in detail."""
    require_matplotlib()
    from matplotlib.figure import Figure

    from bench.load.report.gallery import detailed_rates, gallery
    from bench.load.report.headline import headline, verdict

    shown = detailed_rates(made, 1)
    plots = [
        replace(plot, title=plot.title if s.rate is None else f"{plot.title}, {s.title}")
        for s in gallery(made, max_detailed=1)
        for plot in s.plots
        if s.rate is None or s.rate.qps in shown
    ]
    head_in, title_in = 0.9, 0.35
    heights = [head_in] + [plot.height_in + title_in for plot in plots]
    with styled():
        figure = Figure(figsize=(WIDTH_IN, sum(heights)), layout="constrained", facecolor="white")
        rows = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)
        head, *parts = rows[:, 0]
        head.text(0.01, 0.68, verdict(made)[1], fontsize=13, weight="bold", va="center")
        head.text(0.01, 0.28, headline(made), fontsize=10, color=MUTED, va="center")
        for part, plot in zip(parts, plots, strict=True):
            part.suptitle(plot.title, x=0.01, ha="left", fontsize=12, weight="bold")
            plot.draw(part)
        try:
            figure.savefig(path, format="png", dpi=110)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


@contextlib.contextmanager
def styled() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context(cast("Any", _STYLE)):
        yield


def vertical(axes: Axes, x: float, text: str, colour: str = VERMILLION) -> None:
    """A limit, named above the picture; only named where it is outside what is drawn."""
    low, high = axes.get_xlim()
    if low <= x <= high:
        axes.axvline(x, color=colour, linewidth=1.2, linestyle=(0, (5, 2)))
    else:
        text += f": {'right' if x > high else 'left'} of this plot"
    axes.set_title(text, loc="right", color=colour, fontsize=9, fontweight="normal")


def horizontal(axes: Axes, y: float, text: str, colour: str = VERMILLION) -> None:
    """A limit, named on its line; in the corner where it is outside what is drawn."""
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
    """Ticks at the rates that were tried, as far as there is room for their names."""
    low, high = min(rates), max(rates)
    kept: list[float] = []
    for qps in sorted(rates):
        if not kept or qps - kept[-1] >= MIN_TICK_GAP * (high - low):
            kept.append(qps)
    axes.set_xticks(kept, [f"{qps:.3g}" for qps in kept])


def plain_log(axis: Any, *, most: float = 150.0) -> None:
    """A logarithmic axis with numbers that people read. most: times the least value that the
    greatest may be for more numbers than powers of ten to have room."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    steps: tuple[float, ...] = (1.0, 2.0, 5.0) if high < most * low else (1.0,)
    if high < 10 * low:
        steps = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
    axis.set_major_locator(LogLocator(subs=steps, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())
