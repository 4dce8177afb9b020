"""SLOs: the limits that a good request meets, and the requests that met them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np

from bench.load.results.columns import Bools, Columns
from serve.errors import ConfigError

ITL_SHARE = 0.01  # the share of a request's gaps that may exceed the limit

PRESETS = {
    "chat": "ttft=200,itl=50",
    "rag": "ttft=300,itl=100,e2e=3000",
    "code": "e2e=2000",
    "content": "ttft=600,itl=200",
}


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in seconds, or None. With from_schedule, TTFT and E2E count from the time at which a
    request was due, otherwise from its sending."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    itl_s: float | None = None
    e2e_s: float | None = None
    from_schedule: bool = True

    @property
    def limits_ms(self) -> dict[str, float]:
        values = {name.removesuffix("_s"): limit for name, limit in asdict(self).items()}
        del values["from_schedule"]
        return {name: limit * 1000 for name, limit in values.items() if limit is not None}

    @property
    def longest_s(self) -> float:
        """The longest limit in seconds; 0 without limits."""
        return max(self.limits_ms.values(), default=0.0) / 1000

    def __str__(self) -> str:
        limits = ", ".join(f"{name.upper()} {ms:g} ms" for name, ms in self.limits_ms.items())
        return f"{limits}, from {'schedule' if self.from_schedule else 'send'}"


def parse_slo(text: str, *, from_schedule: bool = True) -> Slo:
    """Parses `ttft=200,tpot=50,itl=50,e2e=2000` (milliseconds) or the name of a preset. Raises
    ConfigError."""
    limits: dict[str, float] = {}
    for part in PRESETS.get(text.strip(), text).split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        try:
            limit_s = float(value) / 1000
        except ValueError:
            limit_s = math.nan
        if name not in ("ttft", "tpot", "itl", "e2e") or not 0 < limit_s < math.inf:
            raise ConfigError(
                f"slo: {part.strip()!r} is not ttft=, tpot=, itl= or e2e= with milliseconds, and"
                f" {text!r} is none of {', '.join(PRESETS)}"
            )
        if f"{name}_s" in limits:
            raise ConfigError(f"slo: {name} is given twice in {text!r}")
        limits[f"{name}_s"] = limit_s
    return Slo(**limits, from_schedule=from_schedule)


def judge(columns: Columns, slo: Slo) -> tuple[Bools, Bools]:
    """Returns masks (is judged, is good) of the requests; is_good also covers those not counted.

    Failed and incomplete requests and answers without text are misses; requests cancelled on
    purpose are not judged. An answer meets a limit that has no meaning for it, such as TPOT of one
    token.
    """
    start = columns.due if slo.from_schedule else columns.sent
    is_good = columns.is_answered.copy()
    with np.errstate(invalid="ignore"):
        if slo.ttft_s is not None:
            is_good &= ~(columns.first - start > slo.ttft_s)
        if slo.e2e_s is not None:
            is_good &= ~(columns.last - start > slo.e2e_s)
        if slo.tpot_s is not None:
            is_good &= ~(tpot(columns) > slo.tpot_s)
    if slo.itl_s is not None:
        count = len(columns.due)
        gap_s = columns.gap / np.maximum(np.nan_to_num(columns.gap_tokens, nan=1.0), 1.0)
        weight = np.maximum(np.nan_to_num(columns.gap_tokens, nan=1.0), 1.0)
        over = np.bincount(columns.gap_owner, weight * (gap_s > slo.itl_s), minlength=count)
        gaps = np.bincount(columns.gap_owner, weight, minlength=count)
        is_good &= over <= np.floor(ITL_SHARE * gaps)
        is_good &= ~(columns.is_thin & (tpot(columns) > slo.itl_s))  # only the mean gap is known
    return columns.is_counted & ~columns.is_cancelled, is_good


def tpot(columns: Columns) -> np.ndarray:
    """Returns (last - first) / (tokens - 1), with chunks for tokens if these are unknown; NaN for
    answers of one token or in one piece."""
    count = np.where(np.isnan(columns.tokens), columns.num_chunks, columns.tokens) - 1
    has_rate = (count > 0) & (columns.num_chunks > 1)
    return np.where(has_rate, (columns.last - columns.first) / np.maximum(count, 1), np.nan)
