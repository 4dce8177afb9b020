"""What this process may use of the machine: free memory and processors."""

from __future__ import annotations

import os
from pathlib import Path


def available_memory() -> int:
    """Bytes this process may still take: free system memory, capped by the cgroup's limit."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for limit_file, usage_file, stat_file, idle_name in (
        (
            "/sys/fs/cgroup/memory.max",
            "/sys/fs/cgroup/memory.current",
            "/sys/fs/cgroup/memory.stat",
            "inactive_file",
        ),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
            "/sys/fs/cgroup/memory/memory.stat",
            "total_inactive_file",
        ),
    ):
        limit, usage = _read(limit_file).strip(), _read(usage_file).strip()
        if limit.isdigit() and usage.isdigit():
            # files that were read, a checkpoint among them, are counted but given back at need
            idle = _counter(_read(stat_file), idle_name)
            available = min(available, max(0, int(limit) - int(usage) + idle))
    return available


def _counter(text: str, name: str) -> int:
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdigit():
            return int(value)
    return 0


def usable_processors() -> int:
    """Those this process may run on, capped by the cgroup's quota of their time."""
    processors = len(os.sched_getaffinity(0))
    v1 = "/sys/fs/cgroup/cpu/cpu.cfs_"
    for text in (
        _read("/sys/fs/cgroup/cpu.max"),
        f"{_read(f'{v1}quota_us')} {_read(f'{v1}period_us')}",
    ):
        numbers = text.split()  # "max" or -1 is no limit
        if len(numbers) == 2 and all(number.isdigit() for number in numbers):
            quota, period = map(int, numbers)
            if quota and period:
                processors = min(processors, -(-quota // period))
    return processors


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def process_bytes() -> int:
    """Memory that this process has now (resident)."""
    for line in _read("/proc/self/status").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0
