"""Attention of prefill chunks over K/V tiles, with FlashAttention-2's loop (Dao 2023).

A program computes some rows of one sequence with all query heads of one K/V head, so that a short
chunk still fills a tile of the product. Blocks of keys begin at position 0, so a row's bits depend
neither on other rows nor on the chunks of its prompt.
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

_LN2, _LOG2E = tl.constexpr(0.6931471805599453), tl.constexpr(LOG2E)


@triton.jit
def _attend_span(
    q0, q1, most, total, acc0, acc1, tile, head, first, end, position, kv_len, scale,
    CAP: tl.constexpr,
    HAS_MASK: tl.constexpr,
    WINDOW: tl.constexpr,
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
):  # fmt: skip
    """Attends to blocks of keys from first, a multiple of BLOCK, to end; position: [M] of rows."""
    keys = tl.arange(0, BLOCK)
    for key in tl.range(first, end, BLOCK, num_stages=STAGES):
        present = key + keys < kv_len
        mapped = key + keys // 16 * 16 < kv_len
        visible = (key + keys)[None, :] <= position[:, None]
        visible = visible & present[None, :]
        if WINDOW > 0:
            visible = visible & ((key + keys)[None, :] > position[:, None] - WINDOW)
        most, total, acc0, acc1 = attend_block(
            q0, q1, most, total, acc0, acc1,
            tile + tl.cast(key // 16, tl.int64) * TILE_STRIDE, head, keys, present, mapped,
            visible, scale, CAP, HAS_MASK,
            TILE_STRIDE, KV_HEADS, HEAD_DIM, NUM_GROUPS, PARTS, PART_PAD, TYPE, COMPUTE,
        )  # fmt: skip
    return most, total, acc0, acc1


@triton.jit
def prefill_kernel(
    q,
    q_stride,
    anchor,
    distance: tl.int64,
    starts,
    sequences,
    tile_list,
    num_tiles,
    out,
    out_stride,
    lse,
    sinks,
    scale: tl.float32,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    PREFIX_ONLY: tl.constexpr,
    HAS_LSE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    GQA: tl.constexpr,
    ROWS: tl.constexpr,
    ROWS_PAD: tl.constexpr,
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
    """Reads sequences: [(first row, rows, K/V length, 0)] and tile_list: [(sequence, row)], int32.

    The tensor cores are the bound: 4 * D operations per row, head and key. Two warp groups of 64
    rows each use every block of K and V from shared memory; only blocks on the diagonal or on the
    window's edge are masked. With int8 K/V each block is converted once for 128 rows.
    """
    head, index = tl.program_id(0), tl.program_id(1)
    if index < tl.load(num_tiles):
        sequence = tl.load(tile_list + index * 2)
        row = tl.load(tile_list + index * 2 + 1)
        q_start = tl.load(sequences + sequence * 4)
        num_rows = tl.load(sequences + sequence * 4 + 1)
        kv_len = tl.load(sequences + sequence * 4 + 2)
        tile = tile_pointer(anchor, distance, tl.load(starts + sequence), TILE_STRIDE)
        m = tl.arange(0, ROWS_PAD)
        rows = row + m // GQA
        is_row = (m < ROWS * GQA) & (rows < num_rows)
        first_position = kv_len if PREFIX_ONLY else kv_len - num_rows
        position = first_position + rows
        PART: tl.constexpr = HEAD_DIM // PARTS
        d = tl.arange(0, PART_PAD)
        mask = is_row[:, None] & (d < PART)[None, :]
        place = (q_start + rows).to(tl.int64)
        of_head = (head * GQA + m % GQA) * HEAD_DIM
        at = (place * q_stride + of_head)[:, None] + d[None, :]
        q0 = as_operand(tl.load(q + at, mask=mask, other=0), COMPUTE)
        q1 = q0
        if PARTS == 2:
            q1 = as_operand(tl.load(q + PART + at, mask=mask, other=0), COMPUTE)
        most = tl.full([ROWS_PAD], float("-inf"), tl.float32)
        total = tl.zeros([ROWS_PAD], tl.float32)
        acc0 = tl.zeros([ROWS_PAD, PART_PAD], tl.float32)
        acc1 = tl.zeros([ROWS_PAD, PART_PAD], tl.float32)
        # Some rows' windows begin in [begin, edge); all rows see all keys of [edge, full);
        # [full, end) is the diagonal.
        lowest = first_position + row
        highest = first_position + tl.minimum(row + ROWS, num_rows) - 1
        end = tl.minimum(highest + 1, kv_len)
        begin = 0
        if WINDOW > 0:
            begin = tl.maximum(lowest - WINDOW + 1, 0) // BLOCK * BLOCK
        full = tl.maximum(tl.minimum(lowest + 1, kv_len) // BLOCK * BLOCK, begin)
        edge = begin
        if WINDOW > 0:
            edge = tl.cdiv(tl.maximum(highest - WINDOW + 1, 0), BLOCK) * BLOCK
            edge = tl.minimum(tl.maximum(edge, begin), full)
            most, total, acc0, acc1 = _attend_span(
                q0, q1, most, total, acc0, acc1, tile, head, begin, edge, position, kv_len, scale,
                CAP, True, WINDOW, BLOCK, STAGES,
                TILE_STRIDE, KV_HEADS, HEAD_DIM, NUM_GROUPS, PARTS, PART_PAD, TYPE, COMPUTE,
            )  # fmt: skip
        most, total, acc0, acc1 = _attend_span(
            q0, q1, most, total, acc0, acc1, tile, head, edge, full, position, kv_len, scale,
            CAP, False, 0, BLOCK, STAGES,
            TILE_STRIDE, KV_HEADS, HEAD_DIM, NUM_GROUPS, PARTS, PART_PAD, TYPE, COMPUTE,
        )  # fmt: skip
        most, total, acc0, acc1 = _attend_span(
            q0, q1, most, total, acc0, acc1, tile, head, full, end, position, kv_len, scale,
            CAP, True, WINDOW, BLOCK, STAGES,
            TILE_STRIDE, KV_HEADS, HEAD_DIM, NUM_GROUPS, PARTS, PART_PAD, TYPE, COMPUTE,
        )  # fmt: skip
        if HAS_SINKS:
            sink = tl.load(sinks + head * GQA + m % GQA) * _LOG2E
            now = tl.maximum(most, sink)
            shrink = tl.exp2(most - now)
            total = total * shrink + tl.exp2(sink - now)
            acc0, acc1, most = acc0 * shrink[:, None], acc1 * shrink[:, None], now
        safe = tl.where(total > 0, total, 1.0)
        dtype: tl.constexpr = out.dtype.element_ty
        at = (place * out_stride + of_head)[:, None] + d[None, :]
        tl.store(out + at, (acc0 / safe[:, None]).to(dtype), mask=mask)
        if PARTS == 2:
            tl.store(out + PART + at, (acc1 / safe[:, None]).to(dtype), mask=mask)
        if HAS_LSE:
            found = tl.where(total > 0, (most + tl.log2(safe)) * _LN2, float("-inf"))
            tl.store(lse + place * (KV_HEADS * GQA) + head * GQA + m % GQA, found, mask=is_row)


def tile_rows(heads_per_kv: int, head_dim: int) -> int:
    """Returns the rows of a sequence that one program computes."""
    return max(1, _most_rows(head_dim) // heads_per_kv)


def _most_rows(head_dim: int) -> int:
    """Returns the rows and heads of a program whose sums fit the registers."""
    return 128 if head_dim <= 128 else 64 if head_dim <= 256 else 32


def prefill(
    q: Tensor,
    tiles: KVTiles,
    base: int,
    starts: Tensor,
    sequences: Tensor,
    tile_list: Tensor,
    num_tiles: Tensor,
    max_tiles: int,
    rows_per_tile: int,
    out: Tensor,
    lse: Tensor | None = None,
    *,
    prefix_only: bool = False,
    sinks: Tensor | None = None,
) -> None:
    """Computes Backend.prefill_attention, or prefix_attention if prefix_only, of several sequences.

    q, out: [T, H, D] with strided rows; lse: [T, H] fp32. starts: [S] int64, each sequence's
    token number of position 0; sequences: [S, 4] int32 of first row, rows, K/V length;
    tile_list: [max_tiles, 2] int32 of sequence and row in it, of which num_tiles are used. Rows
    without a tile are not written. sinks: [H] fp32, as in `combine`; not with prefix_only.
    """
    assert q.shape == out.shape and out.shape[1:] == (tiles.num_heads, tiles.head_dim)
    if max_tiles:
        chosen = config(tiles, q.dtype, architecture(q.device))
        prefill_kernel[(tiles.num_kv_heads, max_tiles)](
            q,
            row_stride(q),
            starts,
            layer_distance(tiles, base, starts),
            starts,
            sequences,
            tile_list,
            num_tiles,
            out,
            row_stride(out),
            starts if lse is None else lse,
            starts if sinks is None else sinks,
            tiles.scale * LOG2E,
            PREFIX_ONLY=prefix_only,
            HAS_LSE=lse is not None,
            HAS_SINKS=sinks is not None,
            **constants(tiles, q.dtype, rows_per_tile),
            **chosen.options(),
        )


def constants(tiles: KVTiles, of_q: torch.dtype, rows_per_tile: int) -> dict[str, Any]:
    """Returns the compile-time arguments of prefill_kernel that depend on the layer."""
    return {
        "WINDOW": tiles.window or 0,
        "CAP": tiles.soft_cap * LOG2E,
        "GQA": tiles.heads_per_kv,
        "ROWS": rows_per_tile,
        "ROWS_PAD": max(
            min(64, _most_rows(tiles.head_dim)),
            triton.next_power_of_2(rows_per_tile * tiles.heads_per_kv),
        ),
    } | layer_constants(tiles, of_q)


def config(tiles: KVTiles, of_q: torch.dtype, arch: int) -> Config:
    """Returns two warp groups and the stages that fit shared memory beside the queries.

    sm_86 and sm_89 have 99 KiB.
    """
    is_large = tiles.head_dim > 128
    if tiles.head_dim > 256:
        # int8 of so large heads has many scales, whose addresses take registers
        is_small = arch == 89 or tiles.dtype == torch.int8 or torch.float32 in (tiles.dtype, of_q)
        return Config({"BLOCK": 16 if is_small else 32, "STAGES": 1 if arch == 89 else 2}, 8)
    if torch.float32 in (tiles.dtype, of_q):
        return Config({"BLOCK": 32, "STAGES": 2}, 8)
    if arch < 90:
        is_narrow = is_large or tiles.dtype == torch.int8
        return Config({"BLOCK": 32 if is_narrow else 64, "STAGES": 2}, 8)
    return Config({"BLOCK": 64, "STAGES": 2 if is_large else 3}, 8)
