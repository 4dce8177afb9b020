"""The memory and the processors that this process may use."""

from __future__ import annotations

import os
from pathlib import Path

_KV_SHARE_OF_FREE_MEMORY = 0.4


def available_memory() -> int:
    """Returns the free memory of the system in bytes, capped by the cgroup's limit."""
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
            # the usage counts the page cache (such as checkpoint files), which is reclaimable
            idle = _counter(_read(stat_file), idle_name)
            available = min(available, max(0, int(limit) - int(usage) + idle))
    return available


def local_kv_bytes() -> int:
    """Returns the bytes of this machine's memory that K/V takes when no setting says it."""
    return int(available_memory() * _KV_SHARE_OF_FREE_MEMORY)


def _counter(text: str, name: str) -> int:
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdigit():
            return int(value)
    return 0


def usable_processors() -> int:
    """Returns the number of CPUs in the affinity mask, capped by the cgroup's CPU quota."""
    processors = len(os.sched_getaffinity(0))
    v1 = "/sys/fs/cgroup/cpu/cpu.cfs_"
    for text in (
        _read("/sys/fs/cgroup/cpu.max"),
        f"{_read(f'{v1}quota_us')} {_read(f'{v1}period_us')}",
    ):
        numbers = text.split()  # "max" and -1 mean no limit
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
    """Returns the resident memory of this process in bytes."""
    for line in _read("/proc/self/status").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0
