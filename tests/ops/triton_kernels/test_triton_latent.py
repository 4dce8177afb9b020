"""Latent attention in Triton against float64, in the interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from ops.reference import ReferenceBackend, attention_fp64, round_latent
from tests.support.cuda.cuda_kv import BF16, DEVICE

# after cuda_kv, which chooses the interpreter
from ops.cuda.attention import HeadShape, StepArrays  # isort: skip
from ops.cuda.latent import CudaLatentLayer, LatentTiles  # isort: skip
from ops.triton_kernels import latent as kernels  # isort: skip
from ops.triton_kernels.kv import Rotation  # isort: skip
from tests.support.profile import every_day

pytestmark = pytest.mark.usefixtures("seeded")
SCALE = 0.09


class Latents:
    """The second of two layers in the tiles of several sequences; all other memory is NaN."""

    def __init__(self, heads, value_dim, rope_dim, dtype, lens, groups=(None, None)):
        sizes = (heads, value_dim, rope_dim, SCALE, dtype, *groups)
        of_layer = LatentTiles(*sizes, 1 << 30, 0).layer_bytes
        self.tiles = LatentTiles(*sizes, 2 * of_layer + 48, of_layer + 16)
        self.lens = lens
        tiles = [-(-length // 16) for length in lens]
        self.starts = [16 * (1 + sum(tiles[:i])) for i in range(len(tiles))]
        total = (sum(tiles) + 2) * self.tiles.tile_stride
        poison = 0x7F if dtype == torch.int8 else 0xFF
        memory = torch.full((total + 16,), poison, dtype=torch.uint8, device=DEVICE)
        self.memory = memory[-memory.data_ptr() % 16 :][:total]
        self.base = self.memory.data_ptr()
        self.layer = CudaLatentLayer(self.tiles, self.base)

    def arrays(self, num_rows, num_decodes, sequences=None, min_split=256):
        """Returns a step of the last rows of each sequence, with padding."""
        chosen = range(len(self.lens)) if sequences is None else sequences
        shapes = [HeadShape(self.tiles.num_heads, 1, self.tiles.head_dim, is_latent=True)]
        arrays = StepArrays(512, 8, 4096, shapes, DEVICE, min_split=min_split)
        host = torch.zeros(arrays.num_words, dtype=torch.int32)
        starts, lens = [self.starts[i] for i in chosen], [self.lens[i] for i in chosen]
        arrays.fill(host, starts, num_rows, lens, num_decodes, sum(num_rows), num_decodes)
        arrays.upload(host)
        return arrays

    def append(self, sequence, k, rotation=None):
        """Writes all positions of a sequence, in one chunk."""
        arrays = self.arrays([len(k)], 0, [sequence])
        self.layer.append(arrays, k, rotation)

    def attend(self, q, num_rows, sequences=None, num_decodes=0, lse=None, **more):
        """Attends with the last rows of each sequence."""
        arrays = self.arrays(num_rows, num_decodes, sequences, **more)
        has_prefill = len(num_rows) > num_decodes
        return self.layer.attend(arrays, q, num_decodes, len(q), has_prefill, lse=lse)

    def stored(self, k):
        if self.tiles.dtype != torch.int8:
            return k.to(self.tiles.dtype).double()
        return round_latent(
            k.double(), self.tiles.value_dim, self.tiles.group, self.tiles.rope_group
        )


CASES = [
    (4, 64, 16, torch.float32, torch.float32, (None, None)),
    (33, 20, 8, torch.float32, torch.float32, (None, None)),
    (16, 128, 64, torch.bfloat16, torch.bfloat16, (None, None)),
    (3, 64, 16, torch.int8, torch.float32, (32, 16)),
    (17, 128, 64, torch.int8, torch.bfloat16, (64, 64)),
    (16, 512, 64, torch.int8, torch.bfloat16, (64, 64)),
]


@pytest.mark.parametrize(
    ("heads", "value_dim", "rope_dim", "dtype", "q_dtype", "groups"), every_day((1, 2, 3, 5), CASES)
)
def test_attention(heads, value_dim, rope_dim, dtype, q_dtype, groups):
    lens, num_rows = [1, 70, 37], [1, 1, 5]
    latents = Latents(heads, value_dim, rope_dim, dtype, lens, groups)
    dim = value_dim + rope_dim
    keys = [torch.randn(n, 1, dim, device=DEVICE).to(q_dtype) for n in lens]
    q = torch.randn(sum(num_rows), heads, dim, device=DEVICE).to(q_dtype)
    for i, k in enumerate(keys):
        latents.append(i, k)
    out = latents.attend(q, num_rows, num_decodes=2)
    assert out.dtype == q_dtype and out.shape == (7, heads, value_dim)
    lse = torch.full((7, heads), float("nan"), device=DEVICE)
    wide = latents.attend(q, num_rows, num_decodes=2, lse=lse)
    assert wide.dtype == torch.float32  # the interpreter truncates to bf16
    torch.testing.assert_close(
        wide, out.float(), rtol=0 if q_dtype == torch.float32 else BF16, atol=0
    )
    first = 0
    for k, count in zip(keys, num_rows, strict=True):
        own = slice(first, first + count)
        stored = latents.stored(k)
        expected, sums = attention_fp64(q[own].double(), stored, stored[..., :value_dim], SCALE)
        # products in bf16: each factor is rounded once
        rounding = BF16 if q_dtype == torch.bfloat16 else 1e-5
        size = float(stored.abs().max())
        norms = float(q.double().norm(dim=-1).max() * stored.norm(dim=-1).max())
        of_score = 2 * rounding * norms * SCALE
        error = (out[own].double() - expected).abs().max()
        assert float(error) <= size * (2 * of_score + 3 * rounding)
        assert float((lse[own].double() - sums).abs().max()) <= 2 * of_score + 1e-5
        first += count


@pytest.mark.parametrize("rows", [16, 32])
def test_a_prefill_row_has_the_same_bits_in_any_batch_and_chunk(rows, monkeypatch):
    chosen = kernels.Config({"ROWS": rows, "BLOCK": 16, "num_stages": 1}, 4)
    monkeypatch.setattr(kernels, "config", lambda *_, **__: chosen)
    latents = Latents(9, 48, 16, torch.float32, [40, 17])
    keys = [torch.randn(n, 1, 64, device=DEVICE) for n in latents.lens]
    for i, k in enumerate(keys):
        latents.append(i, k)
    counts = [10, 1]
    q = torch.randn(11, 9, 64, device=DEVICE)
    out = latents.attend(q, counts)
    expected, _ = attention_fp64(q[:10], keys[0], keys[0][..., :48], SCALE)
    torch.testing.assert_close(out[:10].double(), expected, rtol=0, atol=1e-5)
    first = 0
    for i, count in enumerate(counts):
        own = slice(first, first + count)
        assert torch.equal(latents.attend(q[own], [count], [i]), out[own])
        first += count
    for count in (1, 7):
        assert torch.equal(latents.attend(q[10 - count : 10], [count], [0]), out[10 - count : 10])


@pytest.mark.parametrize("heads", [5, 20])
def test_a_decode_row_has_the_same_bits_in_any_batch(heads):
    """The keys of a row are split by its own length."""
    latents = Latents(heads, 48, 16, torch.float32, [70, 33])
    keys = [torch.randn(n, 1, 64, device=DEVICE) for n in latents.lens]
    for i, k in enumerate(keys):
        latents.append(i, k)
    q = torch.randn(2, heads, 64, device=DEVICE)
    out = latents.attend(q, [1, 1], num_decodes=2, min_split=32)
    for i, k in enumerate(keys):
        alone = latents.attend(q[i : i + 1], [1], [i], num_decodes=1, min_split=32)
        assert torch.equal(alone, out[i : i + 1])
        expected, _ = attention_fp64(q[i : i + 1], k, k[..., :48], SCALE)
        torch.testing.assert_close(alone.double(), expected, rtol=0, atol=1e-5)


def test_padding_rows_write_no_other_rows():
    latents = Latents(3, 32, 16, torch.float32, [20, 9])
    for i, length in enumerate(latents.lens):
        latents.append(i, torch.randn(length, 1, 48, device=DEVICE))
    q = torch.randn(16, 3, 48, device=DEVICE)
    expected = latents.attend(q[:6], [1, 5], num_decodes=1)
    arrays = latents.arrays([1, 5], 1)
    host = torch.zeros(arrays.num_words, dtype=torch.int32)
    arrays.fill(host, latents.starts, [1, 5], latents.lens, 1, 16, 4)
    arrays.upload(host)
    before = latents.memory.clone()
    latents.layer.append(arrays, torch.zeros(16, 1, 48, device=DEVICE))
    changed = (latents.memory != before).view(-1, latents.tiles.tile_stride).any(1)
    assert changed.nonzero().flatten().tolist() == [2, 3]  # the last row's tile, and the chunk's
    latents.memory.copy_(before)
    out = latents.layer.attend(arrays, q, 4, 16, True)
    assert torch.equal(out[:6], expected)


def test_append_rotates_the_values_after_the_first():
    latents = Latents(2, 32, 32, torch.float32, [20])
    k = torch.randn(20, 1, 64, device=DEVICE)
    angle = torch.randn(20, 12, device=DEVICE)
    rotation = Rotation(angle.cos(), angle.sin())
    latents.append(0, k, rotation)
    q = torch.randn(3, 2, 64, device=DEVICE)
    out = latents.attend(q, [3])
    turned = k.clone()
    turned[..., 32:] = ReferenceBackend().rotary(k[..., 32:], *rotation)
    expected, _ = attention_fp64(q, turned, turned[..., :32], SCALE)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
