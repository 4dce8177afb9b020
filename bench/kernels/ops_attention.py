"""The attention cases of `serve bench ops`: decode, prefill and prefix, on int8, int4 and bf16 K/V.

K/V is laid out as memory/ lays it out; torch's attention on the same numbers is the peer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as functional
from torch import Tensor

from bench.kernels.ops_linear import FAR, Case, Timed
from ops.backend import KeyValues
from ops.cpu.native_plain_attention import decode_attention, prefill_attention
from ops.cpu.native_tiled_attention import Int4Attention, Int8Attention, TiledAttentionStep
from quant.kv import TILE_TOKENS, Int4KVFormat, Int8KVFormat

HEADS, KV_HEADS = 32, 8
_LAYERS = 16  # whose bf16 K/V lies side by side
Bits = Literal[8, 4]
_PREFILLS: tuple[tuple[str, Bits], ...] = (("prefill attention", 8), ("int4 prefill attention", 4))


def _attend_all(kv: QuantizedKV, step: TiledAttentionStep, q: Tensor) -> None:
    for op in kv.ops:
        op.attend(step, q)


def _format(dim: int, bits: Bits) -> Int8KVFormat | Int4KVFormat:
    return Int4KVFormat(KV_HEADS, dim, 32) if bits == 4 else Int8KVFormat(KV_HEADS, dim, 64)


class QuantizedKV:
    """int8 or int4 K/V of some sequences of one length in several layers, which is zero until
    filled.

    The kernels have only its address, so the caller must keep it alive.
    """

    def __init__(self, sequences: int, context: int, dim: int, layers: int, bits: Bits = 8) -> None:
        form = _format(dim, bits)
        tile_bytes = form.tile_bytes * layers
        range_bytes = -(-context // TILE_TOKENS) * tile_bytes
        self.memory = torch.zeros(sequences * range_bytes + 64, dtype=torch.uint8)
        self.address = self.memory.data_ptr() + -self.memory.data_ptr() % 64
        self.tile_bytes, self.context, self.dim = tile_bytes, context, dim
        self.starts = [i * range_bytes for i in range(sequences)]
        attention = Int4Attention if bits == 4 else Int8Attention
        self.ops = [
            attention(
                offset_bytes=i * form.tile_bytes,
                num_heads=HEADS,
                num_kv_heads=KV_HEADS,
                head_dim=dim,
                group=form.group,
                scale=dim**-0.5,
            )
            for i in range(layers)
        ]
        self.bytes_read = form.token_bytes * context * sequences * layers

    def fill(self) -> QuantizedKV:
        """Fills every position of every layer with random values."""
        k = torch.randn(len(self.starts) * self.context, KV_HEADS, self.dim)
        whole = self.step(self.context)
        for op in self.ops:
            op.append(whole, k, k.roll(1, 0), None)
        return self

    def step(
        self, rows: int, starts: Sequence[int] | None = None, *, prefix_only: bool = False
    ) -> TiledAttentionStep:
        """Returns a step with the last `rows` positions of each sequence, or of the sequences that
        begin at `starts`. With prefix_only it attends only to the positions before them."""
        starts = self.starts if starts is None else starts
        n = len(starts)
        where = (self.address, self.tile_bytes)
        return TiledAttentionStep(
            *where, starts, [rows] * n, [self.context] * n, prefix_only=prefix_only
        )


def decode_cases(quick: bool) -> Iterator[Case]:
    """Yields decode attention over int8 and over int4 K/V. torch's is the peer of the first."""
    shapes = [(d, b, n) for d in (64, 128) for b in (1, 8, 32) for n in (512, 4096)]
    shapes += [(d, 1, 32_768) for d in (64, 128)]
    for dim, batch, context in [(64, 1, 512)] if quick else shapes:
        layer_bytes = Int8KVFormat(KV_HEADS, dim, 64).token_bytes * context * batch
        layers = 1 if quick else max(1, min(32, FAR // layer_bytes))
        kv = QuantizedKV(batch, context, dim, layers).fill()
        step, q = kv.step(1), torch.randn(batch, HEADS, dim)
        keys = torch.randn(batch, KV_HEADS, context, dim).bfloat16()
        query = q.bfloat16()[:, :, None]
        shape = f"B={batch} L={context} {HEADS}/{KV_HEADS} D={dim}"
        yield Case(
            "decode attention",
            shape,
            "read",
            kv.bytes_read,
            0.8,
            Timed(partial(_attend_all, kv, step, q)),
            peer=partial(
                functional.scaled_dot_product_attention, query, keys, keys, enable_gqa=True
            ),
            peer_work=layer_bytes,
        )
        del keys, query
        kv = QuantizedKV(batch, context, dim, layers if quick else 2 * layers, bits=4).fill()
        timed = Timed(partial(_attend_all, kv, kv.step(1), q))
        yield Case("int4 decode attention", shape, "read", kv.bytes_read, 0.6, timed)


def prefill_cases(quick: bool) -> Iterator[Case]:
    """Yields prefill attention over int8 and int4 K/V. Only the unmasked part counts as work."""
    shapes = [(d, past) for d in (64, 128) for past in (0, 4096)]
    for dim, past in [(64, 0)] if quick else shapes:
        rows = 64 if quick else 512
        q = torch.randn(rows, HEADS, dim)
        for name, bits in _PREFILLS:
            kv = QuantizedKV(1, past + rows, dim, 1, bits).fill()
            yield Case(
                name,
                f"{rows} on {past} {HEADS}/{KV_HEADS} D={dim}",
                "bf16",
                4 * HEADS * dim * (rows * past + rows * (rows + 1) // 2),
                0.5,
                Timed(partial(_attend_all, kv, kv.step(rows), q)),
            )


def prefix_cases(quick: bool) -> Iterator[Case]:
    """Yields the prefix attention of a memory node: decode rows and chunks over the keys that
    existed before the step."""
    for dim, batch, context in [(64, 1, 512)] if quick else [(64, 8, 4096), (128, 8, 4096)]:
        layer_bytes = Int8KVFormat(KV_HEADS, dim, 64).token_bytes * context * batch
        kv = QuantizedKV(batch, context, dim, 1 if quick else max(1, FAR // layer_bytes)).fill()
        step, q = kv.step(1, prefix_only=True), torch.randn(batch, HEADS, dim)
        timed = Timed(partial(_attend_all, kv, step, q))
        shape = f"B={batch} L={context} {HEADS}/{KV_HEADS} D={dim}"
        yield Case("prefix attention", shape, "read", kv.bytes_read, 0.8, timed)
    for dim, rows in [(64, 16)] if quick else [(d, n) for d in (64, 128) for n in (64, 256)]:
        num_prefix = 64 if quick else 4096
        kv = QuantizedKV(1, num_prefix, dim, 1).fill()
        step, q = kv.step(rows, prefix_only=True), torch.randn(rows, HEADS, dim)
        timed = Timed(partial(_attend_all, kv, step, q))
        shape = f"{rows} on {num_prefix} {HEADS}/{KV_HEADS} D={dim}"
        work = 4.0 * HEADS * dim * rows * num_prefix
        yield Case("prefix attention", shape, "bf16", work, 0.5, timed)


def plain_prefill_cases(quick: bool) -> Iterator[Case]:
    """Yields prefill attention over bf16 K/V, with another layer at every call.

    Only the unmasked part counts as work, for the peer too. torch gets dense K/V of one layer with
    its heads repeated and its mask made before.
    """
    shapes = [(d, past) for d in (64, 128) for past in (0, 4096)]
    for dim, past in [(64, 0)] if quick else shapes:
        rows = 64 if quick else 512
        length = past + rows
        tokens = torch.randn(length, _LAYERS, 2, KV_HEADS, dim, dtype=torch.bfloat16)
        layers = [KeyValues(*x[:, :, :, None].permute(1, 3, 2, 0, 4)) for x in tokens.unbind(1)]
        q = torch.randn(rows, HEADS, dim, dtype=torch.bfloat16)
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in layers[0])
        mask = torch.full((rows, length), float("-inf"), dtype=q.dtype).triu_(past + 1)
        work = 4.0 * HEADS * dim * (rows * past + rows * (rows + 1) // 2)
        yield Case(
            "bf16 prefill attention",
            f"{rows} on {past} {HEADS}/{KV_HEADS} D={dim}",
            "bf16",
            work,
            0.5,
            Timed(partial(_prefill_next, itertools.cycle(layers), q)),
            peer=partial(
                functional.scaled_dot_product_attention,
                q.transpose(0, 1)[None],
                k.contiguous(),
                v.contiguous(),
                attn_mask=mask if past else None,
                is_causal=not past,
            ),
            peer_work=work,
        )


def _prefill_next(layers: Iterator[KeyValues], q: Tensor) -> None:
    prefill_attention(q, next(layers), q.shape[2] ** -0.5, None)


def plain_decode_cases(quick: bool) -> Iterator[Case]:
    """Yields decode attention over bf16 K/V: one row of each sequence, over all layers of so many
    sequences that no cache holds them. The peer has one layer."""
    shapes = [(d, b, n) for d in (64, 128) for b, n in ((1, 512), (8, 4096), (32, 512))]
    for dim, batch, length in [(64, 1, 512)] if quick else shapes:
        layer_bytes = 2 * 2 * batch * length * KV_HEADS * dim
        layers = 1 if quick else max(1, min(_LAYERS, FAR // layer_bytes))
        tokens = torch.randn(batch, length, layers, 2, KV_HEADS, dim, dtype=torch.bfloat16)
        caches = [
            [KeyValues(*x[:, :, :, None].permute(1, 3, 2, 0, 4)) for x in tokens[:, :, i].unbind(0)]
            for i in range(layers)
        ]
        q = torch.randn(batch, HEADS, dim, dtype=torch.bfloat16)
        k, v = tokens[:, :, 0].permute(2, 0, 3, 1, 4).contiguous()
        yield Case(
            "bf16 decode attention",
            f"B={batch} L={length} {HEADS}/{KV_HEADS} D={dim}",
            "read",
            float(layer_bytes * layers),
            0.8,
            Timed(partial(_decode_all, caches, q)),
            peer=partial(
                functional.scaled_dot_product_attention, q[:, :, None], k, v, enable_gqa=True
            ),
            peer_work=float(layer_bytes),
        )


def _decode_all(caches: list[list[KeyValues]], q: Tensor) -> None:
    for layer in caches:
        decode_attention(q, layer, q.shape[2] ** -0.5)
