"""Latent attention in Triton against float64, in the interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from ops.reference import ReferenceBackend, attention_fp64, round_latent
from tests.support.cuda.cuda_kv import BF16, DEVICE

# after cuda_kv, which chooses the interpreter
from ops.triton_kernels import latent as kernels  # isort: skip
from ops.triton_kernels.kv import Rotation  # isort: skip

pytestmark = pytest.mark.usefixtures("seeded")
SCALE = 0.09


class Latents:
    """The second of two layers in the tiles of several sequences; all other memory is NaN."""

    def __init__(self, heads, value_dim, rope_dim, dtype, lens, groups=(None, None)):
        sizes = (heads, value_dim, rope_dim, SCALE, dtype, *groups)
        of_layer = kernels.LatentTiles(*sizes, 1 << 30, 0).layer_bytes
        self.tiles = kernels.LatentTiles(*sizes, 2 * of_layer + 48, of_layer + 16)
        self.lens = lens
        tiles = [-(-length // 16) for length in lens]
        self.starts = [16 * (1 + sum(tiles[:i])) for i in range(len(tiles))]
        total = (sum(tiles) + 2) * self.tiles.tile_stride
        poison = 0x7F if dtype == torch.int8 else 0xFF
        memory = torch.full((total + 16,), poison, dtype=torch.uint8, device=DEVICE)
        self.memory = memory[-memory.data_ptr() % 16 :][:total]
        self.base = self.memory.data_ptr()

    def append(self, sequence, k, rotation=None):
        start = self.starts[sequence]
        rows = torch.arange(start, start + len(k), device=DEVICE)
        kernels.append(self.tiles, self.base, k, rows, rotation)

    def attend(self, q, num_rows, sequences=None):
        """Attends with the last rows of each sequence."""
        chosen = range(len(self.lens)) if sequences is None else sequences
        rows, first = [], 0
        for i, count in zip(chosen, num_rows, strict=True):
            length = self.lens[i]
            rows.append(kernels.LatentRows(self.starts[i], first, count, length - count, length))
            first += count
        return kernels.attend(self.tiles, self.base, q, rows)

    def stored(self, k):
        if self.tiles.dtype != torch.int8:
            return k.to(self.tiles.dtype).double()
        return round_latent(
            k.double(), self.tiles.value_dim, self.tiles.group, self.tiles.rope_group
        )


CASES = [
    (4, 64, 16, torch.float32, torch.float32, (None, None)),
    (20, 48, 32, torch.float32, torch.float32, (None, None)),
    (16, 128, 64, torch.bfloat16, torch.bfloat16, (None, None)),
    (3, 64, 16, torch.int8, torch.float32, (32, 16)),
    (17, 128, 64, torch.int8, torch.bfloat16, (64, 64)),
    (16, 512, 64, torch.int8, torch.bfloat16, (64, 64)),
]


@pytest.mark.parametrize(("heads", "value_dim", "rope_dim", "dtype", "q_dtype", "groups"), CASES)
def test_attention(heads, value_dim, rope_dim, dtype, q_dtype, groups):
    lens, num_rows = [1, 37, 70], [1, 5, 1]
    latents = Latents(heads, value_dim, rope_dim, dtype, lens, groups)
    dim = value_dim + rope_dim
    keys = [torch.randn(n, 1, dim, device=DEVICE).to(q_dtype) for n in lens]
    q = torch.randn(sum(num_rows), heads, dim, device=DEVICE).to(q_dtype)
    for i, k in enumerate(keys):
        latents.append(i, k)
    out, lse = latents.attend(q, num_rows)
    assert out.dtype == q_dtype and out.shape == (7, heads, value_dim)
    first = 0
    for k, count in zip(keys, num_rows, strict=True):
        own = slice(first, first + count)
        stored = latents.stored(k)
        expected, expected_lse = attention_fp64(
            q[own].double(), stored, stored[..., :value_dim], SCALE
        )
        # products in bf16: each factor is rounded once
        rounding = BF16 if q_dtype == torch.bfloat16 else 1e-5
        size = float(stored.abs().max())
        norms = float(q.double().norm(dim=-1).max() * stored.norm(dim=-1).max())
        of_score = 2 * rounding * norms * SCALE
        error = (out[own].double() - expected).abs().max()
        assert float(error) <= size * (2 * of_score + 3 * rounding)
        assert float((lse[own].double() - expected_lse).abs().max()) <= of_score + 1e-4
        first += count


def test_a_row_has_the_same_bits_in_any_batch(monkeypatch):
    monkeypatch.setattr(kernels, "SPLIT", 32)
    latents = Latents(5, 48, 16, torch.float32, [90, 33, 64])
    keys = [torch.randn(n, 1, 64, device=DEVICE) for n in latents.lens]
    for i, k in enumerate(keys):
        latents.append(i, k)
    q = torch.randn(12, 5, 64, device=DEVICE)
    out, lse = latents.attend(q, [7, 1, 4])
    first = 0
    for i, count in enumerate([7, 1, 4]):
        alone = latents.attend(q[first : first + count], [count], [i])
        assert torch.equal(alone[0], out[first : first + count])
        assert torch.equal(alone[1], lse[first : first + count])
        last = latents.attend(q[first + count - 1 : first + count], [1], [i])
        assert torch.equal(last[0], out[first + count - 1 : first + count])
        first += count
    expected, _ = attention_fp64(q[:7], keys[0], keys[0][..., :48], SCALE)
    torch.testing.assert_close(out[:7].double(), expected, rtol=0, atol=1e-5)


def test_append_rotates_the_values_after_the_first():
    latents = Latents(2, 32, 32, torch.float32, [20])
    k = torch.randn(20, 1, 64, device=DEVICE)
    angle = torch.randn(20, 12, device=DEVICE)
    rotation = Rotation(angle.cos(), angle.sin())
    latents.append(0, k, rotation)
    q = torch.randn(3, 2, 64, device=DEVICE)
    out, _ = latents.attend(q, [3])
    turned = k.clone()
    turned[..., 32:] = ReferenceBackend().rotary(k[..., 32:], *rotation)
    expected, _ = attention_fp64(q, turned, turned[..., :32], SCALE)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)


def test_rows_without_keys():
    latents = Latents(2, 32, 16, torch.float32, [16])
    rows = [kernels.LatentRows(latents.starts[0], 0, 2, 0, 0)]
    out, lse = kernels.attend(
        latents.tiles, latents.base, torch.randn(2, 2, 48, device=DEVICE), rows
    )
    assert torch.equal(out.cpu(), torch.zeros(2, 2, 32))
    assert torch.equal(lse.cpu(), torch.full((2, 2), float("-inf")))
