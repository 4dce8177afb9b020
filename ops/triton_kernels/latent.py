"""Latent attention in Triton: one vector for each token, all of it K and its first part V.

A tile of 16 tokens holds the layer's vectors, [16, D], and for int8 scales [16, groups] fp16 after
them: those of the first value_dim values before those of the rest. All query heads of a token read
the same vectors, so rows are pairs of a token and a head, in this order, and decode and prefill are
one kernel. A block of vectors is loaded once and used for the scores and for the values.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.kv_tiles import TILE_TOKENS
from ops.triton_kernels.kv import Rotation
from ops.triton_kernels.tiles import LOG2E, TYPES, as_operand, row_stride, tile_pointer

_LN2 = tl.constexpr(0.6931471805599453)
SPLIT = 2048  # keys with sums of their own; it does not depend on the batch
_SIZES = {torch.int8: 1, torch.bfloat16: 2, torch.float32: 4}


@dataclass(frozen=True, slots=True)
class LatentTiles:
    """The layout of one layer. Its part of the tile of token n is at
    base + n // 16 * tile_stride + offset (bytes). group, rope_group: values that share a scale in
    the first value_dim values and in the rest, for int8 only."""

    num_heads: int
    value_dim: int
    rope_dim: int
    scale: float
    dtype: torch.dtype
    group: int | None
    rope_group: int | None
    tile_stride: int
    offset: int

    def __post_init__(self) -> None:
        assert self.value_dim % 16 == 0 and self.rope_dim % 16 == 0, f"{self}"
        assert (self.dtype == torch.int8) == (self.group is not None), f"{self}"
        assert self.tile_stride % 16 == 0 and self.offset % 16 == 0, f"{self}"
        assert 0 <= self.offset <= self.tile_stride - self.layer_bytes, f"{self}"

    @property
    def num_groups(self) -> int:
        """Scales of a vector; 0: not quantized."""
        if self.group is None or self.rope_group is None:
            return 0
        return self.value_dim // self.group + self.rope_dim // self.rope_group

    @property
    def layer_bytes(self) -> int:
        dim = self.value_dim + self.rope_dim
        return TILE_TOKENS * (dim * _SIZES[self.dtype] + 2 * self.num_groups)


class LatentRows(NamedTuple):
    """Rows of one sequence: its range's first token, its rows' first index and number in the step,
    the position of the first of them, and the keys that exist. A row sees the keys up to its own
    position."""

    start: int
    first_row: int
    num_rows: int
    position: int
    num_keys: int


def _distance(tiles: LatentTiles, base: int, anchor: Tensor) -> int:
    return base + tiles.offset - anchor.data_ptr()


def _constants(tiles: LatentTiles) -> dict[str, Any]:
    return {
        "TILE_STRIDE": tiles.tile_stride,
        "VALUE_DIM": tiles.value_dim,
        "ROPE_DIM": tiles.rope_dim,
        "GROUP": tiles.group or 1,
        "ROPE_GROUP": tiles.rope_group or 1,
        "TYPE": TYPES[tiles.dtype],
    }


# ---- writing


@triton.jit
def _store(
    x, values, scales, first, DIM: tl.constexpr, SIZE: tl.constexpr, TYPE: tl.constexpr,
    PAD: tl.constexpr,
):  # fmt: skip
    """Stores x, [DIM] values of a token, with a scale for each SIZE of them."""
    GROUPS: tl.constexpr = DIM // SIZE
    if tl.int8 == TYPE:
        parts = tl.reshape(x, [PAD // SIZE, SIZE])
        wanted = tl.max(tl.abs(parts), axis=1) / 127.0
        nearest = wanted.to(tl.float16)
        above = (nearest.to(tl.int16, bitcast=True) + 1).to(tl.float16, bitcast=True)
        scale = tl.where(nearest.to(tl.float32) < wanted, above, nearest)
        step = tl.where(scale > 0, 1.0 / scale.to(tl.float32), 0.0)
        scaled = tl.minimum(tl.maximum(parts * step[:, None], -127.0), 127.0)
        rounded = tl.floor(tl.abs(scaled) + 0.5) * tl.where(scaled < 0, -1.0, 1.0)
        x = tl.reshape(rounded, [PAD])
        g = tl.arange(0, PAD // SIZE)
        tl.store(scales + first + g, scale, mask=g < GROUPS)
    d = tl.arange(0, PAD)
    tl.store(values + d, x.to(TYPE), mask=d < DIM)


@triton.jit
def append_kernel(
    k, k_stride, cos, sin, rows, anchor, distance: tl.int64,
    HALF: tl.constexpr, VALUE_PAD: tl.constexpr, ROPE_PAD: tl.constexpr,
    TILE_STRIDE: tl.constexpr, VALUE_DIM: tl.constexpr, ROPE_DIM: tl.constexpr,
    GROUP: tl.constexpr, ROPE_GROUP: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Rotates the values after VALUE_DIM and writes one row. Bytes are the bound."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(rows + row)
    if token < 0:
        return
    DIM: tl.constexpr = VALUE_DIM + ROPE_DIM
    GROUPS: tl.constexpr = VALUE_DIM // GROUP + ROPE_DIM // ROPE_GROUP
    tile = tile_pointer(anchor, distance, token, TILE_STRIDE)
    values = tile.to(tl.pointer_type(TYPE), bitcast=True) + token % 16 * DIM
    scales = (tile + 16 * DIM).to(tl.pointer_type(tl.float16), bitcast=True) + token % 16 * GROUPS
    d = tl.arange(0, VALUE_PAD)
    x = tl.load(k + row * k_stride + d, mask=d < VALUE_DIM, other=0).to(tl.float32)
    _store(x, values, scales, 0, VALUE_DIM, GROUP, TYPE, VALUE_PAD)
    d = tl.arange(0, ROPE_PAD)
    rest = k + row * k_stride + VALUE_DIM
    x = tl.load(rest + d, mask=d < ROPE_DIM, other=0).to(tl.float32)
    if HALF > 0:
        is_turned, is_first = d < 2 * HALF, d < HALF
        partner = tl.where(is_first, d + HALF, d - HALF)
        other = tl.load(rest + partner, mask=is_turned, other=0).to(tl.float32)
        angle = row * HALF + tl.where(is_first, d, d - HALF)
        c = tl.load(cos + angle, mask=is_turned, other=1)
        s = tl.load(sin + angle, mask=is_turned, other=0)
        x = x * c + tl.where(is_first, -other, other) * s
    _store(x, values + VALUE_DIM, scales, VALUE_DIM // GROUP, ROPE_DIM, ROPE_GROUP, TYPE, ROPE_PAD)


def append(
    tiles: LatentTiles, base: int, k: Tensor, rows: Tensor, rotation: Rotation | None = None
) -> None:
    """Stores k: [T, 1, D] with strided rows in the tiles.

    rows: [T] int64 token numbers; rows below 0 are skipped. A rotation turns the first values after
    value_dim. For int8, a group's scale is max|x| / 127 rounded up to fp16.
    """
    count, heads, dim = k.shape
    assert (heads, dim) == (1, tiles.value_dim + tiles.rope_dim), f"{k.shape}"
    assert len(rows) >= count and rows.dtype == torch.int64, f"{rows.shape} {rows.dtype}"
    half = 0 if rotation is None else rotation.cos.shape[1]
    assert 2 * half <= tiles.rope_dim, f"{half=}"
    if count:
        append_kernel[(count,)](
            k,
            row_stride(k),
            k if rotation is None else rotation.cos,
            k if rotation is None else rotation.sin,
            rows,
            rows,
            _distance(tiles, base, rows),
            HALF=half,
            VALUE_PAD=triton.next_power_of_2(tiles.value_dim),
            ROPE_PAD=triton.next_power_of_2(tiles.rope_dim),
            **_constants(tiles),
            num_warps=4,
        )


# ---- attention


@triton.jit
def _queries(q, at, seen, first: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
             COMPUTE: tl.constexpr):  # fmt: skip
    d = tl.arange(0, PAD)[None, :]
    mask = seen[:, None] & (d < DIM)
    return as_operand(tl.load(q + at[:, None] + first + d, mask=mask, other=0), COMPUTE)


@triton.jit
def _vectors(
    tile, tokens, present, first: tl.constexpr, scale_at: tl.constexpr, DIM: tl.constexpr,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr, PAD: tl.constexpr,
    TILE_STRIDE: tl.constexpr, TYPE: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Loads values [first, first + DIM) of each token as [N, PAD] of COMPUTE."""
    ITEM: tl.constexpr = TYPE.primitive_bitwidth // 8
    d = tl.arange(0, PAD)[None, :]
    mask = present[:, None] & (d < DIM)
    at = (tokens // 16).to(tl.int64) * (TILE_STRIDE // ITEM) + tokens % 16 * WIDTH + first
    x = tl.load(tile.to(tl.pointer_type(TYPE), bitcast=True) + at[:, None] + d, mask=mask, other=0)
    if tl.int8 == TYPE:
        scales = (tile + 16 * WIDTH).to(tl.pointer_type(tl.float16), bitcast=True)
        at = (tokens // 16).to(tl.int64) * (TILE_STRIDE // 2) + tokens % 16 * GROUPS + scale_at
        scale = tl.load(scales + at[:, None] + d // SIZE, mask=mask, other=0)
        x = x.to(tl.float32) * scale.to(tl.float32)
    return as_operand(x, COMPUTE)


@triton.jit
def attend_kernel(
    q, q_stride, anchor, distance: tl.int64, items, outs, lses, scale: tl.float32,
    HEADS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, VALUE_PAD: tl.constexpr,
    ROPE_PAD: tl.constexpr, COMPUTE: tl.constexpr,
    TILE_STRIDE: tl.constexpr, VALUE_DIM: tl.constexpr, ROPE_DIM: tl.constexpr,
    GROUP: tl.constexpr, ROPE_GROUP: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Reads items: [(range start, first row, rows, position, first key, end, keys, slot)] int64.

    A row is a pair of a token of the step and a head; rows counts them, ROWS at most. Writes fp32
    outs: [slots, VALUE_DIM] and lses in base 2, for `merge_kernel`. With 16 and more heads a vector
    is used often enough that tensor cores are the bound for long chunks, and bytes for decode.
    """
    WIDTH: tl.constexpr = VALUE_DIM + ROPE_DIM
    GROUPS: tl.constexpr = VALUE_DIM // GROUP + ROPE_DIM // ROPE_GROUP
    item = items + tl.program_id(0) * 8
    tile = tile_pointer(anchor, distance, tl.load(item), TILE_STRIDE)
    first_row, rows, position = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    first, end, slot = tl.load(item + 4), tl.load(item + 5), tl.load(item + 7)
    m = tl.arange(0, ROWS)
    row = first_row + m
    at = row // HEADS * q_stride + row % HEADS * WIDTH
    last = tl.minimum(position + row // HEADS - first_row // HEADS, tl.load(item + 6) - 1)
    q_values = _queries(q, at, m < rows, 0, VALUE_DIM, VALUE_PAD, COMPUTE)
    q_rest = _queries(q, at, m < rows, VALUE_DIM, ROPE_DIM, ROPE_PAD, COMPUTE)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VALUE_PAD], tl.float32)
    for key in range(first, end, BLOCK):
        tokens = key + tl.arange(0, BLOCK)
        present = tokens < end
        values = _vectors(tile, tokens, present, 0, 0, VALUE_DIM, GROUP, WIDTH, GROUPS, VALUE_PAD,
                          TILE_STRIDE, TYPE, COMPUTE)  # fmt: skip
        rest = _vectors(tile, tokens, present, VALUE_DIM, VALUE_DIM // GROUP, ROPE_DIM, ROPE_GROUP,
                        WIDTH, GROUPS, ROPE_PAD, TILE_STRIDE, TYPE, COMPUTE)  # fmt: skip
        score = tl.dot(q_values, tl.trans(values), input_precision="ieee")
        score = tl.dot(q_rest, tl.trans(rest), score, input_precision="ieee") * scale
        score = tl.where(tokens[None, :] <= last[:, None], score, float("-inf"))
        now = tl.maximum(most, tl.max(score, axis=1))
        shift = tl.where(now == float("-inf"), 0.0, now)
        weights = tl.exp2(score - shift[:, None])
        shrink = tl.exp2(most - shift)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None]
        acc = tl.dot(as_operand(weights, COMPUTE), values, acc, input_precision="ieee")
        most = now
    d = tl.arange(0, VALUE_PAD)[None, :]
    safe = tl.where(total > 0, total, 1.0)
    out = outs + (slot + m)[:, None] * VALUE_DIM + d
    tl.store(out, acc / safe[:, None], mask=(m < rows)[:, None] & (d < VALUE_DIM))
    tl.store(lses + slot + m, most + tl.log2(safe), mask=m < rows)


@triton.jit
def merge_kernel(
    outs, lses, rows, result, result_lse, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr
):
    """Reads rows: [(first slot, splits, slots from split to split)] int64 for each row and merges
    its splits in order. Latency is the bound."""
    row = tl.program_id(0).to(tl.int64)
    first, count = tl.load(rows + row * 3), tl.load(rows + row * 3 + 1)
    step = tl.load(rows + row * 3 + 2)
    d = tl.arange(0, VALUE_PAD)
    most = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([VALUE_PAD], tl.float32)
    for split in range(0, count):
        lse = tl.load(lses + first + split * step)
        if lse > float("-inf"):
            now = tl.maximum(most, lse)
            shrink, weight = tl.exp2(most - now), tl.exp2(lse - now)
            part = tl.load(
                outs + (first + split * step) * VALUE_DIM + d, mask=d < VALUE_DIM, other=0
            )
            acc = acc * shrink + part * weight
            total = total * shrink + weight
            most = now
    safe = tl.where(total > 0, total, 1.0)
    is_first = d < 1
    tl.store(
        result + row * VALUE_DIM + d, (acc / safe).to(result.dtype.element_ty), mask=d < VALUE_DIM
    )
    lse = (most + tl.log2(safe)) * _LN2
    tl.store(result_lse + row + d, tl.broadcast_to(lse, [VALUE_PAD]), mask=is_first)


def _work(rows: Sequence[LatentRows], heads: int, block: int) -> tuple[list[int], list[int], int]:
    """Returns the items of attend_kernel, the rows of merge_kernel, and the number of slots. Blocks
    and splits begin at fixed places of a sequence, so that a row's bits do not depend on others."""
    items: list[int] = []
    merged: list[int] = []
    slots = 0
    for part in rows:
        all_rows = part.num_rows * heads
        for first in range(0, all_rows, block):
            count = min(block, all_rows - first)
            last = part.position + (first + count - 1) // heads
            end = min(last + 1, part.num_keys)
            splits = -(-end // SPLIT)
            for split in range(splits):
                low, high = split * SPLIT, min(end, (split + 1) * SPLIT)
                row = part.first_row * heads + first
                position = part.position + first // heads
                where = slots + split * count
                items += (part.start, row, count, position, low, high, part.num_keys, where)
            for i in range(count):
                merged += (slots + i, splits, count)
            slots += splits * count
    return items, merged, slots


def attend(
    tiles: LatentTiles, base: int, q: Tensor, rows: Sequence[LatentRows]
) -> tuple[Tensor, Tensor]:
    """Computes attention of q: [T, H, D] in q's type, [T, H, value_dim], and lse [T, H] fp32.

    rows describes each sequence, in the order of q. A row without keys gets 0 and an lse of -inf.
    """
    count, heads, dim = q.shape
    assert (heads, dim) == (tiles.num_heads, tiles.value_dim + tiles.rope_dim), f"{q.shape}"
    assert sum(part.num_rows for part in rows) == count, f"{rows}"
    out = torch.empty(count, heads, tiles.value_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(count, heads, dtype=torch.float32, device=q.device)
    if not count:
        return out, lse
    items, merged, slots = _work(rows, heads, 16)
    outs = torch.empty(max(1, slots), tiles.value_dim, device=q.device)
    lses = torch.empty(max(1, slots), device=q.device)
    is_wide = torch.float32 in (tiles.dtype, q.dtype)
    pads = {
        "VALUE_PAD": triton.next_power_of_2(tiles.value_dim),
        "ROPE_PAD": triton.next_power_of_2(tiles.rope_dim),
    }
    if items:
        work = torch.tensor(items, dtype=torch.int64, device=q.device)
        attend_kernel[(len(items) // 8,)](
            q,
            row_stride(q),
            work,
            _distance(tiles, base, work),
            work,
            outs,
            lses,
            tiles.scale * LOG2E,
            HEADS=heads,
            ROWS=16,
            BLOCK=32,
            COMPUTE=tl.float32 if is_wide else tl.bfloat16,
            num_warps=4,
            **pads,
            **_constants(tiles),
        )
    table = torch.tensor(merged, dtype=torch.int64, device=q.device)
    merge_kernel[(count * heads,)](
        outs,
        lses,
        table,
        out,
        lse,
        VALUE_DIM=tiles.value_dim,
        VALUE_PAD=pads["VALUE_PAD"],
        num_warps=4,
    )
    return out, lse
