"""int8 and int4 K/V on real kernels and the expected attention over it, for several test files."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ops.cpu.native_tiled_attention import Int4Attention, Int8Attention, TiledAttentionStep
from ops.reference import hadamard
from quant.kv import (
    TILE_TOKENS,
    Int4KVFormat,
    Int8KVFormat,
    bounds_bytes,
    fitting_group,
    fitting_int4_group,
)


class Cache:
    """K/V of one or more sequences in two layers; only the second is used. has_bounds: whether it
    keeps the bounds of its keys; has_bounds_beside: in a store of their own."""

    def __init__(
        self,
        *,
        heads,
        kv_heads,
        dim,
        group=64,
        tokens,
        sequences=1,
        bits=8,
        has_bounds=False,
        has_bounds_beside=False,
        **switches,
    ):
        form: Int4KVFormat | Int8KVFormat
        if bits == 4:
            form = Int4KVFormat(kv_heads, dim, fitting_int4_group(dim, group))
        else:
            form = Int8KVFormat(kv_heads, dim, fitting_group(dim, group))
        self.group, self.heads, self.dim = form.group, heads, dim
        self.kv_heads = kv_heads
        self.tile_bytes = 2 * form.tile_bytes
        self.bounds_offset = 0 if has_bounds_beside else self.tile_bytes
        self.bounds_tile_bytes = bounds_bytes(kv_heads, dim)
        if has_bounds:
            self.tile_bytes += self.bounds_tile_bytes
        num_tiles = -(-tokens // TILE_TOKENS)
        self.range_bytes = num_tiles * self.tile_bytes
        self.memory, self.address = unwritten(sequences * self.range_bytes)
        self.bounds_range_bytes = num_tiles * self.bounds_tile_bytes if has_bounds_beside else 0
        self.bounds_memory, self.bounds_address = unwritten(sequences * self.bounds_range_bytes)
        self.op = (Int4Attention if bits == 4 else Int8Attention)(
            offset_bytes=form.tile_bytes,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            group=form.group,
            scale=dim**-0.5,
            bounds_offset=self.bounds_offset if has_bounds or has_bounds_beside else None,
            **switches,
        )

    def used(self) -> Tensor:
        """Returns the bytes of all sequences."""
        return self.memory[self.address - self.memory.data_ptr() :][: len(self.memory) - 64]

    def step(self, sequences, num_rows, kv_lens, prefix_only=False) -> TiledAttentionStep:
        starts = [i * self.range_bytes for i in sequences]
        step = TiledAttentionStep(
            self.address, self.tile_bytes, starts, num_rows, kv_lens, prefix_only=prefix_only
        )
        if self.bounds_range_bytes:
            starts = [i * self.bounds_range_bytes for i in sequences]
            step.add_bounds(self.bounds_address, self.bounds_tile_bytes, starts)
        return step

    def fill(self, k: Tensor, v: Tensor, sequence=0, chunk=10**9) -> None:
        for at in range(0, len(k), chunk):
            part = slice(at, min(at + chunk, len(k)))
            step = self.step([sequence], [part.stop - at], [part.stop])
            self.op.append(step, k[part], v[part], None)

    def attend(self, q: Tensor, kv_len: int, sequence=0, lse=None) -> Tensor:
        return self.op.attend(self.step([sequence], [len(q)], [kv_len]), q, lse)


def unwritten(num_bytes: int) -> tuple[Tensor, int]:
    """Returns memory that has as many bytes from the returned address on. 0x7f7f is NaN in fp16, so
    that reading unwritten memory shows."""
    memory = torch.full((num_bytes + 64,), 0x7F, dtype=torch.uint8)
    return memory, memory.data_ptr() + -memory.data_ptr() % 64


def score_error(q: Tensor, stored_k: Tensor, scale: float) -> float:
    """Bounds a score's error: q is rounded to 1 / 32,512 of its largest value."""
    step = float(q.abs().max()) / 32512
    most = float(stored_k.abs().sum(-1).max()) if len(stored_k) else 0.0
    return scale * step * most + 1e-5


def out_error(of_score: float, stored_v: Tensor) -> float:
    """Bounds a result's error: weights are rounded to 1 / 65,534 of a stretch's largest, 64 of
    them against values up to 127 steps."""
    most = float(stored_v.abs().max()) if len(stored_v) else 0.0
    return most * (2 * of_score + 64 / 65534) + 1e-5


def rounded_query4(q: Tensor) -> Tensor:
    """Returns q: [T, H, D] as the int4 kernels round it: to 127ths of the largest transformed
    value of a head."""
    turned = hadamard(q)
    top = turned.abs().amax(-1, keepdim=True)
    steps = (turned * (torch.tensor(127.0) / top)).round().double()
    return hadamard(steps * (top / 127).double()) / (q.shape[-1] & -q.shape[-1])


def out_error4(stored_v: Tensor) -> float:
    """Bounds a result's error over int4 K/V, given rounded queries and stored K/V, by six standard
    deviations. Each of a stretch's 64 weights has two rounding errors, its own and a carried one,
    of up to 1 / 508 of the largest."""
    deviation = math.sqrt(2 * 64 / 12) / 254
    return (2e-4 + 6 * deviation) * float(stored_v.square().mean().sqrt()) + 1e-5
