"""Packed weights in memory that several processes of one machine use.

The memory is a memfd, or the mapped file of packed weights; its bytes have the offsets that they
have in the file. A process sends the descriptor to others. It seals a memfd before that: then
no process, itself included, can change or shorten it, so that checksums that were right stay right.
The memory lives as long as one process maps it.

A memfd has small pages unless the system is set otherwise, and decoding would be slower on them.
Linux (since 6.1) makes huge ones of them on demand, whatever the setting. Where it does not, no
memory is shared.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading

import torch
from torch import Tensor

from serve.models.packed_cache.layout import DATA_START
from serve.models.packed_cache.region import HUGE, MAP_NORESERVE, huge_bytes
from serve.models.packed_cache.writer import round_up
from serve.regular_file import is_safe_file

_MAP_FIXED = 0x10  # Linux; Python does not name it
_COLLAPSE = 25  # of madvise, since Linux 6.1
_TRIES = 3  # the kernel may be using the page
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEALS = 0xF  # no further seal; no shrinking, growing or writing
_STEP = 64 << 20  # a call waits for all processors
_AHEAD = 256 << 20  # bytes that are made before they are asked for
_LEAST_HUGE = 0.9  # of the data

_libc = ctypes.CDLL(None, use_errno=True)  # its calls let other threads run
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class NotShared(Exception):
    """Memory that cannot be shared, or that a peer should not have given; the message says why."""


class SharedMemory:
    """The data of packed weights, uint8 by their offsets in a file, and their descriptor."""

    def __init__(self, fd: int, data: Tensor) -> None:
        """Owns the descriptor. The data stay mapped with the last tensor over them."""
        self.data = data
        self._fd = fd

    def fileno(self) -> int:
        return self._fd

    def __del__(self) -> None:
        os.close(self._fd)


def map_shared(fd: int, data_end: int) -> SharedMemory:
    """Maps what a peer shares, and owns the descriptor. NotShared if others could change it, or
    its pages are small; then the descriptor is closed, too."""
    try:
        os.set_inheritable(fd, False)
        _check_descriptor(fd, data_end)
        data = _map_private(_Place(data_end), fd, data_end)
        end = min(data_end, DATA_START + HUGE)
        torch.sum(data[DATA_START : end : mmap.PAGESIZE])  # touches pages
        if not is_on_huge_pages(data, end):
            raise NotShared("the system has no huge pages of it")
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError):
            raise NotShared(str(error)) from error
        raise
    return SharedMemory(fd, data)


def is_on_huge_pages(data: Tensor, end: int) -> bool:
    """Returns whether nearly all data up to `end`, which were read, are on huge pages."""
    wanted = (end - DATA_START) // HUGE * HUGE
    return huge_bytes(data.data_ptr()) >= max(_LEAST_HUGE * wanted, HUGE)


def _check_descriptor(fd: int, data_end: int) -> None:
    status = os.fstat(fd)
    if status.st_size < data_end:
        raise NotShared("it is too small")
    try:
        seals = fcntl.fcntl(fd, _F_GET_SEALS)
    except OSError:  # of a file system
        seals = 0
    if seals & _SEALS != _SEALS:
        if not is_safe_file(status):
            raise NotShared("others could change it")
    elif status.st_blocks * 512 < data_end - DATA_START:
        raise NotShared("parts of it take no memory yet, and would take this process's")


class _Place:
    """Addresses of whole huge pages, which are free when the last tensor over them is."""

    def __init__(self, num_bytes: int) -> None:
        num_bytes = round_up(num_bytes, HUGE)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        memory = mmap.mmap(-1, num_bytes + HUGE, flags=flags)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        skipped = -whole.data_ptr() % HUGE
        self.data = whole[skipped : skipped + num_bytes]

    def map(self, flags: int, fd: int) -> None:
        """Maps a file in place of what was there. OSError."""
        prot = mmap.PROT_READ | mmap.PROT_WRITE
        address, flags = self.data.data_ptr(), flags | _MAP_FIXED
        if _libc.mmap(address, len(self.data), prot, flags, fd, 0) != address:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _map_private(place: _Place, fd: int, data_end: int) -> Tensor:
    """Maps data so that nothing that this process does changes them for others."""
    place.map(mmap.MAP_PRIVATE | MAP_NORESERVE, fd)
    _libc.madvise(place.data.data_ptr(), len(place.data), mmap.MADV_HUGEPAGE)
    return place.data[:data_end]


def try_arena(data_end: int) -> Arena | None:
    """Returns memory for so many bytes; None if the system has none that others can use well."""
    try:
        arena = Arena(data_end)
    except OSError:
        return None
    try:
        arena.grow(DATA_START + 1)
    except NotShared:
        arena.close()
        return None
    return arena


class Arena:
    """A memfd that is being filled from DATA_START on. Tensors over `data` stay valid when it is
    sealed."""

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: that the data may have; only what is filled takes memory. OSError."""
        self._fd = -1
        self._ahead: threading.Thread | None = None
        self._place = _Place(max_bytes)
        self.data = self._place.data
        self._end = self._made = DATA_START  # of what was asked for, and of its huge pages
        self._making = threading.Lock()  # held while huge pages are made
        self._is_asked = threading.Event()  # tells that thread
        self._is_over = False
        self._fd = os.memfd_create("mergestep-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, len(self.data))
            self._place.map(mmap.MAP_SHARED, self._fd)
            # what a child can write to cannot be sealed
            _libc.madvise(self.data.data_ptr(), len(self.data), mmap.MADV_DONTFORK)
        except BaseException:
            self.close()
            raise

    def grow(self, end: int) -> None:
        """Has the memory up to `end` made. NotShared if there is none on huge pages."""
        if end > len(self.data):
            raise NotShared("there are more weights than were expected")
        self._end = max(self._end, end)
        self._is_asked.set()
        while self._made < end:
            with self._making:
                if self._made < end:
                    self._make_step()

    def begin_ahead(self) -> None:
        """Has a thread make some memory before it is asked for, until `seal` or `close`, which has
        to be called: the kernel takes about as long for it as packing does for what goes there."""
        self._ahead = threading.Thread(
            target=self._make_ahead, name="mergestep-weights-memory", daemon=True
        )
        self._ahead.start()

    def _make_ahead(self) -> None:
        try:
            while True:
                self._is_asked.clear()
                if self._is_over:
                    return
                if self._made >= min(self._end + _AHEAD, len(self.data)):
                    self._is_asked.wait()
                    continue
                with self._making:
                    self._make_step()
        except NotShared:
            pass  # `grow` meets the same error in the thread that loads, which handles it

    def _make_step(self) -> None:
        at, num_bytes = self._made, min(_STEP, len(self.data) - self._made)
        # an empty place cannot become a huge page; another thread may write to it meanwhile
        self.data[at : at + num_bytes : HUGE].sum()
        address = self.data.data_ptr() + at
        if not any(_libc.madvise(address, num_bytes, _COLLAPSE) == 0 for _ in range(_TRIES)):
            raise NotShared(f"no huge page: {os.strerror(ctypes.get_errno())}")
        self._made += num_bytes

    def _end_ahead(self) -> None:
        thread, self._ahead = self._ahead, None
        if thread is not None:
            self._is_over = True
            self._is_asked.set()
            thread.join()

    def seal(self) -> SharedMemory:
        """Returns the memory as others may have it; it is not changed any more. What was not asked
        for is free. OSError."""
        self._end_ahead()
        num_bytes = round_up(self._end, HUGE)
        os.ftruncate(self._fd, num_bytes)
        data = _map_private(self._place, self._fd, num_bytes)
        fcntl.fcntl(self._fd, _F_ADD_SEALS, _SEALS)
        fd, self._fd = self._fd, -1
        return SharedMemory(fd, data)

    def close(self) -> None:
        """Ends it without memory that others may have; what is in `data` stays."""
        self._end_ahead()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()
