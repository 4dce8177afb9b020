"""Prefill attention over K/V tiles, with chunks of several sequences at once."""

from __future__ import annotations

import pytest
import torch

from tests.support.cuda.cuda_kv import DEVICE, Tiles, random_kv, random_q
from tests.support.profile import every_day

pytestmark = pytest.mark.usefixtures("seeded")
BF16, FP32, INT8 = torch.bfloat16, torch.float32, torch.int8


def make(heads, kv_heads, dim, dtype, group=None, window=None, *, lens, q_dtype=FP32, **more):
    kv = [random_kv(length, kv_heads, dim, q_dtype) for length in lens]
    return Tiles(heads, kv_heads, dim, dtype, group, window, lens, kv, **more)


def attend(tiles: Tiles, q, num_rows, *, prefix_only=False):
    """Returns (out, lse) of the chunks' rows, one chunk after another."""
    from ops.triton_kernels.prefill import prefill

    if prefix_only:  # the work list of as many rows whose K/V are there too
        arrays = tiles.arrays(
            num_rows, 0, kv_lens=[a + b for a, b in zip(tiles.lens, num_rows, strict=True)]
        )
        arrays.prompts[: len(num_rows), 2] = torch.tensor(tiles.lens, dtype=torch.int32)
    else:
        arrays = tiles.arrays(num_rows, 0)
    out = torch.full(q.shape, float("nan"), dtype=q.dtype, device=DEVICE)
    lse = torch.full(q.shape[:2], float("nan"), device=DEVICE)
    prefill(
        q, tiles.layer, tiles.base, arrays.prompt_starts, arrays.prompts, arrays.tiles[0],
        arrays.num_tiles[0], len(arrays.tiles[0]), arrays.rows_per_tile[0], out, lse,
        prefix_only=prefix_only, sinks=None if prefix_only else tiles.attention.sinks,
    )  # fmt: skip
    return out, lse


def check(tiles: Tiles, found, q, num_rows, *, prefix_only=False):
    out, lse, first = *found, 0
    for i, rows in enumerate(num_rows):
        part = slice(first, first + rows)
        expected, of_lse, bound = tiles.expected(q[part], i, prefix_only=prefix_only)
        error = (out[part].cpu().double() - expected).abs()
        assert (error <= bound).all(), f"{i}: {float((error / bound).max())} of the bound"
        tolerance = 1e-5 if q.dtype == FP32 else 2e-2
        torch.testing.assert_close(lse[part].cpu().double(), of_lse, rtol=0, atol=tolerance)
        first += rows


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype", "group", "q_dtype"),
    every_day(
        (0, 2, 5, 6, 8),
        [
            (2, 2, 64, FP32, None, FP32),
            (8, 1, 96, BF16, None, BF16),
            (4, 1, 80, BF16, None, BF16),
            (4, 1, 256, BF16, None, BF16),
            (4, 2, 128, INT8, 64, BF16),
            (7, 1, 64, INT8, 64, BF16),
            (2, 1, 80, INT8, 40, BF16),
            (4, 2, 96, INT8, 32, BF16),
            (4, 1, 256, INT8, 64, FP32),
            (8, 1, 512, BF16, None, BF16),
            (2, 1, 512, INT8, 64, FP32),
        ],
    ),
)
def test_chunks_of_several_sequences(heads, kv_heads, dim, dtype, group, q_dtype):
    lens, num_rows = [70, 1, 150], [70, 1, 40]
    tiles = make(heads, kv_heads, dim, dtype, group, lens=lens, q_dtype=q_dtype)
    q = random_q(sum(num_rows), heads, dim, q_dtype)
    check(tiles, attend(tiles, q, num_rows), q, num_rows)


@pytest.mark.parametrize("past", every_day((0, 3, 5), [0, 1, 15, 31, 32, 33, 64, 127]))
def test_lengths_around_tiles_and_blocks(past):
    rows = [1, 16, 33, 64, 66]
    tiles = make(2, 1, 64, INT8, 64, lens=[past + n for n in rows])
    q = random_q(sum(rows), 2, 64, FP32)
    check(tiles, attend(tiles, q, rows), q, rows)


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("prefix_only", [False, True])
def test_soft_caps_and_sinks(window, prefix_only):
    lens, rows = [90, 40], [50, 3]
    sinks = [0.5, -3.0, 2.0, 30.0]
    tiles = make(4, 2, 64, INT8, 64, window, lens=lens, soft_cap=1.5, sinks=sinks)
    q = 4 * random_q(sum(rows), 4, 64, FP32)
    found = attend(tiles, q, rows, prefix_only=prefix_only)
    check(tiles, found, q, rows, prefix_only=prefix_only)


@pytest.mark.parametrize("window", every_day((1, 3), [1, 20, 32, 65, 128, 1000]))
@pytest.mark.parametrize("prefix_only", [False, True])
def test_windows(window, prefix_only):
    lens, rows = [100, 140, 40], [100, 70, 3]
    tiles = make(2, 1, 64, INT8, 64, window, lens=lens)
    q = random_q(sum(rows), 2, 64, FP32)
    found = attend(tiles, q, rows, prefix_only=prefix_only)
    check(tiles, found, q, rows, prefix_only=prefix_only)


def test_prefix_and_own_keys_merged_are_the_whole():
    lens, rows = [130, 65], [50, 65]
    past = [a - b for a, b in zip(lens, rows, strict=True)]
    tiles = make(4, 2, 64, INT8, 32, lens=lens)
    q = random_q(sum(rows), 4, 64, FP32)
    whole, whole_lse = attend(tiles, q, rows)
    tiles.lens = past
    tiles_prefix = attend(tiles, q, rows, prefix_only=True)
    own = Tiles(4, 2, 64, INT8, 32, lens=rows)
    # the same stored numbers, from each chunk's first token on
    for i, (length, n) in enumerate(zip(lens, rows, strict=True)):
        k, v = tiles.read(i, length)
        own.write(i, k[-n:].float(), v[-n:].float())
    tiles_own = attend(own, q, rows)
    lse = torch.logaddexp(tiles_prefix[1], tiles_own[1])
    out = sum(o * (part - lse).exp()[..., None] for o, part in (tiles_prefix, tiles_own))
    torch.testing.assert_close(lse, whole_lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out, whole, rtol=1e-5, atol=1e-5)
    assert (tiles_prefix[1][rows[0] :] == -torch.inf).all()  # the second sequence has no prefix
    assert not tiles_prefix[0][rows[0] :].any()


@pytest.mark.parametrize(("dtype", "group", "window"), [(INT8, 32, None), (BF16, None, 40)])
def test_a_rows_bits_depend_neither_on_the_others_nor_on_chunks(dtype, group, window):
    tiles = make(4, 2, 64, dtype, group, window, lens=[150, 90], q_dtype=BF16)
    q = random_q(190, 4, 64)
    whole, _ = attend(tiles, q, [120, 70])
    tiles.lens = [70, 80]  # the first 40 of the 120 rows, the first 60 of the 70
    part, _ = attend(tiles, torch.cat((q[:40], q[120:180])), [40, 60])
    assert torch.equal(part[:40], whole[:40])
    assert torch.equal(part[40:], whole[120:180])
