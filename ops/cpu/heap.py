"""The glibc setting that decides what happens to freed buffers, made once at start-up."""

from __future__ import annotations

import ctypes

# malloc.h
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8


def keep_freed_memory() -> None:
    """Tells glibc to reuse freed buffers instead of returning them to the system.

    A step allocates the same megabytes again and again. Returning them costs a page fault for every
    4 KiB (a tenth of a 1B model's step, more where faults are slow). One arena suffices, because
    buffers are freed in the thread that allocated them.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return  # not glibc
    for option, value in (
        (_M_ARENA_MAX, 1),
        (_M_MMAP_THRESHOLD, 1 << 30),
        (_M_TRIM_THRESHOLD, (1 << 31) - 1),
        (_M_TOP_PAD, 64 << 20),
    ):
        libc.mallopt(option, value)


def return_freed_memory() -> None:
    """Returns freed buffers to the system, after work that took more memory than what follows."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc
        libc.malloc_trim(0)
