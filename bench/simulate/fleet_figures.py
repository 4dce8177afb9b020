"""The figures of runs of equal calls on several servers, measured or simulated."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bench.simulate.fleet import FleetCall, FleetRecord


class Mix(NamedTuple):
    """Tokens of each prompt and of each answer."""

    prompt: int
    output: int

    def __str__(self) -> str:
        return f"{self.prompt}/{self.output}"


class Seen(NamedTuple):
    """One call, in seconds. gap_s: its longest gap."""

    ttft_s: float
    tpot_s: float
    gap_s: float


@dataclass(frozen=True, slots=True)
class Slo:
    """The longest time to the first token, and between tokens on average."""

    ttft_s: float
    tpot_s: float

    def is_kept(self, seen: Seen) -> bool:
        return seen.ttft_s <= self.ttft_s and seen.tpot_s <= self.tpot_s


class Figures(NamedTuple):
    """Of one run: milliseconds, and calls a second that kept the SLO."""

    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    gap_p99: float
    qps: float


def figures(seen: Sequence[Seen], slo: Slo, seconds: float) -> Figures:
    """seconds: in which the calls arrived."""

    def of(values: list[float], share: float) -> float:
        return 1e3 * sorted(values)[min(len(values) - 1, math.ceil(share * len(values)) - 1)]

    ttft, tpot = [one.ttft_s for one in seen], [one.tpot_s for one in seen]
    kept = sum(slo.is_kept(one) for one in seen)
    gaps = [one.gap_s for one in seen]
    return Figures(
        of(ttft, 0.5),
        of(ttft, 0.99),
        of(tpot, 0.5),
        of(tpot, 0.99),
        of(gaps, 0.99),
        kept / seconds,
    )


def poisson(mix: Mix, qps: float, seconds: float, seed: int) -> list[FleetCall]:
    """Returns as many calls as the rate gives in that time, the first one at once."""
    rng = random.Random(seed)
    count = max(2, round(qps * seconds))
    times = [rng.expovariate(1.0) for _ in range(count)]
    scale, at_s, calls = seconds / sum(times), 0.0, []
    for gap in times:
        calls.append(FleetCall(at_s, *mix))
        at_s += scale * gap
    return calls


def seen_of(record: FleetRecord) -> Seen:
    """Returns what the client of a simulated call has seen."""
    gaps = [b - a for a, b in zip(record.times, record.times[1:], strict=False)]
    return Seen(record.ttft_s, record.tpot_s, max(gaps, default=0.0))
