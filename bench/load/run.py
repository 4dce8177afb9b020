"""Offers a schedule to a target, on an absolute clock: a slow target cannot slow it down."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from bench.load.record import Outcome, Record, RunResult
from bench.load.targets import Target
from bench.load.work import Schedule, Work
from serve.errors import MergestepError, plain

SPIN_S = 0.001


def _describe(error: Exception) -> str:
    code = getattr(error, "code", "")
    return f"{code}: {error}" if code else plain(error)


async def run_load(
    target: Target,
    schedule: Schedule,
    *,
    seed: int = 0,
    warmup: Sequence[Work] = (),
    on_change: Callable[[int, int, int], None] | None = None,
) -> RunResult:
    """Offers the load and waits for every answer. warmup: sent before, one after the other.
    on_change(sent, done, failed)."""
    for work in warmup:
        await target.send(work, Record(-1, 0.0))
    gc.collect()
    gc.freeze()
    counts = {"sent": 0, "done": 0, "failed": 0}

    async def one(work: Work, record: Record) -> None:
        record.sent_s = time.perf_counter()
        counts["sent"] += 1
        try:
            await target.send(work, record)
            record.outcome = Outcome.OK
        except (MergestepError, OSError, TimeoutError) as exc:
            record.error = _describe(exc)[:200]
            record.outcome = Outcome.FAILED
            counts["failed"] += 1
        record.finished_s = time.perf_counter()
        counts["done"] += 1
        if on_change is not None:
            on_change(counts["sent"], counts["done"], counts["failed"])

    started = datetime.now(UTC).isoformat(timespec="seconds")
    start_s = time.perf_counter() + 0.05
    records = [
        Record(index, start_s + at_s, group=work.group)
        for index, (work, at_s) in enumerate(zip(schedule.works, schedule.arrivals_s, strict=True))
    ]
    async with asyncio.TaskGroup() as group:
        for work, record in zip(schedule.works, records, strict=True):
            await _sleep_until(record.scheduled_s)
            group.create_task(one(work, record))
    gc.unfreeze()
    for record in records:
        _relative(record, start_s)
    end_s = max(record.finished_s for record in records)
    return RunResult(schedule.qps, seed, target.name, records, (0.0, end_s), started)


def _relative(record: Record, start_s: float) -> None:
    record.scheduled_s -= start_s
    record.sent_s -= start_s
    record.finished_s -= start_s
    record.chunks_s = [at_s - start_s for at_s in record.chunks_s]


async def _sleep_until(at_s: float) -> None:
    """The loop's timers are about a millisecond coarse; the rest is spent yielding."""
    remaining_s = at_s - time.perf_counter()
    if remaining_s > SPIN_S:
        await asyncio.sleep(remaining_s - SPIN_S)
    while time.perf_counter() < at_s:  # an event would need the same timer
        await asyncio.sleep(0)
