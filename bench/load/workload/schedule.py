"""Makes the schedule: the requests to send and their times, from settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.load.workload.arrivals import arrival_times, count_requests, parse_arrival, ramp_qps
from bench.load.workload.datasets import (
    TIMED,
    DatasetSettings,
    check,
    conversation_calls,
    load_calls,
    split_name,
)
from bench.load.workload.mixed import warm_up_requests
from bench.load.workload.prompts import WORDS, make_works
from bench.load.workload.work import Call, Schedule, Work
from serve.errors import ConfigError

WARM_UP_SEED = 1_000_003  # is added to the seed, so that the prefix cache has no measured prompt


@dataclass(frozen=True, slots=True)
class ArrivalSettings:
    """The arrival process. kind is one of bench.load.workload.arrivals.KINDS. speedup is a factor
    on a trace's own time, if no qps is given."""

    kind: str = "poisson"
    speedup: float | None = None


@dataclass(frozen=True, slots=True)
class Offer:
    """The calls, ascending by at_s (seconds after the start), and their mean rate."""

    qps: float
    calls: list[Call]
    notes: list[str]


def make_calls(
    dataset: DatasetSettings,
    arrival: ArrivalSettings,
    *,
    qps: float | None,
    requests: int | None = None,
    duration_s: float | None = None,
    seed: int = 0,
) -> Offer:
    """Returns calls with lengths and times but no prompts, as a simulator needs them; a million
    take seconds. qps is None if the arrivals have their own rate (ramp, and trace in its own time
    or with a speedup). Raises ConfigError."""
    check(dataset)
    kind, _ = parse_arrival(arrival.kind)
    if kind != "trace" and arrival.speedup is not None:
        raise ConfigError("speedup goes with arrival trace")
    notes: list[str] = []
    if kind == "trace":
        if split_name(dataset.name)[0] not in TIMED:
            raise ConfigError(f"arrival trace needs one of {', '.join(TIMED)}, not {dataset.name}")
        if qps is None:
            return _own_time(dataset, arrival, requests, duration_s, seed, notes)
        if arrival.speedup is not None:
            raise ConfigError("give either qps or speedup, not both")
    rate = _rate(kind, arrival.kind, qps)
    calls = load_calls(dataset, count_requests(rate, requests, duration_s), seed, notes)
    times = arrival_times(
        arrival.kind, rate, len(calls), seed, times_s=_times(calls) if kind == "trace" else ()
    )
    return Offer(rate, _due(calls, times), notes)


def _rate(kind: str, text: str, qps: float | None) -> float:
    if kind == "inf":
        if qps is not None and not math.isinf(qps):
            raise ConfigError("arrival inf has qps inf")
        return math.inf
    if (mean := ramp_qps(text)) is not None:
        if qps is not None:
            raise ConfigError(f"arrival {text} has its own rates, so qps must not be given")
        return mean
    if qps is None:
        raise ConfigError(f"arrival {text} needs a qps")
    if not qps > 0:
        raise ConfigError(f"qps must be positive, not {qps}")
    return qps


def _own_time(
    dataset: DatasetSettings,
    arrival: ArrivalSettings,
    requests: int | None,
    duration_s: float | None,
    seed: int,
    notes: list[str],
) -> Offer:
    """Returns a trace in its own time, or faster. duration_s is in the schedule's time."""
    speedup = 1.0 if arrival.speedup is None else arrival.speedup
    if not 0 < speedup < math.inf:
        raise ConfigError(f"speedup must be positive, not {speedup}")
    count: int | None = count_requests(1.0, requests, duration_s)
    if duration_s is not None:
        count = None
        end_s = min(dataset.end_s, dataset.start_s + duration_s * speedup)
        dataset = replace(dataset, end_s=end_s)
    calls = load_calls(dataset, count, seed, notes)
    times = _times(calls)
    times = [(at_s - times[0]) / speedup for at_s in times]
    qps = len(calls) / times[-1] if times[-1] > 0 else math.inf
    notes.append(f"arrivals are the trace's own, {speedup:g} times as fast")
    return Offer(qps, _due(calls, times), notes)


def _times(calls: Sequence[Call]) -> list[float]:
    times = [call.at_s for call in calls if call.at_s is not None]
    if len(times) != len(calls):
        raise ConfigError("arrival trace: not every request has a timestamp")
    return times


def _due(calls: Sequence[Call], times: Sequence[float]) -> list[Call]:
    return [replace(call, at_s=at_s) for call, at_s in zip(calls, times, strict=True)]


def make_schedule(
    dataset: DatasetSettings,
    arrival: ArrivalSettings,
    *,
    qps: float | None,
    requests: int | None = None,
    duration_s: float | None = None,
    seed: int = 0,
    tokens: Sequence[int],
) -> tuple[Schedule, list[str]]:
    """Returns the schedule, and notes for the reader of the results. tokens are the ids of which
    made-up prompts consist (a target's prompt_tokens). Another seed gives other prompts and times.
    Raises ConfigError."""
    offer = make_calls(
        dataset, arrival, qps=qps, requests=requests, duration_s=duration_s, seed=seed
    )
    works = _works(dataset, offer.calls, seed, tokens)
    notes = offer.notes
    if dataset.as_text and any(call.work is None for call in offer.calls):
        notes.append("prompts are random words with an approximate number of tokens")
    times = [call.at_s for call in offer.calls if call.at_s is not None]
    return Schedule(offer.qps, works, times), notes


def make_warm_up(
    dataset: DatasetSettings, count: int, seed: int, tokens: Sequence[int]
) -> list[Work]:
    """Returns requests for the warm-up. Their lengths are those of the data set, but their prompts
    differ from make_schedule's: a file's texts are replaced by made-up prompts."""
    if count == 0:
        return []
    kind = split_name(dataset.name)[0]
    if kind == "mixed":
        return _works(dataset, conversation_calls(dataset, warm_up_requests(count)), seed, tokens)
    calls = load_calls(dataset, count, seed + WARM_UP_SEED, [])
    if kind in ("sharegpt", "jsonl"):
        calls = [replace(call, work=None) for call in calls]
    return _works(dataset, calls, seed + WARM_UP_SEED, tokens)


def _works(
    dataset: DatasetSettings, calls: Sequence[Call], seed: int, tokens: Sequence[int]
) -> list[Work]:
    words_per_token = None
    if dataset.as_text:
        counted = dataset.count_tokens(" ".join(WORDS)) if dataset.count_tokens else len(WORDS)
        words_per_token = len(WORDS) / max(1, counted)
    return make_works(
        calls, seed, tokens, words_per_token=words_per_token, ignore_eos=dataset.ignore_eos
    )
