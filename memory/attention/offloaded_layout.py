"""The layout of int8 and int4 K/V in tiles of which a part is in memory, and the rest in a file."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from memory.attention.seam import AttentionLayer
from memory.attention.tiled import TiledKVLayout, is_selectable
from quant.kv import bounds_bytes

UNIT_ALIGNMENT = 4096
"""Units begin at multiples of this, in memory and in the file, which is read in such blocks."""

_LINE_BYTES = 64


class OffloadedKVLayout(TiledKVLayout):
    """The layout of K/V whose layers have places of their own, the units, in multiples of
    UNIT_ALIGNMENT.

    tile_bytes: of all units of a tile. bounds: where those of each layer begin in a tile of their
    own, of bounds_tile_bytes, if K/V is selected.
    """

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        kv_dtype: str,
        group: int,
        *,
        has_bounds: bool = False,
    ) -> None:
        super().__init__(layers, kv_dtype, group)
        assert all(layer.shares is None for layer in layers), "each layer has its own K/V"
        self.unit_bytes = [aligned(form.tile_bytes) for form in self.formats]
        self.offsets, self.tile_bytes = [0] * len(self.layers), sum(self.unit_bytes)
        self.bounds_tile_bytes = 0
        if not has_bounds:
            return
        for number, layer in enumerate(self.layers):
            assert is_selectable(layer), "all layers select"
            self.bounds[number] = self.bounds_tile_bytes
            self.bounds_tile_bytes += bounds_bytes(layer.num_kv_heads, layer.head_dim)

    def bounds_padding(self, tiles_per_page: int) -> int:
        """Returns the bytes that `pad_bounds` adds to the bounds of a tile."""
        unit = max(_LINE_BYTES, UNIT_ALIGNMENT // gcd(UNIT_ALIGNMENT, tiles_per_page))
        return -self.bounds_tile_bytes % unit

    def pad_bounds(self, tiles_per_page: int) -> None:
        """Pads the bounds of each tile, so that those of a page's tiles fill whole system pages."""
        self.bounds_tile_bytes += self.bounds_padding(tiles_per_page)


def aligned(num_bytes: int) -> int:
    """Returns the multiple of UNIT_ALIGNMENT that holds so many bytes."""
    return -(-num_bytes // UNIT_ALIGNMENT) * UNIT_ALIGNMENT
