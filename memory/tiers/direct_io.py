"""Chooses the I/O method for a directory: it tries them at start, or takes the configured one.

I/O bypasses the page cache (O_DIRECT) if the file system supports that.
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
# The errors of a kernel, a seccomp filter or a device that does not support an I/O method.
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
    """Returns (descriptor, whether it bypasses the page cache). Raises OSError."""
    flags |= os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, mode), True
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    logger.info("storage I/O: no O_DIRECT in %s; through the page cache instead", path)
    return os.open(path, flags & ~os.O_EXCL, mode), False


def open_block_file(fd: int, *, is_direct: bool, depth: int = 64, io: str = "threads") -> BlockFile:
    """Returns a BlockFile that owns the descriptor. io: an answer of `choose_io`."""
    if io == "threads":
        return ThreadFile(fd, is_direct=is_direct, depth=depth)
    return RingFile(fd, is_direct=is_direct, depth=depth, io=io)


def choose_io(directory: str | Path, io: str = "auto", *, depth: int = 64) -> str:
    """Returns the I/O method that works in this directory, one of IO_CHOICES except "auto".

    Each candidate writes and reads a block. "auto" tries io_uring, then threads; "sqpoll" and
    "iopoll" fall back to plain io_uring. Raises OSError if no candidate works.
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


def choose_read_io(directory: str | Path) -> str:
    """Returns the I/O method for files of this directory, which need not be one to write to."""
    try:
        return choose_io(directory)
    except OSError:
        return "threads"


def _try_out(directory: str | Path, io: str, depth: int) -> OSError | None:
    """Returns the error that rules the method out, or None. A full or failing disk does not."""
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
    """Transfers (address, length, offset) blocks with a file's `read` or `write` and waits for
    them. Raises the first OSError."""
    ended: queue.SimpleQueue[OSError | None] = queue.SimpleQueue()
    start([Transfer(*block, ended.put) for block in blocks])
    errors = [ended.get() for _ in blocks]
    for error in errors:
        if error is not None:
            raise error


def address_of(memory: mmap.mmap) -> int:
    """Returns the address of a mapping, which must outlive all transfers."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
