"""A BlockFile that fails on purpose, in front of a real one, and memory for its pages."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from memory.tiers.block_file import ALIGNMENT, BlockFile, Done, Transfer
from memory.tiers.direct_io import address_of, open_block_file

# "write" or "read" and the transfer's number -> None (no fault), an errno, "torn" (half of it is
# written, and success reported), "short" (half is written, then EIO) or "hold" (until `release`).
Plan = Callable[[str, int], int | str | None]


class FaultyFile:
    """`plan` decides for every transfer; `opener` is what DiskTier takes as open_file."""

    def __init__(self, file: BlockFile, plan: Plan) -> None:
        self._file = file
        self._plan = plan
        self._counts = {"read": 0, "write": 0}
        self._held: list[tuple[Callable[[Sequence[Transfer]], None], Transfer]] = []
        self._lock = threading.Lock()
        self.io = file.io
        self.is_direct = file.is_direct
        self.fileno, self.register = file.fileno, file.register
        self.preallocate, self.flush, self.close = file.preallocate, file.flush, file.close

    def read(self, transfers: Sequence[Transfer]) -> None:
        self._start("read", self._file.read, transfers)

    def write(self, transfers: Sequence[Transfer]) -> None:
        self._start("write", self._file.write, transfers)

    def _start(self, kind, start, transfers):
        for transfer in transfers:
            with self._lock:
                number = self._counts[kind]
                self._counts[kind] += 1
            fault = self._plan(kind, number)
            half = max(ALIGNMENT, transfer.length // 2 // ALIGNMENT * ALIGNMENT)
            if fault is None:
                start([transfer])
            elif fault == "hold":
                with self._lock:
                    self._held.append((start, transfer))
            elif fault == "torn":
                start([replace(transfer, length=half)])
            elif fault == "short":
                start([replace(transfer, length=half, done=_failing(transfer.done))])
            else:
                assert isinstance(fault, int)
                transfer.done(OSError(fault, os.strerror(fault)))

    def release(self) -> None:
        with self._lock:
            held, self._held = self._held, []
        for start, transfer in held:
            start([transfer])


def _failing(done: Done) -> Done:
    return lambda error: done(error or OSError(errno.EIO, "only half of it"))


def faulty(plan: Plan):
    """Returns (opener, list that the opened file is put in)."""
    opened: list[FaultyFile] = []

    def opener(fd: int, *, is_direct: bool, depth: int, io: str) -> FaultyFile:
        file = FaultyFile(open_block_file(fd, is_direct=is_direct, depth=depth, io=io), plan)
        opened.append(file)
        return file

    return opener, opened


class Pages:
    """Aligned memory for some pages, with their content by number."""

    def __init__(self, page_bytes: int, num_pages: int) -> None:
        self.page_bytes = page_bytes
        self._memory = mmap.mmap(-1, page_bytes * num_pages)
        self._base = address_of(self._memory)

    def at(self, page: int) -> int:
        return self._base + page * self.page_bytes

    def fill(self, page: int, text: bytes) -> int:
        """Fills the page with repetitions of `text` and returns its address."""
        content = repeated(text, self.page_bytes)
        ctypes.memmove(self.at(page), content, self.page_bytes)
        return self.at(page)

    def holds(self, page: int, text: bytes) -> bool:
        return self.content(page) == repeated(text, self.page_bytes)

    def content(self, page: int) -> bytes:
        return ctypes.string_at(self.at(page), self.page_bytes)


def repeated(text: bytes, size: int) -> bytes:
    return (text * (size // len(text) + 1))[:size]
