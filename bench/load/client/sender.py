"""Sends requests when they are due, in one process. A slow target cannot slow it down."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from functools import partial

from bench.load.client.answer import CallError
from bench.load.client.record import Outcome, Progress, Record
from bench.load.client.targets import Target
from bench.load.client.timer import Sleeper
from bench.load.workload.offered_load import Item
from serve.errors import MergestepError, message_of

MAX_ERROR_CHARS = 200


class Sender:
    """Sends items and fills their records.

    start_s is the schedule's beginning in time.perf_counter. records and probes are in the items'
    order; until run() has ended, their times are those of time.perf_counter."""

    def __init__(
        self,
        target: Target,
        items: Sequence[Item],
        *,
        start_s: float,
        grace_s: float | None,
        max_concurrency: int | None,
        process: int = 0,
    ) -> None:
        self._target = target
        self._start_s = start_s
        self._grace_s = grace_s
        self._slots = asyncio.Semaphore(max_concurrency) if max_concurrency is not None else None
        self._is_over = asyncio.Event()
        self._paces: list[asyncio.Task[None]] = []
        self._running: dict[asyncio.Task[None], Record] = {}
        self._cancelled: set[int] = set()
        self._bug: BaseException | None = None
        self._pairs = [
            (item, Record(item.index, start_s + item.due_s, group=item.work.group, process=process))
            for item in items
        ]
        self.records = [record for item, record in self._pairs if not item.is_probe]
        self.probes = [record for item, record in self._pairs if item.is_probe]
        self._num_sent = self._num_done = self._num_failed = self._num_tokens = 0
        self._ttfts_s: list[float] = []

    def stop(self) -> None:
        """Stops sending and aborts open requests, so that run() returns."""
        self._is_over.set()

    async def run(self) -> None:
        """Runs until every answer has ended, the grace is over, or stop() is called."""
        load = [pair for pair in self._pairs if not pair[0].is_probe]
        probes = [pair for pair in self._pairs if pair[0].is_probe]
        self._paces = [
            asyncio.create_task(self._pace(pairs, slots))
            for pairs, slots in ((load, self._slots), (probes, None))
        ]
        for pace in self._paces:
            pace.add_done_callback(self._check_end)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._remaining_s()):
                await self._is_over.wait()
        open_tasks = [*self._paces, *self._running]
        for task in open_tasks:
            task.cancel()
        await asyncio.gather(*open_tasks, return_exceptions=True)
        if self._bug is not None:
            raise self._bug
        self._make_relative()

    def _remaining_s(self) -> float | None:
        if self._grace_s is None:
            return None
        last_s = max((record.scheduled_s for _, record in self._pairs), default=self._start_s)
        return last_s + self._grace_s - time.perf_counter()

    def _check_end(self, task: asyncio.Task[None]) -> None:
        """Ends the run if a task that ended was the last one, or failed with a bug."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._bug = self._bug or error
            self._is_over.set()
        if not self._running and all(pace.done() for pace in self._paces):
            self._is_over.set()

    async def _pace(
        self, pairs: list[tuple[Item, Record]], slots: asyncio.Semaphore | None
    ) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.closing(Sleeper()) as sleeper:
            for number, (item, record) in enumerate(pairs):
                prepared = self._target.prepare(item.work)
                await sleeper.until(record.scheduled_s)
                if slots is not None:
                    await slots.acquire()
                elif number % 16 == 15:  # until() does not yield if the sender is behind
                    await asyncio.sleep(0)
                task = loop.create_task(self._one(item, record, prepared))
                self._running[task] = record
                task.add_done_callback(partial(self._ended, slots))

    async def _one(self, item: Item, record: Record, prepared: object) -> None:
        task = asyncio.current_task()
        assert task is not None
        record.dispatched_s = time.perf_counter()
        self._num_sent += not item.is_probe
        timer = None
        if item.cancel_after_s is not None:
            timer = asyncio.get_running_loop().call_later(
                item.cancel_after_s, self._cancel, task, item.index
            )

        def on_chunk() -> None:
            if not item.is_probe and len(record.chunks_s) == 1:
                self._ttfts_s.append(record.chunks_s[0] - record.scheduled_s)
            if len(record.chunks_s) == item.cancel_after_chunks:
                self._cancel(task, item.index)

        try:
            await self._target.send(prepared, record, on_chunk)
            record.outcome = Outcome.OK
        except asyncio.CancelledError:
            if item.is_probe or item.index not in self._cancelled:
                raise  # the request stays incomplete
            record.outcome = Outcome.CANCELLED
        except (MergestepError, OSError) as exc:
            record.outcome = Outcome.FAILED
            record.error = _describe(exc)
            exc.__traceback__ = None  # breaks a reference cycle, as the garbage collector is off
        finally:
            if timer is not None:
                timer.cancel()
            if not record.finished_s >= record.scheduled_s:  # the target did not set it
                record.finished_s = time.perf_counter()
            self._count(item, record)

    def _cancel(self, task: asyncio.Task[None], index: int) -> None:
        self._cancelled.add(index)
        task.cancel()

    def _count(self, item: Item, record: Record) -> None:
        if item.is_probe:
            return
        self._num_done += 1
        self._num_failed += record.outcome is Outcome.FAILED
        self._num_tokens += record.output_tokens or len(record.chunks_s)

    def _ended(self, slots: asyncio.Semaphore | None, task: asyncio.Task[None]) -> None:
        del self._running[task]
        if slots is not None:
            slots.release()
        self._check_end(task)

    def progress(self) -> Progress:
        ttfts_s, self._ttfts_s = self._ttfts_s, []
        probes = {id(record) for record in self.probes}
        running = [record for record in self._running.values() if id(record) not in probes]
        return Progress(
            time.perf_counter() - self._start_s,
            len(self.records),
            self._num_sent,
            self._num_done,
            self._num_failed,
            len(running),
            self._num_tokens + sum(len(record.chunks_s) for record in running),
            ttfts_s,
        )

    def _make_relative(self) -> None:
        start_s = self._start_s
        for record in (*self.records, *self.probes):
            record.scheduled_s -= start_s
            record.dispatched_s -= start_s
            record.sent_s -= start_s
            record.finished_s -= start_s
            record.chunks_s = [at_s - start_s for at_s in record.chunks_s]


def _describe(error: Exception) -> str:
    if isinstance(error, CallError):
        text = f"{error.code}: {error}"
    else:
        code = getattr(error, "code", "")
        text = f"{code}: {error}" if code else message_of(error)
    return text[:MAX_ERROR_CHARS]
