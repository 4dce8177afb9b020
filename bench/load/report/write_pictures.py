"""Writes pictures into a page (SVG) or a file (PNG)."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from html import escape
from pathlib import Path

from bench.common.plot_style import MUTED, VARIABLES, WIDTH_IN, require_matplotlib, styled
from bench.load.report.gallery import detailed_rates, gallery
from bench.load.report.plots import Plot
from bench.load.report.terminal import headline, verdict
from bench.load.results.document import Measurement
from serve.errors import ConfigError


def svg(plot: Plot) -> str:
    """Returns an <svg> element. Its colours are the page's variables, and its ids are unique."""
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


def write_png(path: Path, measurement: Measurement) -> None:
    """Writes the measurement's pictures below each other, under its verdict, with one rate in
    detail. Raises ConfigError."""
    require_matplotlib()
    from matplotlib.figure import Figure

    shown = detailed_rates(measurement, 1)
    plots = [
        replace(plot, title=plot.title if s.rate is None else f"{plot.title}, {s.title}")
        for s in gallery(measurement, max_detailed=1)
        for plot in s.plots
        if s.rate is None or s.rate.qps in shown
    ]
    head_in, title_in = 0.9, 0.35
    heights = [head_in] + [plot.height_in + title_in for plot in plots]
    with styled():
        figure = Figure(figsize=(WIDTH_IN, sum(heights)), layout="constrained", facecolor="white")
        rows = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)
        head, *parts = rows[:, 0]
        head.text(0.01, 0.68, verdict(measurement)[1], fontsize=13, weight="bold", va="center")
        head.text(0.01, 0.28, headline(measurement), fontsize=10, color=MUTED, va="center")
        for part, plot in zip(parts, plots, strict=True):
            part.suptitle(plot.title, x=0.01, ha="left", fontsize=12, weight="bold")
            plot.draw(part)
        try:
            figure.savefig(path, format="png", dpi=110)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
