"""Which way of direct I/O works in a directory: tried out at start, logged, or forced.

Direct means past the page cache (O_DIRECT); where the file system has none, through it.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import queue
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from memory.tiers.block_file import ALIGNMENT, BlockFile, RingFile, ThreadFile, Transfer

logger = logging.getLogger(__name__)

IO_CHOICES = ("auto", "io_uring", "sqpoll", "iopoll", "threads")
# What a kernel, a seccomp filter or a device says to a way of working that it does not have.
_REFUSALS = {
    errno.EINVAL,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EPERM,
    errno.EACCES,
    errno.ENOMEM,
    errno.EMFILE,
}


def open_direct(path: str | Path, flags: int, mode: int = 0o600) -> tuple[int, bool]:
    """(descriptor, whether it goes past the page cache). OSError."""
    flags |= os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, mode), True
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    logger.info("storage I/O: no O_DIRECT in %s; through the page cache instead", path)
    return os.open(path, flags & ~os.O_EXCL, mode), False


def open_block_file(fd: int, *, is_direct: bool, depth: int = 64, io: str = "threads") -> BlockFile:
    """`io` as `choose_io` answered it. Takes the descriptor over."""
    if io == "threads":
        return ThreadFile(fd, is_direct=is_direct, depth=depth)
    return RingFile(fd, is_direct=is_direct, depth=depth, io=io)


def choose_io(directory: str | Path, io: str = "auto", *, depth: int = 64) -> str:
    """The way that works in this directory: one of IO_CHOICES but "auto".

    Every candidate writes and reads a block. "auto" is io_uring, else threads; "sqpoll" and
    "iopoll" fall back to plain io_uring; "io_uring" refused is an OSError.
    """
    if io not in IO_CHOICES:
        raise ValueError(f"io={io!r}: one of {', '.join(IO_CHOICES)}")
    candidates = {
        "auto": ("io_uring", "threads"),
        "sqpoll": ("sqpoll", "io_uring"),
        "iopoll": ("iopoll", "io_uring"),
    }.get(io, (io,))
    refusals: list[tuple[str, OSError]] = []
    for candidate in candidates:
        refusal = _try_out(directory, candidate, depth)
        if refusal is None:
            why = "".join(f"; {name} refused: {error}" for name, error in refusals)
            logger.info("storage I/O in %s: %s%s", directory, candidate, why)
            return candidate
        refusals.append((candidate, refusal))
    raise refusals[-1][1]


def _try_out(directory: str | Path, io: str, depth: int) -> OSError | None:
    """What is wrong with it. A full or failing disk says nothing against a way of working."""
    pattern = os.urandom(ALIGNMENT)
    with mmap.mmap(-1, 2 * ALIGNMENT) as memory:
        address = address_of(memory)
        memory[:ALIGNMENT] = pattern
        try:
            file = _open_scratch(directory, io, depth)
        except OSError as error:
            return error if error.errno in _REFUSALS else None
        try:
            wait_for(file.write, [(address, ALIGNMENT, 0)])
            wait_for(file.read, [(address + ALIGNMENT, ALIGNMENT, 0)])
        except OSError as error:
            return error if error.errno in _REFUSALS else None
        finally:
            file.close()
        if memory[ALIGNMENT:] != pattern:
            return OSError(errno.EIO, "the block that was read is not the one written")
    return None


def _open_scratch(directory: str | Path, io: str, depth: int) -> BlockFile:
    handle, path = tempfile.mkstemp(dir=directory, prefix=".probe-")
    os.close(handle)
    try:
        fd, is_direct = open_direct(path, os.O_RDWR)
    finally:
        os.unlink(path)
    try:
        return open_block_file(fd, is_direct=is_direct, depth=depth, io=io)
    except OSError:
        os.close(fd)
        raise


def wait_for(
    start: Callable[[Sequence[Transfer]], None], blocks: Sequence[tuple[int, int, int]]
) -> None:
    """Run (address, length, offset) blocks with a file's `read` or `write`. The first OSError."""
    ended: queue.SimpleQueue[OSError | None] = queue.SimpleQueue()
    start([Transfer(*block, ended.put) for block in blocks])
    errors = [ended.get() for _ in blocks]
    for error in errors:
        if error is not None:
            raise error


def address_of(memory: mmap.mmap) -> int:
    """Where a mapping lies. It must outlive every transfer."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
