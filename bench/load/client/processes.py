"""Divides a load that is too large for one process between several client processes.

Each process is a new interpreter (`python -m bench.load.client.worker`). Messages go over its
standard input and output, as a length of four bytes and JSON; nothing is pickled. All processes of
a machine share the clock time.perf_counter, so they start at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import sys
from typing import Any, Self

import orjson

from bench.load.client.record import Outcome, ProcessHealth, Progress, Record
from bench.load.client.targets import ServerSettings, ServerTarget, Target
from bench.load.workload.offered_load import Item, LoadOptions
from bench.load.workload.work import Schedule
from serve.errors import ConfigError, MergestepError

# CPU time that a request and each chunk of its answer cost the client, on one core of an AMD EPYC
# virtual machine, measured with scripted answers of 1 and of 40 chunks at 100 to 500 per second.
# Under more load, several chunks arrive with one read and cost less.
REQUEST_COST_S = 175e-6
CHUNK_COST_S = 26e-6
TYPICAL_CHUNKS = 128
FULL_CORE = 0.6
MAX_PROCESSES = 16


def num_processes(
    schedule: Schedule, target: Target, options: LoadOptions
) -> tuple[int, list[str]]:
    """Returns the number of client processes, and notes about it. Raises ConfigError."""
    if not isinstance(target, ServerTarget):
        if (options.processes or 1) > 1:
            raise ConfigError("processes must be 1 for an engine in this process")
        return 1, []
    if options.processes is not None:
        limit = options.max_concurrency or len(schedule.works)
        return min(options.processes, limit, len(schedule.works)), []
    if options.max_concurrency is not None:
        return 1, []
    span_s = schedule.arrivals_s[-1]
    qps = len(schedule.works) / span_s if span_s else float(len(schedule.works))
    lengths = [work.max_tokens or TYPICAL_CHUNKS for work in schedule.works]
    busy = qps * (REQUEST_COST_S + CHUNK_COST_S * sum(lengths) / len(lengths))
    needed = max(1, math.ceil(busy / FULL_CORE))
    count = min(needed, os.cpu_count() or 1, MAX_PROCESSES, len(schedule.works))
    if count < needed:
        note = f"the load needs {needed} client processes, but only {count} are possible"
        return count, [note]
    return count, []


async def write_frame(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    """Writes a message. A dataclass becomes a dictionary of its fields."""
    data = orjson.dumps(message)
    writer.write(len(data).to_bytes(4, "big") + data)
    await writer.drain()


async def read_frame(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Reads a message. Raises IncompleteReadError if the other side has closed the pipe."""
    size = int.from_bytes(await reader.readexactly(4), "big")
    message: dict[str, Any] = orjson.loads(await reader.readexactly(size))
    return message


def record_from(values: dict[str, Any]) -> Record:
    """Returns the record of a JSON object, in which null stands for NaN."""
    for name in ("sent_s", "finished_s", "dispatched_s"):
        if values[name] is None:
            values[name] = math.nan
    return Record(**{**values, "outcome": Outcome(values["outcome"])})


def _health_from(values: dict[str, Any]) -> ProcessHealth:
    numbers: dict[str, Any] = {k: math.nan if v is None else v for k, v in values.items()}
    return ProcessHealth(**numbers)


class Crew:
    """The client processes. `async with` starts them and waits until all are ready."""

    def __init__(
        self, count: int, items: list[Item], settings: ServerSettings, options: LoadOptions
    ) -> None:
        self._items = items
        self._settings = settings
        self._options = options
        self._processes: list[asyncio.subprocess.Process] = []
        self._progress = [Progress(0.0, 0) for _ in range(count)]
        self._stops: set[asyncio.Task[None]] = set()
        self._limits = [
            None
            if options.max_concurrency is None
            else (options.max_concurrency + count - 1 - k) // count
            for k in range(count)
        ]

    async def __aenter__(self) -> Self:
        path = os.pathsep.join(path or os.getcwd() for path in sys.path)
        command = [sys.executable, "-m", "bench.load.client.worker"]
        try:
            for _ in self._progress:
                self._processes.append(
                    await asyncio.create_subprocess_exec(
                        *command,
                        stdin=asyncio.subprocess.PIPE,
                        stdout=asyncio.subprocess.PIPE,
                        env={**os.environ, "PYTHONPATH": path},
                    )
                )
            await asyncio.gather(*map(self._begin, range(len(self._processes))))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self._processes:
            if process.returncode is None:
                process.kill()
        await asyncio.gather(*(process.wait() for process in self._processes))

    async def run(self, start_s: float) -> tuple[list[Record], list[Record], list[ProcessHealth]]:
        """Runs the load. Returns records and probes, in the items' order, and each process's
        health."""
        parts = await asyncio.gather(
            *(self._run(number, start_s) for number in range(len(self._processes)))
        )
        records = [record_from(values) for part in parts for values in part["records"]]
        probes = [record_from(values) for part in parts for values in part["probes"]]
        records.sort(key=lambda record: record.index)
        probes.sort(key=lambda record: record.index)
        return records, probes, [_health_from(part["health"]) for part in parts]

    def stop(self) -> None:
        for number in range(len(self._processes)):
            self._stops.add(asyncio.create_task(self._write(number, {"stop": True})))

    def progress(self) -> Progress:
        """Returns the sum of all processes' progress."""
        whole = Progress(0.0, 0)
        for part in self._progress:
            whole.at_s = max(whole.at_s, part.at_s)
            whole.num_total += part.num_total
            whole.num_sent += part.num_sent
            whole.num_done += part.num_done
            whole.num_failed += part.num_failed
            whole.num_running += part.num_running
            whole.num_tokens += part.num_tokens
            whole.ttfts_s += part.ttfts_s
            part.ttfts_s = []
        return whole

    async def _begin(self, number: int) -> None:
        message = {
            "process": number,
            "settings": self._settings,
            "items": self._items[number :: len(self._processes)],
            "grace_s": self._options.grace_s,
            "max_concurrency": self._limits[number],
        }
        await self._write(number, message)
        await self._read(number)

    async def _run(self, number: int, start_s: float) -> dict[str, Any]:
        await self._write(number, {"start_s": start_s})
        while True:
            message = await self._read(number)
            if "health" in message:
                return message
            before = self._progress[number].ttfts_s
            self._progress[number] = Progress(**message["progress"])
            self._progress[number].ttfts_s[:0] = before

    async def _write(self, number: int, message: dict[str, Any]) -> None:
        """Writes to a process; _read notices if the process has ended."""
        stdin = self._processes[number].stdin
        assert stdin is not None
        with contextlib.suppress(OSError, RuntimeError):  # the latter is uvloop's
            await write_frame(stdin, message)

    async def _read(self, number: int) -> dict[str, Any]:
        process = self._processes[number]
        assert process.stdout is not None
        try:
            return await read_frame(process.stdout)
        except asyncio.IncompleteReadError as exc:
            code = await process.wait()
            raise MergestepError(f"client process {number} ended early, status {code}") from exc
