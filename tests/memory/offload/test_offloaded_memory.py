"""Pages of K/V without memory of their own, the bounds beside them, and which tile is where."""

from __future__ import annotations

import ctypes
import os

import pytest

from memory.offload.offloaded_memory import OffloadedMemory

PAGE, TILE, BOUNDS = 4 * 8192, 8192, 4096


@pytest.fixture
def memory():
    made = OffloadedMemory(PAGE, 6, BOUNDS, tile_bytes=TILE)
    yield made
    made.close()


def num_bytes(fd):
    return os.fstat(fd).st_blocks * 512


def peek(address):
    return ctypes.c_uint8.from_address(address).value


def poke(address, value):
    ctypes.c_uint8.from_address(address).value = value


def test_mapping_gives_memory_to_bounds_only(memory):
    memory.reserve(8 * PAGE)
    memory.prepare(0, 2)
    memory.map(0, 0, 4)
    assert num_bytes(memory.fileno()) == 0
    assert num_bytes(memory._bounds.fileno()) == 4 * BOUNDS


def test_no_huge_page_holds_more_than_what_is_written(memory):
    """What counts where the system gives huge pages to every memfd."""
    base = memory.reserve(8 * PAGE)
    memory.map(PAGE, 0, 2)
    for address in (base + PAGE, memory.pool_address):
        assert "nh" in mapping_flags(address)
    assert "nh" not in mapping_flags(memory._bounds.page_address(0))


def mapping_flags(address):
    """Returns the flags of the mapping that begins at the address."""
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if line.startswith(f"{address:x}-"):
                return next(line.split() for line in lines if line.startswith("VmFlags:"))
    raise AssertionError("nothing is mapped there")


def test_bounds_are_at_the_slots_of_their_pages(memory):
    base = memory.reserve(8 * PAGE)
    memory.map(2 * PAGE, 3, 2)
    poke(base + 3 * PAGE + 7, 70)
    poke(memory.bounds_address + 3 * BOUNDS + 9, 90)
    memory.unmap(2 * PAGE, 2)
    memory.map(5 * PAGE, 4, 1)
    assert peek(base + 5 * PAGE + 7) == 70
    assert peek(memory.bounds_address + 5 * BOUNDS + 9) == 90
    memory.copy_page(4, 0)
    memory.map(0, 0, 1)
    assert (peek(base + 7), peek(memory.bounds_address + 9)) == (70, 90)
    memory.release(4, 1)
    assert (peek(base + 5 * PAGE + 7), peek(memory.bounds_address + 5 * BOUNDS + 9)) == (0, 0)


def test_the_pool_holds_the_same_bytes(memory):
    base = memory.reserve(8 * PAGE)
    memory.map(PAGE, 5, 1)
    poke(base + PAGE + 3, 33)
    assert peek(memory.pool_address + 5 * PAGE + 3) == 33


def test_tiles_of_a_range(memory):
    memory.reserve(8 * PAGE)
    memory.map(2 * PAGE, 4, 1)
    memory.map(3 * PAGE, 0, 2)
    assert memory.num_tiles == 24
    assert memory.pool_tiles(2 * PAGE, 0, 12).tolist() == [16, 17, 18, 19, *range(8)]
    assert memory.pool_tiles(2 * PAGE, 3, 2).tolist() == [19, 0]
    assert memory.pool_tiles(2 * PAGE, 4, 1).tolist() == [0]
    assert memory.pool_tiles(3 * PAGE, 7, 0).tolist() == []
    memory.unmap(3 * PAGE, 1)
    for first, count in ((3, 2), (11, 5)):
        with pytest.raises(AssertionError):
            memory.pool_tiles(2 * PAGE, first, count)


def test_without_bounds():
    memory = OffloadedMemory(PAGE, 2, 0, tile_bytes=TILE)
    base = memory.reserve(2 * PAGE)
    memory.prepare(0, 2)
    memory.map(0, 1, 1)
    poke(base, 1)
    memory.copy_page(1, 0)
    memory.map(PAGE, 0, 1)
    assert peek(base + PAGE) == 1
    memory.release(0, 2)
    memory.unmap(0, 2)
    assert memory.bounds_address == 0 and num_bytes(memory.fileno()) == 0
    memory.close()
