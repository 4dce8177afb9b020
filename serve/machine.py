"""The memory, the processors and the ports that this process may use."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

KV_SHARE_OF_FREE_MEMORY = 0.4
# A bound on that, in bytes, for a process that shares the machine with other models.
LOCAL_KV_ENV = "MERGESTEP_LOCAL_KV_BYTES"


def available_memory() -> int:
    """Returns the free memory of the system in bytes, capped by the cgroup's limit.

    Files that this process has mapped, such as libraries and packed weights, are in use, although
    the system could read them again and counts them as available.
    """
    mapped = _status_bytes(_read("/proc/self/status"), "RssFile")
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            available = max(0, int(line.split()[1]) * 1024 - mapped)
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
            idle = max(0, _counter(_read(stat_file), idle_name) - mapped)
            available = min(available, max(0, int(limit) - int(usage) + idle))
    return available


def total_memory() -> int:
    """Returns the memory of the system in bytes, capped by the cgroup's limit."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        limit = _read(file).strip()  # "max" and the largest number mean no limit
        if limit.isdigit():
            total = min(total, int(limit))
    return total


def local_kv_bytes(beside: int = 0) -> int:
    """Returns the bytes of this machine's memory that K/V takes when no setting says it. beside:
    what is yet to be taken for other things."""
    num_bytes = int(max(0, available_memory() - beside) * KV_SHARE_OF_FREE_MEMORY)
    bound = os.environ.get(LOCAL_KV_ENV, "")
    return min(num_bytes, int(bound)) if bound.isdigit() else num_bytes


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


def process_bytes(pid: int | str = "self") -> int:
    """Returns the resident memory of a process in bytes; 0 if there is none."""
    return _status_bytes(_read(f"/proc/{pid}/status"), "VmRSS")


def memory_parts() -> dict[str, int]:
    """Returns the bytes of this process's resident memory that no file backs ("anonymous": objects,
    heaps, weights), that files back ("file"), and that is shared ("shared": the K/V pool as far as
    it is mapped, and weights that replicas share)."""
    status = _read("/proc/self/status")
    names = {"anonymous": "RssAnon", "file": "RssFile", "shared": "RssShmem"}
    return {part: _status_bytes(status, name) for part, name in names.items()}


class HeapUsage(NamedTuple):
    """Bytes of the C heap. in_use: allocated; free: freed, and kept for later allocations; mapped:
    large allocations with a mapping of their own, all in use."""

    in_use: int
    free: int
    mapped: int


class _MallInfo2(ctypes.Structure):
    """glibc's struct mallinfo2, malloc.h."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


@cache
def _mallinfo() -> Callable[[], Any] | None:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return None
    libc.mallinfo2.restype = _MallInfo2
    return libc.mallinfo2


def heap_usage() -> HeapUsage | None:
    """Returns the usage of the heap of C and C++ code, such as tokenizers and kernels; None without
    glibc 2.33. It takes tens of microseconds: free blocks are counted one by one."""
    mallinfo = _mallinfo()
    if mallinfo is None:
        return None
    found = mallinfo()
    return HeapUsage(found.uordblks, found.fordblks, found.hblkhd)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def trim_heap() -> None:
    """Returns the free memory of the C heap to the system. It takes a tenth of a millisecond for
    each megabyte, in which no thread can allocate; without glibc it does nothing."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


def _status_bytes(status: str, name: str) -> int:
    """Returns a size of /proc/PID/status; 0 if it is not there."""
    for line in status.splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def free_port(address: str = "127.0.0.1") -> int:
    """Returns a TCP port of an address of this machine that nothing listens on, which the system
    chooses. Another process may take it at any time. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
    return port


def has_idle_core(compute_threads: int | None) -> bool:
    """Returns whether a core is free for a thread that maps pages ahead, beside those that compute:
    None for all.

    If every core computes, that thread delays one that the others wait for, which costs more than
    mapping in the step.
    """
    processors = usable_processors()
    return min(compute_threads or processors, processors) < processors
