"""Pages of K/V without memory of their own, their bounds, and which tile is where."""

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


def test_mapping_gives_memory_to_bounds(memory):
    memory.reserve(8 * PAGE)
    memory.prepare(0, 2)
    memory.map(0, 0, 4)
    assert num_bytes(memory._bounds.fileno()) == 4 * BOUNDS


def test_bounds_are_at_the_slots_of_their_pages(memory):
    assert memory.reserve(8 * PAGE) == memory.bounds_address
    memory.map(2 * PAGE, 3, 2)
    poke(memory.bounds_address + 3 * BOUNDS + 9, 90)
    memory.unmap(2 * PAGE, 2)
    memory.map(5 * PAGE, 4, 1)
    assert peek(memory.bounds_address + 5 * BOUNDS + 9) == 90
    memory.copy_page(4, 0)
    memory.map(0, 0, 1)
    assert peek(memory.bounds_address + 9) == 90
    memory.release(4, 1)
    assert peek(memory.bounds_address + 5 * BOUNDS + 9) == 0


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
    memory.reserve(2 * PAGE)
    memory.prepare(0, 2)
    memory.map(0, 1, 1)
    assert memory.pool_tiles(0, 0, 2).tolist() == [4, 5]
    memory.copy_page(1, 0)
    memory.release(0, 2)
    memory.unmap(0, 2)
    assert memory.bounds_address == 0
    memory.close()
