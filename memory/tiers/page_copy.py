"""Copies between the pages that attention reads and host memory that waits for them."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import Protocol

from memory.tiers.direct_io import address_of


class PageCopier(Protocol):
    """Where the host memory comes from, and how pages get there and back. `follow` is for the
    thread that computes, `copy` for one other, the rest for before and after."""

    def allocate(self, size_bytes: int) -> int:
        """Address of host memory, a multiple of 4096; once per object. OSError if there is none."""

    def follow(self) -> None:
        """Copies asked for from now on come after what the caller has given the device so far.
        Does not wait. OSError if that cannot be promised."""

    def copy(self, copies: Sequence[tuple[int, int]], size_bytes: int, *, to_host: bool) -> bool:
        """Copy (target, source) each; when it returns they have ended. False: some have failed,
        and no target may be trusted. OSError: nobody knows whether they have ended."""

    def close(self) -> None:
        """Give the host memory back. Nothing is under way."""


class MemoryCopier:
    """For pages that are host memory themselves."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    def allocate(self, size_bytes: int) -> int:
        assert self._memory is None, "once per object"
        self._memory = mmap.mmap(-1, size_bytes)
        return address_of(self._memory)

    def follow(self) -> None:
        """Whoever wrote the pages has ended."""

    def copy(self, copies: Sequence[tuple[int, int]], size_bytes: int, *, to_host: bool) -> bool:
        for target, source in copies:
            ctypes.memmove(target, source, size_bytes)
        return True

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None
