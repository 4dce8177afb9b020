"""Copies between the pages that attention reads and the host tier's memory."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import Protocol

from memory.tiers.direct_io import address_of


class PageCopier(Protocol):
    """Allocates host memory and copies pages there and back. The computing thread calls `follow`,
    and one other thread calls `copy`."""

    def allocate(self, size_bytes: int) -> int:
        """Returns the address of new host memory, a multiple of 4096. Once per object. Raises
        OSError."""

    def follow(self) -> None:
        """Orders later copies after the device work that the caller has submitted so far. Does not
        wait. Raises OSError on failure."""

    def copy(self, copies: Sequence[tuple[int, int]], size_bytes: int, *, to_host: bool) -> bool:
        """Copies each (target, source) pair and waits for the end. Returns False if some failed:
        then no target is valid. Raises OSError if it is unknown whether the copies have ended."""

    def close(self) -> None:
        """Frees the host memory. No copy is running."""


class MemoryCopier:
    """Copies pages that are host memory themselves."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    def allocate(self, size_bytes: int) -> int:
        assert self._memory is None, "once per object"
        self._memory = mmap.mmap(-1, size_bytes)
        return address_of(self._memory)

    def follow(self) -> None:
        """Does nothing: the pages were written before the call."""

    def copy(self, copies: Sequence[tuple[int, int]], size_bytes: int, *, to_host: bool) -> bool:
        for target, source in copies:
            ctypes.memmove(target, source, size_bytes)
        return True

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None
