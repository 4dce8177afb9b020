"""Options of offering a schedule: warm-up, grace, concurrency, cancellation, probes, processes."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from bench.load.workload.work import Schedule, Work
from serve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The options of offering a schedule. Raises ConfigError for values out of range.

    warmup requests are sent before the load, and their answers are discarded. Requests of the
    schedule's first warmup_s seconds are sent but not counted. Open requests are aborted and become
    incomplete grace_s seconds after the last arrival; None waits for all. max_concurrency makes the
    loop a closed one. cancel_rate is the share of the requests whose connection the client closes,
    cancel_after_s after they are sent or after cancel_after_chunks chunks. probe_qps is the rate of
    one-token requests beside the load. If processes is None, the load determines their number."""

    seed: int = 0
    warmup: Sequence[Work] = ()
    warmup_s: float = 0.0
    grace_s: float | None = None
    max_concurrency: int | None = None
    cancel_rate: float = 0.0
    cancel_after_s: float | None = None
    cancel_after_chunks: int | None = None
    probe_qps: float = 0.0
    processes: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("max_concurrency", 1), ("processes", 1), ("cancel_after_chunks", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} must be at least {least}, not {value}")
        for name in ("warmup_s", "grace_s", "cancel_after_s", "probe_qps"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(f"{name} must be 0 or a positive number, not {value}")
        if not 0 <= self.cancel_rate <= 1:
            raise ConfigError(f"cancel_rate must be from 0 to 1, not {self.cancel_rate}")
        if self.cancel_rate and (self.cancel_after_s is None) == (self.cancel_after_chunks is None):
            raise ConfigError("cancel_rate needs either cancel_after_s or cancel_after_chunks")


@dataclass(frozen=True, slots=True)
class Item:
    """A request to send due_s seconds after the start. It is not cancelled if both cancel_after_*
    are None."""

    index: int
    due_s: float
    work: Work
    is_probe: bool = False
    cancel_after_s: float | None = None
    cancel_after_chunks: int | None = None


def items_of(schedule: Schedule, options: LoadOptions) -> list[Item]:
    """Returns the schedule's requests, then the probes, each in the order of their due times."""
    rng = random.Random(f"cancel-{options.seed}")
    items = []
    for index, (work, due_s) in enumerate(zip(schedule.works, schedule.arrivals_s, strict=True)):
        after: tuple[float | None, int | None] = (None, None)
        if rng.random() < options.cancel_rate:
            after = (options.cancel_after_s, options.cancel_after_chunks)
        items.append(Item(index, due_s, work, False, *after))
    return items + _probes(schedule, options)


def _probes(schedule: Schedule, options: LoadOptions) -> list[Item]:
    """Returns evenly spaced probes in the middle of their intervals, so that none coincides with
    the first request."""
    if not options.probe_qps or not schedule.works:
        return []
    example = schedule.works[0]
    if example.messages is not None:
        work = Work(messages=[{"role": "user", "content": "Hi"}], max_tokens=1)
    elif example.prompt is not None:
        work = Work(prompt="Hi", max_tokens=1)
    else:
        work = Work(token_ids=(example.token_ids or [])[:1], max_tokens=1)
    count = max(1, round(schedule.arrivals_s[-1] * options.probe_qps))
    return [Item(i, (i + 0.5) / options.probe_qps, work, True) for i in range(count)]
