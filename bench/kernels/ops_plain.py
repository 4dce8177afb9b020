"""Attention over bf16 K/V for bench/kernels/ops.py, beside torch's on the same numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from ops.backend import KeyValues
from ops.cpu.native_attention import decode_attention, prefill_attention

_LAYERS = 16


class Attended(NamedTuple):
    """work: bytes of K/V that are read, or operations on keys that a row sees; peer_work: of the
    peer, which has one layer."""

    shape: str
    work: float
    peer_work: float
    run: Callable[[], object]
    peer: Callable[[], object]


def plain_prefills(quick: bool, heads: int, kv_heads: int) -> Iterator[Attended]:
    """K/V as memory/ lays them, a token's layers side by side; another layer every time.

    torch gets dense K/V of one layer, its heads repeated and its mask made before.
    """
    shapes = [(d, past) for d in (64, 128) for past in (0, 4096)]
    for dim, past in [(64, 0)] if quick else shapes:
        rows = 64 if quick else 512
        length = past + rows
        tokens = torch.randn(length, _LAYERS, 2, kv_heads, dim, dtype=torch.bfloat16)
        layers = [KeyValues(*x[:, :, :, None].permute(1, 3, 2, 0, 4)) for x in tokens.unbind(1)]
        q = torch.randn(rows, heads, dim, dtype=torch.bfloat16)
        k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in layers[0])
        mask = torch.full((rows, length), float("-inf"), dtype=q.dtype).triu_(past + 1)
        peer = partial(
            functional.scaled_dot_product_attention,
            q.transpose(0, 1)[None],
            k.contiguous(),
            v.contiguous(),
            attn_mask=mask if past else None,
            is_causal=not past,
        )
        work = 4.0 * heads * dim * (rows * past + rows * (rows + 1) // 2)
        run = partial(_prefill_next, itertools.cycle(layers), q)
        yield Attended(f"{rows} on {past} {heads}/{kv_heads} D={dim}", work, work, run, peer)


def _prefill_next(layers: Iterator[KeyValues], q: Tensor) -> None:
    prefill_attention(q, next(layers), q.shape[2] ** -0.5, None)


def plain_decodes(quick: bool, heads: int, kv_heads: int, far: int) -> Iterator[Attended]:
    """One row of each sequence; all layers of so many sequences that no cache holds them."""
    shapes = [(d, b, n) for d in (64, 128) for b, n in ((1, 512), (8, 4096), (32, 512))]
    for dim, batch, length in [(64, 1, 512)] if quick else shapes:
        layer_bytes = 2 * 2 * batch * length * kv_heads * dim
        layers = 1 if quick else max(1, min(_LAYERS, far // layer_bytes))
        tokens = torch.randn(batch, length, layers, 2, kv_heads, dim, dtype=torch.bfloat16)
        caches = [
            [KeyValues(*x[:, :, :, None].permute(1, 3, 2, 0, 4)) for x in tokens[:, :, i].unbind(0)]
            for i in range(layers)
        ]
        q = torch.randn(batch, heads, dim, dtype=torch.bfloat16)
        k, v = tokens[:, :, 0].permute(2, 0, 3, 1, 4).contiguous()
        peer = partial(
            functional.scaled_dot_product_attention, q[:, :, None], k, v, enable_gqa=True
        )
        run = partial(_decode_all, caches, q)
        shape = f"B={batch} L={length} {heads}/{kv_heads} D={dim}"
        yield Attended(shape, float(layer_bytes * layers), float(layer_bytes), run, peer)


def _decode_all(caches: list[list[KeyValues]], q: Tensor) -> None:
    for layer in caches:
        decode_attention(q, layer, q.shape[2] ** -0.5)
