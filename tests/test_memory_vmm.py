"""Real address-space edits on Linux: what is written in a page is seen wherever it is mapped."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from memory.allocator import PageAllocator
from memory.kv_manager import KVManager
from memory.vmm import LinuxMemory

PAGE = 64 << 10


@pytest.fixture
def memory():
    memory = LinuxMemory(PAGE, 8)
    yield memory
    memory.close()


def peek(address: int) -> int:
    return ctypes.c_uint8.from_address(address).value


def poke(address: int, value: int) -> None:
    ctypes.c_uint8.from_address(address).value = value


def test_a_page_moves_with_its_content(memory):
    base = memory.reserve(16 * PAGE)
    memory.map(0, 3, 1)
    poke(base + 5, 77)
    memory.unmap(0, 1)
    memory.map(4 * PAGE, 3, 1)
    assert peek(base + 4 * PAGE + 5) == 77


def test_one_page_at_two_addresses(memory):
    base = memory.reserve(16 * PAGE)
    memory.map(0, 2, 2)
    memory.map(8 * PAGE, 2, 2)
    poke(base + PAGE, 5)
    assert peek(base + 9 * PAGE) == 5


def test_released_memory_is_zero(memory):
    base = memory.reserve(4 * PAGE)
    memory.map(0, 0, 1)
    poke(base, 9)
    memory.unmap(0, 1)
    memory.release(0, 1)
    memory.map(0, 0, 1)
    assert peek(base) == 0


def test_a_tebibyte_can_be_reserved(memory):
    base = memory.reserve(1 << 40)
    memory.map((1 << 40) - PAGE, 0, 1)
    poke(base + (1 << 40) - 1, 1)
    assert peek(base + (1 << 40) - 1) == 1


def test_a_hole_is_a_fault_and_not_garbage():
    """In a child process: the fault is a SIGSEGV."""
    code = (
        "import ctypes; from memory.vmm import LinuxMemory\n"
        f"m = LinuxMemory({PAGE}, 2); a = m.reserve(4 * {PAGE}); m.map(0, 0, 1)\n"
        f"ctypes.c_uint8.from_address(a + {PAGE} - 1).value = 1; print('mapped', flush=True)\n"
        f"ctypes.c_uint8.from_address(a + {PAGE}).value\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "mapped\n"
    assert done.returncode == -11


def test_map_outside_the_reservation_is_our_bug(memory):
    memory.reserve(2 * PAGE)
    with pytest.raises(AssertionError):
        memory.map(2 * PAGE, 0, 1)


def test_kv_manager_on_real_memory(memory):
    """Data of a live range survives while idle ranges are taken apart around it."""
    kv = KVManager(memory, num_pages=8, num_ranges=4, max_model_len=64, token_bytes=8192)
    base = memory.reserve(kv.total_bytes)
    first = kv.open(16)
    assert kv.grow(first, 16)
    kv.commit()
    poke(base + first.index * kv.range_bytes + 15 * 8192, 42)
    second = kv.open(40)
    assert kv.grow(second, 40)
    kv.commit()
    poke(base + second.index * kv.range_bytes + 39 * 8192, 43)
    kv.close(second)
    assert kv.grow(first, 50)
    kv.commit()
    assert peek(base + first.index * kv.range_bytes + 15 * 8192) == 42
    poke(base + first.index * kv.range_bytes + 49 * 8192, 44)
    kv.check_integrity()
    kv.close(first)
    kv.trim()
    assert kv.num_mapped == 0


def test_allocator_prefers_the_next_page():
    pages = PageAllocator(6)
    a = pages.take()
    b = pages.take(a)
    assert b == a + 1
    c = pages.take()
    pages.share(c)
    assert not pages.give_back(c)
    assert pages.give_back(c)
    assert pages.num_free == 4
    pages.check_integrity({a: 1, b: 1})
    with pytest.raises(AssertionError, match="free already"):
        pages.give_back(c)
    with pytest.raises(AssertionError, match="references"):
        pages.check_integrity({a: 1})
