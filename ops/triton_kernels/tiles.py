"""K/V tiles in Triton: shared parts of the kernels that read or write them.

A tile's address is never a pointer argument, because the driver only accepts mapped pointers and
the first page of a reservation may be unmapped. It is a 64-bit distance from any tensor, the
anchor, which also tells the compiler the alignment.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import functools
import os
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.kv_tiles import KVTiles

TYPES = {torch.int8: tl.int8, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
LOG2E = 1.4426950408889634
_IS_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")


class Config(NamedTuple):
    """Launch parameters that do not affect results. constants: compile-time arguments;
    max_registers: limit per thread."""

    constants: dict[str, Any]
    num_warps: int
    max_registers: int | None = None

    def options(self) -> dict[str, Any]:
        """Returns the arguments of a launch."""
        limit = {} if self.max_registers is None else {"maxnreg": self.max_registers}
        return self.constants | {"num_warps": self.num_warps} | limit


@functools.cache
def layer_distance(tiles: KVTiles, base: int, anchor: Tensor) -> int:
    """Returns the bytes from the anchor to the layer's part of the reservation's first tile."""
    distance = base + tiles.offset - anchor.data_ptr()
    assert distance % 16 == 0 and anchor.data_ptr() % 16 == 0, f"{base=}"
    return distance


def layer_constants(tiles: KVTiles, *types: torch.dtype) -> dict[str, Any]:
    """Returns the compile-time arguments that describe a layer.

    Products are in fp32 if K/V or one of types is fp32, else in bf16. One or two scales per head
    are applied after the products over the head, part by part; more are applied to the elements.
    """
    groups, dim = tiles.num_groups, tiles.head_dim
    parts = 2 if groups == 2 else 1
    is_wide = torch.float32 in (tiles.dtype, *types)
    return {
        "TILE_STRIDE": tiles.tile_stride,
        "KV_HEADS": tiles.num_kv_heads,
        "HEAD_DIM": dim,
        "NUM_GROUPS": groups,
        "PARTS": parts,
        "PART_PAD": triton.next_power_of_2(dim // parts),
        "TYPE": TYPES[tiles.dtype],
        "COMPUTE": tl.float32 if is_wide else tl.bfloat16,
    }


def row_stride(x: Tensor) -> int:
    """Returns the row stride of x: [T, heads, D], whose heads must be dense."""
    dim = x.shape[2]
    assert x.stride(2) == 1 and (x.stride(1) == dim or x.shape[1] == 1), f"{x.stride()}"
    return x.stride(0)


@triton.jit
def as_operand(x, COMPUTE: tl.constexpr):
    """Returns x as an operand of tl.dot. The interpreter rounds to bf16 but multiplies in fp32."""
    if _IS_INTERPRETED:
        return x.to(tl.float32).to(COMPUTE).to(tl.float32)
    else:
        return x.to(COMPUTE)


@triton.jit
def tile_pointer(anchor, distance, token, TILE_STRIDE: tl.constexpr):
    """Returns a byte pointer to the layer's part of the tile of token number `token`."""
    return anchor.to(tl.pointer_type(tl.int8), bitcast=True) + (
        distance + token // 16 * TILE_STRIDE
    )


@triton.jit
def value_pointer(
    tile,
    head,
    IS_V: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Returns a pointer to the head's values in tile, the layer's part of a tile."""
    values = tile.to(tl.pointer_type(TYPE), bitcast=True)
    return values + (IS_V * KV_HEADS + head) * (16 * HEAD_DIM)


@triton.jit
def scale_pointer(
    tile,
    head,
    IS_V: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
):
    """Returns a pointer to the head's scales in a tile of int8 values."""
    scales = (tile + 2 * KV_HEADS * 16 * HEAD_DIM).to(tl.pointer_type(tl.float16), bitcast=True)
    return scales + (head * 32 + IS_V) * NUM_GROUPS


@triton.jit
def value_offsets(
    tokens,
    dims,
    IS_V: tl.constexpr,
    TILE_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Returns the offsets of dims of tokens from a head's values of token 0, in elements."""
    SIZE: tl.constexpr = TYPE.primitive_bitwidth // 8
    tiles = (tokens // 16).to(tl.int64) * (TILE_STRIDE // SIZE)
    if IS_V and tl.int8 == TYPE:
        return tiles + tokens % 16 + dims * 16
    else:
        return tiles + tokens % 16 * HEAD_DIM + dims


@triton.jit
def scale_offsets(tokens, TILE_STRIDE: tl.constexpr, NUM_GROUPS: tl.constexpr):
    """Returns the offsets of tokens' scales of K or V from those of token 0."""
    return (tokens // 16).to(tl.int64) * (TILE_STRIDE // 2) + tokens % 16 * (2 * NUM_GROUPS)


@triton.jit
def load_values(
    tile,
    head,
    tokens,
    present,
    mapped,
    part: tl.constexpr,
    IS_V: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    TILE_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    PART_PAD: tl.constexpr,
    TYPE: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Loads one part of each token's vector as [N, PART_PAD] of COMPUTE.

    Values are zero beyond the part and, except for int8, for absent tokens. mapped: tokens of tiles
    with a present token. IS_WHOLE: all tokens are present. With more than two groups, scales are
    applied here.
    """
    PART: tl.constexpr = HEAD_DIM // PARTS
    BY_DIM: tl.constexpr = IS_V and tl.int8 == TYPE
    inner = tl.arange(0, PART_PAD)
    if BY_DIM:
        # With one mask value for a tile's 16 tokens they are read in one load.
        inner, tokens = inner[:, None], tokens[None, :]
        mask, scaled = mapped[None, :], present[None, :]
    else:
        inner, tokens = inner[None, :], tokens[:, None]
        mask = present[:, None]
        scaled = mask
    dims = part * PART + inner
    if PART != PART_PAD:
        mask = mask & (inner < PART)
    offsets = value_offsets(tokens, dims, IS_V, TILE_STRIDE, HEAD_DIM, TYPE)
    if BY_DIM:
        # The compiler loses sight of this where the numbers of the tiles come from memory.
        offsets = tl.max_contiguous(tl.multiple_of(offsets, (1, 16)), (1, 16))
    values = value_pointer(tile, head, IS_V, KV_HEADS, HEAD_DIM, TYPE) + offsets
    if IS_WHOLE and PART == PART_PAD:
        x = tl.load(values)
    else:
        x = tl.load(values, mask=mask, other=0)
    if NUM_GROUPS > 2:
        scales = scale_pointer(tile, head, IS_V, KV_HEADS, HEAD_DIM, NUM_GROUPS)
        scales += scale_offsets(tokens, TILE_STRIDE, NUM_GROUPS) + dims // (HEAD_DIM // NUM_GROUPS)
        scale = tl.load(scales, mask=mask & scaled, other=0)
        x = as_operand(x.to(tl.float32) * scale.to(tl.float32), COMPUTE)
    else:
        x = as_operand(x, COMPUTE)
    return tl.trans(x) if BY_DIM else x


@triton.jit
def load_scales(
    tile,
    head,
    tokens,
    present,
    TILE_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
):
    """Loads four [N] fp32: each token's first and last scale of K and of V, for one or two groups.

    Scales of absent tokens are 0. They are read as one word, which unlike fp16 can be prefetched.
    """
    SIZE: tl.constexpr = 4 * NUM_GROUPS
    WORD: tl.constexpr = tl.int32 if NUM_GROUPS == 1 else tl.int64
    scales = scale_pointer(tile, head, 0, KV_HEADS, HEAD_DIM, NUM_GROUPS)
    words = scales.to(tl.pointer_type(WORD), bitcast=True)
    at = (tokens // 16).to(tl.int64) * (TILE_STRIDE // SIZE) + tokens % 16
    word = tl.load(words + at, mask=present, other=0)
    LAST: tl.constexpr = 16 * (NUM_GROUPS - 1)
    OF_V: tl.constexpr = 16 * NUM_GROUPS
    k_first, k_last = _scale_in(word, 0), _scale_in(word, LAST)
    return k_first, k_last, _scale_in(word, OF_V), _scale_in(word, OF_V + LAST)


@triton.jit
def _scale_in(word, bit: tl.constexpr):
    """Returns the fp16 number at a bit offset of a word as fp32."""
    return (word >> bit).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
