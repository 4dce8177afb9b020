"""The file of the units that are not in memory: without a name, so that it ends with the process.

Each thread has a `Lane`, which transfers many units in one call: by a ring of io_uring of its own,
or by the threads of a `ThreadFile` where the kernel refuses rings.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import tempfile
import threading
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from memory.tiers.block_file import BlockFile, ThreadFile, preallocate
from memory.tiers.direct_io import choose_io, open_direct, wait_for
from ops.cpu import native_library

logger = logging.getLogger(__name__)

Places = npt.NDArray[np.int64]
Sums = npt.NDArray[np.uint32]

_DEPTH = 64

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fstatfs.argtypes = [ctypes.c_int, ctypes.c_void_p]
_IN_MEMORY = {0x01021994, 0x858458F6}  # tmpfs, ramfs: linux/magic.h
_STATFS_WORDS = 32  # more than the structure has


class Lane(Protocol):
    """A way to the file. Addresses, offsets and lengths are multiples of 4096."""

    def read(self, addresses: Places, offsets: Places, length: int) -> Sums:
        """Reads `length` bytes from each offset to the address beside it. Returns the checksums of
        what was read. Raises OSError after a failure; then too no transfer runs any more."""

    def write(self, addresses: Places, offsets: Places, length: int) -> Sums:
        """Writes, as `read` reads. Memory that changes meanwhile leaves a checksum or content that
        is of no use."""


class UnitFile(Protocol):
    """A file of units."""

    def lane(self) -> Lane:
        """Returns a new lane. Raises OSError."""

    def close(self) -> None:
        """Closes the file. No lane is used any more."""


class ScratchFile:
    """A `UnitFile` without a name. io: an answer of `choose_io`. It owns the descriptor."""

    def __init__(self, fd: int, *, is_direct: bool, io: str) -> None:
        self.io = io
        self.is_direct = is_direct
        self._fd = fd
        self._threads: ThreadFile | None = None

    def fileno(self) -> int:
        return self._fd

    def lane(self) -> Lane:
        if self.io != "threads":
            return RingLane(self._fd)
        if self._threads is None:  # lanes share the threads
            fd = os.dup(self._fd)
            self._threads = ThreadFile(fd, is_direct=self.is_direct, depth=_DEPTH)
        return BlockLane(self._threads)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.close()
            self._threads = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class RingLane:
    """A `Lane` with a ring of its own. Calls of several threads follow one another."""

    def __init__(self, fd: int) -> None:
        self._lock = threading.Lock()
        self._ring: Any = native_library.library().IoRing(fd, _DEPTH, False, False)

    def read(self, addresses: Places, offsets: Places, length: int) -> Sums:
        return self._transfer(False, addresses, offsets, length)

    def write(self, addresses: Places, offsets: Places, length: int) -> Sums:
        return self._transfer(True, addresses, offsets, length)

    def _transfer(self, is_write: bool, addresses: Places, offsets: Places, length: int) -> Sums:
        addresses, offsets = np.ascontiguousarray(addresses), np.ascontiguousarray(offsets)
        sums = np.empty(len(addresses), dtype=np.uint32)
        with self._lock:
            self._ring.transfer_blocks(
                is_write,
                (addresses.ctypes.data, offsets.ctypes.data),
                sums.ctypes.data,
                len(addresses),
                length,
            )
        return sums


class BlockLane:
    """A `Lane` over a `BlockFile`."""

    def __init__(self, file: BlockFile) -> None:
        self._file = file

    def read(self, addresses: Places, offsets: Places, length: int) -> Sums:
        wait_for(self._file.read, _blocks(addresses, offsets, length))
        return checksums(addresses, length)

    def write(self, addresses: Places, offsets: Places, length: int) -> Sums:
        sums = checksums(addresses, length)
        wait_for(self._file.write, _blocks(addresses, offsets, length))
        return sums


def _blocks(addresses: Places, offsets: Places, length: int) -> list[tuple[int, int, int]]:
    pairs = zip(addresses.tolist(), offsets.tolist(), strict=True)
    return [(address, length, offset) for address, offset in pairs]


def checksums(addresses: Places, length: int) -> Sums:
    """Returns the checksums of `length` bytes at each address."""
    checksum = native_library.library().checksum
    sums = [checksum(address, length) & 0xFFFFFFFF for address in addresses.tolist()]
    return np.array(sums, dtype=np.uint32)


def open_file(directory: str | Path, size_bytes: int) -> ScratchFile:
    """Makes a file of so many bytes in the directory, with all its space. It has no name, so the
    space is free again when the process ends, however it ends. Raises OSError."""
    io = choose_io(directory)
    fd, is_direct = _open_nameless(directory)
    if _is_in_memory(fd):
        logger.warning("K/V on disk: %s is no disk: its files take memory", directory)
    try:
        status = os.fstatvfs(fd)
        if status.f_bavail * status.f_frsize < size_bytes:  # before the disk is filled up
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(fd, size_bytes)
        _allocate(fd, size_bytes)
    except BaseException:
        os.close(fd)
        raise
    return ScratchFile(fd, is_direct=is_direct, io=io)


def _open_nameless(directory: str | Path) -> tuple[int, bool]:
    with contextlib.suppress(OSError):
        return open_direct(directory, os.O_TMPFILE | os.O_RDWR)
    # a file system that knows no files without names
    handle, path = tempfile.mkstemp(dir=directory, prefix=".kv-")
    os.close(handle)
    try:
        return open_direct(path, os.O_RDWR)
    finally:
        os.unlink(path)


def _is_in_memory(fd: int) -> bool:
    found = (ctypes.c_long * _STATFS_WORDS)()  # the first one is the type
    return _libc.fstatfs(fd, found) == 0 and found[0] & 0xFFFFFFFF in _IN_MEMORY


def _allocate(fd: int, size_bytes: int) -> None:
    try:
        preallocate(fd, size_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        logger.warning("K/V on disk: the file system does not promise the space of a file")
