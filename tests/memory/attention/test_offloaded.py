"""Attention over K/V of which only the units are in memory that a layer has asked for, each in
another place each time: the others are at an address without memory, and what units have left is
overwritten."""

from __future__ import annotations

import ctypes
import errno
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from memory.attention.layouts import local_attention
from memory.attention.offloaded import Flags, OffloadedAttention
from memory.attention.offloaded import Tiles as TileNumbers
from memory.attention.offloaded_layout import UNIT_ALIGNMENT, OffloadedKVLayout
from memory.attention.seam import AttentionLayer, AttentionStep, PlannedAttention
from memory.attention.tiled import TiledKVLayout
from memory.pages.lost_kv import KVLostError
from memory.policies.selection import Selection
from memory.policies.setting import KVPolicy
from ops import get_backend
from ops.cpu import native_library

pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
    pytest.mark.usefixtures("seeded"),
]
TILES = 40  # of a range
LAYERS = [AttentionLayer(4, 2, 64, 0.125)] * 3
RANGES = 3


class Units:
    """Keeps the asked units in a buffer, at random places, and moves all others away."""

    def __init__(self, layout: OffloadedKVLayout) -> None:
        self._layout = layout
        self._frame = max(layout.unit_bytes)
        size = RANGES * TILES * self._frame
        self._buffer = ctypes.create_string_buffer(b"\xff" * (size + UNIT_ALIGNMENT))
        first = ctypes.addressof(self._buffer)
        self._address = first + -first % UNIT_ALIGNMENT
        self._places: dict[tuple[int, int], int] = {}
        self._away: dict[tuple[int, int], bytes] = {}
        self.asked: list[tuple[int, list[int]]] = []
        self.ahead: list[tuple[int, list[int]]] = []
        self.fails = False
        self.fetched_bytes = 0
        self.share = 1.0  # of the units that are read, those that count as fetched
        self._held: list[tuple[int, int]] = []

    def begin_layer(
        self, layer: int, read: TileNumbers, written: TileNumbers, fresh: Flags
    ) -> None:
        if self.fails:
            raise OSError(errno.EIO, "broken")
        assert len(set(read.tolist())) == len(read) and len(written) == len(fresh)
        self.end()
        self.asked.append((layer, read.tolist()))
        self.fetched_bytes += int(self.share * len(read) * self._layout.unit_bytes[layer])
        new = set(written[fresh].tolist())
        frames = random.sample(range(RANGES * TILES), RANGES * TILES)
        for tile in {*read.tolist(), *written.tolist()}:
            content = self._away.pop((layer, tile), None)
            self._places[layer, tile] = self._address + frames.pop() * self._frame
            if tile not in new:
                assert content is not None, f"tile {tile} of layer {layer} was never written"
                ctypes.memmove(self._places[layer, tile], content, len(content))
            self._held.append((layer, tile))

    def locate(self, layer: int, tiles: TileNumbers, places: TileNumbers) -> None:
        places[:] = [self._places.get((layer, tile), 0) for tile in tiles.tolist()]

    def fetch_ahead(self, layer: int, tiles: TileNumbers) -> None:
        assert len(set(tiles.tolist())) == len(tiles)
        self.ahead.append((layer, tiles.tolist()))

    def end(self) -> None:
        for layer, tile in self._held:
            size = self._layout.unit_bytes[layer]
            place = self._places.pop((layer, tile))
            self._away[layer, tile] = ctypes.string_at(place, size)
            ctypes.memset(place, 0xFF, size)
        self._held = []

    @property
    def num_held(self) -> int:
        return len(self._held)


class Offloaded:
    """RANGES ranges of the same tiles in another order: range 2 begins with those of range 0."""

    def __init__(self, selection: Selection | None = None, max_tiles: int = 10**9) -> None:
        self.layout = OffloadedKVLayout(LAYERS, "int8", 64, has_bounds=selection is not None)
        self.layout.pad_bounds(1)
        size = RANGES * TILES * self.layout.bounds_tile_bytes
        self._bounds = ctypes.create_string_buffer(size + UNIT_ALIGNMENT)
        bounds = ctypes.addressof(self._bounds) + -ctypes.addressof(self._bounds) % UNIT_ALIGNMENT
        self.units = Units(self.layout)

        def pool_tiles(start_bytes: int, first_tile: int, count: int) -> TileNumbers:
            first = start_bytes // self.layout.tile_bytes + first_tile
            return np.arange(first, first + count, dtype=np.int64)

        self.attention = OffloadedAttention(
            self.layout, bounds, self.units, pool_tiles, selection, max_tiles
        )
        self.attention._early.always = True  # where the steps tell it


def plain(selection: Selection | None) -> tuple[PlannedAttention, object]:
    layout = TiledKVLayout(LAYERS, "int8", 64, has_bounds=selection is not None)
    size = RANGES * TILES * layout.tile_bytes
    buffer = ctypes.create_string_buffer(size + 64)
    address = ctypes.addressof(buffer) + -ctypes.addressof(buffer) % 64
    return local_attention(layout, address, size, get_backend("cpu"), selection=selection), buffer


def inputs(num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(num_rows, 4, 64), torch.randn(num_rows, 2, 64), torch.randn(num_rows, 2, 64)


def compute(attention: PlannedAttention, step: AttentionStep, seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    plan, found = attention.plan(step), []
    for layer in range(len(LAYERS)):
        q, k, v = inputs(sum(step.num_rows))
        found.append(plan.finish(plan.begin(layer, q), k, v, None).wait())
    return found


def steps() -> list[AttentionStep]:
    """Prompts in chunks, beside rows that decode."""
    one, other = 0, TILES * 16
    found = [
        AttentionStep(0, [one, other], [200, 33], [200, 33], [300, 33]),
        AttentionStep(1, [other, one], [1, 100], [34, 300], [33, 300]),
    ]
    # of a sequence that is computed again: rows of its prompt, and one or more after it
    third = 2 * TILES * 16
    for rows, end, prompt_len in ((100, 100, 211), (112, 212, 211), (60, 272, 211)):
        found.append(AttentionStep(0, [third], [rows], [end], [prompt_len]))
    for i in range(20):
        found.append(AttentionStep(2, [one, other], [1, 2], [301 + i, 36 + 2 * i], [300, 33]))
    return found


POLICIES = [None, Selection(KVPolicy("quest", share=0.25)), Selection(KVPolicy("quest", tokens=32))]


@pytest.mark.parametrize("selection", POLICIES, ids=["all", "a quarter", "two tiles"])
def test_rows_have_the_bits_of_k_v_in_memory(selection: Selection | None) -> None:
    local, _buffer = plain(selection)
    offloaded = Offloaded(selection)
    for number, step in enumerate(steps()):
        found = compute(offloaded.attention, step, number)
        wanted = compute(local, step, number)
        assert all(map(torch.equal, found, wanted)), step
        assert offloaded.units.num_held == 0, "after a step, all units may go"


def test_what_is_not_selected_is_not_fetched() -> None:
    offloaded = Offloaded(Selection(KVPolicy("quest", tokens=48)))
    for number, step in enumerate(steps()[:2]):
        compute(offloaded.attention, step, number)
    offloaded.units.asked.clear()
    step = AttentionStep(1, [0], [1], [301], [300])
    compute(offloaded.attention, step, 3)
    read = [tiles for _, tiles in offloaded.units.asked if tiles]
    assert len(read) == len(LAYERS)
    assert all(3 <= len(tiles) <= 2 * 2 + 1 < 300 // 16 for tiles in read), "two heads choose"


def test_the_next_layer_is_fetched_ahead_by_what_it_read_before() -> None:
    offloaded = Offloaded(Selection(KVPolicy("quest", tokens=48)))
    for number, step in enumerate(steps()[:2]):
        compute(offloaded.attention, step, number)
    for end in (301, 302):
        offloaded.units.asked.clear()
        offloaded.units.ahead.clear()
        compute(offloaded.attention, AttentionStep(1, [0], [1], [end], [300]), 3)
    asked = {layer: tiles for layer, tiles in offloaded.units.asked if tiles}
    assert [layer for layer, _ in offloaded.units.ahead] == [1, 2, 0]
    assert dict(offloaded.units.ahead)[1] == asked[1], "the same q and keys choose the same tiles"


def told(offloaded: Offloaded, step: AttentionStep, seed: int, *, wrong: bool) -> list[Tensor]:
    """Computes a step, and tells it before each layer what q will be, or something else."""
    torch.manual_seed(seed)
    plan, found = offloaded.attention.plan(step), []
    count = plan.num_expected()
    rows = [inputs(sum(step.num_rows)) for _ in LAYERS]
    for layer, (q, k, v) in enumerate(rows):
        ticket = plan.begin(layer, q)
        found.append(plan.finish(ticket, k, v, None).wait())
        if count and layer + 1 < len(LAYERS):
            following = rows[layer + 1][0][:count]
            plan.expect(layer + 1, following.flip(0, 1, 2) if wrong else following)
    return found


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("selection", POLICIES, ids=["all", "a quarter", "two tiles"])
def test_no_bit_depends_on_what_attention_is_told(selection: Selection | None, wrong: bool) -> None:
    local, _buffer = plain(selection)
    offloaded = Offloaded(selection)
    for number, step in enumerate(steps()):
        found = told(offloaded, step, number, wrong=wrong)
        assert all(map(torch.equal, found, compute(local, step, number))), step


def test_what_the_told_queries_choose_is_fetched_ahead() -> None:
    offloaded = Offloaded(Selection(KVPolicy("quest", tokens=48)))
    for number, step in enumerate(steps()[:2]):
        compute(offloaded.attention, step, number)
    compute(offloaded.attention, AttentionStep(1, [0], [1], [301], [300]), 3)
    units, step = offloaded.units, AttentionStep(1, [0], [1], [302], [300])
    read: dict[bool, dict[int, list[int]]] = {}
    for wrong in (False, True):
        units.asked.clear(), units.ahead.clear()
        told(offloaded, step, 4, wrong=wrong)
        asked = {layer: tiles for layer, tiles in units.asked if tiles}
        assert [layer for layer, _ in units.ahead] == [1, 2, 0], "each layer once"
        read[wrong] = dict(units.ahead)
        assert all((read[wrong][layer] == asked[layer]) is not wrong for layer in (1, 2))


def test_nothing_is_chosen_early_if_nearly_all_is_in_memory() -> None:
    offloaded = Offloaded(Selection(KVPolicy("quest", tokens=48)))
    compute(offloaded.attention, steps()[0], 0)
    asked = []
    for number, share in enumerate((0.5, 0.02, 0.0, 0.5, 0.5)):
        offloaded.units.share = share
        step = AttentionStep(1, [0], [1], [201 + number], [200])
        plan = offloaded.attention.plan(step)
        asked.append(plan.num_expected())
        for layer in range(len(LAYERS)):
            q, k, v = inputs(1)
            plan.finish(plan.begin(layer, q), k, v, None)
    assert asked == [1, 1, 0, 0, 1], "it depends on the step before"
    offloaded.attention._early.always = False
    step = AttentionStep(1, [0], [1], [206], [200])
    assert offloaded.attention.plan(step).num_expected() == 0


def test_rows_that_decode_are_told_beside_those_of_a_prompt() -> None:
    offloaded = Offloaded(Selection(KVPolicy("quest", tokens=48)))
    compute(offloaded.attention, steps()[0], 0)
    step = AttentionStep(1, [0, TILES * 16], [1, 100], [201, 133], [200, 300])
    offloaded.units.asked.clear()
    assert offloaded.attention.plan(step).num_expected() == 1
    told(offloaded, step, 1, wrong=False)
    ahead = dict(offloaded.units.ahead)
    assert ahead[2] == dict(offloaded.units.asked)[2]
    assert ahead[2][-9:] == [*range(TILES, TILES + 9)], "a prompt reads everything"
    assert len(ahead[2]) < 13 + 9
    prompts = AttentionStep(0, [0, TILES * 16], [1, 1], [202, 134], [300, 300])
    assert offloaded.attention.plan(prompts).num_expected() == 0, "nothing is chosen"


def test_whole_sequences_are_fetched_ahead_layer_after_layer() -> None:
    offloaded = Offloaded()
    compute(offloaded.attention, steps()[0], 0)
    everything = [*range(13), *range(TILES, TILES + 3)]
    assert offloaded.units.ahead == [(layer, everything) for layer in (1, 2, 0)]


def test_sequences_that_do_not_fit_together_are_refused_before_anything_is_read() -> None:
    selection = Selection(KVPolicy("quest", tokens=48))
    offloaded = Offloaded(selection, max_tiles=15)
    for step in (  # 13 tiles and 3 of another sequence
        AttentionStep(0, [0], [200], [200], [200]),
        AttentionStep(0, [TILES * 16], [33], [33], [33]),
    ):
        compute(offloaded.attention, step, 0)
    offloaded.units.asked.clear()
    before = selection.counts()
    with pytest.raises(KVLostError, match="a layer of the step does not fit"):
        offloaded.attention.plan(AttentionStep(0, [0, TILES * 16], [1] * 2, [201, 34], [201] * 2))
    assert not offloaded.units.asked and selection.counts() == before
    offloaded.attention.plan(AttentionStep(2, [0, TILES * 16], [1, 1], [201, 34], [200, 33]))


@pytest.mark.parametrize("budget", [160, 1000], ids=["most tiles", "all tiles"])
def test_rows_that_choose_more_than_fits_are_refused_before_anything_is_fetched(
    budget: int,
) -> None:
    offloaded = Offloaded(Selection(KVPolicy("quest", tokens=budget)), max_tiles=13)
    for start, length in ((0, 200), (TILES * 16, 33)):
        compute(offloaded.attention, AttentionStep(0, [start], [length], [length], [length]), 0)
    offloaded.units.asked.clear()
    both = AttentionStep(2, [0, TILES * 16], [1, 1], [201, 34], [200, 33])
    with pytest.raises(KVLostError, match="a layer of the step does not fit"):
        compute(offloaded.attention, both, 1)
    assert not offloaded.units.asked and offloaded.units.num_held == 0
    compute(offloaded.attention, AttentionStep(1, [0], [1], [201], [200]), 1)  # alone it fits


def test_k_v_that_cannot_be_read_ends_the_step_and_lets_all_units_go() -> None:
    offloaded = Offloaded()
    compute(offloaded.attention, steps()[0], 0)
    plan = offloaded.attention.plan(AttentionStep(1, [0], [1], [201]))
    q, k, v = inputs(1)
    plan.finish(plan.begin(0, q), k, v, None)
    offloaded.units.fails = True
    with pytest.raises(KVLostError, match="K/V on disk: broken") as raised:
        plan.finish(plan.begin(1, q), k, v, None)
    assert raised.value.errno == errno.EIO
    assert offloaded.units.num_held == 0


@pytest.mark.parametrize("tiles_per_page", [1, 2, 3, 8, 64])
def test_bounds_of_a_page_fill_whole_system_pages(tiles_per_page: int) -> None:
    layout = OffloadedKVLayout(LAYERS, "int8", 64, has_bounds=True)
    before = layout.bounds_tile_bytes
    layout.pad_bounds(tiles_per_page)
    assert layout.bounds_tile_bytes * tiles_per_page % UNIT_ALIGNMENT == 0
    assert layout.bounds_tile_bytes % 64 == 0
    assert before <= layout.bounds_tile_bytes < before + UNIT_ALIGNMENT
    assert all(size % UNIT_ALIGNMENT == 0 for size in (*layout.unit_bytes, layout.tile_bytes))
