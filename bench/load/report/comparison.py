"""A figure of two results (`Row`), and all of them (`Comparison`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from bench.load.results.confidence import Estimate


@dataclass(frozen=True, slots=True)
class Row:
    """One figure in both. ratio: other / first. differs: the intervals do not overlap; where one
    is not known, it cannot be said (None). worse_by: of the first figure; negative: better."""

    rate: str
    name: str
    first: Estimate
    other: Estimate
    ratio: float
    differs: bool | None
    worse_by: float

    def is_regression(self, fail_over: float) -> bool:
        """Worse than the limit allows, and not by what the intervals explain."""
        return self.worse_by > fail_over and self.differs is not False


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of one result with the first one."""

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
