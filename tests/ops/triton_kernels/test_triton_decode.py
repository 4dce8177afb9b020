"""Decode attention over K/V tiles, through the work lists of StepArrays."""

from __future__ import annotations

import pytest
import torch

from tests.support.cuda.cuda_kv import DEVICE, Tiles, random_kv, random_q
from tests.support.profile import every_day

pytestmark = pytest.mark.usefixtures("seeded")
BF16, FP32, INT8 = torch.bfloat16, torch.float32, torch.int8


def make(heads, kv_heads, dim, dtype, group=None, window=None, *, lens, q_dtype=BF16, **more):
    kv = [random_kv(length, kv_heads, dim, q_dtype) for length in lens]
    return Tiles(heads, kv_heads, dim, dtype, group, window, lens, kv, **more)


def attend(tiles: Tiles, q, *, padding=0, **sizes):
    rows = len(tiles.lens)
    arrays = tiles.arrays([1] * rows, rows, padding=(padding, 0), **sizes)
    return tiles.attention.attend(arrays, q, rows + padding, rows + padding, False)


def check(tiles: Tiles, out, q):
    assert out.dtype == q.dtype and out.shape == q.shape
    for i in range(len(tiles.lens)):
        expected, _, bound = tiles.expected(q[i : i + 1], i)
        error = (out[i : i + 1].cpu().double() - expected).abs()
        assert (error <= bound).all(), f"row {i}: {float((error / bound).max())} of the bound"


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype", "group", "q_dtype"),
    every_day(
        (1, 3, 7, 8, 11, 15),
        [
            (4, 1, 64, FP32, None, FP32),
            (4, 2, 96, FP32, None, FP32),
            (2, 2, 64, BF16, None, BF16),
            (8, 1, 80, BF16, None, BF16),
            (4, 1, 256, BF16, None, BF16),
            (4, 1, 128, INT8, 64, BF16),
            (4, 2, 64, INT8, 64, BF16),
            (2, 2, 80, INT8, 40, BF16),
            (8, 1, 96, INT8, 32, FP32),
            (4, 2, 96, INT8, 32, BF16),
            (1, 1, 256, INT8, 64, BF16),
            (20, 1, 64, INT8, 32, BF16),
            (4, 1, 128, INT8, 128, FP32),
            (2, 1, 192, BF16, None, BF16),
            (2, 1, 512, BF16, None, BF16),
            (2, 1, 512, INT8, 64, FP32),
        ],
    ),
)
def test_rows_of_many_lengths(heads, kv_heads, dim, dtype, group, q_dtype):
    tiles = make(heads, kv_heads, dim, dtype, group, lens=[1, 17, 200], q_dtype=q_dtype)
    q = random_q(3, heads, dim, q_dtype)
    check(tiles, attend(tiles, q, min_split=64), q)


@pytest.mark.parametrize("dtype", [INT8, FP32])
def test_lengths_around_tiles_blocks_and_splits(dtype):
    lens = [2, 15, 16, 31, 63, 64, 65, 127, 128, 129]
    group = 64 if dtype == INT8 else None
    tiles = make(2, 1, 64, dtype, group, lens=lens, q_dtype=FP32)
    q = random_q(len(lens), 2, 64, FP32)
    check(tiles, attend(tiles, q, min_split=128), q)


@pytest.mark.parametrize("window", every_day((1, 4), [1, 16, 50, 64, 129, 1000]))
def test_windows(window):
    lens = [1, 40, 64, 131, 200]
    tiles = make(4, 2, 64, INT8, 64, window, lens=lens, q_dtype=FP32)
    q = random_q(len(lens), 4, 64, FP32)
    check(tiles, attend(tiles, q, min_split=64), q)


@pytest.mark.covering(1)
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_soft_caps_and_sinks(window, has_sinks):
    sinks = [0.5, -3.0, 2.0, 30.0] if has_sinks else None
    more = {"lens": [1, 40, 200], "q_dtype": FP32, "soft_cap": 1.5, "sinks": sinks}
    tiles = make(4, 2, 64, INT8, 64, window, **more)
    q = 4 * random_q(3, 4, 64, FP32)
    check(tiles, attend(tiles, q, min_split=64), q)


def test_padding_rows_are_zeros_and_write_nothing_else():
    tiles = make(4, 2, 64, INT8, 64, lens=[20, 70], q_dtype=FP32)
    q = random_q(4, 4, 64, FP32)
    out = attend(tiles, q, padding=2)
    check(tiles, out[:2], q[:2])
    assert not out[2:].any()


@pytest.mark.parametrize(("dtype", "group"), [(INT8, 32), (BF16, None)])
def test_a_rows_bits_do_not_depend_on_the_others(dtype, group):
    lens = [130, 5, 77, 200]
    tiles = make(4, 2, 64, dtype, group, lens=lens)
    q = random_q(4, 4, 64)
    together = attend(tiles, q, min_split=64)
    for i in range(4):
        alone = Tiles(4, 2, 64, dtype, group, lens=[lens[i]])
        alone.memory, alone.base = tiles.memory, tiles.base
        alone.attention, alone.starts = tiles.attention, [tiles.starts[i]]
        assert torch.equal(attend(alone, q[i : i + 1], min_split=64)[0], together[i])


def test_large_scores_of_either_sign_do_not_overflow():
    k, v = random_kv(100, 1, 64, FP32)
    tiles = Tiles(2, 1, 64, FP32, lens=[100], kv=[(300 * k, v)])
    q = random_q(1, 2, 64, FP32)
    out = attend(tiles, q, min_split=64)
    assert (out.cpu().double() - tiles.expected(q, 0)[0]).abs().max() < 1e-3


def test_combine_gives_the_log_sum_exp():
    from ops.triton_kernels.decode import combine

    lses = torch.tensor([[0.5], [-3.0], [700.0], [701.0]], device=DEVICE)
    outs = torch.randn(4, 1, 64, device=DEVICE)
    slots = torch.tensor([[2, 2], [0, 0], [0, 2]], dtype=torch.int32, device=DEVICE)
    result, lse = torch.empty(3, 1, 64, device=DEVICE), torch.empty(3, 1, device=DEVICE)
    combine(outs, lses, slots, result, lse)
    for row, slot in ((0, slice(2, 4)), (2, slice(0, 2))):
        expected = (lses[slot].softmax(0)[..., None] * outs[slot]).sum(0)
        torch.testing.assert_close(result[row], expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lse[row], lses[slot].logsumexp(0), rtol=1e-6, atol=1e-6)
    assert not result[1].any() and lse[1] == -torch.inf
