"""Tiles of K/V that lie anywhere, by a table of their addresses, and are moved between calls."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from ops.cpu import native_library
from quant.kv import TILE_TOKENS
from tests.support.memory.int8_kv import Cache, unwritten
from tests.support.memory.selected_kv import tiles_of, topic_keys

pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
    pytest.mark.usefixtures("seeded"),
]

# single rows, drafts, a prompt that goes on, all of a prompt
LENGTHS = [700, 333, 5, 300, 170]
ROWS = [1, 3, 1, 120, 170]
NUM_TILES = [-(-length // TILE_TOKENS) for length in LENGTHS]
SELECTING, BUDGETS = [1, 2, 1, 0, 0], [6, 5, 7, 1]


class Moved:
    """The tiles of a cache in another order, and much further apart."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.stride = 3 * cache.tile_bytes
        self.memory, self.address = unwritten(sum(NUM_TILES) * self.stride)
        self.places = np.zeros(sum(NUM_TILES), dtype=np.int64)
        self.move(tiles_in_order(cache))

    def move(self, content: Tensor) -> None:
        self.memory.fill_(0x7F)
        self.numbers = torch.randperm(len(content))
        self.places[:] = self.address + self.numbers.numpy() * self.stride
        self._tiles()[self.numbers] = content

    def content(self) -> Tensor:
        return self._tiles()[self.numbers]

    def _tiles(self) -> Tensor:
        first = self.address - self.memory.data_ptr()
        used = self.memory[first : first + sum(NUM_TILES) * self.stride]
        return used.view(-1, self.stride)[:, : self.cache.tile_bytes]


def tiles_in_order(cache: Cache) -> Tensor:
    return torch.cat([tiles_of(cache, count, i) for i, count in enumerate(NUM_TILES)])


def step_of(cache: Cache, *, selects: bool):
    step = cache.step(range(len(LENGTHS)), ROWS, LENGTHS)
    if selects:
        step.select(SELECTING, BUDGETS)
    return step


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("selects", [False, True])
def test_the_bits_are_those_of_tiles_in_a_row(isa, bits, selects):
    cache = Cache(
        heads=4, kv_heads=2, dim=32, tokens=max(LENGTHS), sequences=len(LENGTHS), bits=bits,
        has_bounds_beside=selects,
    )  # fmt: skip
    for i, (length, rows) in enumerate(zip(LENGTHS, ROWS, strict=True)):
        before = length - rows
        if before:
            cache.fill(topic_keys(before, 2, 32), torch.randn(before, 2, 32), i)
    moved = Moved(cache)
    step, placed = step_of(cache, selects=selects), step_of(cache, selects=selects)
    placed.place_tiles(moved.places)
    k, v, q = (torch.randn(sum(ROWS), heads, 32) for heads in (2, 2, 4))
    old_bounds = cache.bounds_memory.clone()
    cache.op.append(step, k, v, None)
    bounds, expected = cache.bounds_memory.clone(), cache.op.attend(step, q)
    cache.bounds_memory[:] = old_bounds
    cache.op.append(placed, k, v, None)
    assert torch.equal(moved.content(), tiles_in_order(cache))
    assert torch.equal(cache.bounds_memory, bounds)
    kept = tiles_in_order(cache)
    cache.memory.fill_(0x7F)
    for _ in range(2):
        assert torch.equal(cache.op.attend(placed, q), expected)
        is_read = cache.op.choose(placed, q)
        moved.move(kept)  # after the choice
        moved.places[(is_read == 0).numpy()] = 0
        assert torch.equal(cache.op.attend_chosen(placed, q), expected)
        moved.move(kept)
    assert bool(expected.isfinite().all()) and bool((is_read == 0).any()) == selects


def test_places_of_all_tiles_are_asked_for():
    cache = Cache(heads=4, kv_heads=2, dim=32, tokens=max(LENGTHS), sequences=len(LENGTHS))
    step = step_of(cache, selects=False)
    with pytest.raises(AssertionError, match="a place for each tile"):
        step.place_tiles(np.zeros(sum(NUM_TILES) - 1, dtype=np.int64))
    prefix = cache.step([0], [1], [10], prefix_only=True)
    with pytest.raises(AssertionError, match="prefix"):
        prefix.place_tiles(np.zeros(1, dtype=np.int64))
