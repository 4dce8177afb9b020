"""Offers a schedule to a target: warm-up, processes, samples, progress, interruption, result."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

from bench.load.client.health import (
    Watch,
    health_notes,
    raise_file_limit,
    stolen_notes,
    stolen_s,
)
from bench.load.client.processes import Crew, num_processes
from bench.load.client.record import (
    Outcome,
    ProcessHealth,
    Progress,
    Record,
    RunResult,
    ServerSample,
    StepRow,
)
from bench.load.client.redact import printable
from bench.load.client.sender import Sender
from bench.load.client.targets import ServerTarget, Target
from bench.load.workload.offered_load import Item, LoadOptions, items_of
from bench.load.workload.work import Schedule
from serve.errors import ConfigError, message_of

LEAD_S = 0.1
PROGRESS_S = 0.25
SAMPLE_S = 0.333

OnProgress = Callable[[Progress], None]


@dataclass(slots=True)
class _Sent:
    """The results of sending the items."""

    records: list[Record]
    probes: list[Record]
    health: list[ProcessHealth]
    start_s: float
    samples: list[ServerSample] = field(default_factory=list)
    steps: list[StepRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stopped_s: float | None = None


async def offer(
    schedule: Schedule,
    target: Target,
    options: LoadOptions | None = None,
    on_progress: OnProgress | None = None,
) -> RunResult:
    """Sends the schedule and waits for the answers. The target must be open (`async with`).

    Ctrl-C ends the run early with the records so far; a second one interrupts Python. Raises the
    target's errors before anything of the schedule is sent: the target cannot be reached, the model
    does not exist, or a warm-up failed.
    """
    options = options or LoadOptions()
    if not schedule.works:
        raise ConfigError("there is no request to send")
    notes = []
    file_limit = raise_file_limit()
    notes += await target.check(schedule.works[0])
    for work in options.warmup:
        await target.warm_up(work)
    items = items_of(schedule, options)
    count, why = num_processes(schedule, target, options)
    notes += why
    started = datetime.now(UTC).isoformat(timespec="seconds")
    began_s, stolen = time.perf_counter(), stolen_s()
    if count == 1:
        sent = await _from_here(items, target, options, on_progress)
    else:
        assert isinstance(target, ServerTarget)
        sent = await _from_several(count, items, target, options, on_progress)
    notes += stolen_notes(stolen_s() - stolen, time.perf_counter() - began_s)
    return _result(schedule, target, options, sent, notes, started, file_limit)


async def _from_here(
    items: list[Item], target: Target, options: LoadOptions, on_progress: OnProgress | None
) -> _Sent:
    async with Watch(stop_gc=isinstance(target, ServerTarget)) as watch:
        start_s = time.perf_counter() + LEAD_S
        sender = Sender(
            target,
            items,
            start_s=start_s,
            grace_s=options.grace_s,
            max_concurrency=options.max_concurrency,
        )
        take_steps, resent = target.trace_steps(), target.num_resent
        sent = _Sent(sender.records, sender.probes, [], start_s)
        async with _observed(sent, target, sender.progress, on_progress):
            with _interruptible(sender.stop, sent):
                await sender.run()
    resent = target.num_resent - resent
    sent.health = [watch.health(0, len(items), target.max_connections, resent)]
    sent.steps, notes = take_steps()
    sent.notes += notes
    return sent


async def _from_several(
    count: int,
    items: list[Item],
    target: ServerTarget,
    options: LoadOptions,
    on_progress: OnProgress | None,
) -> _Sent:
    async with Crew(count, items, target.settings, options) as crew:
        start_s = time.perf_counter() + LEAD_S
        sent = _Sent([], [], [], start_s)
        async with _observed(sent, target, crew.progress, on_progress):
            with _interruptible(crew.stop, sent):
                sent.records, sent.probes, sent.health = await crew.run(start_s)
    return sent


@contextlib.asynccontextmanager
async def _observed(
    sent: _Sent,
    target: Target,
    progress: Callable[[], Progress],
    on_progress: OnProgress | None,
) -> AsyncIterator[None]:
    """Takes the target's samples and reports progress during the block and at its end. An error of
    the samples becomes a note, so that the run is not lost."""

    async def sample() -> None:
        try:
            while (figures := await target.sample()) is not None or sent.samples:
                if figures is not None:
                    sent.samples.append(figures)
                await asyncio.sleep(SAMPLE_S)
        except Exception as exc:
            sent.notes.append(f"the server's own figures end early: {printable(message_of(exc))}")

    async def report(on_progress: OnProgress) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            on_progress(progress())

    tasks = [asyncio.create_task(sample())]
    if on_progress is not None:
        tasks.append(asyncio.create_task(report(on_progress)))
    try:
        yield
        if on_progress is not None:
            on_progress(progress())
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    for error in ended:
        if isinstance(error, Exception):
            raise error


@contextlib.contextmanager
def _interruptible(stop: Callable[[], None], sent: _Sent) -> Iterator[None]:
    """Lets the first Ctrl-C call stop(). Outside the main thread it does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    before = signal.getsignal(signal.SIGINT)

    def interrupted() -> None:
        sent.stopped_s = time.perf_counter() - sent.start_s
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)
        stop()

    try:
        loop.add_signal_handler(signal.SIGINT, interrupted)
    except NotImplementedError:  # Windows
        yield
        return
    try:
        yield
    finally:
        if loop.remove_signal_handler(signal.SIGINT):
            signal.signal(signal.SIGINT, before)


def _result(
    schedule: Schedule,
    target: Target,
    options: LoadOptions,
    sent: _Sent,
    notes: list[str],
    started: str,
    file_limit: int | None,
) -> RunResult:
    records, probes = sent.records, sent.probes
    notes += sent.notes
    if sent.stopped_s is not None:
        total = len(records)
        records = [r for r in records if r.scheduled_s <= sent.stopped_s]
        probes = [r for r in probes if r.scheduled_s <= sent.stopped_s]
        notes.append(f"stopped by the user: {len(records)} of {total} requests were due")
    for health in sent.health:
        notes += health_notes(health, file_limit)
    if options.max_concurrency is not None:
        notes.append(
            f"max_concurrency {options.max_concurrency}: latencies from schedule include the wait"
            " for a free slot, latencies from send do not"
        )
    if num_incomplete := sum(r.outcome is Outcome.INCOMPLETE for r in records):
        notes.append(f"{num_incomplete} requests had not ended at the end of the run")
    for row in sent.steps:
        row.start_s -= sent.start_s
        row.end_s -= sent.start_s
    for sample in sent.samples:
        sample.at_s -= sent.start_s
    last_s = max((r.scheduled_s for r in records), default=0.0)
    end_s = max([last_s, *(r.finished_s for r in records if not math.isnan(r.finished_s))])
    return RunResult(
        qps=schedule.qps,
        seed=options.seed,
        target=target.name,
        records=records,
        window=(options.warmup_s, end_s),
        started=started,
        probes=probes,
        steps=sent.steps,
        samples=sent.samples,
        health=sent.health,
        notes=notes,
        is_closed_loop=options.max_concurrency is not None,
        was_interrupted=sent.stopped_s is not None,
    )
