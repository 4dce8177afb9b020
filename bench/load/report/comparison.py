"""The comparison of two results: one figure (`Row`) and all figures (`Comparison`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from bench.load.results.confidence import Estimate


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of two results. ratio is other / first. differs means that the intervals do not
    overlap; None if one is unknown. worse_by is a share of the first figure; if negative, the other
    figure is better."""

    rate: str
    name: str
    first: Estimate
    other: Estimate
    ratio: float
    differs: bool | None
    worse_by: float

    def is_regression(self, fail_over: float) -> bool:
        """Returns whether the figure is worse than the limit allows, beyond the intervals."""
        return self.worse_by > fail_over and self.differs is not False


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of one result with the first."""

    name: str
    rows: list[Row]
    warnings: list[str]
    is_usable: bool
    regressions: list[Row] = field(default_factory=list)


def ratio_text(row: Row) -> str:
    return "-" if math.isnan(row.ratio) else f"{row.ratio:.3f}"


def overlap_text(row: Row) -> str:
    if row.differs is None:
        return "not known"
    return "apart" if row.differs else "overlap"
