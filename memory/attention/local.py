"""Attention over K/V in this machine's memory: the seam's local implementation.

`finish` appends the rows of the step, then runs the decode kernel on the rows of the first
num_decodes sequences and the prefill kernel on each remaining sequence. Layers above do not see
this split.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from memory.attention.kv_layout import KVCache, rotate_keys, store_rows, values_of
from memory.attention.seam import (
    AttentionLayer,
    AttentionStep,
    Finished,
    Rotation,
    Ticket,
    single_rows,
)
from memory.pages.layer_groups import READ_BLOCK
from ops.backend import Backend, KeyValues, Partial


class LocalAttention:
    """Implements PlannedAttention on one KVCache."""

    is_remote = False

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        cache: KVCache,
        backend: Backend,
        is_eager: bool = False,
    ) -> None:
        """is_eager: `begin` attends over earlier keys, because k and v come later."""
        self.is_eager = is_eager
        self.layers = list(layers)
        self.cache = cache
        self.backend = backend
        self.layer_tensors = [cache.layer(i) for i in range(len(self.layers))]
        self.sinks = [None if x.sinks is None else torch.tensor(x.sinks) for x in self.layers]

    def plan(self, step: AttentionStep) -> LocalPlan:
        return LocalPlan(self, step)


class LocalPlan:
    """Attention for one step's rows."""

    def __init__(self, parent: LocalAttention, step: AttentionStep) -> None:
        self._parent = parent
        rows: list[int] = []
        for start, num_rows, kv_len in zip(step.starts, step.num_rows, step.kv_lens, strict=True):
            rows.extend(range(start + kv_len - num_rows, start + kv_len))
        self._rows = torch.tensor(rows, dtype=torch.int64)
        if sum(step.num_rows[: step.num_decodes]) > step.num_decodes:
            step = single_rows(step)
        self._step = step
        self._views: list[list[KeyValues]] = [
            parent.cache.views(start, kv_len)
            for start, kv_len in zip(step.starts, step.kv_lens, strict=True)
        ]

    def begin(self, layer: int, q: Tensor) -> Ticket:
        parent, num_decodes = self._parent, self._step.num_decodes
        begun = None
        if parent.is_eager and num_decodes:
            rows = q[:num_decodes].to(parent.cache.layout.dtype)
            shape, caches = parent.layers[layer], self._decode_caches(layer)
            begun = parent.backend.begin_decode(rows, caches, shape.scale, soft_cap=shape.soft_cap)
        return Ticket(layer, q, begun)

    def _decode_caches(self, layer: int) -> list[KeyValues]:
        window = self._parent.layers[layer].window
        return [_last(views[layer], window) for views in self._views[: self._step.num_decodes]]

    def finish(
        self, ticket: Ticket, k: Tensor | None, v: Tensor | None, rotation: Rotation | None
    ) -> Finished:
        parts = self._finish(ticket, k, v, rotation)
        shape = self._parent.layers[ticket.layer]
        out = parts[0].out if len(parts) == 1 else torch.cat([part.out for part in parts])
        return Finished(values_of(shape, out).to(ticket.q.dtype))

    def finish_partial(
        self, ticket: Ticket, k: Tensor | None, v: Tensor | None, rotation: Rotation | None
    ) -> Partial:
        """Finishes a layer; returns also the rows' log-sum-exp."""
        parts = self._finish(ticket, k, v, rotation)
        out, lse = (torch.cat(items) for items in zip(*parts, strict=True))
        return Partial(values_of(self._parent.layers[ticket.layer], out), lse)

    def _finish(
        self, ticket: Ticket, k: Tensor | None, v: Tensor | None, rotation: Rotation | None
    ) -> list[Partial]:
        layer, q, begun = ticket
        parent = self._parent
        if k is not None:
            shape, cache = parent.layers[layer], parent.layer_tensors[layer]
            k = rotate_keys(parent.backend, shape, k, rotation)
            store_rows(parent.backend, k, v, cache, self._rows)
        return self._attend(Ticket(layer, q.to(parent.cache.layout.dtype), begun))

    def _attend(self, ticket: Ticket) -> list[Partial]:
        layer, q, begun = ticket
        shape, backend = self._parent.layers[layer], self._parent.backend
        cap, sinks = shape.soft_cap, self._parent.sinks[layer]
        num_decodes = self._step.num_decodes
        parts: list[Partial] = []
        if num_decodes:
            caches, rows = self._decode_caches(layer), q[:num_decodes]
            part = backend.decode_attention(
                rows, caches, shape.scale, begun, soft_cap=cap, sinks=sinks
            )
            parts.append(part)
        row = num_decodes
        for index in range(num_decodes, len(self._views)):
            n = self._step.num_rows[index]
            cache = _reached(self._views[index][layer], n, shape.window)
            rows = q[row : row + n]
            part = backend.prefill_attention(
                rows, cache, shape.scale, shape.window, soft_cap=cap, sinks=sinks
            )
            parts.append(part)
            row += n
        return parts


def _reached(cache: KeyValues, num_rows: int, window: int | None) -> KeyValues:
    """Returns the keys that the last num_rows positions see, from the start of a block of
    READ_BLOCK keys on. Kernels sum over such blocks, so a row has the same bits however the prompt
    is cut into chunks. Keys before may not be mapped any more."""
    length = cache.k.shape[2]
    first = 0 if window is None else length - num_rows + 1 - window
    if first < READ_BLOCK:
        return cache
    first -= first % READ_BLOCK
    return KeyValues(cache.k[:, :, first:], cache.v[:, :, first:])


def _last(cache: KeyValues, num_tokens: int | None) -> KeyValues:
    """Returns the last num_tokens keys, which are all that a sliding window reaches."""
    length = cache.k.shape[2]
    if num_tokens is None or num_tokens >= length:
        return cache
    first = length - num_tokens
    return KeyValues(cache.k[:, :, first:], cache.v[:, :, first:])
