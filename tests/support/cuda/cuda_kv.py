"""K/V tiles that torch alone writes and reads, and the expected attention over them."""

from __future__ import annotations

import os

import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from ops.cuda.attention import CudaAttentionLayer, HeadShape, KVTiles, StepArrays, layer_bytes
from ops.reference import attention_fp64, round_kv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Largest error of one rounding to bf16; the interpreter truncates instead.
BF16 = 2.0**-8 if DEVICE == "cuda" else 2.0**-7


class Tiles:
    """The second of three layers in the tiles of several sequences; all other memory is poison."""

    def __init__(
        self, heads, kv_heads, dim, dtype, group=None, window=None, lens=(), kv=None, *,
        soft_cap=0.0, sinks=None, room=0,
    ):  # fmt: skip
        """room: bytes of a tile behind the layer's part."""
        size = layer_bytes(kv_heads, dim, dtype, group)
        self.layer = KVTiles(
            heads,
            kv_heads,
            dim,
            dim**-0.5,
            window,
            dtype,
            group,
            2 * size + 48 + room,
            size + 16,
            soft_cap,
        )  # fmt: skip
        self.sinks = sinks
        self.lens, stride = list(lens), self.layer.tile_stride
        tiles = [-(-length // 16) for length in self.lens]
        self.starts = [16 * (3 + sum(tiles[:i])) for i in range(len(tiles))]
        # NaN as bf16, fp32 and fp16 (the scales)
        poison = 0x7F if dtype == torch.int8 else 0xFF
        total = (sum(tiles) + 4) * stride
        memory = torch.full((total + 16,), poison, dtype=torch.uint8, device=DEVICE)
        self.memory = memory[-memory.data_ptr() % 16 :][:total]
        self.base = self.memory.data_ptr()
        on_device = None if sinks is None else torch.tensor(sinks, device=DEVICE)
        self.attention = CudaAttentionLayer(self.layer, self.base, sinks=on_device)
        for i, (k, v) in enumerate(kv or ()):
            self.write(i, k, v)

    def parts(self, memory: Tensor, sequence: int, length: int | None = None):
        """Returns [tiles, ...] copies of K [Hk, 16, D], V as K or [Hk, D, 16], scales [Hk, 16,
        2, G]."""
        layer = self.layer
        heads, dim, groups = layer.num_kv_heads, layer.head_dim, layer.num_groups
        count = -(-(self.lens[sequence] if length is None else length) // 16)
        size = layer_bytes(heads, dim, layer.dtype, layer.group)
        first = self.starts[sequence] // 16 * layer.tile_stride + layer.offset
        view = memory[first:].as_strided((count, size), (layer.tile_stride, 1))
        values = heads * 16 * dim * layer.dtype.itemsize
        sizes = [values, values] + ([heads * 16 * groups * 4] if groups else [])
        of_v = (dim, 16) if groups else (16, dim)
        shapes = [(count, heads, 16, dim), (count, heads, *of_v), (count, heads, 16, 2, groups)]
        kinds = [layer.dtype, layer.dtype, torch.float16]
        found = zip(view.split(sizes, 1), kinds, shapes, strict=False)
        return [x.contiguous().view(kind).view(shape) for x, kind, shape in found]

    def by_token(self, parts: list[Tensor]) -> list[tuple[Tensor, Tensor | None]]:
        """Returns views of K and V in parts: [tiles, Hk, 16, D] and, if there are any, their
        scales."""
        k, v, *scales = parts
        if not scales:
            return [(k, None), (v, None)]
        return [(k, scales[0][..., 0, :]), (v.transpose(2, 3), scales[0][..., 1, :])]

    def write(self, sequence: int, k: Tensor, v: Tensor) -> None:
        """Writes k, v: [L, Hk, D] as `append` must write them, without it."""
        layer, length = self.layer, len(k)
        at = torch.arange(length)
        parts = self.parts(self.memory, sequence)
        for x, (values, scales) in zip((k, v), self.by_token(parts), strict=True):
            x = x.float().to(DEVICE)
            if layer.group:
                groups = x.unflatten(2, (-1, layer.group))
                stored = round_kv(x, layer.group).unflatten(2, (-1, layer.group))
                wanted = groups.abs().amax(3) / 127
                scale = wanted.half()
                above = (scale.view(torch.int16) + 1).view(torch.float16)
                scale = torch.where(scale.float() < wanted, above, scale)
                scales[at // 16, :, at % 16] = scale
                x = (stored / scale.float()[..., None]).round().flatten(2)
            values[at // 16, :, at % 16] = x.to(layer.dtype)
        count = len(parts[0])
        packed = torch.cat([x.reshape(count, -1).view(torch.uint8) for x in parts], 1)
        first = self.starts[sequence] // 16 * layer.tile_stride + layer.offset
        view = self.memory[first:].as_strided(packed.shape, (layer.tile_stride, 1))
        view.copy_(packed)

    def read(self, sequence: int, length: int | None = None) -> tuple[Tensor, Tensor]:
        """Returns K and V, [L, Hk, D] float64, multiplied with their scales."""
        length = self.lens[sequence] if length is None else length
        parts = self.parts(self.memory, sequence, length)
        found = []
        for values, scales in self.by_token(parts):
            x = values.double()
            if self.layer.group:
                x = x * scales.double().repeat_interleave(self.layer.group, 3)
            found.append(x.transpose(1, 2).flatten(0, 1)[:length].cpu())
        return found[0], found[1]

    def arrays(self, num_rows, num_decodes, *, padding=(0, 0), kv_lens=None, **sizes) -> StepArrays:
        """Returns a step of all sequences; padding: decode rows and rows more than needed."""
        layer = self.layer
        lens = self.lens if kv_lens is None else kv_lens
        decodes = num_decodes + padding[0]
        rows = decodes + sum(num_rows[num_decodes:]) + padding[1]
        arrays = StepArrays(
            max(rows, 1), len(lens) + padding[0], max(lens),
            [HeadShape(layer.num_heads, layer.num_kv_heads, layer.head_dim)],
            DEVICE, [layer.window], **sizes,
        )  # fmt: skip
        host = torch.full((arrays.num_words,), -7, dtype=torch.int32)
        arrays.fill(host, self.starts[: len(lens)], num_rows, lens, num_decodes, rows, decodes)
        arrays.upload(host)
        return arrays

    def expected(self, q: Tensor, sequence: int, kv_len: int | None = None, prefix_only=False):
        """Returns (out, lse, bound of out) of rows q: [n, H, D], the last of kv_len, in float64."""
        k, v = self.read(sequence, kv_len)
        q, scale, window = q.cpu(), self.layer.scale, self.layer.window
        first = len(k) if prefix_only else len(k) - len(q)
        options = {"window": window, "soft_cap": self.layer.soft_cap, "first_position": first}
        if not prefix_only:
            options["sinks"] = self.sinks
        out, lse = attention_fp64(q, k, v, scale, **options)
        if q.dtype == torch.float32:
            return out, lse, torch.full_like(out, 1e-5)
        spread, _ = attention_fp64(q, k, v.abs(), scale, **options)
        # weights and the result are rounded; with several scales also the values
        score = 0.0
        if self.layer.num_groups > 2:
            score = scale * BF16 * float(q.double().norm(dim=-1).max() * k.norm(dim=-1).max())
        many = 2 if self.layer.num_groups > 2 else 1
        bound = spread * (BF16 * many * 1.05 + 2 * score) + out.abs() * BF16 + 1e-6
        return out, lse, bound


def random_kv(length: int, kv_heads: int, dim: int, dtype=torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Returns k and v, [L, Hk, D] each, rounded to dtype."""
    return torch.randn(length, kv_heads, dim).to(dtype), torch.randn(length, kv_heads, dim).to(
        dtype
    )


def random_q(rows: int, heads: int, dim: int, dtype=torch.bfloat16) -> Tensor:
    """Returns [rows, H, D], a strided part of a larger tensor whose rest is poison."""
    whole = torch.full((rows, heads + 2, dim), float("nan"), device=DEVICE, dtype=dtype)
    whole[:, :heads] = torch.randn(rows, heads, dim, device=DEVICE).to(dtype)
    return whole[:, :heads]
