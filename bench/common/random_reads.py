"""What a disk gives to direct reads of parts of a file, by as many threads as read K/V in steps."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from memory.offload.scratch_file import Lane, open_file

Units = npt.NDArray[np.int64]

_SECONDS = 1.0
_AT_ONCE = 256  # reads of a thread
_THREADS = 2  # a layer waits for what it reads, while more is fetched ahead


def disk_rate(
    folder: str | Path, unit_bytes: int, total_bytes: int = 1 << 30, *, in_order: bool = False
) -> float:
    """Returns the bytes a second of direct reads of unit_bytes each in a file of total_bytes, at
    random places or one behind the other. OSError."""
    file = open_file(folder, total_bytes)
    lanes = [file.lane() for _ in range(_THREADS)]
    groups = total_bytes // (unit_bytes * _AT_ONCE)
    try:
        addresses, _memory = _room(unit_bytes)
        for group in range(groups):
            units = group * _AT_ONCE + np.arange(_AT_ONCE)
            lanes[0].write(addresses, units * unit_bytes, unit_bytes)
        with ThreadPoolExecutor(_THREADS) as threads:
            reads = [
                threads.submit(_read, lane, unit_bytes, _places(number, groups, in_order))
                for number, lane in enumerate(lanes)
            ]
            return sum(each.result() for each in reads)
    finally:
        lanes.clear()
        file.close()


def _room(unit_bytes: int) -> tuple[npt.NDArray[np.int64], torch.Tensor]:
    """Returns the addresses of places for units, and the memory that has them."""
    memory = torch.ones(_AT_ONCE * unit_bytes + 4096, dtype=torch.uint8)
    address = memory.data_ptr() + -memory.data_ptr() % 4096
    return address + np.arange(_AT_ONCE, dtype=np.int64) * unit_bytes, memory


def _places(thread: int, groups: int, in_order: bool) -> Iterator[Units]:
    """Yields the numbers of the units that a thread reads at once."""
    rng = np.random.default_rng(thread)
    first = thread * groups // _THREADS
    for group in itertools.count(first):
        if in_order:
            yield group % groups * _AT_ONCE + np.arange(_AT_ONCE)
        else:
            yield rng.integers(0, groups * _AT_ONCE, _AT_ONCE)


def _read(lane: Lane, unit_bytes: int, places: Iterator[Units]) -> float:
    """Returns the bytes a second of one thread."""
    addresses, _memory = _room(unit_bytes)
    began, num_bytes = time.perf_counter(), 0
    while time.perf_counter() - began < _SECONDS:
        lane.read(addresses, next(places) * unit_bytes, unit_bytes)
        num_bytes += _AT_ONCE * unit_bytes
    return num_bytes / (time.perf_counter() - began)
