"""The kinds of disk access that `serve bench io` compares. Each runs one pattern at one depth for a
given time."""

from __future__ import annotations

import errno
import itertools
import json
import mmap
import os
import queue
import random
import resource
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bench.common.percentiles import is_supported, tail
from memory.tiers.block_file import ThreadFile, Transfer
from memory.tiers.direct_io import address_of, open_direct
from ops.cpu import native_library

_SEED = 7


@dataclass(frozen=True, slots=True)
class Pattern:
    """What is read or written. block: bytes of one operation."""

    name: str
    block: int
    is_random: bool
    is_write: bool


@dataclass(frozen=True, slots=True)
class Sample:
    """The figures of one pattern at one depth. p50_s, high_s, mean_s: latency of an operation;
    high_s is the p99, or the maximum of fewer than 100 operations. submit_s, reap_s: seconds inside
    these calls for all operations, None where there are none."""

    operations: int
    wall_s: float
    cpu_s: float
    p50_s: float
    high_s: float
    mean_s: float
    submit_s: float | None = None
    reap_s: float | None = None


def sample_of(latencies: list[float], wall_s: float, cpu_s: float, **calls: float) -> Sample:
    latencies.sort()
    count = len(latencies)
    middle, high = latencies[count // 2], tail(latencies).value
    return Sample(count, wall_s, cpu_s, middle, high, statistics.fmean(latencies), **calls)


class DiskAccess(Protocol):
    """An interface through which a file on the disk is read and written."""

    name: str

    def run(self, pattern: Pattern, depth: int, seconds: float) -> Sample:
        """Runs `depth` operations at a time for some seconds. Raises OSError."""
        ...


def offsets(pattern: Pattern, size: int) -> Callable[[], int]:
    """Returns a function that returns the next block's offset in a file of `size` bytes."""
    count = size // pattern.block
    if not pattern.is_random:
        in_turn = itertools.cycle(range(count))
        return lambda: next(in_turn) * pattern.block
    rng = random.Random(_SEED)
    blocks = itertools.cycle([rng.randrange(count) for _ in range(65_536)])
    return lambda: next(blocks) * pattern.block


def cpu_seconds() -> float:
    """Returns the user and system time of all threads of the process, io_uring's kernel threads
    included."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Ring:
    """io_uring from one thread, which submits as many operations as it has reaped."""

    def __init__(
        self, name: str, path: Path, size: int, *, sqpoll: bool = False, fixed: bool = False
    ) -> None:
        self.name = name
        self._path, self._size = path, size
        self._sqpoll, self._fixed = sqpoll, fixed

    def run(self, pattern: Pattern, depth: int, seconds: float) -> Sample:
        fd, _ = open_direct(self._path, os.O_RDWR)
        try:
            with mmap.mmap(-1, depth * pattern.block) as memory:
                memory.write(os.urandom(4096) * (len(memory) // 4096))
                base = address_of(memory)
                ring = native_library.library().IoRing(fd, depth, self._sqpoll, False)
                if self._fixed:
                    ring.register_buffers([(base, len(memory))])
                return self._loop(ring, base, pattern, depth, seconds)
        finally:
            os.close(fd)

    def _loop(self, ring: Any, base: int, pattern: Pattern, depth: int, seconds: float) -> Sample:
        latencies: list[float] = []
        next_offset = offsets(pattern, self._size)
        started = [0.0] * depth
        ready, in_flight = list(range(depth)), 0
        clock, block, is_write = time.perf_counter, pattern.block, int(pattern.is_write)
        submit_s = reap_s = 0.0
        cpu, start = cpu_seconds(), clock()
        now, end = start, start + seconds
        while in_flight or now < end:
            if ready and now < end:
                fields: list[int] = []
                for tag in ready:
                    fields += (tag, is_write, base + tag * block, block, next_offset())
                    started[tag] = now
                ring.submit(fields)
                in_flight += len(ready)
                after = clock()
                submit_s += after - now
                now = after
            events = ring.reap(1, 1.0)
            after = clock()
            reap_s += after - now
            now = after
            ready = []
            for tag, result in events:
                _check(result, block)
                latencies.append(now - started[tag])
                ready.append(tag)
            in_flight -= len(ready)
        cpu_s = cpu_seconds() - cpu
        return sample_of(latencies, now - start, cpu_s, submit_s=submit_s, reap_s=reap_s)


def _check(result: int, block: int) -> None:
    if result != block:
        number = -result if result < 0 else errno.EIO
        raise OSError(number, f"a block of {block} bytes: {os.strerror(number)}")


class Threads:
    """The thread pool of the disk tier."""

    name = "threads"

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._size = path, size

    def run(self, pattern: Pattern, depth: int, seconds: float) -> Sample:
        fd, is_direct = open_direct(self._path, os.O_RDWR)
        file = ThreadFile(fd, is_direct=is_direct, depth=depth)
        try:
            with mmap.mmap(-1, depth * pattern.block) as memory:
                memory.write(os.urandom(4096) * (len(memory) // 4096))
                return self._loop(file, address_of(memory), pattern, depth, seconds)
        finally:
            file.close()

    def _loop(
        self, file: ThreadFile, base: int, pattern: Pattern, depth: int, seconds: float
    ) -> Sample:
        latencies: list[float] = []
        next_offset = offsets(pattern, self._size)
        ended: queue.SimpleQueue[tuple[int, float, OSError | None]] = queue.SimpleQueue()
        clock = time.perf_counter
        transfer = file.write if pattern.is_write else file.read

        def begin(tag: int) -> None:
            begun = clock()
            address = base + tag * pattern.block
            on_end = lambda error: ended.put((tag, clock() - begun, error))  # noqa: E731
            transfer([Transfer(address, pattern.block, next_offset(), on_end)])

        cpu, start = cpu_seconds(), clock()
        for tag in range(depth):
            begin(tag)
        in_flight = depth
        while in_flight:
            tag, latency, error = ended.get()
            if error is not None:
                raise error
            latencies.append(latency)
            if clock() - start < seconds:
                begin(tag)
            else:
                in_flight -= 1
        return sample_of(latencies, clock() - start, cpu_seconds() - cpu)


class Fio:
    """The tool fio, with io_uring."""

    name = "fio io_uring"

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._size = path, size

    @staticmethod
    def is_installed() -> bool:
        return shutil.which("fio") is not None

    def run(self, pattern: Pattern, depth: int, seconds: float) -> Sample:
        kind = ("rand" if pattern.is_random else "") + ("write" if pattern.is_write else "read")
        command = ["fio", "--name=x", f"--filename={self._path}", f"--size={self._size}"]
        command += [f"--rw={kind}", f"--bs={pattern.block}", f"--iodepth={depth}", "--direct=1"]
        command += ["--ioengine=io_uring", "--time_based", f"--runtime={int(seconds * 1000)}ms"]
        command += ["--thread", "--overwrite=1", "--randrepeat=1", "--norandommap"]
        done = subprocess.run(
            [*command, "--output-format=json"], capture_output=True, text=True, timeout=60
        )
        if done.returncode:
            raise OSError(errno.EIO, f"fio: {done.stderr.strip()[:200]}")
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        found = job["write" if pattern.is_write else "read"]
        latency = found["lat_ns"]["mean"]
        count, percentiles = found["total_ios"], found["clat_ns"].get("percentile", {})
        high = percentiles.get("99.000000", latency)
        return Sample(
            count,
            found["runtime"] / 1000,
            (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000,
            percentiles.get("50.000000", latency) / 1e9,
            (high if is_supported(99.0, count) else found["clat_ns"]["max"]) / 1e9,
            latency / 1e9,
        )


class Pread:
    """One call after the other, for machines without fio. The depth is always 1."""

    name = "pread"

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._size = path, size

    def run(self, pattern: Pattern, depth: int, seconds: float) -> Sample:
        latencies: list[float] = []
        next_offset = offsets(pattern, self._size)
        call = os.pwritev if pattern.is_write else os.preadv
        clock = time.perf_counter
        fd, _ = open_direct(self._path, os.O_RDWR)
        try:
            with mmap.mmap(-1, pattern.block) as memory:
                memory.write(os.urandom(4096) * (pattern.block // 4096))
                cpu, start = cpu_seconds(), clock()
                now = start
                while now - start < seconds:
                    _check(call(fd, [memory], next_offset()), pattern.block)
                    latencies.append(clock() - now)
                    now += latencies[-1]
                return sample_of(latencies, now - start, cpu_seconds() - cpu)
        finally:
            os.close(fd)
