"""Both kinds of memory show bytes written in a page wherever the page is mapped.

On Linux these are real edits of the address space, on CUDA calls of a fake driver.
"""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from memory.kv_manager import KVManager
from memory.pages.allocator import PageAllocator
from memory.pages.cuda_vmm import CudaMemory
from memory.pages.linux_vmm import LinuxMemory
from tests.support.cuda.fakes_cuda import FakeDriver

PAGE = 64 << 10


@dataclass
class Space:
    """Memory, and functions that read and write a byte as its kernels do."""

    memory: LinuxMemory | CudaMemory
    peek: Callable[[int], int]
    poke: Callable[[int, int], None]


@pytest.fixture(params=["linux", "cuda"])
def space(request):
    if request.param == "linux":
        space = Space(LinuxMemory(PAGE, 8), peek, poke)
    else:
        driver = FakeDriver(granularity=PAGE)
        space = Space(
            CudaMemory(PAGE, 8, driver=driver),
            lambda address: (driver.run_all(), driver.read(address, 1)[0])[1],
            lambda address, value: driver.write(address, bytes([value])),
        )
    yield space
    space.memory.close()


@pytest.fixture
def memory():
    memory = LinuxMemory(PAGE, 8)
    yield memory
    memory.close()


def peek(address: int) -> int:
    return ctypes.c_uint8.from_address(address).value


def poke(address: int, value: int) -> None:
    ctypes.c_uint8.from_address(address).value = value


def test_a_page_moves_with_its_content(space):
    base = space.memory.reserve(16 * PAGE)
    space.memory.map(0, 3, 1)
    space.poke(base + 5, 77)
    space.memory.unmap(0, 1)
    space.memory.map(4 * PAGE, 3, 1)
    assert space.peek(base + 4 * PAGE + 5) == 77


def test_a_page_is_copied_wherever_it_is(space):
    base = space.memory.reserve(16 * PAGE)
    space.memory.map(0, 3, 1)
    space.poke(base + 5, 77)
    space.memory.unmap(0, 1)
    space.memory.map(2 * PAGE, 4, 1)
    space.memory.copy_page(3, 4)
    assert space.peek(base + 2 * PAGE + 5) == 77
    space.poke(base + 2 * PAGE + 5, 78)
    space.memory.copy_page(4, 6)  # page 4 has never been mapped
    space.memory.map(0, 3, 1)
    space.memory.map(PAGE, 6, 1)
    assert (space.peek(base + 5), space.peek(base + PAGE + 5)) == (77, 78)


def test_a_page_has_an_address_wherever_it_is(space):
    base = space.memory.reserve(16 * PAGE)
    space.memory.prepare(0, 3)
    space.memory.map(0, 3, 1)
    space.poke(base + 5, 77)
    address = space.memory.page_address(3)
    assert space.peek(address + 5) == 77
    space.memory.unmap(0, 1)
    space.poke(address + 5, 78)
    space.poke(space.memory.page_address(5) + 5, 79)  # page 5 has never been mapped
    assert space.memory.page_address(3) == address
    space.memory.map(4 * PAGE, 3, 1)
    space.memory.map(8 * PAGE, 5, 1)
    assert (space.peek(base + 4 * PAGE + 5), space.peek(base + 8 * PAGE + 5)) == (78, 79)


def test_one_page_at_two_addresses(space):
    base = space.memory.reserve(16 * PAGE)
    space.memory.map(0, 2, 2)
    space.memory.map(8 * PAGE, 2, 2)
    space.poke(base + PAGE, 5)
    assert space.peek(base + 9 * PAGE) == 5


def test_mapping_replaces_an_earlier_mapping(space):
    """A manager whose unmap has failed relies on this."""
    base = space.memory.reserve(8 * PAGE)
    space.memory.map(0, 0, 4)
    for i in range(4):
        space.poke(base + i * PAGE, 10 + i)
    space.memory.map(PAGE, 2, 1)
    assert [space.peek(base + i * PAGE) for i in range(4)] == [10, 12, 12, 13]


def test_partly_mapped_ranges_can_be_unmapped(space):
    base = space.memory.reserve(8 * PAGE)
    space.memory.map(PAGE, 0, 1)
    space.memory.map(3 * PAGE, 1, 2)
    space.poke(base + PAGE, 3)
    space.memory.unmap(0, 8)
    space.memory.unmap(0, 8)
    space.memory.map(7 * PAGE, 0, 1)
    assert space.peek(base + 7 * PAGE) == 3


def test_preparing_keeps_content(space):
    base = space.memory.reserve(8 * PAGE)
    space.memory.prepare(0, 3)
    space.memory.map(0, 0, 2)
    space.poke(base + PAGE, 6)
    space.memory.prepare(0, 4)
    assert space.peek(base + PAGE) == 6
    space.memory.unmap(0, 2)
    space.memory.prepare(1, 1)
    space.memory.map(0, 1, 1)
    assert space.peek(base) == 6


def test_preparing_beside_mapping(space):
    """Threads prepare random pages while one thread maps, unmaps and releases."""
    base = space.memory.reserve(16 * PAGE)
    stop = threading.Event()
    errors: list[BaseException] = []

    def prepare(seed: int) -> None:
        numbers = random.Random(seed)
        try:
            while not stop.is_set():
                first = numbers.randrange(8)
                space.memory.prepare(first, numbers.randint(1, 8 - first))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=prepare, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    try:
        for i in range(150):
            page = i % 7
            space.memory.map(page * PAGE, page, 2)
            space.poke(base + page * PAGE, i)
            space.memory.map(8 * PAGE, page, 1)
            assert space.peek(base + 8 * PAGE) == i
            space.memory.unmap(0, 9)
            space.memory.release(page, 1)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not errors


def test_released_memory_is_zero(memory):
    base = memory.reserve(4 * PAGE)
    memory.map(0, 0, 1)
    poke(base, 9)
    memory.unmap(0, 1)
    memory.release(0, 1)
    memory.map(0, 0, 1)
    assert peek(base) == 0


def test_prepared_memory_is_present_and_counted(memory):
    """Otherwise the first touch would allocate. Releasing frees prepared pages as well."""
    used = os.fstat(memory._fd).st_blocks
    memory.prepare(2, 3)
    assert (os.fstat(memory._fd).st_blocks - used) * 512 == 3 * PAGE
    memory.release(2, 3)
    assert os.fstat(memory._fd).st_blocks == used


def test_a_tebibyte_can_be_reserved(space):
    base = space.memory.reserve(1 << 40)
    space.memory.map((1 << 40) - PAGE, 0, 1)
    space.poke(base + (1 << 40) - 1, 1)
    assert space.peek(base + (1 << 40) - 1) == 1


def test_an_unmapped_page_is_a_fault_and_not_garbage():
    """The fault is a SIGSEGV, so it happens in a child process."""
    code = (
        "import ctypes; from memory.pages.linux_vmm import LinuxMemory\n"
        f"m = LinuxMemory({PAGE}, 2); a = m.reserve(4 * {PAGE}); m.map(0, 0, 1)\n"
        f"ctypes.c_uint8.from_address(a + {PAGE} - 1).value = 1; print('mapped', flush=True)\n"
        f"ctypes.c_uint8.from_address(a + {PAGE}).value\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "mapped\n"
    assert done.returncode == -11


def test_map_outside_the_reservation_is_our_bug(space):
    space.memory.reserve(2 * PAGE)
    with pytest.raises(AssertionError):
        space.memory.map(2 * PAGE, 0, 1)


def test_kv_manager_on_memory(space):
    """Data of a live range survives while idle ranges around it are unmapped."""
    kv = KVManager(space.memory, num_pages=8, num_ranges=4, max_model_len=64, token_bytes=8192)
    base, range_bytes = space.memory.reserve(kv.total_bytes), kv.range_tokens * 8192
    first = kv.open(16)
    assert kv.grow(first, 16)
    kv.commit()
    space.poke(base + first.index * range_bytes + 15 * 8192, 42)
    second = kv.open(40)
    assert kv.grow(second, 40)
    kv.commit()
    space.poke(base + second.index * range_bytes + 39 * 8192, 43)
    kv.close(second)
    assert kv.grow(first, 50)
    kv.commit()
    assert space.peek(base + first.index * range_bytes + 15 * 8192) == 42
    space.poke(base + first.index * range_bytes + 49 * 8192, 44)
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
