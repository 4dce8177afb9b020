"""`Plot`, one picture of a report. The other plots_*.py draw what it shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import FigureBase


@dataclass(frozen=True, slots=True)
class Plot:
    """height_in: of a picture WIDTH_IN wide. note: what was left out, or how to read it."""

    name: str
    title: str
    height_in: float
    draw: Callable[[FigureBase], None]
    note: str = ""
