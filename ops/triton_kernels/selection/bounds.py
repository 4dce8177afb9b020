"""Bounds of the keys of a tile: the largest and the smallest value of every dimension.

They are bytes, rounded outwards, with one scale for a tile and K/V head (ops.kv_tiles:
key_bounds_bytes): all of a sequence's bounds are read for every token, so that half the bytes of
fp16 save more than the K/V that a slightly better order would. K/V in bf16 and fp32 has the same.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.kv_tiles import KVTiles, layer_bytes
from ops.triton_kernels.kv import gathered
from ops.triton_kernels.tiles import TYPES, layer_distance, tile_pointer

_WIDER = tl.constexpr(1.0 + 2.0**-20)  # so that a rounded quotient is no more than 127 steps


@triton.jit
def bounds_kernel(
    rows,
    anchor,
    distance: tl.int64,
    BOUNDS: tl.constexpr,
    TILE_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TYPE: tl.constexpr,
    DIM_PAD: tl.constexpr,
):
    """Writes the bounds of the tile that a row completes, for one K/V head (axis 1).

    Most programs end at once, as one row in 16 completes a tile. The latency of one load of 16 keys
    and one store is the bound.
    """
    number = tl.load(rows + tl.program_id(0))
    head = tl.program_id(1)
    if (number >= 0) & (number % 16 == 15):
        tile = tile_pointer(anchor, distance, number, TILE_STRIDE)
        keys = gathered(
            tile, head, tl.arange(0, 16)[:, None], 16, False,
            TILE_STRIDE, KV_HEADS, HEAD_DIM, NUM_GROUPS, TYPE, DIM_PAD,
        )  # fmt: skip
        most, least = tl.max(keys, 0), tl.min(keys, 0)
        scale = tl.max(tl.maximum(tl.abs(most), tl.abs(least)), 0) / 127.0 * _WIDER
        step = tl.where(scale > 0, scale, 1.0)
        d = tl.arange(0, DIM_PAD)
        bounds = tile + BOUNDS + head * (2 * HEAD_DIM) + d
        of_head = d < HEAD_DIM
        tl.store(bounds, tl.ceil(tl.div_rn(most, step)).to(tl.int8), mask=of_head)
        tl.store(bounds + HEAD_DIM, tl.floor(tl.div_rn(least, step)).to(tl.int8), mask=of_head)
        scales = (tile + BOUNDS + KV_HEADS * 2 * HEAD_DIM).to(
            tl.pointer_type(tl.float32), bitcast=True
        )
        tl.store(scales + head, scale)


def bound_keys(tiles: KVTiles, base: int, rows: Tensor, count: int) -> None:
    """Writes the bounds of the tiles whose last tokens are among the first `count` rows.

    rows: int64 token numbers; those below 0 are skipped. All keys of these tiles are stored.
    """
    assert len(rows) >= count and rows.dtype == torch.int64, f"{rows.shape} {rows.dtype}"
    if count:
        bounds_kernel[(count, tiles.num_kv_heads)](
            rows,
            rows,
            layer_distance(tiles, base, rows),
            **constants(tiles),
            NUM_GROUPS=tiles.num_groups,
            TYPE=TYPES[tiles.dtype],
            num_warps=1,
        )


def constants(tiles: KVTiles) -> dict[str, Any]:
    """Returns the compile-time arguments that say where a layer's bounds are."""
    heads, dim = tiles.num_kv_heads, tiles.head_dim
    return {
        "BOUNDS": layer_bytes(heads, dim, tiles.dtype, tiles.group),
        "TILE_STRIDE": tiles.tile_stride,
        "KV_HEADS": heads,
        "HEAD_DIM": dim,
        "DIM_PAD": triton.next_power_of_2(dim),
    }
