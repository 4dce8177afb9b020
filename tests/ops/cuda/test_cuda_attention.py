"""A step's metadata, and whole steps of one layer: append, then decode rows and prefill chunks."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time

import pytest
import torch

from tests.support.cuda.cuda_kv import DEVICE, Tiles, random_kv, random_q

from ops.cuda.attention import HeadShape, KVTiles, StepArrays, layer_bytes  # isort: skip

pytestmark = pytest.mark.usefixtures("seeded")
FP32, INT8 = torch.float32, torch.int8


def step_arrays(max_rows=64, max_seqs=8, max_len=4096, heads=4, kv_heads=2, **more) -> StepArrays:
    shapes = [HeadShape(heads, kv_heads, 64)]
    return StepArrays(max_rows, max_seqs, max_len, shapes, DEVICE, **more)


def filled(arrays, *step) -> torch.Tensor:
    host = torch.full((arrays.num_words,), -7, dtype=torch.int32)
    arrays.fill(host, *step)
    arrays.upload(host)
    return host


def test_rows_and_prompts():
    arrays = step_arrays()
    filled(arrays, [160, 32, 320, 1600], [1, 1, 5, 33], [7, 1, 20, 33], 2, 44, 4)
    rows = [166, 32, *range(335, 340), *range(1600, 1633), -1, -1, -1, -1]
    assert arrays.rows[:44].tolist() == rows
    assert arrays.starts[:2].tolist() == [160, 32]
    assert arrays.prompt_starts[:2].tolist() == [320, 1600]
    assert arrays.prompts[:2, :3].tolist() == [[2, 5, 20], [7, 33, 33]]
    # two query heads per K/V head: 64 rows a tile; the longest chunk first
    assert arrays.num_tiles[0].tolist() == [2]
    assert arrays.tiles[0][:2].tolist() == [[0, 0], [1, 0]]


def test_prompt_tiles_cover_every_row_once():
    arrays = step_arrays(max_rows=400, heads=8, kv_heads=1)
    counts = [1, 16, 17, 100, 33]
    filled(arrays, [0] * 5, counts, [n + 50 for n in counts], 0, 200, 0)
    (rows,) = arrays.rows_per_tile
    tiles = arrays.tiles[0][: arrays.num_tiles[0].item()].tolist()
    covered = [[s, r] for s, n in enumerate(counts) for r in range(0, n, rows)]
    assert sorted(tiles) == covered
    assert len(covered) <= 200 // rows + 5


@pytest.mark.parametrize("window", [None, 1, 100, 300, 5000])
def test_items_cover_every_visible_key_once(window):
    arrays = step_arrays(max_len=70000, windows=[window], min_split=64)
    lens = [1, 64, 65, 2047, 2048, 2049, 70000]
    filled(arrays, [0] * 7, [1] * 7, lens, 7, 8, 8)
    items = arrays.items[0][: arrays.num_items[0].item()].tolist()
    slots = arrays.slots[0].tolist()
    assert slots[7] == [0, 0]
    for row, length in enumerate(lens):
        first, count = slots[row]
        own = [item for item in items if item[0] == row]
        assert [item[3] for item in own] == list(range(first, first + count))
        ends = [item[2] for item in own]
        assert [item[1] for item in own] == [max(0, length - (window or length)), *ends[:-1]]
        assert ends[-1] == length and count <= 33
        # multiples of a power of two that depends on the row alone
        size = max([64, *(b - a for a, b in itertools.pairwise(ends))])
        assert size & (size - 1) == 0 and all(end % size == 0 for end in ends[:-1])


def test_lists_for_each_window():
    arrays = step_arrays(windows=[None, 64], min_split=64)
    filled(arrays, [0, 640], [1, 1], [300, 10], 2, 2, 2)
    assert [n.item() for n in arrays.num_items] == [6, 3]
    assert arrays.items[1][:3].tolist() == [[0, 236, 256, 0], [0, 256, 300, 1], [1, 0, 10, 2]]
    assert [arrays.window_index(w) for w in (None, 64)] == [0, 1]


def test_a_step_without_sequences():
    arrays = step_arrays()
    filled(arrays, [], [], [], 0, 3, 2)
    assert arrays.rows[:3].tolist() == [-1] * 3 and arrays.num_tiles[0].tolist() == [0]
    assert arrays.num_items[0].tolist() == [0] and not arrays.slots[0].any()


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("max_rows 65; the limit is 64", ([0], [60], [60], 0, 65, 0)),
        ("max_seqs 9; the limit is 8", ([0] * 9, [1] * 9, [1] * 9, 0, 9, 0)),
        ("max_seqs 9; the limit is 8", ([0], [1], [1], 1, 9, 9)),
        ("max_len 4097; the limit is 4096", ([0], [1], [4097], 1, 1, 1)),
    ],
)
def test_limits_are_named(name, step):
    with pytest.raises(ValueError, match=name):
        filled(step_arrays(), *step)


def test_the_largest_steps_fit():
    arrays = step_arrays(max_rows=64, max_seqs=8, max_len=4096, windows=[None, 257], min_split=64)
    filled(arrays, [0] * 8, [1] * 8, [4096] * 8, 8, 64, 8)
    assert int(arrays.num_items[0]) == 8 * 32
    filled(arrays, [0] * 8, [8] * 8, [4096] * 8, 0, 64, 0)
    assert int(arrays.num_tiles[0]) == 8


def test_filling_is_quick():
    """The limit is ten times the time on an idle machine."""
    arrays = StepArrays(4096, 256, 32768, [HeadShape(32, 8, 128)], DEVICE)
    host = torch.zeros(arrays.num_words, dtype=torch.int32)
    decodes = ([16 * i for i in range(256)], [1] * 256, [4000 + i for i in range(256)], 256)
    prompts = ([0] * 8, [256] * 8, [3000] * 8, 0)
    for step, padded in ((decodes, (256, 256)), (prompts, (2048, 0))):
        times_s = []
        for _ in range(5):
            begin = time.perf_counter()
            arrays.fill(host, *step, *padded)
            times_s.append(time.perf_counter() - begin)
        assert min(times_s) < 5e-3, f"{min(times_s) * 1e6:.0f} us"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"dtype": torch.float16}, "float16"),
        ({"group": None}, "scale group None"),
        ({"dtype": FP32}, "scale group 64"),
        ({"head_dim": 72}, "head_dim 72"),
        ({"group": 48}, "group 48 does not divide"),
    ],
)
def test_unsupported_layers_are_refused(change, match):
    given = {"num_kv_heads": 2, "head_dim": 64, "dtype": INT8, "group": 64} | change
    with pytest.raises(ValueError, match=match):
        layer_bytes(**given)


def test_layer_bytes():
    assert layer_bytes(8, 128, INT8, 64) == 2 * 8 * 16 * (128 + 4)
    assert layer_bytes(2, 80, torch.bfloat16, None) == 2 * 2 * 16 * 160
    with pytest.raises(AssertionError):
        KVTiles(4, 2, 64, 0.1, None, INT8, 64, layer_bytes(2, 64, INT8, 64) - 16, 0)


@pytest.mark.parametrize(
    ("dtype", "group", "window"), [(INT8, 32, None), (FP32, None, 30), (torch.bfloat16, None, None)]
)
def test_a_mixed_step(dtype, group, window):
    """A step over earlier K/V appends and attends. The launch has more decode rows than
    sequences, so that they overlap the rows of prefill chunks, and it has padding rows."""
    lens, rows, decodes, padding = [40, 1, 90, 33], [1, 1, 20, 33], 2, (2, 3)
    tiles = Tiles(4, 2, 64, dtype, group, window, lens)
    for i in range(4):
        tiles.write(i, *random_kv(lens[i] - rows[i], 2, 64)) if lens[i] > rows[i] else None
    total = decodes + padding[0] + sum(rows[decodes:]) + padding[1]
    k, v, q = random_q(total, 2, 64), random_q(total, 2, 64), random_q(total, 4, 64)
    arrays = tiles.arrays(rows, decodes, padding=padding, min_split=32)
    tiles.attention.append(arrays, k, v)
    out = tiles.attention.attend(arrays, q, decodes + padding[0], total, True)
    lse = torch.full((total, 4), float("nan"), device=DEVICE)
    wide = tiles.attention.attend(arrays, q, decodes + padding[0], total, True, lse=lse)
    assert wide.dtype == torch.float32
    first = [0, 1, decodes, decodes + rows[2]]
    for i in range(4):
        own = slice(first[i], first[i] + rows[i])
        stored_k, stored_v = tiles.read(i)
        step = 0.5 * 5 / 127 if group else 0.0
        assert (stored_k[-rows[i] :] - k[own].cpu().double()).abs().max() <= step
        assert (stored_v[-rows[i] :] - v[own].cpu().double()).abs().max() <= step
        expected, sums, bound = tiles.expected(q[own], i)
        assert ((out[own].cpu().double() - expected).abs() <= bound).all()
        assert ((wide[own].cpu().double() - expected).abs() <= bound).all()
        torch.testing.assert_close(lse[own].cpu().double(), sums, rtol=0.0, atol=0.02)


HOLES = """
import torch
from memory.pages.linux_vmm import LinuxMemory
from tests.support.cuda.cuda_kv import Tiles, random_kv, random_q
from ops.cuda.attention import CudaAttentionLayer
from ops.triton_kernels.kv import gather
from dataclasses import replace

def run(dtype, group, lens, rows, decodes, window):
    page = 4096
    tiles = Tiles(4, 2, 64, dtype, group, window, lens)
    size = tiles.layer.tile_stride
    stride = -(-size // page) * page
    layer = replace(tiles.layer, tile_stride=stride, offset=0)
    memory = LinuxMemory(page, 64)
    base = memory.reserve(1 << 24)
    starts, used = [], 0
    for i, length in enumerate(lens):
        starts.append(16 * (3 + 40 * i))
        for tile in range(-(-length // 16)):
            pages = stride // page
            memory.map((starts[i] // 16 + tile) * stride, used, pages)
            used += pages
    tiles.layer, tiles.starts = layer, starts
    attention = CudaAttentionLayer(layer, base)
    total = decodes + sum(rows[decodes:])
    arrays = tiles.arrays(lens, 0)
    k, v = random_q(sum(lens), 2, 64), random_q(sum(lens), 2, 64)
    attention.append(arrays, k, v)
    arrays = tiles.arrays(rows, decodes, min_split=32)
    out = attention.attend(arrays, random_q(total, 4, 64), decodes, total, True)
    assert out.isfinite().all()
    for i, length in enumerate(lens):
        a, b = torch.empty(length, 2, 64), torch.empty(length, 2, 64)
        gather(layer, base, starts[i], a, b)
        assert a.isfinite().all() and b.isfinite().all()

run(torch.int8, 32, [33, 16, 17, 48], [1, 1, 17, 5], 2, None)
run(torch.int8, 16, [33, 16, 17, 48], [1, 1, 17, 5], 2, 20)
run(torch.bfloat16, None, [1, 31, 65], [1, 1, 65], 2, None)
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(DEVICE != "cpu", reason="the interpreter reads the host's memory")
def test_unmapped_pages_are_never_touched():
    """A range's tiles end at an unmapped page, as the first page of the reservation is."""
    child = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True)
    assert child.returncode == 0, f"{child.returncode}\n{child.stderr[-2000:]}"
