"""Sections for the tests of the GPU report, none of which needs a device."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from bench.gpu.record import Record


def named(record: Record) -> None:
    record.run("device", lambda: {"name": "NVIDIA Test 9000"})


def good(record: Record) -> None:
    record.put("copy", rate=4e12)
    record.put("int8", rate=1.5e15)


def half(record: Record) -> None:
    """Has one case that works, one that fails, and one more."""
    record.run("first", lambda: {"seconds": 1e-3})
    record.run("broken", lambda: {"seconds": 1 / 0})
    record.run("last", lambda: {"seconds": 2e-3, "bytes": 4e9})


def crash(record: Record) -> None:
    record.put("before", seconds=1.0)
    os.abort()


def hang(record: Record) -> None:
    """Hangs with a child process of its own, which must not outlive it."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    record.put("before", child=child.pid)
    time.sleep(600)


def lose_device(record: Record) -> None:
    """Each process loses its device with the second case that it has not done."""

    def fault() -> dict[str, float]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    for number in range(4):
        record.run(f"good {number}", lambda: {"process": os.getpid()})
        record.run(f"bad {number}", fault)


def look(record: Record) -> None:
    """Records what the report says while the sections run."""
    path = Path(os.environ["GPU_REPORT_SEEN"])
    record.put("seen", text=path.read_text() if path.is_file() else "")


def slow(record: Record) -> None:
    time.sleep(1.5)
    moment(record, "end")


def moment(record: Record, name: str = "moment") -> None:
    record.put(name, s=time.monotonic())
