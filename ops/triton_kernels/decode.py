"""Decode attention over K/V tiles: one row per sequence, whose keys are split over programs.

The split depends only on the row's own length, so a row's bits do not depend on the batch.
`combine` merges a row's splits by their log-sum-exp.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.kv_tiles import KVTiles, architecture
from ops.triton_kernels.softmax import attend_block
from ops.triton_kernels.tiles import (
    LOG2E,
    Config,
    as_operand,
    layer_constants,
    layer_distance,
    row_stride,
    tile_pointer,
)

_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _part(q, row, head, part: tl.constexpr, HEAD_DIM: tl.constexpr, GQA: tl.constexpr,
          PARTS: tl.constexpr, PART_PAD: tl.constexpr, COMPUTE: tl.constexpr):  # fmt: skip
    """Loads one part of the queries that share a K/V head: [16 or more, PART_PAD]."""
    ROWS: tl.constexpr = 16 if GQA <= 16 else triton.next_power_of_2(GQA)
    PART: tl.constexpr = HEAD_DIM // PARTS
    m = tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, PART_PAD)[None, :]
    at = row + (head * GQA + m) * HEAD_DIM + part * PART + d
    return as_operand(tl.load(q + at, mask=(m < GQA) & (d < PART), other=0), COMPUTE)


@triton.jit
def decode_kernel(
    q,
    q_stride,
    anchor,
    distance: tl.int64,
    starts,
    items,
    num_items,
    outs,
    lses,
    tables,
    scale: tl.float32,
    TABLE_STRIDE: tl.constexpr,
    CAP: tl.constexpr,
    GQA: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    TILE_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    PART_PAD: tl.constexpr,
    TYPE: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Reads items: [(row, first key, end, slot)] int32; writes fp32 outs: [slots, H, D] and lses.

    TABLE_STRIDE: if it is not 0, keys are those of the tiles in tables: [rows, Hk, TABLE_STRIDE]
    int32, side by side, and a program reads them from all over the sequence.

    Bytes are the bound: every key and value is read once. A stage of 64 keys of 128 int8 dimensions
    is 16 KiB. Two stages in flight in each of three programs on an SM are 96 KiB, while 4.3 TB/s at
    0.8 us need 26 KiB, so some programs may be between two items. Neighbouring items are the heads
    of one split and read neighbouring parts of its tiles.
    """
    ROWS: tl.constexpr = 16 if GQA <= 16 else triton.next_power_of_2(GQA)
    PART: tl.constexpr = HEAD_DIM // PARTS
    keys = tl.arange(0, BLOCK)
    for work in range(tl.program_id(0), tl.load(num_items) * KV_HEADS, tl.num_programs(0)):
        item = items + (work // KV_HEADS) * 4
        head = work % KV_HEADS
        row, first, end, slot = (
            tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
        )  # fmt: skip
        tile = tile_pointer(anchor, distance, tl.load(starts + row), TILE_STRIDE)
        of_row = row.to(tl.int64) * q_stride
        q0 = _part(q, of_row, head, 0, HEAD_DIM, GQA, PARTS, PART_PAD, COMPUTE)
        q1 = q0
        if PARTS == 2:
            q1 = _part(q, of_row, head, 1, HEAD_DIM, GQA, PARTS, PART_PAD, COMPUTE)
        most = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc0 = tl.zeros([ROWS, PART_PAD], tl.float32)
        acc1 = tl.zeros([ROWS, PART_PAD], tl.float32)
        for key in tl.range(first // 16 * 16, end, BLOCK, num_stages=STAGES):
            present = (key + keys >= first) & (key + keys < end)
            mapped = key + keys // 16 * 16 < end
            if TABLE_STRIDE > 0:
                table = tables + (row.to(tl.int64) * KV_HEADS + head) * TABLE_STRIDE
                numbers = tl.load(table + key // 16 + keys // 16, mask=mapped, other=0)
                tokens = numbers * 16 + keys % 16
                block = tile
            else:
                tokens = keys
                block = tile + tl.cast(key // 16, tl.int64) * TILE_STRIDE
            most, total, acc0, acc1 = attend_block(
                q0, q1, most, total, acc0, acc1, block, head, tokens, present, mapped,
                present[None, :], scale, CAP, True,
                TILE_STRIDE, KV_HEADS, HEAD_DIM, NUM_GROUPS, PARTS, PART_PAD, TYPE, COMPUTE,
            )  # fmt: skip
        m = tl.arange(0, ROWS)
        d = tl.arange(0, PART_PAD)
        at = (slot.to(tl.int64) * KV_HEADS + head) * GQA + m
        mask = (m < GQA)[:, None] & (d < PART)[None, :]
        out = outs + at[:, None] * HEAD_DIM + d[None, :]
        tl.store(out, acc0 / total[:, None], mask=mask)
        if PARTS == 2:
            tl.store(out + PART, acc1 / total[:, None], mask=mask)
        tl.store(lses + at, (most + tl.log2(total)) * _LN2, mask=m < GQA)


@triton.jit
def combine_kernel(
    outs,
    lses,
    slots,
    result,
    result_stride,
    result_lse,
    sinks,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    HAS_LSE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Reads slots: [S, 2] int32, first slot and number of slots per row; no slot gives 0 and -inf.
    sinks: a logit for each head, which only adds to the denominator.

    Latency is the bound: a row's partial results have just been written and are in the L2 cache.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = tl.load(slots + row * 2).to(tl.int64)
    count = tl.load(slots + row * 2 + 1)
    d = tl.arange(0, DIM_PAD)
    most = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([DIM_PAD], tl.float32)
    for i in tl.range(0, count, num_stages=2):
        at = (first + i) * HEADS + head
        lse = tl.load(lses + at)
        out = tl.load(outs + at * HEAD_DIM + d, mask=d < HEAD_DIM, other=0)
        now = tl.maximum(most, lse)
        shrink, weight = tl.exp(most - now), tl.exp(lse - now)
        acc = acc * shrink + out * weight
        total = total * shrink + weight
        most = now
    if HAS_SINKS:
        sink = tl.load(sinks + head + tl.arange(0, 1))
        now = tl.maximum(most, sink)
        shrink = tl.exp(most - now)
        acc, total, most = acc * shrink, total * shrink + tl.exp(sink - now), now
    safe = tl.where(total > 0, total, 1.0)
    out = (acc / safe).to(result.dtype.element_ty)
    tl.store(result + row * result_stride + head * HEAD_DIM + d, out, mask=d < HEAD_DIM)
    if HAS_LSE:
        lse = tl.where(total > 0, most + tl.log(safe), float("-inf"))
        tl.store(result_lse + row * HEADS + head + tl.arange(0, 1), lse)


def decode(
    q: Tensor,
    tiles: KVTiles,
    base: int,
    starts: Tensor,
    items: Tensor,
    num_items: Tensor,
    outs: Tensor,
    lses: Tensor,
    num_programs: int,
    tables: Tensor | None = None,
) -> None:
    """Computes attention of q: [S, H, D] over each item's keys into the item's slot of outs, lses.

    starts: [S] int64, token number of each row's position 0, a multiple of 16. tables: [rows, Hk,
    most] int32; then an item's keys are those of the tiles with these numbers, side by side.
    """
    chosen = config(tiles, q.dtype, architecture(q.device), has_tables=tables is not None)
    decode_kernel[(num_programs,)](
        q,
        row_stride(q),
        items,
        layer_distance(tiles, base, items),
        starts,
        items,
        num_items,
        outs,
        lses,
        items if tables is None else tables,
        tiles.scale * LOG2E,
        **constants(tiles, q.dtype, 0 if tables is None else tables.stride(1)),
        **chosen.options(),
    )


def constants(tiles: KVTiles, of_q: torch.dtype, table_stride: int = 0) -> dict[str, Any]:
    """Returns the compile-time arguments of decode_kernel that depend on the layer. table_stride:
    between the tables of K/V heads; 0: none."""
    own = {"GQA": tiles.heads_per_kv, "CAP": tiles.soft_cap * LOG2E, "TABLE_STRIDE": table_stride}
    return own | layer_constants(tiles, of_q)


def config(tiles: KVTiles, of_q: torch.dtype, arch: int, *, has_tables: bool = False) -> Config:
    """Returns blocks of 64 keys; usual heads get registers and stages for 3 programs per SM.
    has_tables: the compiler has to read the numbers of tiles as far ahead as the tiles."""
    found = _config(tiles, of_q, arch)
    if has_tables:
        found.constants["STAGES"] = 2 * found.constants["STAGES"] - 1
    return found


def _config(tiles: KVTiles, of_q: torch.dtype, arch: int) -> Config:
    is_wide = torch.float32 in (tiles.dtype, of_q)
    if tiles.head_dim > 256:
        return Config({"BLOCK": 16 if is_wide or arch == 89 else 32, "STAGES": 2}, 4)
    if is_wide:
        return Config({"BLOCK": 32, "STAGES": 2}, 4)
    row_bytes = tiles.head_dim * tiles.dtype.itemsize
    stages = 2 if row_bytes > (128 if arch == 89 else 256) else 3
    is_usual = tiles.head_dim <= 128 and tiles.heads_per_kv <= 16
    return Config({"BLOCK": 64, "STAGES": stages}, 4, 168 if is_usual else None)


def combine(
    outs: Tensor,
    lses: Tensor,
    slots: Tensor,
    result: Tensor,
    lse: Tensor | None = None,
    *,
    sinks: Tensor | None = None,
) -> None:
    """Merges slots: [S, 2] int32 into rows of result: [S, H, D] (and lse: [S, H] fp32).

    sinks: [H] fp32, logits that take part in the softmax and have no value.
    """
    rows, heads, dim = result.shape
    assert slots.shape[0] >= rows and slots.stride(0) == 2, f"{slots.shape}"
    assert outs.dtype == lses.dtype == torch.float32 and outs.shape[1:] == (heads, dim)
    if rows:
        combine_kernel[(rows, heads)](
            outs,
            lses,
            slots,
            result,
            row_stride(result),
            lses if lse is None else lse,
            lses if sinks is None else sinks,
            HEADS=heads,
            HEAD_DIM=dim,
            DIM_PAD=triton.next_power_of_2(dim),
            HAS_LSE=lse is not None,
            HAS_SINKS=sinks is not None,
            num_warps=1,
        )
