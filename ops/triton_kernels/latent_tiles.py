"""Latents in tiles: one vector for each token, all of it K and its first part V.

A tile of 16 tokens holds the layer's vectors, [16, D], and for int8 scales [16, groups] fp16 after
them: those of the first value_dim values before those of the rest.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.kv_tiles import TILE_TOKENS
from ops.triton_kernels.kv import Rotation
from ops.triton_kernels.tiles import TYPES, row_stride, tile_pointer

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
        assert self.value_dim > 0 < self.rope_dim, f"{self}"
        assert (self.dtype == torch.int8) == (self.group is not None), f"{self}"
        assert self.tile_stride % 16 == 0 and self.offset % 16 == 0, f"{self}"
        assert 0 <= self.offset <= self.tile_stride - self.layer_bytes, f"{self}"

    @property
    def head_dim(self) -> int:
        return self.value_dim + self.rope_dim

    @property
    def num_groups(self) -> int:
        """Scales of a vector; 0: not quantized."""
        if self.group is None or self.rope_group is None:
            return 0
        return self.value_dim // self.group + self.rope_dim // self.rope_group

    @property
    def layer_bytes(self) -> int:
        return TILE_TOKENS * (self.head_dim * _SIZES[self.dtype] + 2 * self.num_groups)


def latent_distance(tiles: LatentTiles, base: int, anchor: Tensor) -> int:
    """Returns the bytes from the anchor to the layer's part of the first tile at base."""
    return base + tiles.offset - anchor.data_ptr()


def latent_constants(tiles: LatentTiles) -> dict[str, Any]:
    """Returns the compile-time arguments that describe a layer."""
    return {
        "TILE_STRIDE": tiles.tile_stride,
        "VALUE_DIM": tiles.value_dim,
        "ROPE_DIM": tiles.rope_dim,
        "GROUP": tiles.group or 1,
        "ROPE_GROUP": tiles.rope_group or 1,
        "TYPE": TYPES[tiles.dtype],
        "VALUE_PAD": _padded(tiles.value_dim),
        "ROPE_PAD": _padded(tiles.rope_dim),
    }


def _padded(dim: int) -> int:
    return max(16, int(triton.next_power_of_2(dim)))


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
            latent_distance(tiles, base, rows),
            HALF=half,
            **latent_constants(tiles),
            num_warps=4,
        )
