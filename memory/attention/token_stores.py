"""What dropping tokens needs of a K/V layout: the weights that rows give to keys, and moves of
tokens to the front of their range."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from memory.attention.kv_layout import KVCache
from memory.attention.tiled import TiledKVLayout
from ops.cpu.native_key_scores import KeyScoring
from quant.kv import Int8KVFormat

Floats = npt.NDArray[np.float32]
Kept = npt.NDArray[np.int32]


class TokenStore(Protocol):
    """The K/V of all layers. `start` is a range's first token address; kept has for each layer the
    tokens that stay, [Hk, tokens], rising."""

    def add_scores(
        self,
        layer: int,
        start: int,
        kv_len: int,
        q: Tensor,
        sums: Floats,
        noise: Floats | None,
        sharpness: Floats | None,
    ) -> None:
        """Adds the weights of the last len(q) rows of kv_len keys to sums, [Hk, more than kv_len],
        row after row. q: [rows, H, D]. noise: as sums, is added to the scores, and sharpness:
        [rows], multiplies them."""

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

    def add_scores(
        self,
        layer: int,
        start: int,
        kv_len: int,
        q: Tensor,
        sums: Floats,
        noise: Floats | None,
        sharpness: Floats | None,
    ) -> None:
        tile_bytes = self._layout.tile_bytes
        rows = q.float().contiguous()
        self._ops[layer].add(self._base(start), tile_bytes, kv_len, rows, sums, noise, sharpness)

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


class PlainTokens:
    """K/V in floating point, computed with torch: slower than the kernels of int8 K/V."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._layers = [cache.layer(i) for i in range(len(cache.layout.layers))]

    def add_scores(
        self,
        layer: int,
        start: int,
        kv_len: int,
        q: Tensor,
        sums: Floats,
        noise: Floats | None,
        sharpness: Floats | None,
    ) -> None:
        shape = self._cache.layout.layers[layer]
        heads, group = shape.num_kv_heads, shape.num_heads // shape.num_kv_heads
        totals = torch.from_numpy(sums)
        for row, query in enumerate(q.float()):
            length = kv_len - len(q) + row + 1
            keys = self._layers[layer][start : start + length, 0].float()  # [keys, Hk, D]
            scores = torch.einsum("hgd,khd->hgk", query.view(heads, group, -1), keys) * shape.scale
            if shape.soft_cap:
                scores = torch.tanh(scores / shape.soft_cap) * shape.soft_cap
            if noise is not None:
                scores = scores + torch.from_numpy(noise)[:, None, :length]
            if sharpness is not None:
                scores = scores * float(sharpness[row])
            for weights in torch.softmax(scores, -1).unbind(1):
                totals[:, :length] += weights

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
