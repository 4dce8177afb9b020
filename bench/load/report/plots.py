"""`Plot`, one picture of a report. The other plots_*.py draw what it shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import FigureBase


@dataclass(frozen=True, slots=True)
class Plot:
    """A picture of WIDTH_IN (plot_style) by height_in inches. note says what is left out or how to
    read it."""

    name: str
    title: str
    height_in: float
    draw: Callable[[FigureBase], None]
    note: str = ""
