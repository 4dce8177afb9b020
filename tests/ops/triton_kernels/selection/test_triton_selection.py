"""Decode rows that read a part of their tiles: bounds, choice and attention."""

from __future__ import annotations

import pytest
import torch

from tests.support.cuda.cuda_kv import DEVICE, random_kv, random_q
from tests.support.cuda.selected_tiles import TILE, SelectedTiles, read_by
from tests.support.profile import every_day

from ops.triton_kernels.selection.scores import PIECES, constants  # isort: skip

pytestmark = pytest.mark.usefixtures("seeded")
BF16, FP32, INT8 = torch.bfloat16, torch.float32, torch.int8


def make(heads, kv_heads, dim, dtype, group=None, *, lens, q_dtype=BF16, **more) -> SelectedTiles:
    kv = [random_kv(length, kv_heads, dim, q_dtype) for length in lens]
    return SelectedTiles(heads, kv_heads, dim, dtype, group, lens=lens, kv=kv, **more)


def check(tiles: SelectedTiles, q, sequences, kv_lens, budgets, **options) -> None:
    """Checks what rows read against the stored bounds, and their results against fp64."""
    out, tables = tiles.select(q, sequences, kv_lens, budgets, **options)
    for row, (sequence, length, budget) in enumerate(zip(sequences, kv_lens, budgets, strict=True)):
        held = -(-length // TILE)
        read, is_clear = tiles.chosen(q[row], sequence, length, budget)
        if 0 < budget < held:
            found = read_by(tables[row], budget, held)
            assert torch.equal(found[is_clear], read[is_clear]), f"row {row}"
            assert is_clear.any(), "nothing was compared"
            read = found
        expected, bound = tiles.attention_over(q[row], sequence, length, read)
        error = (out[row].cpu().double() - expected).abs()
        assert (error <= bound).all(), f"row {row}: {float((error / bound).max())} of the bound"


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype", "group", "q_dtype"),
    every_day(
        (0, 1),
        [
            (4, 2, 64, INT8, 64, BF16),
            (6, 2, 80, BF16, None, BF16),
            (4, 1, 64, FP32, None, FP32),
            (2, 1, 96, INT8, 32, FP32),
            (8, 1, 128, INT8, 64, BF16),
            (2, 2, 256, BF16, None, BF16),
            (20, 1, 64, INT8, 32, BF16),
            (2, 1, 512, INT8, 64, FP32),
        ],
    ),
)
def test_rows_read_the_tiles_with_the_largest_scores(heads, kv_heads, dim, dtype, group, q_dtype):
    lens = [1, 100, 333]
    tiles = make(heads, kv_heads, dim, dtype, group, lens=lens, q_dtype=q_dtype)
    tiles.bound()
    q = random_q(3, heads, dim, q_dtype)
    check(tiles, q, [0, 1, 2], lens, [1, 3, 6])


def test_bounds_are_those_of_the_stored_keys_rounded_outwards():
    """Bytes that no completed tile has stay as they were, and rows below 0 are skipped."""
    for dtype, group, dim in ((INT8, 40, 80), (BF16, None, 96), (FP32, None, 64)):
        tiles = make(4, 2, dim, dtype, group, lens=[50, 31], q_dtype=FP32)
        first, second = tiles.starts
        before = tiles.memory.clone()
        tiles.bound([first + 15, -1, first + 46, second + 3, first + 47])
        at, size = tiles.bounds_bytes()
        changed = torch.zeros_like(before, dtype=torch.bool)
        stride = tiles.layer.tile_stride
        for tile in (first // TILE, first // TILE + 2):
            changed[tile * stride + at : tile * stride + at + size] = True
        assert torch.equal(tiles.memory[~changed], before[~changed])
        most, least = (x[[0, 2]] for x in tiles.bounds(0, 3))
        keys = tiles.read(0)[0][:48].view(3, TILE, 2, dim)[[0, 2]]
        largest = keys.abs().amax((1, 3))[..., None]
        for found, exact in ((most, keys.amax(1)), (-least, -keys.amin(1))):
            assert (found >= exact - 1e-6 * largest).all()
            assert (found - exact <= 1.001 * largest / 127).all()


def test_bounds_of_zeros():
    tiles = SelectedTiles(1, 1, 64, FP32, lens=[16], kv=[[torch.zeros(16, 1, 64)] * 2])
    tiles.bound()
    assert not any(x.any() for x in tiles.bounds(0, 1))


def test_rows_of_one_sequence_and_lengths_around_tiles_and_splits():
    """Drafts are rows of one sequence; the first ones complete a tile that the next ones score."""
    lengths = [126, 127, 128, 129, 130, 144, 145, 1, 16, 17]
    tiles = make(4, 2, 64, INT8, 64, lens=[145], q_dtype=FP32)
    tiles.bound()
    budgets = [8, 7, 4, 8, 1, 9, 2, 1, 1, 1]
    q = random_q(len(lengths), 4, 64, FP32)
    check(tiles, q, [0] * len(lengths), lengths, budgets, padding=2)


@pytest.mark.parametrize("has_sinks", every_day((1,), [False, True]))
def test_soft_caps_and_sinks(has_sinks):
    sinks = [0.5, -3.0, 2.0, 30.0] if has_sinks else None
    tiles = make(4, 2, 64, INT8, 64, lens=[40, 200], q_dtype=FP32, soft_cap=1.5, sinks=sinks)
    tiles.bound()
    check(tiles, 4 * random_q(2, 4, 64, FP32), [0, 1], [40, 200], [2, 5])


def test_rows_that_read_everything_have_the_bits_of_the_ordinary_kernel():
    lens = [7, 130, 200, 64]
    tiles = make(4, 2, 64, INT8, 64, lens=lens)
    tiles.bound()
    q = random_q(4, 4, 64)
    plain = tiles.attention.attend(tiles.rows_of(range(4), lens), q, 4, 4, False)
    out, _ = tiles.select(q, range(4), lens, [500, 0, 13, 5])
    assert torch.equal(out, plain)
    some, _ = tiles.select(q, range(4), lens, [0, 4, 0, 1])
    assert torch.equal(some[[0, 2]], plain[[0, 2]])
    assert not torch.equal(some[1], plain[1]) and not torch.equal(some[3], plain[3])


def test_a_rows_bits_do_not_depend_on_the_others_and_padding_is_zero():
    lens, budgets = [130, 5, 200, 250], [3, 1, 8, 0]
    tiles = make(4, 2, 64, BF16, lens=lens)
    tiles.bound()
    q = random_q(6, 4, 64)
    together, _ = tiles.select(q, range(4), lens, budgets, padding=2)
    assert not together[4:].any()
    for i in range(0, 4, 2):
        alone, _ = tiles.select(q[i : i + 1], [i], [lens[i]], [budgets[i]])
        assert torch.equal(alone[0], together[i])


def choose(scores: torch.Tensor, wanted: int) -> torch.Tensor:
    """Returns the tiles that are chosen by scores: [Hk, n], and the row's own."""
    from ops.triton_kernels.selection.choice import choose_tiles

    heads, count = scores.shape
    bits = scores.float().view(torch.int32)
    orders = torch.full((2, heads, count + 3), 2**31 - 1, dtype=torch.int32, device=DEVICE)
    orders[1, :, :count] = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    choices = torch.tensor([[1, count, wanted, 0]], dtype=torch.int32, device=DEVICE)
    choose_tiles(choices, torch.ones(1, dtype=torch.int32, device=DEVICE), orders, 2)
    return orders[1, :, : wanted + 1].cpu()


@pytest.mark.parametrize("wanted", [0, 1, 5, 99, 100])
def test_of_equal_scores_the_newest_are_chosen(wanted):
    scores = torch.stack((torch.randint(-2, 3, (100,)) / 2, torch.full((100,), -3.5)))
    scores[0, 7] = float("inf")
    scores[0, 11] = float("-inf")
    for head, found in enumerate(choose(scores, wanted).tolist()):
        order = sorted(range(100), key=lambda i: (scores[head, i].item() + 0.0, i))
        assert found == [*sorted(order[100 - wanted :]), 100]


@pytest.mark.parametrize("wanted", [7, 39])
def test_scores_that_are_no_numbers_choose_as_many_tiles_as_any(wanted):
    scores = torch.full((2, 40), float("nan"))
    scores[1] *= -1
    scores[1].view(torch.int32)[[3, 9]] = -1  # the least order, which absent tiles have, too
    for found in choose(scores, wanted).tolist():
        assert len(set(found)) == wanted + 1 and found == sorted(found) and found[-1] == 40


def test_tiles_of_which_each_program_scores_several_blocks():
    length = 4400
    tiles = make(2, 1, 512, FP32, lens=[length], q_dtype=FP32)
    block = constants(tiles.layer, length)["BLOCK"]
    assert length // TILE > PIECES * block + block
    tiles.bound([tiles.starts[0] + i for i in range(15, length, TILE)])
    check(tiles, random_q(1, 2, 512, FP32), [0], [length], [12])
