"""Attention over bf16 K/V for bench/ops.py, beside torch's on the same numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from ops.backend import KeyValues
from ops.native_attention import prefill_attention

_LAYERS = 16


class Prefill(NamedTuple):
    """work: operations on keys that a row sees."""

    shape: str
    work: float
    run: Callable[[], object]
    peer: Callable[[], object]


def plain_prefills(quick: bool, heads: int, kv_heads: int) -> Iterator[Prefill]:
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
        yield Prefill(f"{rows} on {past} {heads}/{kv_heads} D={dim}", work, run, peer)


def _prefill_next(layers: Iterator[KeyValues], q: Tensor) -> None:
    prefill_attention(q, next(layers), q.shape[2] ** -0.5, None)
