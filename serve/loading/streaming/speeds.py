"""Measures how fast weights can be read: directly from the disk, and from memory."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

import torch

from memory.tiers.block_file import Transfer
from memory.tiers.direct_io import address_of, choose_io, open_block_file, open_direct
from serve.loading.streaming.placement import Speeds
from serve.loading.streaming.units import PIECE_BYTES

_IN_FLIGHT = 32
_DISK_BYTES = 512 << 20  # the most that is read to measure
_DISK_S = 0.5
_MEMORY_BYTES = 256 << 20


def measure_speeds(path: Path) -> Speeds:
    """Measures with reads of a file that is there, for about half a second. OSError."""
    return Speeds(disk_speed(path), memory_speed())


def disk_speed(path: Path, most_bytes: int = _DISK_BYTES, most_s: float = _DISK_S) -> float:
    """Returns the bytes a second of direct reads as streaming makes them. OSError."""
    import queue

    fd, is_direct = open_direct(path, os.O_RDONLY)
    size = os.fstat(fd).st_size // PIECE_BYTES
    try:
        io = choose_io(path.parent)
    except OSError:
        io = "threads"  # a folder that cannot be written to
    file = open_block_file(fd, is_direct=is_direct, depth=_IN_FLIGHT, io=io)
    ended: queue.SimpleQueue[OSError | None] = queue.SimpleQueue()
    with mmap.mmap(-1, _IN_FLIGHT * PIECE_BYTES) as memory:
        address = address_of(memory)
        try:
            number = min(size, most_bytes // PIECE_BYTES)
            began, started, done = time.monotonic(), 0, 0
            while done < started or (started < number and time.monotonic() - began < most_s):
                while started < number and started - done < _IN_FLIGHT:
                    at = address + started % _IN_FLIGHT * PIECE_BYTES
                    file.read([Transfer(at, PIECE_BYTES, started * PIECE_BYTES, ended.put)])
                    started += 1
                    if time.monotonic() - began >= most_s:
                        number = started
                error = ended.get()
                done += 1
                if error is not None:
                    raise error
            elapsed = time.monotonic() - began
        finally:
            file.close()
    return done * PIECE_BYTES / max(elapsed, 1e-9) if done else float("inf")


def memory_speed() -> float:
    """Returns the bytes a second at which all threads read memory."""
    values = torch.ones(_MEMORY_BYTES // 4)
    best = 0.0
    for _ in range(3):
        began = time.monotonic()
        values.sum()
        best = max(best, _MEMORY_BYTES / (time.monotonic() - began))
    return best
