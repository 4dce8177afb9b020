"""How many servers should compute prompts for the others, by what arrives.

A call's own predictions (apart.py) see the servers as they are. While all of them do both, no
single call gains by a hand-over, even where roles would serve all of them better. So the steady
states are compared: every server does both, or some compute prompts and the rest decode. What a
call takes in each follows from the rate of calls, their mean lengths and the published step times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from serve.cluster.front.apart import ServerLoad

HORIZON_S = 60.0
HORIZON_CALLS = 64
"""How far back the rate looks, at most."""
LEAST_CALLS = 8.0
"""Of which fewer say nothing of a rate."""
GAIN = 0.05
"""The share of a call's seconds that roles must save; to stay, half of it is enough to lose."""
_EVADED = 0.2
"""The share of prompts' time that streams do not see, since calls go to the server that waits least
(as in simulations of two servers)."""
_FULL = 0.98
_ROUNDS = 30


@dataclass(slots=True)
class Traffic:
    """The calls of late: their rate, and their mean lengths."""

    last_s: float | None = None
    seconds: float = 0.0
    count: float = 0.0
    tokens: float = 0.0
    output: float = 0.0

    def note(self, now_s: float, num_tokens: float, num_output: float) -> None:
        gap_s = 0.0 if self.last_s is None else max(0.0, now_s - self.last_s)
        kept = math.exp(-gap_s / HORIZON_S) * (1.0 - 1.0 / HORIZON_CALLS)
        self.seconds = kept * (self.seconds + gap_s)
        self.count = kept * self.count + 1.0
        self.tokens = kept * self.tokens + num_tokens
        self.output = kept * self.output + num_output
        self.last_s = now_s

    @property
    def rate(self) -> float:
        """Calls a second; 0 while too few have come."""
        if self.count < LEAST_CALLS or not self.seconds:
            return 0.0
        return (self.count - 1.0) / self.seconds

    @property
    def mean_tokens(self) -> float:
        return self.tokens / max(1.0, self.count)

    @property
    def mean_output(self) -> float:
        return self.output / max(1.0, self.count)


def num_prefill(
    loads: Sequence[ServerLoad],
    traffic: Traffic,
    handover_s: float,
    present: int,
    counts: Sequence[int] | None = None,
) -> int:
    """Returns how many of these servers should compute prompts only; 0: all do both. present: how
    many do now. counts: how many can; None: all but one."""
    counts = range(1, len(loads)) if counts is None else counts
    together_s = together_seconds(loads, traffic)
    best_s, best = min(
        ((apart_seconds(loads, traffic, handover_s, k), k) for k in counts),
        default=(math.inf, 0),
    )
    bound = 1.0 + GAIN / 2 if present else 1.0 - GAIN
    return best if best_s < bound * together_s and best_s < math.inf else 0


def together_seconds(loads: Sequence[ServerLoad], traffic: Traffic) -> float:
    """Returns the seconds of a mean call where every server does both; inf if it is too much."""
    rate = traffic.rate / len(loads)
    prompt_s = _mean([load.prefill_s(traffic.mean_tokens) for load in loads])
    share = rate * prompt_s
    if share >= _FULL:
        return math.inf
    seen = (1.0 - _EVADED) * share if len(loads) > 1 else share
    num_streams, pace_s = _decoding(loads, rate, traffic.mean_output, 1.0 - seen)
    # prompts are slower where streams are beside them
    slowdown = _mean([load.next_slowdown for load in loads])
    own_s = prompt_s * (1.0 + (slowdown - 1.0) * (1.0 - math.exp(-num_streams)))
    return own_s + _wait(rate * own_s, own_s, len(loads)) + traffic.mean_output * pace_s


def apart_seconds(
    loads: Sequence[ServerLoad], traffic: Traffic, handover_s: float, count: int
) -> float:
    """Returns the same where `count` of the servers compute the prompts of the others."""
    own_s = _mean([load.prefill_s(traffic.mean_tokens) for load in loads])
    pull_s = _mean([load.pull_s(traffic.mean_tokens) for load in loads])
    rate = traffic.rate / (len(loads) - count)
    _, pace_s = _decoding(loads, rate, traffic.mean_output, 1.0)
    wait_s = _wait(traffic.rate / count * own_s, own_s, count)
    return own_s + wait_s + handover_s + pull_s + traffic.mean_output * pace_s


def _decoding(
    loads: Sequence[ServerLoad], rate: float, num_output: float, share: float
) -> tuple[float, float]:
    """Returns the mean number of streams of a server, and the seconds between a stream's tokens,
    where steps of decode rows have this share of the time."""
    num_streams, pace_s = 1.0, 0.0
    for _ in range(_ROUNDS):
        pace_s = _mean([load.step_of(num_streams) for load in loads]) / share
        following = rate * num_output * pace_s
        if following > 1e4:
            return math.inf, math.inf
        num_streams = (num_streams + following) / 2
    return num_streams, pace_s


def _wait(load: float, seconds: float, servers: int) -> float:
    """Returns the mean wait for one of these servers, each busy for this share of the time with
    work that takes so many seconds each (after Sakasegawa, for equal seconds)."""
    if load >= _FULL:
        return math.inf
    power = math.sqrt(2.0 * (servers + 1)) - 1.0
    return float(load**power / (servers * (1.0 - load)) * seconds / 2.0)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
