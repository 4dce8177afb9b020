"""What a disk gives to direct reads of parts of a file at random places."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch

from memory.offload.scratch_file import open_file

_SECONDS = 1.0
_AT_ONCE = 256  # reads


def disk_rate(folder: str | Path, unit_bytes: int, total_bytes: int = 1 << 30) -> float:
    """Returns the bytes a second of direct reads of unit_bytes at random places of a file of
    total_bytes. OSError."""
    file = open_file(folder, total_bytes)
    count = total_bytes // unit_bytes
    memory = torch.ones(_AT_ONCE * unit_bytes + 4096, dtype=torch.uint8)
    address = memory.data_ptr() + -memory.data_ptr() % 4096
    addresses = address + np.arange(_AT_ONCE, dtype=np.int64) * unit_bytes
    lane, rng = file.lane(), np.random.default_rng(0)
    try:
        for first in range(0, count - _AT_ONCE + 1, _AT_ONCE):
            lane.write(addresses, (first + np.arange(_AT_ONCE)) * unit_bytes, unit_bytes)
        began, num_bytes = time.perf_counter(), 0
        while time.perf_counter() - began < _SECONDS:
            places = rng.integers(0, count // _AT_ONCE * _AT_ONCE, _AT_ONCE) * unit_bytes
            lane.read(addresses, places, unit_bytes)
            num_bytes += _AT_ONCE * unit_bytes
        return num_bytes / (time.perf_counter() - began)
    finally:
        del lane
        file.close()
