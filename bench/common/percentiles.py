"""Percentiles of samples that are large enough for them, and the maximum of those that are not.

A percentile p needs at least 1 / (1 - p) samples, so that one of them lies beyond it: 100 for p99.
Of fewer, an estimate is nothing but the largest value or nearly so; the maximum says what it is.
The median needs none of this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MEDIAN = 50.0
Latencies = dict[str, Any]
"""What `document` returns."""


def least_samples(percent: float) -> int:
    """Returns the number of samples from which on a percentile is an estimate."""
    return 1 if percent <= _MEDIAN else math.ceil(round(100 / (100 - percent), 6))


def is_supported(percent: float, count: float) -> bool:
    return count >= least_samples(percent)


@dataclass(frozen=True, slots=True)
class Tail:
    """A percentile, or the maximum of too small a sample. count: the size of the sample."""

    value: float
    percent: float
    count: int

    @property
    def is_maximum(self) -> bool:
        return not is_supported(self.percent, self.count)

    @property
    def label(self) -> str:
        """ "p99", or "max of 18"."""
        return f"max of {self.count:,}" if self.is_maximum else f"p{self.percent:g}"

    def text(self, form: Callable[[float], str]) -> str:
        """Returns the value for a column of percentiles; a maximum is labelled as one."""
        value = form(self.value)
        return f"max {value} (n {self.count:,})" if self.is_maximum and self.count else value

    @property
    def percentile(self) -> float | None:
        """The value, if it is the percentile."""
        return None if self.is_maximum else self.value


def tail(values: Sequence[float] | NDArray[Any], percent: float = 99.0) -> Tail:
    """Returns the percentile, linear between the closest ranks, or the maximum of too few values;
    NaN for none."""
    count = len(values)
    if not count:
        return Tail(math.nan, percent, 0)
    share = percent if is_supported(percent, count) else 100.0
    return Tail(float(np.percentile(values, share)), percent, count)


def cells(found: Latencies) -> tuple[str, str]:
    """Returns the median and the p99, or the labelled maximum, of a document for a table."""
    if not found["n"]:
        return "", ""
    high = found["max"] if found["p99"] is None else found["p99"]
    return f"{found['p50']:.1f}", Tail(high, 99.0, int(found["n"])).text("{:.1f}".format)


def document(values: Sequence[float], factor: float = 1.0) -> Latencies:
    """Returns what a file of results says about latencies: the median, p99 (null if there are too
    few), the maximum and the number of values. factor: from the values' unit to the file's."""
    if not len(values):
        return {"p50": None, "p99": None, "max": None, "n": 0}
    p99 = tail(values).percentile
    return {
        "p50": factor * float(np.percentile(values, _MEDIAN)),
        "p99": None if p99 is None else factor * p99,
        "max": factor * max(values),
        "n": len(values),
    }
