"""A node's K/V of one layer group: appending to it, and attention over it.

Where the node holds all of a sequence's tokens, its rows attend as they do in local memory
(`local`), after their k and v are written. Where it holds only some tokens (partition mode
`sequence`), it computes prefix attention, the node's half of split attention: no causal mask is
needed, because every row sees all of its sequence's keys on the node, except those before a sliding
window. The engine computes the attention of the step's rows over each other and merges both halves
by their log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from memory.attention.kv_layout import KVCache, KVLayout, store_rows, values_of
from memory.attention.local import LocalAttention
from memory.attention.partial import (
    PartialAttention,
    PlainPartialAttention,
    TiledPartialAttention,
)
from memory.attention.seam import AttentionLayer, PlannedAttention
from memory.attention.tiled import TiledKVLayout, TiledLocalAttention, append, tiled_ops
from memory.nodes.wire import Append, Query
from memory.pages.layer_groups import READ_BLOCK
from memory.policies.selection import Selection
from ops.backend import Backend, KeyValues
from ops.cpu.native_tiled_attention import TiledAttentionStep


class NodeAttention(Protocol):
    """Attention over one layer group's K/V of a session. Layers are numbered within the group."""

    range_tokens: int
    """The distance from one range to the next."""
    local: PlannedAttention
    """Attention over all keys of a row, its own included."""
    partial: PartialAttention
    """Attention over ranges that are segments."""

    def plan_queries(self, queries: Sequence[Query]) -> object:
        """Prepares prefix attention, as far as all layers share it. One-row queries come first."""

    def plan_appends(self, appends: Sequence[Append]) -> object: ...

    def query(self, plan: object, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """Attends over the prefix with q [R, H, D]; returns out [R, H, D] and lse [R, H] fp32."""

    def append(self, plan: object, layer: int, k: Tensor, v: Tensor | None) -> None:
        """Writes k and v, [A, Hk, D] each, or k alone where V is a part of it."""


class TiledNodeAttention:
    """NodeAttention over K/V in tiles."""

    def __init__(
        self,
        layout: TiledKVLayout,
        address: int,
        range_bytes: int,
        selection: Selection | None = None,
    ) -> None:
        """The first range begins at `address`; ranges are range_bytes apart. selection: what rows
        of answers read in layers with bounds."""
        self.layout = layout
        self._address = address
        self._range_bytes = range_bytes
        self.ops = tiled_ops(layout)
        self.range_tokens = range_bytes // layout.token_bytes
        selects = layout.has_bounds
        self.local: PlannedAttention = TiledLocalAttention(
            layout,
            address,
            is_eager=True,
            selection=selection if selects else None,
        )
        self.partial: PartialAttention = TiledPartialAttention(layout, address, is_eager=True)

    def step(
        self, ranges: list[int], rows: list[int], keys: list[int], prefix_only: bool
    ) -> TiledAttentionStep:
        """Returns a step of some ranges: their rows, and their keys."""
        starts = [index * self._range_bytes for index in ranges]
        return TiledAttentionStep(
            self._address, self.layout.tile_bytes, starts, rows, keys, prefix_only=prefix_only
        )

    def plan_queries(self, queries: Sequence[Query]) -> object:
        return self.step(
            [q.range for q in queries],
            [q.num_rows for q in queries],
            [q.num_keys for q in queries],
            True,
        )

    def plan_appends(self, appends: Sequence[Append]) -> object:
        return self.step(
            [a.range for a in appends],
            [a.num_rows for a in appends],
            [a.position + a.num_rows for a in appends],
            False,
        )

    def query(self, plan: object, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        assert isinstance(plan, TiledAttentionStep)
        lse = torch.empty(q.shape[:2], dtype=torch.float32)
        return self.ops[layer].attend(plan, q.float(), lse), lse

    def append(self, plan: object, layer: int, k: Tensor, v: Tensor | None) -> None:
        assert isinstance(plan, TiledAttentionStep)
        append(self.ops[layer], plan, k, v, None)


class PlainNodeAttention:
    """NodeAttention over bf16 or fp32 K/V."""

    def __init__(
        self, layout: KVLayout, address: int, range_bytes: int, size_bytes: int, backend: Backend
    ) -> None:
        self._cache = KVCache(layout, address, size_bytes)
        self._layers: Sequence[AttentionLayer] = layout.layers
        self.range_tokens = range_bytes // layout.token_bytes
        self.local: PlannedAttention = LocalAttention(
            layout.layers, self._cache, backend, is_eager=True
        )
        self.partial: PartialAttention = PlainPartialAttention(
            layout, self._cache, backend, is_eager=True
        )
        self._backend = backend
        self._tensors = [self._cache.layer(i) for i in range(len(layout.layers))]

    def plan_queries(self, queries: Sequence[Query]) -> object:
        views = [self._cache.views(q.range * self.range_tokens, q.num_keys) for q in queries]
        return [(q.num_rows, view) for q, view in zip(queries, views, strict=True)]

    def plan_appends(self, appends: Sequence[Append]) -> object:
        rows: list[int] = []
        for item in appends:
            first = item.range * self.range_tokens + item.position
            rows.extend(range(first, first + item.num_rows))
        return torch.tensor(rows, dtype=torch.int64)

    def query(self, plan: object, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        assert isinstance(plan, list)
        q = q.to(self._tensors[layer].dtype)
        shape = self._layers[layer]
        outs: list[Tensor] = []
        lses: list[Tensor] = []
        singles = [view[layer] for num_rows, view in plan if num_rows == 1]
        if singles and shape.window is None:
            out, lse = self._backend.decode_attention(
                q[: len(singles)], singles, shape.scale, soft_cap=shape.soft_cap
            )
            outs.append(out)
            lses.append(lse)
        else:
            singles = []
        row = len(singles)
        for num_rows, view in plan[row:]:
            cache = _reached(view[layer], shape.window)
            out, lse = self._backend.prefix_attention(
                q[row : row + num_rows], cache, shape.scale, shape.window, soft_cap=shape.soft_cap
            )
            outs.append(out)
            lses.append(lse)
            row += num_rows
        if len(outs) == 1:
            return values_of(shape, outs[0]), lses[0]
        return values_of(shape, torch.cat(outs)), torch.cat(lses)

    def append(self, plan: object, layer: int, k: Tensor, v: Tensor | None) -> None:
        assert isinstance(plan, Tensor)
        cache = self._tensors[layer]
        store_rows(self._backend, k, v, cache, plan)


def _reached(cache: KeyValues, window: int | None) -> KeyValues:
    """Returns the keys that the next position sees, from a block's first one on; those before may
    be unmapped."""
    first = 0 if window is None else max(0, cache.k.shape[2] + 1 - window)
    first -= first % READ_BLOCK
    return KeyValues(cache.k[:, :, first:], cache.v[:, :, first:]) if first else cache
