"""Measures how fast weights can be read: directly from the disk, and from memory."""

from __future__ import annotations

import os
import queue
import tempfile
import time
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import torch

from memory.tiers.block_file import Transfer
from memory.tiers.direct_io import choose_read_io, open_block_file, open_direct
from ops.cpu import native_library
from serve.loading.streaming.placement import Speeds
from serve.loading.streaming.units import PIECE_BYTES, Piece
from serve.models.packed_cache.region import huge_pages

_IN_FLIGHT = 32
_DISK_S = 0.5
_MEMORY_BYTES = _FILE_BYTES = 256 << 20


def measure_speeds(path: Path) -> Speeds:
    """Measures with reads of a file that is there, for about half a second. OSError."""
    return Speeds(disk_speed(path), memory_speed())


def folder_speed(folder: Path) -> float:
    """Returns the bytes a second at which a file of this folder is read. It is made for that, and
    has no name. OSError."""
    chunk = os.urandom(1 << 20)  # what a file system that compresses does not shrink
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(_FILE_BYTES >> 20):
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
        return _speed(Path(f"/proc/self/fd/{file.fileno()}"), folder)


def disk_speed(path: Path, pieces: Sequence[Piece] = (), seconds: float = _DISK_S) -> float:
    """Returns the bytes a second of direct reads as streaming makes them, into memory that is
    there. pieces: what is read, again and again; none: the file from its beginning. OSError."""
    return _speed(path, path.parent, pieces, seconds)


def _speed(
    path: Path, folder: Path, pieces: Sequence[Piece] = (), seconds: float = _DISK_S
) -> float:
    """folder: of the disk."""
    fd, is_direct = open_direct(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        whole = [Piece(at, PIECE_BYTES, 0) for at in range(0, size - PIECE_BYTES + 1, PIECE_BYTES)]
        io = choose_read_io(folder)
        file = open_block_file(fd, is_direct=is_direct, depth=_IN_FLIGHT, io=io)
    except BaseException:
        os.close(fd)
        raise
    ended: queue.SimpleQueue[OSError | None] = queue.SimpleQueue()
    memory = huge_pages(_IN_FLIGHT * PIECE_BYTES)
    memory.zero_()
    address = memory.data_ptr()
    file.register([(address, memory.nbytes)])
    started = done = num_bytes = 0
    began = time.monotonic()
    try:
        for piece in cycle(pieces or whole):
            if time.monotonic() - began >= seconds:
                break
            at = address + started % _IN_FLIGHT * PIECE_BYTES
            file.read([Transfer(at, piece.num_bytes, piece.start, ended.put)])
            started, num_bytes = started + 1, num_bytes + piece.num_bytes
            if started - done >= _IN_FLIGHT:
                _check(ended.get())
                done += 1
        for _ in range(started - done):
            _check(ended.get())
        elapsed = time.monotonic() - began
    finally:
        file.close()
    return num_bytes / elapsed if num_bytes else float("inf")


def _check(error: OSError | None) -> None:
    if error is not None:
        raise error


def memory_speed() -> float:
    """Returns the bytes a second at which all threads read memory."""
    values = torch.ones(_MEMORY_BYTES // 4)
    best, num_threads = 0.0, torch.get_num_threads()
    torch.set_num_threads(native_library.num_threads())  # as many as compute; packing has one
    try:
        for _ in range(3):
            began = time.monotonic()
            values.sum()
            best = max(best, _MEMORY_BYTES / (time.monotonic() - began))
    finally:
        torch.set_num_threads(num_threads)
    return best
