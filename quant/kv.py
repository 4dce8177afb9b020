"""The int8 and int4 K/V formats: bytes of a token, and the scale groups that fit a head.

int8 values are symmetric, with an fp16 scale for `group` neighbouring dimensions of a head next to
them; int4 values are codes of a table of 16 levels, with such scales too. Tokens are stored in
tiles of 16, so that a register holds 16 tokens of K. The kernels define the order of the bytes
(ops/csrc/kv_tiles.inl and kv_tiles4.inl).
"""

from __future__ import annotations

from dataclasses import dataclass

TILE_TOKENS = 16
GROUPS = (8, 16, 32, 64, 128, 256)
MIN_INT4_GROUP, MAX_INT4_GROUP = 16, 32
MAX_HEAD_DIM = 512
MAX_LATENT_DIM = 1024
_SCALE_BYTES = 2
_LINE_BYTES = 64
RECENT_BLOCK = 128
"""The positions of a block. Where int4 K/V keeps recent tokens in int8, too, a row reads the keys
of its own block there, from the last multiple of so many positions on. Positions alone decide, so a
row has the same bits however its sequence was computed."""


@dataclass(frozen=True, slots=True)
class Int8KVFormat:
    """The int8 format of one layer's K and V. group divides head_dim."""

    num_kv_heads: int
    head_dim: int
    group: int

    @property
    def token_bytes(self) -> int:
        """The bytes of K and V of one token, scales included."""
        return self.num_kv_heads * 2 * (self.head_dim + self.head_dim // self.group * _SCALE_BYTES)

    @property
    def tile_bytes(self) -> int:
        return self.token_bytes * TILE_TOKENS


@dataclass(frozen=True, slots=True)
class Int4KVFormat:
    """The int4 format of one layer's K and V. group divides head_dim and is at least 16."""

    num_kv_heads: int
    head_dim: int
    group: int

    @property
    def token_bytes(self) -> int:
        """The bytes of K and V of one token, scales included. V is stored 32 dimensions at a
        time."""
        codes = self.head_dim // 2 + -(-self.head_dim // 32) * 16
        return self.num_kv_heads * (codes + 2 * self.head_dim // self.group * _SCALE_BYTES)

    @property
    def tile_bytes(self) -> int:
        return self.token_bytes * TILE_TOKENS


@dataclass(frozen=True, slots=True)
class LatentKVFormat:
    """The int8 format of one layer's latents: a token's first value_dim numbers and the rope_dim
    that follow, each part with its own groups. A layer's part of a tile ends at 64 bytes."""

    value_dim: int
    rope_dim: int
    group: int
    rope_group: int

    @property
    def tile_bytes(self) -> int:
        scales = self.value_dim // self.group + self.rope_dim // self.rope_group
        size = (self.value_dim + self.rope_dim + scales * _SCALE_BYTES) * TILE_TOKENS
        return -(-size // 64) * 64


def bounds_bytes(num_kv_heads: int, head_dim: int) -> int:
    """Returns the bytes of the bounds of a layer's keys in a tile: two for each dimension of a
    head, and a scale for each head, both padded (ops/csrc/kv_bounds.inl)."""
    sizes = (2 * head_dim, _SCALE_BYTES * num_kv_heads)
    head, scales = (-(-size // _LINE_BYTES) * _LINE_BYTES for size in sizes)
    return num_kv_heads * head + scales


def latent_format(value_dim: int, head_dim: int, wanted: int) -> LatentKVFormat | None:
    """Returns the format with the largest groups up to `wanted`, but at least 16; None if the
    kernels do not support these sizes."""
    rope_dim, wanted = head_dim - value_dim, max(wanted, 16)
    if value_dim <= 0 or rope_dim <= 0 or head_dim > MAX_LATENT_DIM:
        return None
    if value_dim % 16 or rope_dim % 16:
        return None
    groups = [max(g for g in GROUPS if g <= wanted and n % g == 0) for n in (value_dim, rope_dim)]
    return LatentKVFormat(value_dim, rope_dim, *groups)


def fitting_group(head_dim: int, wanted: int) -> int | None:
    """Returns the largest group up to `wanted` that divides head_dim, or None."""
    if head_dim % 16 or head_dim > MAX_HEAD_DIM:
        return None
    return max((g for g in GROUPS if g <= wanted and head_dim % g == 0), default=None)


def fitting_int4_group(head_dim: int, wanted: int) -> int | None:
    """Returns fitting_group's result for int4 K/V, whose groups have 16 to 32 values."""
    return fitting_group(head_dim, min(max(wanted, MIN_INT4_GROUP), MAX_INT4_GROUP))


def kv_format(
    kv_dtype: str, num_kv_heads: int, head_dim: int, wanted: int
) -> Int8KVFormat | Int4KVFormat | None:
    """Returns the format "int8" or "int4" with the largest groups up to `wanted` (int4: up to 32),
    or None if the kernels do not support this head_dim."""
    if kv_dtype == "int4":
        group = fitting_int4_group(head_dim, wanted)
        return None if group is None else Int4KVFormat(num_kv_heads, head_dim, group)
    group = fitting_group(head_dim, wanted)
    return None if group is None else Int8KVFormat(num_kv_heads, head_dim, group)
