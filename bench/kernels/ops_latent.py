"""The cases of attention over int8 latents for `serve bench ops`, at shapes of published models.

The layers of a token lie side by side, as memory/ lays them out, and each call reads another layer,
so that no cache holds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from bench.kernels.ops_linear import FAR, Case, Timed
from ops.cpu.native_latent_attention import LatentAttention
from ops.cpu.native_tiled_attention import TiledAttentionStep
from quant.kv import TILE_TOKENS, latent_format

VALUE_DIM, ROPE_DIM = 512, 64
HEADS = (16, 20, 128)  # of DeepSeek-V2-Lite, GLM-4.7-Flash and DeepSeek-V3


class Latents:
    """Latents of some sequences of one length in several layers. The kernels have only the address,
    so the caller must keep it alive."""

    def __init__(self, heads: int, sequences: int, context: int, layers: int) -> None:
        form = latent_format(VALUE_DIM, VALUE_DIM + ROPE_DIM, 64)
        assert form is not None
        tile_bytes = form.tile_bytes * layers
        range_bytes = -(-context // TILE_TOKENS) * tile_bytes
        self.memory = torch.zeros(sequences * range_bytes + 64, dtype=torch.uint8)
        address = self.memory.data_ptr() + -self.memory.data_ptr() % 64
        self.ops = [
            LatentAttention(
                offset_bytes=i * form.tile_bytes,
                num_heads=heads,
                value_dim=form.value_dim,
                rope_dim=form.rope_dim,
                group=form.group,
                rope_group=form.rope_group,
                scale=0.07,
            )
            for i in range(layers)
        ]
        starts = [i * range_bytes for i in range(sequences)]
        whole = [context] * sequences
        self.step = TiledAttentionStep(address, tile_bytes, starts, [1] * sequences, whole)
        filled = TiledAttentionStep(address, tile_bytes, starts, whole, whole)
        k = torch.randn(sequences * context, 1, VALUE_DIM + ROPE_DIM)
        for op in self.ops:
            op.append(filled, k, None, None)
        self.bytes_read = form.tile_bytes // TILE_TOKENS * context * sequences * layers


def latent_cases(quick: bool) -> Iterator[Case]:
    """Yields decode attention, held against reading its latents and against its products of bytes.

    Queries and weights have two bytes, so a head multiplies each of VALUE_DIM + ROPE_DIM numbers
    twice as K and each of VALUE_DIM twice as V. Without matrix instructions these products take
    longer than reading, and with 128 heads in any case, so that reading is no target there.
    """
    shapes = [(heads, b, n) for heads in HEADS for b, n in ((1, 16384), (8, 2048), (1, 1024))]
    for heads, batch, context in [(16, 1, 512)] if quick else shapes:
        layer_bytes = (VALUE_DIM + ROPE_DIM) * batch * context
        kv = Latents(heads, batch, context, 1 if quick else max(1, min(27, FAR // layer_bytes)))
        timed = Timed(partial(_attend_all, kv, torch.randn(batch, heads, VALUE_DIM + ROPE_DIM)))
        shape = f"B={batch} L={context} H={heads} {VALUE_DIM}+{ROPE_DIM}"
        target = 0.0 if heads > 64 else 0.7
        num_read = float(kv.bytes_read)
        yield Case("latent decode attention", shape, "read", num_read, target, timed)
        multiply_adds = 2 * (2 * VALUE_DIM + ROPE_DIM) * heads * batch * context * len(kv.ops)
        yield Case("latent decode attention", shape, "i8", 2.0 * multiply_adds, 0.0, timed)


def _attend_all(kv: Latents, q: Tensor) -> None:
    for op in kv.ops:
        op.attend(kv.step, q)
