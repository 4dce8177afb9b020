"""Pages of this machine's memory with a host tier behind them, and a copier that fails."""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import Future

import pytest

from memory.pages.linux_vmm import LinuxMemory
from memory.tiers.host_tier import HostTier
from memory.tiers.page_copy import MemoryCopier
from tests.support.memory.late_store import content

PAGE = 4096


class Pages:
    """Pages of a LinuxMemory that a test writes and reads."""

    def __init__(self, num_pages: int) -> None:
        self.memory = LinuxMemory(PAGE, num_pages)
        self.memory.prepare(0, num_pages)

    def __getitem__(self, page: int) -> bytes:
        return ctypes.string_at(self.memory.page_address(page), PAGE)

    def __setitem__(self, page: int, data: bytes) -> None:
        ctypes.memmove(self.memory.page_address(page), data, PAGE)

    def address(self, page: int) -> int:
        return self.memory.page_address(page)


class FailingCopier(MemoryCopier):
    """`fail_next`: the next batch is garbage; `is_lost`: copies end in an unknown state;
    `may_continue`: copies wait until it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.fail_next = self.is_lost = self.is_unordered = False
        self.may_continue = threading.Event()
        self.may_continue.set()
        self.has_started = threading.Event()

    @property
    def is_closed(self) -> bool:
        return self._memory is None

    def follow(self) -> None:
        if self.is_unordered:
            raise OSError(5, "no event")

    def copy(self, copies, size_bytes, *, to_host):
        self.has_started.set()
        assert self.may_continue.wait(10)
        if self.is_lost:
            raise OSError(5, "the device is gone")
        if self.fail_next:
            self.fail_next = False
            for target, _ in copies:
                ctypes.memset(target, 0xDD, size_bytes)
            return False
        return super().copy(copies, size_bytes, to_host=to_host)


@pytest.fixture
def pages():
    pages = Pages(32)
    yield pages
    pages.memory.close()


def name(number: int) -> bytes:
    return b"key %d" % number


def fill(pages: Pages, tier: HostTier, numbers: list[int]) -> list[Future[bool]]:
    """Stores these keys from the pages of the same numbers."""
    for number in numbers:
        pages[number] = content(name(number), PAGE)
    return tier.store_many([(name(number), pages.address(number)) for number in numbers])


def fetch(pages: Pages, tier: HostTier, number: int, timeout_s: float = 10) -> bytes | None:
    """Loads a key into the last page and returns its bytes, or None."""
    pages[31] = bytes(PAGE)
    (future,) = tier.load_many([(name(number), pages.address(31))])
    return pages[31] if future.result(timeout_s) else None


def results(futures: list[Future[bool]]) -> list[bool]:
    return [future.result(10) for future in futures]
