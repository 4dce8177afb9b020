"""K/V tensors on the reservation, and the layout of a token's bytes.

The layout is token-major, [tokens, layers, 2, Hk, D]: all layers of a token lie side by side, each
layer's K beside its V; a layer with a value_dim has K only. A token's address is
(range start + position) * token_bytes, so a kernel needs only a base, one stride and a length.
docs/memory.md has the cost of the stride. Layers of different shapes have slices of different
sizes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from memory.attention.seam import AttentionLayer, Rotation, kv_owner
from ops.backend import Backend, KeyValues


class KVLayout:
    """The layout of all layers' K and V in one token's bytes.

    A layer that shares the K/V of another has its offset.
    """

    tile_tokens = 1

    def __init__(self, layers: Sequence[AttentionLayer], dtype: torch.dtype) -> None:
        self.layers = list(layers)
        self.dtype = dtype
        self.offsets: list[int] = []  # in elements, per layer
        offset = 0
        for number, layer in enumerate(self.layers):
            owner = kv_owner(self.layers, number)
            self.offsets.append(offset if owner == number else self.offsets[owner])
            if owner == number:
                offset += _num_parts(layer) * layer.num_kv_heads * layer.head_dim
        self.token_elements = offset

    def pad(self, token_bytes: int) -> None:
        """Pads each token to token_bytes, so that a page holds a whole number of tokens."""
        assert token_bytes >= self.token_bytes, f"{token_bytes=}"
        self.token_elements = token_bytes // self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        return self.token_elements * self.dtype.itemsize


def _num_parts(layer: AttentionLayer) -> int:
    """Returns 2 for K and V; 1 for K alone."""
    return 2 if layer.value_dim is None else 1


class KVCache:
    """Views of a reservation. It maps no memory: the caller has committed what a view covers."""

    def __init__(self, layout: KVLayout, address: int, size_bytes: int) -> None:
        self.layout = layout
        buffer = (ctypes.c_char * size_bytes).from_address(address)
        self._flat = torch.frombuffer(buffer, dtype=layout.dtype)
        self._num_tokens = size_bytes // layout.token_bytes
        owners = [kv_owner(layout.layers, i) for i in range(len(layout.layers))]
        self._own = [i for i, owner in enumerate(owners) if i == owner]
        self._places = None  # of each layer's K/V among those with K/V of their own; None: the same
        if len(self._own) < len(owners):
            self._places = [self._own.index(owner) for owner in owners]
        shapes = {(x.num_kv_heads, x.head_dim) for x in layout.layers}
        self._is_uniform = len(shapes) == 1 and all(_num_parts(x) == 2 for x in layout.layers)

    def layer(self, index: int) -> Tensor:
        """Returns one layer's K/V of all N token addresses, [N, 2, Hk, D], or [N, 1, Hk, D]."""
        item = self.layout.layers[index]
        heads, dim = item.num_kv_heads, item.head_dim
        return self._flat.as_strided(
            (self._num_tokens, _num_parts(item), heads, dim),
            (self.layout.token_elements, heads * dim, dim, 1),
            self.layout.offsets[index],
        )

    def views(self, start: int, num_tokens: int) -> list[KeyValues]:
        """Returns K and V of num_tokens tokens from the token address `start` on, for each
        layer."""
        own = self._own_views(start, num_tokens)
        return own if self._places is None else [own[place] for place in self._places]

    def _own_views(self, start: int, num_tokens: int) -> list[KeyValues]:
        """Returns the views of the layers that have K/V of their own."""
        if not self._is_uniform:
            return [self.view(i, start, num_tokens) for i in self._own]
        item = self.layout.layers[0]
        heads, dim, stride = item.num_kv_heads, item.head_dim, self.layout.token_elements
        # One strided view of all layers that C++ splits is cheaper than one view per layer.
        whole = self._flat.as_strided(
            (len(self._own), 2, 1, heads, num_tokens, dim),
            (2 * heads * dim, heads * dim, 0, dim, stride, 1),
            start * stride,
        )
        return [KeyValues(*pair.unbind(0)) for pair in whole.unbind(0)]

    def view(self, index: int, start: int, num_tokens: int) -> KeyValues:
        """Returns one layer's item of `views`. Where V is a part of K it is all of K, so that
        operators need not know: they attend over more values than they have to, and `values_of`
        leaves these out."""
        item = self.layout.layers[index]
        heads, dim, stride = item.num_kv_heads, item.head_dim, self.layout.token_elements
        parts = self._flat.as_strided(
            (_num_parts(item), 1, heads, num_tokens, dim),
            (heads * dim, 0, dim, stride, 1),
            start * stride + self.layout.offsets[index],
        )
        return KeyValues(parts[0], parts[-1])


def values_of(layer: AttentionLayer, out: Tensor) -> Tensor:
    """Returns the values of V in the attention of a layer's `view`s, [T, H, D]."""
    return out if layer.value_dim is None else out[..., : layer.value_dim].contiguous()


def rotate_keys(
    backend: Backend, layer: AttentionLayer, k: Tensor, rotation: Rotation | None
) -> Tensor:
    """Returns k, rotated. k may be overwritten."""
    if rotation is None:
        return k
    if layer.value_dim is None:
        return backend.rotary(k, *rotation)
    turned = backend.rotary(k[..., layer.value_dim :].contiguous(), *rotation)
    return torch.cat((k[..., : layer.value_dim], turned), dim=-1)


def store_rows(backend: Backend, k: Tensor, v: Tensor | None, cache: Tensor, rows: Tensor) -> None:
    """Writes k and v, or k alone, to KVCache.layer's tensor, in its type."""
    if v is None:
        cache.index_put_((rows,), k[:, None].to(cache.dtype))
    else:
        backend.store_kv(k.to(cache.dtype), v.to(cache.dtype), cache, rows)
