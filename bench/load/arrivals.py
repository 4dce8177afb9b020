"""When requests are due: seconds from the start, on an absolute schedule whose rate is exact."""

from __future__ import annotations

import itertools
import math
import random

from serve.errors import ConfigError

DEFAULT_REQUESTS = 100


def parse_qps(text: str) -> float:
    try:
        qps = float(text)
    except ValueError:
        qps = math.nan
    if not qps > 0:
        raise ConfigError(f"qps must be a positive number or inf, not {text!r}")
    return qps


def count_requests(qps: float, requests: int | None, duration_s: float | None) -> int:
    if requests is not None and duration_s is not None:
        raise ConfigError("give either requests or duration, not both")
    if duration_s is None:
        return DEFAULT_REQUESTS if requests is None else requests
    if not 0 < duration_s < math.inf:
        raise ConfigError(f"duration must be a positive number of seconds, not {duration_s}")
    if math.isinf(qps):
        raise ConfigError("a duration needs a finite qps")
    return max(1, round(qps * duration_s))


def arrival_times(qps: float, count: int, seed: int) -> list[float]:
    """Seconds from the start, ascending; the last is exactly count / qps."""
    if math.isinf(qps):
        return [0.0] * count
    rng = random.Random(f"arrivals-{seed}")
    sums = list(itertools.accumulate(rng.expovariate(1.0) for _ in range(count)))
    scale = count / qps / sums[-1]
    return [value * scale for value in sums]
