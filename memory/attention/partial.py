"""Attention over a part of a sequence's keys: results with their log-sum-exp, which can be merged.

A *part* is what one call sees. Either the rows' own keys are its last ones, and rows attend
causally, or the rows come after the part and see all of its keys (prefix). The same classes compute
parts in the engine's memory and on memory nodes, so a part has the same bits wherever it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from memory.attention.kv_layout import KVCache, KVLayout, values_of
from memory.attention.layouts import Layout
from memory.attention.local import LocalAttention
from memory.attention.seam import AttentionLayer, AttentionStep, Rotation, Ticket
from memory.attention.tiled import RecentLayers, TiledKVLayout, append, tiled_ops
from ops.backend import Backend, Partial
from ops.cpu.native_tiled_attention import TiledAttentionStep


class OwnPart(Protocol):
    """Parts that end with the rows' own keys, of one step."""

    def begin(self, layer: int, q: Tensor) -> Ticket:
        """Attends over earlier keys, as far as that pays before k and v are there."""

    def finish(
        self, ticket: Ticket, k: Tensor | None, v: Tensor | None, rotation: Rotation | None
    ) -> Partial:
        """Writes k and v, and attends. k and v: as in `Attention.finish`. Returns fp32."""


class PrefixPart(Protocol):
    """Parts that end before the rows, of one step."""

    def attend(self, layer: int, q: Tensor) -> Partial:
        """Attends over all keys of the parts. Returns fp32."""


class PartialAttention(Protocol):
    """Attention over parts of K/V in this machine's memory. A step's sequences are the parts;
    those of one row come first."""

    def own(self, step: AttentionStep) -> OwnPart: ...

    def prefix(self, step: AttentionStep) -> PrefixPart: ...


def partial_attention(
    layout: Layout,
    address: int,
    size_bytes: int,
    backend: Backend,
    *,
    is_eager: bool = False,
    recent: RecentLayers | None = None,
) -> PartialAttention:
    """Returns attention over the reservation at `address`. is_eager: k and v come so late that
    `begin` should attend. recent: the store of recent tokens of int4 K/V; a part begins with a
    block there."""
    if isinstance(layout, TiledKVLayout):
        return TiledPartialAttention(layout, address, is_eager, recent)
    assert recent is None, "recent tokens beside K/V in tiles"
    return PlainPartialAttention(layout, KVCache(layout, address, size_bytes), backend, is_eager)


class TiledPartialAttention:
    """PartialAttention over K/V in tiles."""

    def __init__(
        self,
        layout: TiledKVLayout,
        address: int,
        is_eager: bool,
        recent: RecentLayers | None = None,
    ) -> None:
        assert recent is None or not is_eager, "a recent store is read in one call"
        self._layout, self._address = layout, address
        self._is_eager = is_eager
        self._recent = recent
        self.ops = tiled_ops(layout, recent)

    def _step(self, step: AttentionStep, *, prefix_only: bool) -> TiledAttentionStep:
        token_bytes = self._layout.token_bytes
        starts = [start * token_bytes for start in step.starts]
        return TiledAttentionStep(
            self._address,
            self._layout.tile_bytes,
            starts,
            step.num_rows,
            step.kv_lens,
            prefix_only=prefix_only,
        )

    def own(self, step: AttentionStep) -> OwnPart:
        planned = self._step(step, prefix_only=False)
        if self._recent is not None:
            self._recent.add_to(planned, step)
        return _TiledOwn(self, planned, self._is_eager and planned.num_single_rows > 0)

    def prefix(self, step: AttentionStep) -> PrefixPart:
        return _TiledPrefix(self, self._step(step, prefix_only=True))


class _TiledPrefix:
    def __init__(self, parent: TiledPartialAttention, step: TiledAttentionStep) -> None:
        self._ops, self._step = parent.ops, step

    def attend(self, layer: int, q: Tensor) -> Partial:
        lse = torch.empty(q.shape[:2], dtype=torch.float32)
        return Partial(self._ops[layer].attend(self._step, q.float(), lse), lse)


class _TiledOwn:
    def __init__(
        self, parent: TiledPartialAttention, step: TiledAttentionStep, is_eager: bool
    ) -> None:
        self._ops, self._step, self._is_eager = parent.ops, step, is_eager

    def begin(self, layer: int, q: Tensor) -> Ticket:
        begun = self._ops[layer].begin(self._step, q.float()) if self._is_eager else None
        return Ticket(layer, q, begun)

    def finish(
        self, ticket: Ticket, k: Tensor | None, v: Tensor | None, rotation: Rotation | None
    ) -> Partial:
        layer, q, begun = ticket
        op = self._ops[layer]
        if k is not None:
            append(op, self._step, k, v, rotation)
        lse = torch.empty(q.shape[:2], dtype=torch.float32)
        return Partial(op.attend(self._step, q.float(), lse, begun=begun), lse)


class PlainPartialAttention:
    """PartialAttention over bf16 or fp32 K/V."""

    def __init__(self, layout: KVLayout, cache: KVCache, backend: Backend, is_eager: bool) -> None:
        self.layers: Sequence[AttentionLayer] = layout.layers
        self.cache, self.backend = cache, backend
        self._local = LocalAttention(layout.layers, cache, backend, is_eager)

    def own(self, step: AttentionStep) -> OwnPart:
        num_singles = sum([n == 1 for n in step.num_rows])
        return _PlainOwn(self._local, replace(step, num_decodes=num_singles))

    def prefix(self, step: AttentionStep) -> PrefixPart:
        return _PlainPrefix(self, step)


class _PlainOwn:
    def __init__(self, local: LocalAttention, step: AttentionStep) -> None:
        self._plan = local.plan(step)

    def begin(self, layer: int, q: Tensor) -> Ticket:
        return self._plan.begin(layer, q)

    def finish(
        self, ticket: Ticket, k: Tensor | None, v: Tensor | None, rotation: Rotation | None
    ) -> Partial:
        out, lse = self._plan.finish_partial(ticket, k, v, rotation)
        return Partial(out.float(), lse)


class _PlainPrefix:
    def __init__(self, parent: PlainPartialAttention, step: AttentionStep) -> None:
        self._parent = parent
        self._num_rows = step.num_rows
        pairs = zip(step.starts, step.kv_lens, strict=True)
        self._views = [parent.cache.views(start, length) for start, length in pairs]

    def attend(self, layer: int, q: Tensor) -> Partial:
        parent = self._parent
        shape, backend = parent.layers[layer], parent.backend
        q = q.to(parent.cache.layout.dtype)
        parts: list[Partial] = []
        singles = [
            view[layer] for n, view in zip(self._num_rows, self._views, strict=True) if n == 1
        ]
        row = len(singles)
        if singles:
            part = backend.decode_attention(q[:row], singles, shape.scale, soft_cap=shape.soft_cap)
            parts.append(part)
        for n, view in zip(self._num_rows[row:], self._views[row:], strict=True):
            rows = q[row : row + n]
            parts.append(
                backend.prefix_attention(
                    rows, view[layer], shape.scale, None, soft_cap=shape.soft_cap
                )
            )
            row += n
        out = torch.cat([part.out for part in parts])
        return Partial(values_of(shape, out).float(), torch.cat([part.lse for part in parts]))
