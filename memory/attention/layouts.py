"""The number formats of K/V by their names: the layout of each, and attention over it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memory.attention.kv_layout import KVCache, KVLayout
from memory.attention.local import LocalAttention
from memory.attention.seam import AttentionLayer, PlannedAttention
from memory.attention.tiled import (
    TILED_TYPES,
    RecentLayers,
    TiledKVLayout,
    TiledLocalAttention,
)
from memory.policies.selection import Selection
from ops.backend import Backend

Layout = KVLayout | TiledKVLayout

KV_TYPES = (*TILED_TYPES, "bfloat16", "float32")


def make_layout(
    layers: Sequence[AttentionLayer], kv_dtype: str, group: int, *, has_bounds: bool = False
) -> Layout:
    """Returns the layout of these layers' K/V. kv_dtype: one of KV_TYPES. group: the largest number
    of values of a head that share a scale. has_bounds: whether decoded rows select what they read,
    of K/V in tiles."""
    if kv_dtype in TILED_TYPES:
        return TiledKVLayout(layers, kv_dtype, group, has_bounds=has_bounds)
    assert not has_bounds, f"{kv_dtype} K/V has no bounds"
    return KVLayout(layers, getattr(torch, kv_dtype))


def local_attention(
    layout: Layout,
    address: int,
    num_bytes: int,
    backend: Backend,
    *,
    is_eager: bool = False,
    recent: RecentLayers | None = None,
    selection: Selection | None = None,
) -> PlannedAttention:
    """Returns attention over K/V of num_bytes at `address`. is_eager: `begin` attends over earlier
    keys, because k and v come later. recent: the store of recent tokens of int4 K/V. selection:
    what decoded rows read, of K/V in tiles."""
    if isinstance(layout, TiledKVLayout):
        return TiledLocalAttention(layout, address, is_eager, recent, selection)
    assert selection is None, "K/V is selected in tiles"
    assert recent is None, "recent tokens beside K/V in tiles"
    return LocalAttention(layout.layers, KVCache(layout, address, num_bytes), backend, is_eager)
