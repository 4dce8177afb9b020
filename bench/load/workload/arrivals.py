"""Arrival processes: the times at which requests are due, on a schedule whose rate is exact."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from serve.errors import ConfigError

DEFAULT_REQUESTS = 100
KINDS = "poisson, constant, gamma:K, ramp:A:B, trace or inf"


def parse_qps(text: str) -> list[float]:
    """Returns the rates of `R`, `inf`, `A:B:N` (N rates from A to B, evenly spaced), or several of
    these with commas."""
    rates: list[float] = []
    for part in text.split(","):
        pieces = part.split(":")
        if len(pieces) == 1:
            rates.append(_rate(pieces[0], text))
            continue
        if len(pieces) != 3:
            raise ConfigError(f"qps must be R, inf, A:B:N or several with commas, not {text!r}")
        low, high = _rate(pieces[0], text), _rate(pieces[1], text)
        if math.isinf(low + high):
            raise ConfigError(f"qps A:B:N needs finite rates, not {text!r}")
        if not pieces[2].strip().isascii() or not pieces[2].strip().isdecimal():
            raise ConfigError(f"qps A:B:N needs a whole number N, not {text!r}")
        number = int(pieces[2])
        if not 2 <= number <= 1000:
            raise ConfigError(f"qps A:B:N needs N from 2 to 1000, not {text!r}")
        rates += [float(rate) for rate in np.linspace(low, high, number)]
    return rates


def _rate(piece: str, text: str) -> float:
    try:
        rate = float(piece)
    except ValueError:
        rate = math.nan
    if not rate > 0:
        raise ConfigError(f"qps must be a positive number or inf, not {text!r}")
    return rate


def count_requests(qps: float, requests: int | None, duration_s: float | None) -> int:
    if requests is not None and duration_s is not None:
        raise ConfigError("give either requests or duration, not both")
    if requests is not None and requests < 1:
        raise ConfigError(f"requests must be at least 1, not {requests}")
    if duration_s is None:
        return DEFAULT_REQUESTS if requests is None else requests
    if not 0 < duration_s < math.inf:
        raise ConfigError(f"duration must be a positive number of seconds, not {duration_s}")
    if math.isinf(qps):
        raise ConfigError("a duration needs a finite qps")
    return max(1, round(qps * duration_s))


def arrival_times(
    kind: str, qps: float, count: int, seed: int, *, times_s: Sequence[float] = ()
) -> list[float]:
    """Returns seconds from the start, ascending; the last is exactly count / qps.

    kind is one of KINDS; with an infinite qps it is `inf` in any case. gamma:K has gaps of shape K:
    below 1 they make bursts, 1 is Poisson, above 1 they are more even. A ramp's qps is its mean
    (ramp_qps). times_s are a trace's own times, ascending, of which the first is due at once.
    """
    name, numbers = parse_arrival(kind)
    if name == "inf" or math.isinf(qps):
        return [0.0] * count
    if name == "trace":
        return _rescaled(times_s, qps)
    if name == "constant":
        return [(i + 1) / qps for i in range(count)]
    rng = np.random.default_rng(list(f"arrivals-{seed}".encode()))
    shape = numbers[0] if name == "gamma" else 1.0
    sums = np.cumsum(rng.standard_gamma(shape, count))
    if sums[-1] == 0:  # the shape is so small that every gap is 0 as a float
        raise ConfigError(f"arrival {kind!r} has too small a shape")
    counts = sums * (count / sums[-1])  # numbers of requests due at a rate of 1; the last is exact
    if name == "ramp":
        return _on_ramp(counts, numbers[0], numbers[1])
    return [float(value) for value in counts / qps]


def parse_arrival(kind: str) -> tuple[str, tuple[float, ...]]:
    """Returns the name of an arrival process and its numbers."""
    name, *pieces = kind.split(":")
    lengths = {"poisson": 0, "constant": 0, "gamma": 1, "ramp": 2, "trace": 0, "inf": 0}
    if lengths.get(name) != len(pieces):
        raise ConfigError(f"arrival must be {KINDS}, not {kind!r}")
    try:
        numbers = tuple(float(piece) for piece in pieces)
    except ValueError:
        raise ConfigError(f"arrival must be {KINDS}, not {kind!r}") from None
    if not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise ConfigError(f"arrival {kind!r}: numbers must be finite and not negative")
    if numbers and sum(numbers) == 0:
        raise ConfigError(f"arrival {kind!r}: the rate must not be 0")
    return name, numbers


def ramp_qps(kind: str) -> float | None:
    """Returns the mean rate of a ramp, or None for other kinds."""
    name, numbers = parse_arrival(kind)
    return sum(numbers) / 2 if name == "ramp" else None


def _on_ramp(counts: np.ndarray, first: float, last: float) -> list[float]:
    """Returns the times at which the integral of the rate, first * t + slope * t^2 / 2, reaches
    each count."""
    duration_s = len(counts) / ((first + last) / 2)
    slope = (last - first) / duration_s
    under_root = np.maximum(first * first + 2 * slope * counts, 0.0)
    times = 2 * counts / (first + np.sqrt(under_root))
    return [float(value) for value in np.minimum(times, duration_s)]


def _rescaled(times_s: Sequence[float], qps: float) -> list[float]:
    if not times_s:
        raise ConfigError("arrival trace needs a data set with time stamps")
    first, span_s = times_s[0], times_s[-1] - times_s[0]
    if span_s == 0:
        raise ConfigError("arrival trace: all requests have the same time; use qps inf")
    scale = len(times_s) / qps / span_s
    return [(at_s - first) * scale for at_s in times_s]
