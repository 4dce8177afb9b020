"""New-token attention, the engine's half of split attention.

While memory nodes compute the prefix attention, the engine computes the causal attention of the
step's rows over the step's own k and v, and over the prompt tail cache (prompt_tail_cache.py). The
results are merged. k and v are rounded exactly as the nodes' K/V is, so that a row sees the same
numbers in this step and in later ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from memory.attention.kv_layout import KVCache, KVLayout, store_rows, values_of
from memory.attention.seam import AttentionLayer
from memory.attention.tiled import TiledKVLayout, TiledOp, append, tiled_ops
from memory.nodes.prompt_tail_cache import PromptTailCache, TailSpan
from ops.backend import Backend, KeyValues
from ops.cpu.native_tiled_attention import TiledAttentionStep
from quant.kv import TILE_TOKENS


class NewTokenAttention(Protocol):
    """New-token attention for all layers of a model."""

    def plan(
        self, num_decodes: int, num_rows: Sequence[int], spans: Sequence[TailSpan | None]
    ) -> object:
        """Prepares a step. num_rows has the rows of each sequence; the first num_decodes have one
        each. spans locates those sequences whose K/V is in the prompt tail cache."""

    def attend(
        self, plan: object, layer: int, q: Tensor, k: Tensor, v: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Attends with q [T, H, D] and k, v [T, Hk, D]; q and k are rotated. Returns out [T, H, D]
        and lse [T, H], both fp32. A layer that shares K/V gets k and v of the other one, which has
        attended before. v is None where V is a part of K."""


class _TiledRun(NamedTuple):
    """Rows [first, end) of adjacent sequences. steps is keyed by the bytes of a layer's tile, or
    has the single key 0 for sequences in the prompt tail cache."""

    first: int
    end: int
    steps: dict[int, TiledAttentionStep]


class TiledNewTokenAttention:
    """NewTokenAttention through a small buffer of K/V in tiles, which holds one layer's rows of one
    step."""

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        kv_dtype: str,
        group: int,
        max_rows: int,
        max_num_seqs: int,
        tail_cache: PromptTailCache | None = None,
    ) -> None:
        # the buffer holds one layer at a time, so also a shared layer's own copy
        layouts = [
            TiledKVLayout([replace(layer, shares=None)], kv_dtype, group) for layer in layers
        ]
        self._has_kv = [layer.shares is None for layer in layers]
        self._ops = [tiled_ops(layout)[0] for layout in layouts]
        self._tile_bytes = [layout.tile_bytes for layout in layouts]
        num_tiles = -(-max_rows // TILE_TOKENS) + max_num_seqs
        # zeros, because the kernels also read the scales of rows that were never written
        self._memory = torch.zeros(num_tiles * max(self._tile_bytes) + 64, dtype=torch.uint8)
        address = self._memory.data_ptr()
        self._address = address + -address % 64
        self._tail_cache = tail_cache
        self._tail_ops: list[TiledOp] = []
        if tail_cache is not None:
            assert isinstance(tail_cache.layout, TiledKVLayout)
            self._tail_ops = tiled_ops(tail_cache.layout)

    def plan(
        self, num_decodes: int, num_rows: Sequence[int], spans: Sequence[TailSpan | None]
    ) -> object:
        runs: list[_TiledRun] = []
        row = 0
        both = zip(num_rows, spans, strict=True)
        for is_kept, pairs in groupby(both, key=lambda pair: pair[1] is not None):
            sequences = list(pairs)
            rows = [n for n, _ in sequences]
            steps = (
                self._kept([span for _, span in sequences if span is not None], rows)
                if is_kept
                else self._own(rows)
            )
            runs.append(_TiledRun(row, row + sum(rows), steps))
            row += sum(rows)
        return runs

    def _kept(self, spans: Sequence[TailSpan], rows: list[int]) -> dict[int, TiledAttentionStep]:
        assert self._tail_cache is not None and isinstance(self._tail_cache.layout, TiledKVLayout)
        layout = self._tail_cache.layout
        starts = [span.start * layout.token_bytes for span in spans]
        lengths = [span.num_tokens for span in spans]
        step = TiledAttentionStep(
            self._tail_cache.address, layout.tile_bytes, starts, rows, lengths
        )
        return {0: step}

    def _own(self, rows: list[int]) -> dict[int, TiledAttentionStep]:
        tiles = [0]
        for n in rows:
            tiles.append(tiles[-1] + -(-n // TILE_TOKENS))
        assert tiles[-1] * max(self._tile_bytes) <= self._memory.numel(), f"{tiles[-1]} tiles"
        return {
            size: TiledAttentionStep(
                self._address, size, [tile * size for tile in tiles[:-1]], rows, rows
            )
            for size in set(self._tile_bytes)
        }

    def attend(
        self, plan: object, layer: int, q: Tensor, k: Tensor, v: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(plan, list)
        q = q.float()
        if len(plan) == 1:
            return self._run(plan[0], layer, q, k, v)
        rows = [slice(run.first, run.end) for run in plan]
        parts = [
            self._run(run, layer, q[own], k[own], None if v is None else v[own])
            for run, own in zip(plan, rows, strict=True)
        ]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])

    def _run(
        self, run: _TiledRun, layer: int, q: Tensor, k: Tensor, v: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        is_kept = 0 in run.steps
        op = self._tail_ops[layer] if is_kept else self._ops[layer]
        step = run.steps[0 if is_kept else self._tile_bytes[layer]]
        if self._has_kv[layer] or not is_kept:
            append(op, step, k, v, None)
        lse = torch.empty(q.shape[:2], dtype=torch.float32)
        return op.attend(step, q, lse), lse


class PlainNewTokenAttention:
    """NewTokenAttention in bf16 or fp32. k and v are used in place, or written to the prompt tail
    cache."""

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        dtype: torch.dtype,
        backend: Backend,
        tail_cache: PromptTailCache | None = None,
    ) -> None:
        self._layers = list(layers)
        self._sinks = [None if x.sinks is None else torch.tensor(x.sinks) for x in layers]
        self._dtype = dtype
        self._backend = backend
        self._cache: KVCache | None = None
        if tail_cache is not None:
            assert isinstance(tail_cache.layout, KVLayout)
            self._cache = KVCache(tail_cache.layout, tail_cache.address, tail_cache.size_bytes)

    def plan(
        self, num_decodes: int, num_rows: Sequence[int], spans: Sequence[TailSpan | None]
    ) -> object:
        return num_decodes, list(zip(num_rows[num_decodes:], spans[num_decodes:], strict=True))

    def attend(
        self, plan: object, layer: int, q: Tensor, k: Tensor, v: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(plan, tuple)
        row, chunks = plan
        shape, sinks = self._layers[layer], self._sinks[layer]
        q, k = (x.to(self._dtype).contiguous() for x in (q, k))
        v = k if v is None else v.to(self._dtype).contiguous()
        outs: list[Tensor] = []
        lses: list[Tensor] = []
        if row:
            if shape.soft_cap or sinks is not None:
                caches = [_dense_keys(k[i : i + 1], v[i : i + 1]) for i in range(row)]
                out, lse = self._backend.decode_attention(
                    q[:row], caches, shape.scale, soft_cap=shape.soft_cap, sinks=sinks
                )
            else:
                out, lse = _own_key(q[:row], k[:row], v[:row], shape.scale)
            outs.append(out.float())
            lses.append(lse)
        for num_rows, span in chunks:
            own = slice(row, row + num_rows)
            cache = self._keys(layer, k[own], v[own], span)
            out, lse = self._backend.prefill_attention(
                q[own],
                cache,
                shape.scale,
                shape.window,
                soft_cap=shape.soft_cap,
                sinks=sinks,
            )
            outs.append(out.float())
            lses.append(lse)
            row += num_rows
        if len(outs) == 1:
            return values_of(shape, outs[0]), lses[0]
        return values_of(shape, torch.cat(outs)), torch.cat(lses)

    def _keys(self, layer: int, k: Tensor, v: Tensor, span: TailSpan | None) -> KeyValues:
        if span is None:
            return _dense_keys(k, v)
        assert self._cache is not None
        end = span.start + span.num_tokens
        if self._layers[layer].shares is None:
            rows = torch.arange(end - len(k), end)
            own = v if self._layers[layer].value_dim is None else None
            store_rows(self._backend, k, own, self._cache.layer(layer), rows)
        return self._cache.view(layer, span.start, span.num_tokens)


def _dense_keys(k: Tensor, v: Tensor) -> KeyValues:
    return KeyValues(k.transpose(0, 1)[None], v.transpose(0, 1)[None])


def _own_key(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attends with each row over its own key alone: out is its v, lse its score."""
    rows, heads, dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.view(rows, kv_heads, heads // kv_heads, dim).float()
    lse = (grouped * k.float()[:, :, None]).sum(-1).mul_(scale)
    out = v.float()[:, :, None].expand(grouped.shape).reshape(rows, heads, dim)
    return out, lse.view(rows, heads)
