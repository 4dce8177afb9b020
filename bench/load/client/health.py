"""Measures whether the generator itself kept up: its event loop, CPU time and open files."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import statistics
import time
from pathlib import Path
from typing import Self

from bench.common.percentiles import tail
from bench.load.client.record import ProcessHealth
from bench.load.client.timer import Sleeper

PERIOD_S = 0.01
MAX_CORE_WAIT = 0.1
MAX_STOLEN = 0.01
MIN_STOLEN_S = 0.05


def raise_file_limit() -> int | None:
    """Raises the limit as far as the system allows. Returns how many files may be open, or None if
    there is no limit or it is unknown."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (ValueError, OSError):  # macOS has a lower limit
            pass
    return None if soft == resource.RLIM_INFINITY else soft


def core_wait_s() -> float:
    """Returns the seconds in which this thread was ready but had no core, or NaN if unknown."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_bytes().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return math.nan


def stolen_s() -> float:
    """Returns the core seconds, since its start, that this virtual machine wanted but its host did
    not give, or NaN if unknown."""
    try:
        fields = Path("/proc/stat").read_bytes().split(b"\n", 1)[0].split()
        return int(fields[8]) / os.sysconf("SC_CLK_TCK")  # proc(5): steal
    except (OSError, IndexError, ValueError):
        return math.nan


class Watch:
    """Watches the generating event loop inside `async with`: how late it returns to a timer, the
    thread's CPU time, and garbage collections. In the block the collector ignores the objects that
    existed before; with stop_gc it is off, as the client makes no cycles."""

    def __init__(self, *, stop_gc: bool) -> None:
        self._stop_gc = stop_gc
        self._lags_s: list[float] = []
        self._num_collections = 0

    async def __aenter__(self) -> Self:
        gc.collect()
        gc.freeze()
        gc.callbacks.append(self._collected)
        self._had_gc = gc.isenabled()
        if self._stop_gc:
            gc.disable()
        self._began_s, self._cpu_s = time.perf_counter(), time.thread_time()
        self._core_wait_s = core_wait_s()
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._wall_s = time.perf_counter() - self._began_s
        self._cpu_s = time.thread_time() - self._cpu_s
        self._core_wait_s = core_wait_s() - self._core_wait_s
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        gc.callbacks.remove(self._collected)
        if self._had_gc:
            gc.enable()
        gc.unfreeze()

    def health(
        self, process: int, num_requests: int, max_connections: int, num_resent: int
    ) -> ProcessHealth:
        lags = self._lags_s or [math.nan]
        p99 = tail(lags).percentile
        return ProcessHealth(
            process,
            num_requests,
            self._cpu_s / self._wall_s,
            statistics.median(lags),
            math.nan if p99 is None else p99,
            max(lags),
            self._num_collections,
            max_connections,
            self._core_wait_s / self._wall_s,
            num_resent,
        )

    def _collected(self, phase: str, _: dict[str, int]) -> None:
        self._num_collections += phase == "start"

    async def _run(self) -> None:
        sleeper = Sleeper()
        due_s = time.perf_counter()
        try:
            while True:
                # A blocked loop counts every period that it missed as late.
                due_s += PERIOD_S
                await sleeper.until(due_s)
                self._lags_s.append(time.perf_counter() - due_s)
        finally:
            sleeper.close()


def health_notes(health: ProcessHealth, file_limit: int | None) -> list[str]:
    """Returns notes on limits that were reached, except those of validity.py (CPU, loop lag)."""
    name = f"client process {health.process}"
    notes = []
    if health.core_wait > MAX_CORE_WAIT:
        notes.append(
            f"{name} waited for a core during {health.core_wait:.0%} of the run, as this machine is"
            " busy with other work"
        )
    if file_limit is not None and health.max_connections > 0.95 * file_limit:
        notes.append(
            f"{name} had as many connections as the limit of open files allows ({file_limit})"
        )
    if health.num_resent:
        notes.append(
            f"{name} sent {health.num_resent} requests again on new connections, as the server"
            " closed the kept ones at that moment; their times count from the first sending"
        )
    return notes


def stolen_notes(stolen: float, wall_s: float) -> list[str]:
    """Returns a note if the host withheld too many core seconds (stolen) during the run."""
    if not stolen > max(MAX_STOLEN * wall_s, MIN_STOLEN_S):
        return []
    return [
        f"this virtual machine's host withheld {stolen:.1f} s of CPU time in {wall_s:.0f} s, so"
        " that times may be late"
    ]
