"""A figure of two results (`Row`), and all of them (`Comparison`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from bench.load.results.confidence import Estimate


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of two results. ratio: other / first. differs: the intervals do not overlap, or
    None if one is unknown. worse_by: a share of the first figure; a negative one is better."""

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
