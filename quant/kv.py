"""The int8 K/V format: bytes of a token, and the scale groups that fit a head.

Values are symmetric, with an fp16 scale for `group` neighbouring dimensions of a head next to them.
Tokens are stored in tiles of 16, so that a register holds 16 tokens of K. The kernel defines the
order of the bytes (ops/csrc/attention_decode.inl).
"""

from __future__ import annotations

from dataclasses import dataclass

TILE_TOKENS = 16
GROUPS = (8, 16, 32, 64, 128, 256)
MAX_HEAD_DIM = 512
_SCALE_BYTES = 2


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


def fitting_group(head_dim: int, wanted: int) -> int | None:
    """Returns the largest group up to `wanted` that divides head_dim, or None."""
    if head_dim % 16 or head_dim > MAX_HEAD_DIM:
        return None
    return max((g for g in GROUPS if g <= wanted and head_dim % g == 0), default=None)
