"""K/V tiles in Triton: rotation, append (with int8 quantization) and gather of rows."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.kv_tiles import KVTiles
from ops.triton_kernels.tiles import (
    TYPES,
    layer_distance,
    row_stride,
    scale_offsets,
    scale_pointer,
    tile_pointer,
    value_offsets,
    value_pointer,
)


class Rotation(NamedTuple):
    """The rotation of each row's position. cos, sin: [T, R/2] fp32, for pairs (i, i + R/2) of the
    first R dimensions."""

    cos: Tensor
    sin: Tensor


@triton.jit
def _turned(x, at, dims, mask, cos, sin, turn, HALF: tl.constexpr):
    """Loads x at at + dims as fp32 and rotates the first 2 * HALF dims.

    turn: offset of the row's angles in cos and sin.
    """
    own = tl.load(x + at + dims, mask=mask, other=0).to(tl.float32)
    if HALF > 0:
        is_turned = mask & (dims < 2 * HALF)
        is_first = dims < HALF
        partner = tl.where(is_first, dims + HALF, dims - HALF)
        other = tl.load(x + at + partner, mask=is_turned, other=0).to(tl.float32)
        angle = turn + tl.where(is_first, dims, dims - HALF)
        c = tl.load(cos + angle, mask=is_turned, other=1)
        s = tl.load(sin + angle, mask=is_turned, other=0)
        own = own * c + tl.where(is_first, -other, other) * s
    return own


@triton.jit
def rotate_kernel(
    x,
    x_stride,
    y,
    y_stride,
    cos,
    sin,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
):
    """Rotates one row. A program reads before it writes, so y may be x. Bytes are the bound."""
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS_PAD + tl.arange(0, HEADS_PAD))[:, None]
    i = tl.arange(0, PAIRS)[None, :]
    mask = (head < HEADS) & (i < HALF)
    source = x + row * x_stride + head * HEAD_DIM
    target = y + row * y_stride + head * HEAD_DIM
    first = tl.load(source + i, mask=mask, other=0).to(tl.float32)
    second = tl.load(source + HALF + i, mask=mask, other=0).to(tl.float32)
    c = tl.load(cos + row * HALF + i, mask=i < HALF, other=0)
    s = tl.load(sin + row * HALF + i, mask=i < HALF, other=0)
    dtype: tl.constexpr = y.dtype.element_ty
    tl.store(target + i, (first * c - second * s).to(dtype), mask=mask)
    tl.store(target + HALF + i, (second * c + first * s).to(dtype), mask=mask)
    if REST > 0:
        d = 2 * HALF + tl.arange(0, REST)[None, :]
        mask = (head < HEADS) & (d < HEAD_DIM)
        tl.store(target + d, tl.load(source + d, mask=mask, other=0), mask=mask)


def rotate(x: Tensor, rotation: Rotation, out: Tensor | None = None) -> Tensor:
    """Applies Backend.rotary to x: [T, H, D] with strided rows, into out (may be x; None: new)."""
    rows, heads, dim = x.shape
    half = rotation.cos.shape[1]
    _check_rotation(rotation, rows, dim)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    assert y.shape == x.shape and y.dtype == x.dtype, f"{y.shape} {y.dtype}"
    if rows:
        is_in_place = y.data_ptr() == x.data_ptr()
        heads_pad = min(triton.next_power_of_2(heads), 16)
        rotate_kernel[(rows, triton.cdiv(heads, heads_pad))](
            x,
            row_stride(x),
            y,
            row_stride(y),
            rotation.cos,
            rotation.sin,
            HEADS=heads,
            HEAD_DIM=dim,
            HALF=half,
            HEADS_PAD=heads_pad,
            PAIRS=triton.next_power_of_2(half),
            REST=0 if is_in_place or dim == 2 * half else triton.next_power_of_2(dim - 2 * half),
            num_warps=4,
        )
    return y


@triton.jit
def append_kernel(
    k,
    k_stride,
    v,
    v_stride,
    cos,
    sin,
    rows,
    anchor,
    distance: tl.int64,
    TILE_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TYPE: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    GROUP_PAD: tl.constexpr,
):
    """Stores one row's K (program 0 of axis 1) or V. Bytes are the bound, or with few rows the
    latency of one load and one store."""
    row = tl.program_id(0).to(tl.int64)
    number = tl.load(rows + row)
    is_v = tl.program_id(1)
    if number >= 0:
        GROUP: tl.constexpr = HEAD_DIM // NUM_GROUPS
        head = tl.arange(0, HEADS_PAD)[:, None, None]
        group = tl.arange(0, GROUPS_PAD)[None, :, None]
        inner = tl.arange(0, GROUP_PAD)[None, None, :]
        mask = (head < KV_HEADS) & (group < NUM_GROUPS) & (inner < GROUP)
        dims = group * GROUP + inner
        at = head * HEAD_DIM
        if is_v == 0:
            x = _turned(k + row * k_stride, at, dims, mask, cos, sin, row * HALF, HALF)
        else:
            x = tl.load(v + row * v_stride + at + dims, mask=mask, other=0).to(tl.float32)
        tile = tile_pointer(anchor, distance, number, TILE_STRIDE)
        inside = (number % 16).to(tl.int32)
        if tl.int8 == TYPE:
            wanted = tl.max(tl.abs(x), 2) / 127.0
            scale = tl.minimum(wanted, 65504.0).to(tl.float16)
            # The scale is rounded up, so that no value is clipped.
            above = (scale.to(tl.int16, bitcast=True) + 1).to(tl.float16, bitcast=True)
            is_low = (scale.to(tl.float32) < wanted) & (wanted < 65504.0)
            scale = tl.where(is_low, above, scale)
            wide = scale.to(tl.float32)[:, :, None]
            steps = tl.div_rn(x, tl.where(wide > 0, wide, 1.0))
            steps = tl.minimum(tl.maximum(steps, -127.0), 127.0)
            # Adding 1.5 * 2^23 rounds to the nearest integer, halves to the even one.
            x = (steps + 12582912.0) - 12582912.0
            scales = scale_pointer(tile, head, 0, KV_HEADS, HEAD_DIM, NUM_GROUPS)
            scales += scale_offsets(inside, TILE_STRIDE, NUM_GROUPS) + is_v * NUM_GROUPS + group
            of_group = (head < KV_HEADS) & (group < NUM_GROUPS)
            tl.store(scales, scale[:, :, None], mask=of_group)
        x = x.to(TYPE)
        if is_v == 0:
            values = value_pointer(tile, head, 0, KV_HEADS, HEAD_DIM, TYPE)
            values += value_offsets(inside, dims, False, TILE_STRIDE, HEAD_DIM, TYPE)
            tl.store(values, x, mask=mask)
        else:
            values = value_pointer(tile, head, 1, KV_HEADS, HEAD_DIM, TYPE)
            values += value_offsets(inside, dims, True, TILE_STRIDE, HEAD_DIM, TYPE)
            tl.store(values, x, mask=mask)


def append(
    tiles: KVTiles,
    base: int,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    rotation: Rotation | None = None,
) -> None:
    """Stores k, v: [T, Hk, D] with strided rows in the tiles.

    rows: [T] int64 token numbers; rows below 0 are skipped. A rotation is applied to k first. For
    int8, a group's scale is max|x| / 127 rounded up to fp16, and values are rounded to the nearest.
    """
    count, heads, dim = k.shape
    assert k.shape == v.shape and (heads, dim) == (tiles.num_kv_heads, tiles.head_dim), f"{k.shape}"
    assert len(rows) >= count and rows.dtype == torch.int64, f"{rows.shape} {rows.dtype}"
    if rotation is not None:
        _check_rotation(rotation, count, dim)
    if count:
        append_kernel[(count, 2)](
            k,
            row_stride(k),
            v,
            row_stride(v),
            k if rotation is None else rotation.cos,
            k if rotation is None else rotation.sin,
            rows,
            rows,
            layer_distance(tiles, base, rows),
            **append_constants(tiles, 0 if rotation is None else rotation.cos.shape[1]),
            num_warps=4,
        )


def append_constants(tiles: KVTiles, half: int) -> dict[str, Any]:
    """Returns the compile-time arguments of append_kernel; half: number of rotated pairs."""
    groups = max(tiles.num_groups, 1)
    return {
        "TILE_STRIDE": tiles.tile_stride,
        "KV_HEADS": tiles.num_kv_heads,
        "HEAD_DIM": tiles.head_dim,
        "NUM_GROUPS": groups,
        "TYPE": TYPES[tiles.dtype],
        "HALF": half,
        "HEADS_PAD": triton.next_power_of_2(tiles.num_kv_heads),
        "GROUPS_PAD": triton.next_power_of_2(groups),
        "GROUP_PAD": triton.next_power_of_2(tiles.head_dim // groups),
    }


@triton.jit
def gathered(
    tile,
    head,
    token,
    length,
    IS_V: tl.constexpr,
    TILE_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TYPE: tl.constexpr,
    DIM_PAD: tl.constexpr,
):
    """Loads [N, DIM_PAD] fp32 of tokens: [N, 1]; undefined beyond length and HEAD_DIM."""
    d = tl.arange(0, DIM_PAD)[None, :]
    # The mask covers whole tiles, in which 16 tokens may be side by side.
    mask = (token // 16 * 16 < length) & (d < HEAD_DIM)
    values = value_pointer(tile, head, IS_V, KV_HEADS, HEAD_DIM, TYPE)
    values += value_offsets(token, d, IS_V, TILE_STRIDE, HEAD_DIM, TYPE)
    x = tl.load(values, mask=mask, other=0).to(tl.float32)
    if NUM_GROUPS > 0:
        scales = scale_pointer(tile, head, IS_V, KV_HEADS, HEAD_DIM, NUM_GROUPS)
        scales += scale_offsets(token, TILE_STRIDE, NUM_GROUPS) + d // (HEAD_DIM // NUM_GROUPS)
        x *= tl.load(scales, mask=mask, other=0).to(tl.float32)
    return x


@triton.jit(do_not_specialize=["start", "length"])
def gather_kernel(
    anchor,
    distance: tl.int64,
    start: tl.int64,
    length,
    k,
    v,
    BLOCK: tl.constexpr,
    TILE_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TYPE: tl.constexpr,
    DIM_PAD: tl.constexpr,
):
    """Copies BLOCK tokens of one head's K or V (axis 2) to dense rows. Bytes are the bound."""
    token = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[:, None]
    head, is_v = tl.program_id(1), tl.program_id(2)
    d = tl.arange(0, DIM_PAD)[None, :]
    mask = (token < length) & (d < HEAD_DIM)
    tile = tile_pointer(anchor, distance, start, TILE_STRIDE)
    target = (token.to(tl.int64) * KV_HEADS + head) * HEAD_DIM + d
    dtype: tl.constexpr = k.dtype.element_ty
    if is_v == 0:
        x = gathered(
            tile, head, token, length, False,
            TILE_STRIDE, KV_HEADS, HEAD_DIM, NUM_GROUPS, TYPE, DIM_PAD,
        )  # fmt: skip
        tl.store(k + target, x.to(dtype), mask=mask)
    else:
        x = gathered(
            tile, head, token, length, True,
            TILE_STRIDE, KV_HEADS, HEAD_DIM, NUM_GROUPS, TYPE, DIM_PAD,
        )  # fmt: skip
        tl.store(v + target, x.to(dtype), mask=mask)


def gather(tiles: KVTiles, base: int, start: int, k: Tensor, v: Tensor) -> None:
    """Copies the K/V of L tokens from number start on to dense k, v: [L, Hk, D], bf16 or fp32.

    start is a multiple of 16.
    """
    length, heads, dim = k.shape
    assert k.shape == v.shape and (heads, dim) == (tiles.num_kv_heads, tiles.head_dim), f"{k.shape}"
    assert k.is_contiguous() and v.is_contiguous() and start % 16 == 0, f"{start=}"
    if length:
        block = 64
        gather_kernel[(triton.cdiv(length, block), heads, 2)](
            k,
            layer_distance(tiles, base, k),
            start,
            length,
            k,
            v,
            BLOCK=block,
            TILE_STRIDE=tiles.tile_stride,
            KV_HEADS=heads,
            HEAD_DIM=dim,
            NUM_GROUPS=tiles.num_groups,
            TYPE=TYPES[tiles.dtype],
            DIM_PAD=triton.next_power_of_2(dim),
            num_warps=4,
        )


def _check_rotation(rotation: Rotation, rows: int, dim: int) -> None:
    cos, sin = rotation
    assert cos.dtype == sin.dtype == torch.float32 and cos.shape == sin.shape, f"{cos.shape}"
    assert cos.is_contiguous() and sin.is_contiguous() and len(cos) >= rows, f"{cos.shape}"
    assert 0 < 2 * cos.shape[1] <= dim, f"{cos.shape} for heads of {dim}"
