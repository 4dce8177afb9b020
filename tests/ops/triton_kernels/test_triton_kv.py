"""Kernels write rows into K/V tiles and read them back."""

from __future__ import annotations

import pytest
import torch

from ops.reference import ReferenceBackend
from tests.support.cuda.cuda_kv import BF16, DEVICE, Tiles, random_kv, random_q

from ops.triton_kernels.kv import Rotation, append, gather, rotate  # isort: skip

pytestmark = pytest.mark.usefixtures("seeded")
FP32, INT8 = torch.float32, torch.int8


def rotation(rows: int, half: int) -> Rotation:
    angles = torch.randn(rows, half, device=DEVICE)
    return Rotation(angles.cos(), angles.sin())


@pytest.mark.parametrize(
    ("heads", "dim", "half"), [(1, 64, 32), (3, 80, 16), (5, 96, 48), (17, 16, 4)]
)
@pytest.mark.parametrize("dtype", [FP32, torch.bfloat16])
@pytest.mark.parametrize("in_place", [True, False])
def test_rotate(heads, dim, half, dtype, in_place):
    x, turn = random_q(3, heads, dim, dtype), rotation(3, half)
    expected = ReferenceBackend().rotary(x, turn.cos, turn.sin).float()
    before = x.clone()
    found = rotate(x, turn, x if in_place else None)
    # a rounded sum of two rounded products: where they cancel, the error is that of the products
    bound = 2 * (2**-23 + (BF16 if dtype != FP32 else 0)) * before.float().abs().amax()
    assert (found.float() - expected).abs().max() <= bound
    assert torch.equal(found[..., 2 * half :], before[..., 2 * half :])
    assert torch.equal(x, found if in_place else before)


def test_rotate_without_rows():
    assert rotate(torch.empty(0, 2, 64, device=DEVICE), rotation(0, 32)).shape == (0, 2, 64)


@pytest.mark.parametrize(
    ("kv_heads", "dim", "dtype", "group"),
    [
        (2, 64, FP32, None),
        (1, 80, torch.bfloat16, None),
        (2, 128, INT8, 64),
        (3, 64, INT8, 64),
        (1, 80, INT8, 40),
        (2, 96, INT8, 32),
    ],
)
def test_append_writes_its_rows_and_nothing_else(kv_heads, dim, dtype, group):
    """Compared byte for byte, with the poison around it; rows numbered below 0 are skipped."""
    lens = [17, 3]
    kv = [random_kv(length, kv_heads, dim, torch.bfloat16) for length in lens]
    expected = Tiles(kv_heads, kv_heads, dim, dtype, group, lens=lens, kv=kv)
    tiles = Tiles(kv_heads, kv_heads, dim, dtype, group, lens=lens)
    numbers = [s + i for s, length in zip(tiles.starts, lens, strict=True) for i in range(length)]
    numbers.insert(4, -1)
    rows = torch.tensor([*numbers, -1], device=DEVICE)
    k, v = (torch.cat([x[i] for x in kv]) for i in range(2))
    spread = [random_q(22, kv_heads, dim) for _ in range(2)]  # strided rows
    for x, source in zip(spread, (k, v), strict=True):
        x[:4], x[5:21] = source[:4].to(DEVICE), source[4:].to(DEVICE)
    append(tiles.layer, tiles.base, *spread, rows)
    assert torch.equal(tiles.memory, expected.memory)


def test_append_of_zeros_and_of_values_beyond_fp16_scales():
    tiles = Tiles(1, 1, 64, INT8, 32, lens=[3])
    k = torch.zeros(3, 1, 64, device=DEVICE)
    k[1, 0, :32], k[2, 0, 5] = 1e-9, 1e9
    numbers = torch.arange(3, device=DEVICE) + tiles.starts[0]
    append(tiles.layer, tiles.base, k, -k, numbers)
    found, _ = tiles.read(0)
    assert not found[0].any() and not found[2, 0, 32:].any()
    assert (found[1, 0, :32] - 1e-9).abs().max() <= 2**-25  # the smallest scale
    assert found[2, 0, 5] == 127 * 65504 and found.isfinite().all()


@pytest.mark.parametrize(("half", "group"), [(32, 64), (16, 32), (8, None)])
def test_append_rotates_k_in_fp32_before_it_quantizes(half, group):
    dtype = INT8 if group else FP32
    k, v = random_kv(5, 2, 64)
    turn = rotation(5, half)
    turned = ReferenceBackend().rotary(k.float().to(DEVICE), *turn)
    expected = Tiles(2, 2, 64, dtype, group, lens=[5], kv=[(turned, v)])
    tiles = Tiles(2, 2, 64, dtype, group, lens=[5])
    numbers = torch.arange(5, device=DEVICE) + tiles.starts[0]
    append(tiles.layer, tiles.base, k.to(DEVICE), v.to(DEVICE), numbers, turn)
    (found, found_v), (k64, v64) = tiles.read(0), expected.read(0)
    assert torch.equal(found_v, v64)
    # a fused product may round one step differently
    step = float(k64.abs().max()) / 127 * 1.01 if group else 1e-6
    assert (found - k64).abs().max() <= step
    assert (found - k64).abs().gt(1e-6).double().mean() < 0.02


@pytest.mark.parametrize(
    ("dim", "dtype", "group"), [(64, FP32, None), (80, torch.bfloat16, None), (96, INT8, 32)]
)
@pytest.mark.parametrize("length", [1, 70])
def test_gather(dim, dtype, group, length):
    tiles = Tiles(2, 2, dim, dtype, group, lens=[20, 70])
    for i in range(2):
        tiles.write(i, *random_kv(tiles.lens[i], 2, dim))
    k, v = (torch.full((length, 2, dim), float("nan"), device=DEVICE) for _ in range(2))
    gather(tiles.layer, tiles.base, tiles.starts[1], k, v)
    for found, expected in zip((k, v), tiles.read(1, length), strict=True):
        assert torch.equal(found.cpu(), expected.float())
    narrow = torch.empty(length, 2, dim, dtype=torch.bfloat16, device=DEVICE)
    gather(tiles.layer, tiles.base, tiles.starts[1], narrow, narrow.clone())
    assert ((narrow - k).abs() <= BF16 * k.abs()).all()
