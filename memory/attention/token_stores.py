"""What dropping tokens needs of a K/V layout: the weights that rows give to keys, and moves of
tokens to the front of their range."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from memory.attention.kv_layout import KVCache
from memory.attention.tiled import TiledKVLayout
from ops.cpu.native_key_scores import KeyScoring, PlainKeyScoring, ScorePlan
from quant.kv import Int8KVFormat

Floats = npt.NDArray[np.float32]
Kept = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Rows of a step that give scores: [first, end) of its rows, the last of which sees kv_len keys
    of the range at token address `start`. sums: [layers, Hk, at least kv_len], to which the rows'
    weights are added. noise: as sums, is added to the scores, and sharpness: [rows], multiplies
    them."""

    start: int
    first: int
    end: int
    kv_len: int
    sums: Floats
    noise: Floats | None
    sharpness: Floats | None


class KeyScorer(Protocol):
    """Scores the keys of one step."""

    def add(self, layer: int, q: Tensor) -> None:
        """Adds the weights of the rows in a layer whose K is written, row after row. q: [rows of
        the step, H, D]."""


class TokenStore(Protocol):
    """The K/V of all layers. `start` is a range's first token address; kept has for each layer the
    tokens that stay, [Hk, tokens], rising."""

    def scorer(self, scored: Sequence[ScoredRows]) -> KeyScorer:
        """Returns what scores these rows of a step."""

    def move(self, start: int, kept: Sequence[Kept]) -> None:
        """Moves the tokens to the first places of their range."""

    def take(self, start: int, kept: Sequence[Kept]) -> object:
        """Returns a copy of the tokens for `put`."""

    def put(self, start: int, taken: object) -> None:
        """Writes tokens to the first places of a range."""


class TiledTokens:
    """int8 K/V in tiles at `address`."""

    def __init__(self, layout: TiledKVLayout, address: int) -> None:
        self._layout, self._address = layout, address
        self._ops: list[KeyScoring] = []
        parts = zip(layout.layers, layout.formats, layout.offsets, strict=True)
        for layer, form, offset in parts:
            assert isinstance(form, Int8KVFormat), f"{form}"
            self._ops.append(
                KeyScoring(
                    offset_bytes=offset,
                    num_heads=layer.num_heads,
                    num_kv_heads=layer.num_kv_heads,
                    head_dim=layer.head_dim,
                    group=form.group,
                    scale=layer.scale,
                    soft_cap=layer.soft_cap,
                )
            )

    def _base(self, start: int) -> int:
        return self._address + start * self._layout.token_bytes

    def scorer(self, scored: Sequence[ScoredRows]) -> KeyScorer:
        plan = ScorePlan(self._layout.tile_bytes)
        for it in scored:
            base, count = self._base(it.start), it.end - it.first
            plan.add(base, it.first, count, it.kv_len, it.sums, it.noise, it.sharpness)
        return _NativeScorer(self._ops, plan)

    def move(self, start: int, kept: Sequence[Kept]) -> None:
        base = self._base(start)
        for op, tokens in zip(self._ops, kept, strict=True):
            op.gather(base, base, self._layout.tile_bytes, tokens)

    def take(self, start: int, kept: Sequence[Kept]) -> object:
        tile = self._layout.tile_tokens
        num_tiles = -(-max(tokens.shape[1] for tokens in kept) // tile)
        copy = np.zeros(num_tiles * self._layout.tile_bytes, dtype=np.uint8)
        for op, tokens in zip(self._ops, kept, strict=True):
            op.gather(self._base(start), copy.ctypes.data, self._layout.tile_bytes, tokens)
        return copy

    def put(self, start: int, taken: object) -> None:
        assert isinstance(taken, np.ndarray)
        ctypes.memmove(self._base(start), taken.ctypes.data, taken.nbytes)


class _NativeScorer:
    def __init__(self, ops: Sequence[KeyScoring | PlainKeyScoring], plan: ScorePlan) -> None:
        self._ops, self._plan = ops, plan

    def add(self, layer: int, q: Tensor) -> None:
        self._ops[layer].add(self._plan, layer, q.float())


class PlainTokens:
    """K/V in floating point. Torch scores types and heads that the kernels do not have, row by row;
    torch moves tokens, too."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        layout = cache.layout
        self._layers = [cache.layer(i) for i in range(len(layout.layers))]
        can_score = PlainKeyScoring.can_score
        self._ops: list[PlainKeyScoring] = []
        if all(can_score(layer.head_dim, layout.dtype) for layer in layout.layers):
            self._ops = [
                PlainKeyScoring(
                    offset_bytes=offset * layout.dtype.itemsize,
                    num_heads=layer.num_heads,
                    num_kv_heads=layer.num_kv_heads,
                    head_dim=layer.head_dim,
                    dtype=layout.dtype,
                    scale=layer.scale,
                    soft_cap=layer.soft_cap,
                )
                for layer, offset in zip(layout.layers, layout.offsets, strict=True)
            ]

    def scorer(self, scored: Sequence[ScoredRows]) -> KeyScorer:
        if not self._ops:
            return _TorchScorer(self._cache, self._layers, scored)
        layout, token_bytes = self._cache.layout, self._cache.layout.token_bytes
        address = self._layers[0].data_ptr() - layout.offsets[0] * layout.dtype.itemsize
        plan = ScorePlan(token_bytes)
        for it in scored:
            base, count = address + it.start * token_bytes, it.end - it.first
            plan.add(base, it.first, count, it.kv_len, it.sums, it.noise, it.sharpness)
        return _NativeScorer(self._ops, plan)

    def _gathered(self, start: int, layer: int, kept: Kept) -> Tensor:
        """Returns a layer's K/V of the tokens, [tokens, 2, Hk, D]."""
        rows = torch.from_numpy(kept.T.astype(np.int64)) + start  # [tokens, Hk]
        heads = torch.arange(rows.shape[1])
        return self._layers[layer][rows[:, None], torch.arange(2)[:, None], heads]

    def move(self, start: int, kept: Sequence[Kept]) -> None:
        self.put(start, self.take(start, kept))

    def take(self, start: int, kept: Sequence[Kept]) -> object:
        return [self._gathered(start, layer, tokens) for layer, tokens in enumerate(kept)]

    def put(self, start: int, taken: object) -> None:
        assert isinstance(taken, list)
        for cache, tokens in zip(self._layers, taken, strict=True):
            cache[start : start + len(tokens)] = tokens


class GroupedTokens:
    """K/V of layer groups, each in a store of its own; each has the layers that follow those of the
    one before."""

    def __init__(self, stores: Sequence[TokenStore], layers_of: Sequence[Sequence[int]]) -> None:
        """layers_of: for each store, the numbers of its layers in the model."""
        spans = [slice(numbers[0], numbers[-1] + 1) for numbers in layers_of]
        self._parts = list(zip(stores, spans, strict=True))

    def scorer(self, scored: Sequence[ScoredRows]) -> KeyScorer:
        scorers: list[tuple[KeyScorer, int]] = []
        for store, span in self._parts:
            own = [
                replace(it, sums=it.sums[span], noise=None if it.noise is None else it.noise[span])
                for it in scored
            ]
            scorer = store.scorer(own)
            scorers += [(scorer, position) for position in range(span.stop - span.start)]
        return _GroupedScorer(scorers)

    def move(self, start: int, kept: Sequence[Kept]) -> None:
        for store, span in self._parts:
            store.move(start, kept[span])

    def take(self, start: int, kept: Sequence[Kept]) -> object:
        return [store.take(start, kept[span]) for store, span in self._parts]

    def put(self, start: int, taken: object) -> None:
        assert isinstance(taken, list)
        for (store, _), own in zip(self._parts, taken, strict=True):
            store.put(start, own)


class _GroupedScorer:
    def __init__(self, scorers: Sequence[tuple[KeyScorer, int]]) -> None:
        """scorers: for each layer, what scores its keys, and its number there."""
        self._scorers = scorers

    def add(self, layer: int, q: Tensor) -> None:
        scorer, position = self._scorers[layer]
        scorer.add(position, q)


class _TorchScorer:
    def __init__(
        self, cache: KVCache, layers: Sequence[Tensor], scored: Sequence[ScoredRows]
    ) -> None:
        self._cache, self._layers, self._scored = cache, layers, scored

    def add(self, layer: int, q: Tensor) -> None:
        for rows in self._scored:
            for row in range(rows.first, rows.end):
                self._add_row(layer, q[row].float(), rows, row - rows.first)

    def _add_row(self, layer: int, query: Tensor, rows: ScoredRows, row: int) -> None:
        shape = self._cache.layout.layers[layer]
        heads, group = shape.num_kv_heads, shape.num_heads // shape.num_kv_heads
        length = rows.kv_len - (rows.end - rows.first) + row + 1
        keys = self._layers[layer][rows.start : rows.start + length, 0].float()  # [keys, Hk, D]
        scores = torch.einsum("hgd,khd->hgk", query.view(heads, group, -1), keys) * shape.scale
        if shape.soft_cap:
            scores = torch.tanh(scores / shape.soft_cap) * shape.soft_cap
        if rows.noise is not None:
            scores = scores + torch.from_numpy(rows.noise[layer])[:, None, :length]
        if rows.sharpness is not None:
            scores = scores * float(rows.sharpness[row])
        total = torch.from_numpy(rows.sums[layer])
        for weights in torch.softmax(scores, -1).unbind(1):
            total[:, :length] += weights
