"""Linux's virtual memory: pages of a memfd, mapped at fixed addresses of a PROT_NONE reservation.

It decides nothing: `KVManager` chooses which page is mapped where. An access to an unmapped address
ends the process with SIGSEGV.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

_MAP_FIXED = 0x10
MAP_NORESERVE = 0x4000
_MAP_POPULATE = 0x8000
_PROT_NONE = 0
_FAILED = ctypes.c_void_p(-1).value
_FALLOC_KEEP_SIZE = 1
_FALLOC_PUNCH_HOLE = 2

_libc = ctypes.CDLL(None, use_errno=True)  # calls release the GIL
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


class LinuxMemory:
    """A `VirtualMemory` of memfd pages in a PROT_NONE reservation."""

    maps_during_kernels = True

    def __init__(self, page_bytes: int, num_pages: int) -> None:
        assert page_bytes % mmap.PAGESIZE == 0, f"{page_bytes=}"
        self.page_bytes = page_bytes
        self._address = 0
        self._size = 0
        self._is_kept = False
        self._fd = os.memfd_create("mergestep-kv", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, page_bytes * num_pages)
        # One mapping of all pages in a row, to access a page whatever range maps it.
        self._pool_size = page_bytes * num_pages
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_SHARED | MAP_NORESERVE
        self._pool = _mmap(0, self._pool_size, protection, flags, self._fd, 0)

    def reserve(self, size_bytes: int) -> int:
        assert not self._address, "one reservation per object"
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self._address = _mmap(0, size_bytes, _PROT_NONE, flags, -1, 0)
        self._size = size_bytes
        return self._address

    def prepare(self, first_page: int, num_pages: int) -> None:
        # Linux allocates at the first call and zeroes only at the second one (mm/shmem.c), or
        # at the first touch. 64 KiB: 18 + 6 us here take 34 of 49 us off `map`.
        for _ in range(2):
            self._fallocate(0, first_page, num_pages)

    def map(self, offset: int, first_page: int, num_pages: int) -> None:
        size = num_pages * self.page_bytes
        assert 0 <= offset <= self._size - size, f"{offset=} {size=}"
        # Populating here keeps page faults out of the kernels.
        flags = mmap.MAP_SHARED | _MAP_FIXED | _MAP_POPULATE
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        file_offset = first_page * self.page_bytes
        _mmap(self._address + offset, size, protection, flags, self._fd, file_offset)

    def copy_page(self, source: int, target: int) -> None:
        ctypes.memmove(self.page_address(target), self.page_address(source), self.page_bytes)

    def page_address(self, page: int) -> int:
        """Returns an address at which the page can be accessed, whatever range maps it."""
        return self._pool + page * self.page_bytes

    def fileno(self) -> int:
        """Returns the descriptor of the pages: page n begins at n * page_bytes."""
        return self._fd

    def keep_pages(self) -> None:
        """Makes `close` leave the pages mapped at their page_address: a disk that hangs may write
        there at any time, so these addresses must not be used for other memory."""
        self._is_kept = True

    def unmap(self, offset: int, num_pages: int) -> None:
        size = num_pages * self.page_bytes
        assert 0 <= offset <= self._size - size, f"{offset=} {size=}"
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | MAP_NORESERVE
        _mmap(self._address + offset, size, _PROT_NONE, flags, -1, 0)

    def release(self, first_page: int, num_pages: int) -> None:
        self._fallocate(_FALLOC_KEEP_SIZE | _FALLOC_PUNCH_HOLE, first_page, num_pages)

    def _fallocate(self, mode: int, first_page: int, num_pages: int) -> None:
        start, size = first_page * self.page_bytes, num_pages * self.page_bytes
        while _libc.fallocate(self._fd, mode, start, size) != 0:
            if ctypes.get_errno() != errno.EINTR:
                raise _os_error("fallocate")

    def close(self) -> None:
        if self._address:
            _libc.munmap(self._address, self._size)
            self._address = self._size = 0  # so that a later `map` fails
        if self._pool and not self._is_kept:
            _libc.munmap(self._pool, self._pool_size)
            self._pool = 0
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _mmap(address: int, size: int, protection: int, flags: int, fd: int, offset: int) -> int:
    result = _libc.mmap(address, size, protection, flags, fd, offset)
    if result is None or result == _FAILED:
        raise _os_error("mmap")
    return int(result)


def _os_error(call: str) -> OSError:
    number = ctypes.get_errno()
    hint = ""
    if number == errno.ENOMEM:
        hint = " (address space, memory or vm.max_map_count exhausted; use a larger kv_page_bytes)"
    return OSError(number, f"{call}: {os.strerror(number)}{hint}")
