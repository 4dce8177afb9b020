"""Rows that choose among tiles of which several machines have some, on every instruction set: the
same tiles as where one machine has them all, and attention over these."""

from __future__ import annotations

import pytest
import torch

from ops.cpu import native_library
from ops.cpu.native_partials import merge_into
from ops.cpu.native_tile_lists import TileList, TileShares, count_tiles
from quant.kv import TILE_TOKENS
from tests.support.memory.int8_kv import Cache
from tests.support.memory.selected_kv import topic_keys

pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
    pytest.mark.usefixtures("seeded"),
]
SHAPE = {"heads": 4, "kv_heads": 2, "dim": 64}
POSITIONS = (0, 15, 16, 40, 330, 335, 700)


class Shared:
    """Sequences whose K/V is on one machine (whole), and tile by tile on several in turn (parts).
    Each has one row at its end."""

    def __init__(self, count, keys, bits=8, shape=SHAPE):
        values = [torch.randn(k.shape) for k in keys]
        tokens, settings = max(map(len, keys)), {"bits": bits, "has_bounds": True}
        sizes = {"tokens": tokens, "sequences": len(keys)}
        self.whole = Cache(**shape, **sizes, **settings)
        self.parts = [Cache(**shape, **sizes, **settings) for _ in range(count)]
        self.lens = [len(k) for k in keys]
        self.own = [[] for _ in range(count)]  # of each part and sequence, its keys
        for i, (k, v) in enumerate(zip(keys, values, strict=True)):
            self.whole.fill(k, v, i)
            for number, part in enumerate(self.parts):
                tile = torch.arange(len(k)) // TILE_TOKENS
                mine = tile % count == number
                part.fill(k[mine], v[mine], i)
                self.own[number].append(int(mine.sum()))
        self.q = torch.randn(len(keys), shape["heads"], shape["dim"])

    def steps(self):
        rows = [1] * len(self.lens)
        numbers = range(len(rows))
        return [
            part.step(numbers, rows, own, prefix_only=True)
            for part, own in zip(self.parts, self.own, strict=True)
        ]

    def num_tiles(self, number):
        """Returns how many tiles before its own each row has in a part."""
        befores = [(length - 1) // TILE_TOKENS for length in self.lens]
        count = len(self.parts)
        return [before // count + (number < before % count) for before in befores]

    def lists(self, wanted):
        found = []
        for number, step in enumerate(self.steps()):
            shares = TileShares(self.num_tiles(number), wanted)
            words = self.parts[number].op.list_tiles(step, self.q, shares)
            found.append(TileList(shares, words))
        return found

    def whole_step(self, wanted):
        rows = [1] * len(self.lens)
        step = self.whole.step(range(len(rows)), rows, self.lens)
        step.select(rows, [n + 1 for n in wanted])
        return step


def read_lists(listed, kv_heads):
    """Yields each row, head and what its list has: pairs of a tile's number and its order."""
    at = 0
    words = listed.words.tolist()
    for row, (tiles, most) in enumerate(
        zip(listed.shares.num_tiles.tolist(), listed.shares.listed.tolist(), strict=True)
    ):
        for head in range(kv_heads):
            orders = words[at : at + most]
            at += most
            numbers = range(tiles)
            if 0 < most < tiles:
                bits = [word & 0xFFFFFFFF for word in words[at : at + -(-tiles // 32)]]
                at += len(bits)
                numbers = [n for n in range(tiles) if bits[n // 32] >> n % 32 & 1]
            yield row, head, list(zip(numbers, orders, strict=bool(most)))
    assert at == len(words)


def chosen(lists, counts, kv_heads):
    """Returns the numbers, in the whole sequence, of the tiles of each row and head that are
    chosen."""
    found = {}
    for number, (listed, count) in enumerate(zip(lists, counts, strict=True)):
        for row, head, pairs in read_lists(listed, kv_heads):
            best = sorted(pairs, key=lambda pair: (pair[1], pair[0]), reverse=True)
            tiles = [tile for tile, _ in best[: int(count[row, head])]]
            found.setdefault((row, head), []).extend(t * len(lists) + number for t in tiles)
    return {key: sorted(tiles) for key, tiles in found.items()}


def keys_of(kind):
    for position in POSITIONS:
        length = position + 1
        if kind == "topics":
            yield topic_keys(length, 1, 64)
        else:  # all or many tiles have the same bounds
            same = torch.randn(1, 1, 64).expand(length, 1, 64).clone()
            if kind == "few":
                same[: length // 3] *= 0.5
            yield same


@pytest.mark.covering(2)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", ["topics", "same", "few"])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_chosen_tiles_are_those_of_one_machine(isa, kind, count, bits):
    shape = SHAPE | {"kv_heads": 1}
    rows = Shared(count, list(keys_of(kind)), bits, shape)
    for wanted in (0, 1, 2, 7, 20, 100):
        each = [wanted] * len(POSITIONS)
        lists = rows.lists(each)
        found = chosen(lists, count_tiles(lists, 1), 1)
        is_read = rows.whole.op.choose(rows.whole_step(each), rows.q)
        at = 0
        for row, length in enumerate(rows.lens):
            num_tiles = -(-length // TILE_TOKENS)
            expected = is_read[at : at + num_tiles - 1].nonzero()[:, 0].tolist()
            assert found[row, 0] == expected, f"{wanted=} {length=}"
            at += num_tiles


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_merged_results_are_those_of_one_machine(isa, bits, count):
    """One machine has its bits."""
    rows = Shared(count, [topic_keys(position + 1, 2, 64) for position in POSITIONS], bits)
    for wanted in ([0] * 7, [3] * 7, [1, 2, 0, 1, 9, 20, 30], [100] * 7):
        lists = rows.lists(wanted)
        counts = count_tiles(lists, 2)
        expected_lse = torch.empty(len(POSITIONS), 4)
        expected = rows.whole.op.attend(rows.whole_step(wanted), rows.q, expected_lse)
        total, total_lse = torch.zeros(expected.shape), torch.full(expected_lse.shape, -torch.inf)
        for part, step, listed, own in zip(rows.parts, rows.steps(), lists, counts, strict=True):
            lse = torch.empty(expected_lse.shape)
            out = part.op.attend_listed(step, rows.q, listed, own, lse)
            assert bool((out[lse == -torch.inf] == 0).all())
            merge_into(total, total_lse, out, lse)
        if count == 1:
            assert torch.equal(total, expected) and torch.equal(total_lse, expected_lse)
        assert (total - expected).abs().max() < (2e-3 if bits == 8 else 2e-2)
        assert (total_lse - expected_lse).abs().max() < 1e-3


def test_a_list_is_no_longer_than_what_a_row_chooses():
    shares = TileShares([0, 5, 100, 100, 100], [9, 9, 0, 7, 100])
    assert shares.listed.tolist() == [0, 5, 0, 7, 100]
    assert shares.num_words == 5 + (7 + 4) + 100


def test_counts_of_absurd_lists_stay_within_the_lists():
    """A machine may send any numbers."""
    shares = [TileShares([40], [6]), TileShares([39], [6])]
    for draw in range(50):
        generator = torch.Generator().manual_seed(draw)
        lists = [
            TileList(
                one,
                torch.randint(
                    -(2**31), 2**31, (one.num_words * 2,), generator=generator, dtype=torch.int64
                ).to(torch.int32)
                if draw % 2
                else torch.full((one.num_words * 2,), -(2**31), dtype=torch.int32),
            )
            for one in shares
        ]
        for one, count in zip(shares, count_tiles(lists, 2), strict=True):
            assert bool((count >= 0).all()) and bool((count <= one.listed[:, None]).all())
