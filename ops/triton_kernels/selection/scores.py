"""Scores of tiles: an upper bound of what any of their keys could score against a query.

The bound is the sum over the dimensions of the larger of q * largest and q * smallest (Quest, Tang
et al. 2024). Query heads that share a K/V head read the same tiles, those of the largest sum of
their bounds, which is one product: of the largest values with the sum of what is positive in the
queries, and of the smallest with the sum of what is negative.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.kv_tiles import KVTiles
from ops.triton_kernels.selection import bounds
from ops.triton_kernels.tiles import layer_distance, row_stride, tile_pointer

PIECES = 32  # programs that share the tiles of a row and K/V head
_VALUES = 4096  # of a block of bounds


@triton.jit
def scores_kernel(
    q,
    q_stride,
    anchor,
    distance: tl.int64,
    starts,
    choices,
    num_choices,
    orders,
    ORDERS_STRIDE: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    GQA: tl.constexpr,
    GQA_PAD: tl.constexpr,
    BOUNDS: tl.constexpr,
    TILE_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
):
    """Reads choices: [(row, tiles with bounds, ...)] int32 and starts: [S] int64; writes orders:
    [rows, Hk, ORDERS_STRIDE] int32, which are in the order of the scores.

    Bytes are the bound: every bound is read once, in pieces of 2 * HEAD_DIM bytes. Neighbouring
    programs read those of a tile's heads, which are side by side.
    """
    d = tl.arange(0, DIM_PAD)
    of_head = d < HEAD_DIM
    for work in range(
        tl.program_id(0), tl.load(num_choices) * (PIECES * KV_HEADS), tl.num_programs(0)
    ):
        choice = choices + work // (PIECES * KV_HEADS) * 4
        head, piece = work % KV_HEADS, work // KV_HEADS % PIECES
        row, count = tl.load(choice), tl.load(choice + 1)
        if piece * BLOCK < count:
            m = tl.arange(0, GQA_PAD)[:, None]
            of_row = q + row.to(tl.int64) * q_stride + (head * GQA + m) * HEAD_DIM + d[None, :]
            x = tl.load(of_row, mask=(m < GQA) & of_head[None, :], other=0).to(tl.float32)
            above, below = tl.sum(tl.maximum(x, 0.0), 0), tl.sum(tl.minimum(x, 0.0), 0)
            first = tile_pointer(anchor, distance, tl.load(starts + row), TILE_STRIDE) + BOUNDS
            scales = (first + KV_HEADS * 2 * HEAD_DIM).to(tl.pointer_type(tl.float32), bitcast=True)
            target = orders + (row.to(tl.int64) * KV_HEADS + head) * ORDERS_STRIDE
            for begin in range(piece * BLOCK, count, PIECES * BLOCK):
                n = begin + tl.arange(0, BLOCK)
                present = n < count
                wide = n.to(tl.int64)
                at = first + wide[:, None] * TILE_STRIDE + (head * (2 * HEAD_DIM) + d)[None, :]
                mask = present[:, None] & of_head[None, :]
                most = tl.load(at, mask=mask, other=0).to(tl.float32)
                least = tl.load(at + HEAD_DIM, mask=mask, other=0).to(tl.float32)
                scale = tl.load(scales + wide * (TILE_STRIDE // 4) + head, mask=present, other=0)
                score = tl.sum(most * above[None, :] + least * below[None, :], 1) * scale
                # A signed integer of the same order: what is below zero counts from the other end.
                bits = score.to(tl.int32, bitcast=True)
                tl.store(target + n, bits ^ ((bits >> 31) & 0x7FFFFFFF), mask=present)


def score_tiles(
    q: Tensor,
    tiles: KVTiles,
    base: int,
    starts: Tensor,
    choices: Tensor,
    num_choices: Tensor,
    orders: Tensor,
    num_programs: int,
) -> None:
    """Writes the orders of the tiles of each choice's row of q: [S, H, D]; see scores_kernel."""
    assert orders.is_contiguous() and orders.shape[1] == tiles.num_kv_heads, f"{orders.shape}"
    assert choices.dtype == orders.dtype == torch.int32 and choices.stride(0) == 4
    scores_kernel[(num_programs,)](
        q,
        row_stride(q),
        choices,
        layer_distance(tiles, base, choices),
        starts,
        choices,
        num_choices,
        orders,
        **constants(tiles, orders.shape[2]),
        num_warps=4,
    )


def constants(tiles: KVTiles, orders_stride: int) -> dict[str, Any]:
    """Returns the compile-time arguments of scores_kernel."""
    own = bounds.constants(tiles)
    return own | {
        "ORDERS_STRIDE": orders_stride,
        "PIECES": PIECES,
        "BLOCK": max(8, _VALUES // own["DIM_PAD"]),
        "GQA": tiles.heads_per_kv,
        "GQA_PAD": triton.next_power_of_2(tiles.heads_per_kv),
    }
