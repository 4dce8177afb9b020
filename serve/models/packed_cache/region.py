"""A file of packed weights in memory: mapped where the system has huge pages of it, else read.

Decoding reads all weights for every token, through few enough pages only if they are huge. File
systems whose page cache has large folios (ext4 since Linux 6.16, XFS and others before it) map
files so: the kernel then reads the file in pieces of 2 MiB, processes that serve one model share
its memory, and a file that is still cached costs nothing. Elsewhere the file is read into anonymous
huge pages, chunk by chunk and in several threads.

Every chunk is compared with its checksum, behind threads that bring it into memory
(serve/read_ahead.py).
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from ops.cpu import native_library
from serve.machine import usable_processors
from serve.models.packed_cache.layout import (
    DATA_START,
    DamagedCache,
    Index,
    Span,
    chunks_of,
)
from serve.read_ahead import read_ahead

MAP_NORESERVE = 0x4000  # Linux; Python names it since 3.13
HUGE = 2 << 20  # bytes of a huge page
_NUM_PROBED = 1  # chunks
_LEAST_HUGE = 0.9  # of a mapping's bytes
_MIN_READERS = 4  # threads, so that a disk has several requests at once


def open_region(fd: int, index: Index) -> tuple[Tensor, bool]:
    """Returns the data of an open file, uint8 by offsets in the file, from DATA_START on, and
    whether it is mapped. Its memory is freed with the last tensor over it. DamagedCache if a
    checksum differs."""
    mapped = _Mapping(fd, index.data_end)
    chunks = list(zip(chunks_of(index.data_end), index.checksums, strict=True))
    ahead = read_ahead(fd)

    def check(item: tuple[Span, int]) -> None:
        chunk, checksum = item
        ahead.wait(chunk.start + chunk.num_bytes)
        _check(mapped.data, chunk, checksum)

    try:
        probed, rest = chunks[:_NUM_PROBED], chunks[_NUM_PROBED:]
        for item in probed:
            check(item)
        if not rest or mapped.is_huge(rest[0][0].start):
            _in_threads(check, rest)
            if mapped.is_huge(index.data_end):
                return mapped.data, True
    finally:
        ahead.stop()
    data = huge_pages(index.data_end)
    _in_threads(lambda chunk: _read(fd, data, *chunk), chunks)
    return data, False


def _in_threads(
    run: Callable[[tuple[Span, int]], None], chunks: Iterable[tuple[Span, int]]
) -> None:
    with ThreadPoolExecutor(max(_MIN_READERS, usable_processors())) as threads:
        for _ in threads.map(run, chunks):
            pass


def _check(data: Tensor, chunk: Span, checksum: int) -> None:
    address = data.data_ptr() + chunk.start
    if native_library.library().checksum(address, chunk.num_bytes) != checksum:
        raise DamagedCache(f"its bytes from {chunk.start} on are damaged")


def _read(fd: int, data: Tensor, chunk: Span, checksum: int) -> None:
    part = data.numpy().data[chunk.start : chunk.start + chunk.num_bytes]
    done = 0
    while done < chunk.num_bytes:
        count = os.preadv(fd, [part[done:]], chunk.start + done)
        if count == 0:
            raise DamagedCache("it is cut off")
        done += count
    _check(data, chunk, checksum)


def huge_pages(num_bytes: int) -> Tensor:
    """Returns new memory that begins a huge page."""
    memory = mmap.mmap(-1, num_bytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _ask_for_huge_pages(memory)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    skipped = -whole.data_ptr() % HUGE
    return whole[skipped : skipped + num_bytes]


def _ask_for_huge_pages(memory: mmap.mmap) -> None:
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)


class _Mapping:
    """The first num_bytes of a file, mapped. Nothing writes to them."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        # private and writable, as torch wants it
        memory = mmap.mmap(
            fd,
            num_bytes,
            flags=mmap.MAP_PRIVATE | MAP_NORESERVE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
        )
        _ask_for_huge_pages(memory)
        self.data = torch.frombuffer(memory, dtype=torch.uint8)

    def is_huge(self, end: int) -> bool:
        """Returns whether nearly all data up to `end`, which were read, are on huge pages."""
        wanted = (end - DATA_START) // HUGE * HUGE
        return 0 < _LEAST_HUGE * wanted <= huge_bytes(self.data.data_ptr())


def huge_bytes(address: int) -> int:
    """Returns the bytes of huge pages of the mapping at `address`, which is of a file or of a
    memfd; 0 if the system does not say."""
    found = 0
    try:
        with open("/proc/self/smaps") as lines:
            for line in lines:
                if line.startswith(f"{address:x}-"):
                    break
            for line in lines:
                if line.startswith(("FilePmdMapped:", "ShmemPmdMapped:")):
                    found += int(line.split()[1]) << 10
                if line.startswith("VmFlags:"):
                    break
    except (OSError, ValueError):
        pass
    return found
