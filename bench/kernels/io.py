"""The storage path: `serve bench io [--dir D] [--quick]`.

It measures reading and writing 4 KiB at random and 128 KiB in sequence, at rising queue depth, by
every kind of disk access that works here, past the page cache; which part of an operation's time
is software; and which share of the device's best the disk tier reaches. It writes only into a
temporary folder in D.
"""

from __future__ import annotations

import argparse
import errno
import json
import logging
import mmap
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.common import tables
from bench.common.percentiles import Tail, is_supported
from bench.kernels.io_paths import DiskAccess, Fio, Pattern, Pread, Ring, Sample, Threads
from memory.tiers.block_file import ThreadFile
from memory.tiers.direct_io import address_of, choose_io, open_direct, wait_for
from memory.tiers.disk_tier import DiskTier
from ops.cpu import native_library
from serve.errors import ConfigError, message_of

PATTERNS = (
    Pattern("4 KiB random read", 4096, is_random=True, is_write=False),
    Pattern("4 KiB random write", 4096, is_random=True, is_write=True),
    Pattern("128 KiB sequential read", 131_072, is_random=False, is_write=False),
    Pattern("128 KiB sequential write", 131_072, is_random=False, is_write=True),
)
_MIB = 1 << 20
Begin = Callable[[Sequence[tuple[bytes, int]]], list[Future[bool]]]
_PAGES = (128 << 10, 1 << 20)
_STORE_DEPTH, _BATCH = 32, 8


def _accesses(path: Path, size: int) -> tuple[list[DiskAccess], list[str]]:
    """Returns the kinds of access that work here, and notes on those that do not."""
    accesses: list[DiskAccess] = [Threads(path, size)]
    notes = []
    try:
        choose_io(path.parent, "io_uring")
        accesses.append(Ring("io_uring", path, size))
        accesses.append(Ring("io_uring fixed", path, size, fixed=True))
        if choose_io(path.parent, "sqpoll") == "sqpoll":
            accesses.append(Ring("io_uring SQPOLL", path, size, sqpoll=True))
        else:
            notes.append("SQPOLL is refused here")
        if choose_io(path.parent, "iopoll") != "iopoll":
            notes.append("IOPOLL is refused here")
    except OSError as error:
        notes.append(f"no io_uring ({message_of(error)})")
    accesses.append(Fio(path, size) if Fio.is_installed() else Pread(path, size))
    return accesses, notes


def _prepare(path: Path, size: int) -> bool:
    """Writes a file of random bytes. Returns whether the page cache could be avoided."""
    fd, is_direct = open_direct(path, os.O_RDWR | os.O_CREAT)
    file = ThreadFile(fd, is_direct=is_direct, depth=4)
    try:
        with mmap.mmap(-1, 4 * _MIB) as memory:
            memory.write(os.urandom(_MIB) * 4)
            base = address_of(memory)
            blocks = [(base + i % 4 * _MIB, _MIB, i * _MIB) for i in range(size // _MIB)]
            wait_for(file.write, blocks)
        file.flush()
    finally:
        file.close()
    return is_direct


def summarize(pattern: Pattern, way: str, depth: int, sample: Sample) -> dict[str, Any]:
    """Returns one cell in microseconds; software: user and system time of one operation."""
    count = sample.operations
    scale = 1e6 / count
    return {
        "pattern": pattern.name,
        "way": way,
        "depth": depth,
        "iops": count / sample.wall_s,
        "gb_s": count * pattern.block / sample.wall_s / 1e9,
        "p50_us": sample.p50_s * 1e6,
        "p99_us": sample.high_s * 1e6 if is_supported(99.0, count) else None,
        "max_us": None if is_supported(99.0, count) else sample.high_s * 1e6,
        "operations": count,
        "mean_us": sample.mean_s * 1e6,
        "cpu_us": sample.cpu_s * scale,
        "submit_us": None if sample.submit_s is None else sample.submit_s * scale,
        "reap_us": None if sample.reap_s is None else sample.reap_s * scale,
    }


def measure_store(folder: Path, size: int, seconds: float, rounds: int) -> list[dict[str, Any]]:
    """Measures the disk tier and the raw device in turn; medians of the ratios."""
    results = []
    raw_way = _raw_access(folder / "raw", size)
    for page_bytes in _PAGES:
        pairs: dict[str, list[tuple[float, float]]] = {"store": [], "load": []}
        with mmap.mmap(-1, _STORE_DEPTH * page_bytes) as memory:
            memory.write(os.urandom(_MIB) * (len(memory) // _MIB))
            store = DiskTier(folder / "store", page_bytes, size, b"bench")
            try:
                driver = _Driver(store, address_of(memory), size // page_bytes)
                for _ in range(rounds):
                    for kind, run in (("store", driver.store), ("load", driver.load)):
                        pattern = Pattern("", page_bytes, is_random=False, is_write=kind == "store")
                        before = _raw_rate(raw_way, pattern, seconds)
                        ours = run(seconds)
                        raw = (before + _raw_rate(raw_way, pattern, seconds)) / 2
                        pairs[kind].append((ours, raw))
            finally:
                store.close()  # before its memory is unmapped
        for kind, shares in pairs.items():
            row: dict[str, Any] = {"what": kind, "page_bytes": page_bytes, "io": store.io}
            row["gb_s"] = statistics.median(ours for ours, _ in shares)
            row["raw_gb_s"] = statistics.median(raw for _, raw in shares)
            row["share"] = statistics.median(ours / raw for ours, raw in shares)
            results.append(row)
    return results


def _raw_rate(access: DiskAccess, pattern: Pattern, seconds: float) -> float:
    sample = access.run(pattern, _STORE_DEPTH, seconds / 2)
    return sample.operations * pattern.block / sample.wall_s / 1e9


def _raw_access(path: Path, size: int) -> DiskAccess:
    try:
        choose_io(path.parent, "io_uring")
    except OSError:
        return Threads(path, size)
    return Ring("io_uring", path, size)


class _Driver:
    """Keeps _STORE_DEPTH requests in flight, adding _BATCH at a time; returns GB/s."""

    def __init__(self, store: DiskTier, base: int, num_slots: int) -> None:
        self._store, self._base, self._num_slots = store, base, num_slots
        self._stored = 0

    def store(self, seconds: float) -> float:
        """Stores new pages; once the file is full they replace the oldest. Returns GB/s."""
        first = self._stored
        count, rate = self._drive(self._store.store_many, lambda n: first + n, seconds)
        self._stored = first + count
        return rate

    def load(self, seconds: float) -> float:
        # Those that completed last are there, not exactly those that were begun last.
        recent = min(self._stored, self._num_slots - _STORE_DEPTH)
        first = self._stored - recent
        return self._drive(self._store.load_many, lambda n: first + n % recent, seconds)[1]

    def _drive(self, begin: Begin, key: Callable[[int], int], seconds: float) -> tuple[int, float]:
        page = self._store.page_bytes
        under_way: deque[Future[bool]] = deque()
        start = time.perf_counter()
        number = 0
        while under_way or number == 0:
            has_time = time.perf_counter() - start < seconds
            while has_time and len(under_way) <= _STORE_DEPTH - _BATCH:
                numbers = range(number, number + _BATCH)
                at = [self._base + n % _STORE_DEPTH * page for n in numbers]
                keys = [b"%d" % key(n) for n in numbers]
                under_way += begin(list(zip(keys, at, strict=True)))
                number += _BATCH
            if not under_way.popleft().result():
                raise OSError(errno.EIO, f"the disk tier failed: {self._store.stats()}")
        return number, number * page / (time.perf_counter() - start) / 1e9


def _headline(head: dict[str, Any]) -> str:
    io = "O_DIRECT" if head["direct"] else "through the page cache"
    lines = [
        f"kernel {head['kernel']}, processors {head['processors']}, {io}, "
        f"checksum {head['checksum_gb_s']:.1f} GB/s",
        *head["notes"],
    ]
    return "\n".join(lines)


def report(cells: list[dict[str, Any]], store: list[dict[str, Any]], console: Console) -> None:
    depths = sorted({cell["depth"] for cell in cells})
    for pattern in PATTERNS:
        title = f"{pattern.name}: " + ("operations/s" if pattern.is_random else "GB/s")
        console.print(f"\n{title}; p50 / p99 us; CPU us", highlight=False)
        table = Table("depth", *map(str, depths))
        mine = [cell for cell in cells if cell["pattern"] == pattern.name]
        for way in dict.fromkeys(cell["way"] for cell in mine):
            by_depth = {cell["depth"]: _cell(cell, pattern) for cell in mine if cell["way"] == way}
            table.add_row(way, *(by_depth.get(depth, "") for depth in depths))
        console.print(table)
    table = Table("depth 1", "way", "latency", "CPU", "in submit", "in reap", "device and wake-up")
    for cell in cells:
        if cell["depth"] == 1:
            values = [cell["mean_us"], cell["cpu_us"], cell["submit_us"], cell["reap_us"]]
            shown = ["" if value is None else f"{value:.1f}" for value in values]
            table.add_row(cell["pattern"], cell["way"], *shown, _outside(cell))
    console.print(table)
    table = Table("disk tier", "page", "I/O", "GB/s", "raw GB/s", "share")
    for row in store:
        page = f"{row['page_bytes'] >> 10} KiB"
        rates = (f"{row['gb_s']:.2f}", f"{row['raw_gb_s']:.2f}", f"{row['share']:.0%}")
        table.add_row(row["what"], page, row["io"], *rates)
    console.print(table)


def _outside(cell: dict[str, Any]) -> str:
    """Returns the latency that is not CPU time. A polling kernel thread runs during the wait."""
    if cell["cpu_us"] >= cell["mean_us"] or "SQPOLL" in cell["way"]:
        return "n/a"
    rest = cell["mean_us"] - cell["cpu_us"]
    return f"{rest:.1f} ({rest / cell['mean_us']:.0%})"


def _cell(cell: dict[str, Any], pattern: Pattern) -> str:
    rate = f"{cell['iops']:,.0f}" if pattern.is_random else f"{cell['gb_s']:.2f}"
    high_us = cell["max_us"] if cell["p99_us"] is None else cell["p99_us"]
    high = Tail(high_us, 99.0, cell["operations"]).text("{:.0f}".format)
    return f"{rate}\n{cell['p50_us']:.0f} / {high}\n{cell['cpu_us']:.1f}"


def checksum_rate() -> float:
    """Returns the GB/s of checksums over more memory than the caches hold."""
    with mmap.mmap(-1, 64 * _MIB) as memory:
        memory.write(bytes(64 * _MIB))
        base, checksum = address_of(memory), native_library.library().checksum
        start = time.perf_counter()
        for i in range(128):
            checksum(base + i % 64 * _MIB, _MIB)
        return 128 * _MIB / (time.perf_counter() - start) / 1e9


def run_and_report(directory: Path, *, quick: bool, json_file: Path | None = None) -> None:
    """Measures in `directory`, prints the tables and the JSON line. Raises ConfigError for a
    directory that cannot be used."""
    tables.check_file(json_file)
    if not directory.is_dir():
        what = "is a file, not a directory" if directory.exists() else "does not exist"
        raise ConfigError(f"--dir {directory} {what}")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"--dir {directory} cannot be written")
    size = (64 if quick else 512) * _MIB
    free = shutil.disk_usage(directory).free
    if free < 3 * size:
        raise ConfigError(
            f"--dir {directory} has {free // _MIB} MiB free, and this needs {3 * size // _MIB}; "
            "choose another one"
        )
    depths = (1, 16) if quick else (1, 2, 4, 8, 16, 32, 64)
    seconds = 0.06 if quick else 0.2
    logging.getLogger("memory").setLevel(logging.ERROR)
    console = tables.console()
    cells = []
    with tempfile.TemporaryDirectory(prefix=".bench-io-", dir=directory) as name:
        folder = Path(name)
        is_direct = _prepare(folder / "raw", size)
        accesses, notes = _accesses(folder / "raw", size)
        if not is_direct:
            notes.append("NO O_DIRECT HERE: these are figures of the page cache, not of a device")
        watched = Console(stderr=True)
        is_hidden = not watched.is_terminal
        with Progress(console=watched, transient=True, disable=is_hidden) as progress:
            task = progress.add_task("measuring", total=len(PATTERNS) * len(accesses) * len(depths))
            for pattern in PATTERNS:
                for access in accesses:
                    for depth in depths:
                        progress.update(task, description=f"{pattern.name}, {access.name}")
                        sample = access.run(pattern, depth, seconds)
                        cells.append(summarize(pattern, access.name, depth, sample))
                        progress.advance(task)
            progress.update(task, description="the disk tier")
            store = measure_store(folder, size, 2 * seconds, 1 if quick else 3)
    head = {
        "kernel": platform.release(),
        "processors": os.cpu_count(),
        "direct": is_direct,
        "notes": notes,
        "checksum_gb_s": checksum_rate(),
    }
    console.print(_headline(head), highlight=False)
    report(cells, store, console)
    result = {**head, "cells": cells, "store": store}
    tables.write(json_file, tables.Head.now("io"), {"disk": result})
    print(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.kernels.io", description=__doc__)
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="where; here by default")
    parser.add_argument("--quick", action="store_true", help="a few seconds")
    args = parser.parse_args()
    try:
        run_and_report(args.dir, quick=args.quick)
    except ConfigError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
