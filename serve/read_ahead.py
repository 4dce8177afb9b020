"""Brings a file of packed weights into the page cache ahead of its reader.

Threads that only fault read as fast as the disk, in huge pages where the file system has them:
while the reader compares checksums behind them, and, at the start of a server, while modules are
imported. A record says which file a model was started from last. Nothing heavy is imported here.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
import os
import threading
from pathlib import Path
from typing import Any

from serve.machine import available_memory
from serve.regular_file import open_trusted, read_record, user_cache, write_record

BESIDE = ".mergestep"  # in the model's directory
STEP_BYTES = 64 << 20  # for less, the interpreter's lock would be waited for too often
NUM_THREADS = 2  # so that a disk has several requests at once; where they meet, pages are small
_MAP_NORESERVE = 0x4000  # Linux; Python names it since 3.13
_POPULATE_READ = 22  # of madvise, since Linux 5.14
_PREFIX = "last-"
_MAX_PATH_BYTES = 4096
_KEY_DIGITS = 32


class ReadAhead:
    """Reads a file from its beginning to its end, in threads that take pieces in turn. What cannot
    be read ahead is left to the reader."""

    def __init__(self, fd: int) -> None:
        """fd: may be closed afterwards."""
        status = os.fstat(fd)
        self.file = status.st_dev, status.st_ino
        self._size = status.st_size
        self._is_stopped = False
        self._moved = threading.Condition()
        # the kernel reads ahead by descriptor: threads that share one make it read small pages
        self._files = _descriptors(fd, min(NUM_THREADS, -(-self._size // STEP_BYTES)))
        # of each thread, the first piece that it has not read
        self._next = [STEP_BYTES * number for number in range(len(self._files))]
        for number in range(len(self._files)):
            threading.Thread(
                target=self._run, args=(number,), name="read-ahead", daemon=True
            ).start()

    def wait(self, end: int) -> None:
        """Waits until the bytes before `end` were read, or are left to the reader."""
        with self._moved:
            self._moved.wait_for(
                lambda: min(self._next, default=self._size) >= min(end, self._size)
            )

    def stop(self) -> None:
        """Leaves the rest to the reader, after the pieces that are being read."""
        self._is_stopped = True

    def _run(self, number: int) -> None:
        try:
            with contextlib.suppress(OSError):  # no room in the address space, for example
                self._read(number)
        finally:
            os.close(self._files[number])
            self._move(number, self._size)

    def _read(self, number: int) -> None:
        madvise = ctypes.CDLL(None).madvise  # lets other threads run, as that of mmap does not
        stride = STEP_BYTES * len(self._files)
        for start in range(self._next[number], self._size, stride):
            num_bytes = min(STEP_BYTES, self._size - start)
            if self._is_stopped or not _fault(self._files[number], start, num_bytes, madvise):
                return
            if start + stride < self._size:
                self._move(number, start + stride)

    def _move(self, number: int, start: int) -> None:
        with self._moved:
            self._next[number] = start
            self._moved.notify_all()


def _descriptors(fd: int, count: int) -> list[int]:
    """Returns descriptors of their own for the file; fewer if the process can have no more."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for _ in range(count):
            found.append(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC))
    return found


def _fault(fd: int, start: int, num_bytes: int, madvise: Any) -> bool:
    """Brings a piece of a file into the page cache. Returns whether the kernel does so. The piece
    is mapped for that time only: what is mapped counts as this process's memory."""
    # writable, since ctypes takes the address of nothing else; nothing writes to it
    memory = mmap.mmap(
        fd,
        num_bytes,
        flags=mmap.MAP_PRIVATE | _MAP_NORESERVE,
        prot=mmap.PROT_READ | mmap.PROT_WRITE,
        offset=start,
    )
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    place = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    return not madvise(place, ctypes.c_size_t(num_bytes), _POPULATE_READ)


_lock = threading.Lock()
_begun: ReadAhead | None = None


def read_ahead(fd: int) -> ReadAhead:
    """Returns the thread that reads this file already, else a new one."""
    global _begun
    status = os.fstat(fd)
    with _lock:
        begun, _begun = _begun, None
    if begun is not None and begun.file == (status.st_dev, status.st_ino):
        return begun
    if begun is not None:
        begun.stop()
    return ReadAhead(fd)


def end() -> None:
    """Ends what `begin` has begun: the file is not the one that is needed."""
    global _begun
    with _lock:
        begun, _begun = _begun, None
    if begun is not None:
        begun.stop()


def begin(model: Path, packed_cache: str | Path) -> None:
    """Begins to read the file from which the model was started last, if there is memory for it.
    packed_cache: the setting."""
    global _begun
    folder = records_folder(packed_cache)
    content = folder and read_record(folder, _name(model), _MAX_PATH_BYTES)
    if not content:
        return
    file = Path(os.fsdecode(content))
    if packed_cache != "auto" and file.parent != Path(packed_cache).absolute():
        return
    fd = open_trusted(file)
    if fd is None:
        return
    try:
        size = os.fstat(fd).st_size
        if 0 < size < available_memory():
            with _lock:
                _begun = ReadAhead(fd)
    finally:
        os.close(fd)


def note_start(records: Path, model: Path, file: Path) -> None:
    """Notes that a model is started from a file of packed weights. records: see records_folder.
    model: its directory or file."""
    content = os.fsencode(file.absolute())
    if read_record(records, _name(model), _MAX_PATH_BYTES) != content:
        write_record(records, _PREFIX, _name(model), content)


def records_folder(packed_cache: str | Path) -> Path | None:
    """Returns the folder for what a start notes for the next one, None for none. A model's own
    directory is never it: it may come from a stranger, with records in it."""
    if packed_cache == "off":
        return None
    if packed_cache != "auto":
        return Path(packed_cache)
    cache = user_cache()
    return cache and cache / "packed"


def _name(model: Path) -> str:
    path = os.fsencode(model.resolve())
    return f"{_PREFIX}{hashlib.sha256(path).hexdigest()[:_KEY_DIGITS]}"
