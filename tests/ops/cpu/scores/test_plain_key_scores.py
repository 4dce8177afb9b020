"""The weights that rows give to keys in bf16 and fp32, against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from memory.attention.kv_layout import KVCache, KVLayout
from memory.attention.seam import AttentionLayer
from memory.attention.token_stores import PlainTokens, ScoredRows


class Store:
    """Random K/V of two layers in a cache of some tokens."""

    def __init__(self, dtype, heads, kv_heads, dim, tokens, soft_cap=0.0):
        torch.manual_seed(tokens)
        layer = AttentionLayer(heads, kv_heads, dim, scale=dim**-0.5, soft_cap=soft_cap)
        layout = KVLayout([layer, layer], dtype)
        self.memory = torch.randn(tokens * layout.token_elements).to(dtype)
        size = self.memory.numel() * self.memory.element_size()
        self.tokens = PlainTokens(KVCache(layout, self.memory.data_ptr(), size))
        self.heads, self.dim, self.kv_heads = heads, dim, kv_heads

    def sums(self, kv_len):
        return np.zeros((2, self.kv_heads, -(-kv_len // 16) * 16), dtype=np.float32)

    def add(self, q, start, kv_len, sums, noise=None, sharpness=None, layer=1):
        rows = ScoredRows(start, 0, len(q), kv_len, sums, noise, sharpness)
        self.tokens.scorer([rows]).add(layer, q)

    def with_torch(self, q, start, kv_len, **changes):
        """Returns what torch computes, as for heads that the kernels do not have."""
        sums, ops = self.sums(kv_len), self.tokens._ops
        self.tokens._ops = []
        self.add(q, start, kv_len, sums, **changes)
        self.tokens._ops = ops
        return sums


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (7, 1, 80), (2, 2, 16)])
@pytest.mark.parametrize(("kv_len", "rows"), [(1, 1), (17, 17), (200, 19)])
def test_sums_are_those_of_torch(dtype, heads, kv_heads, dim, kv_len, rows, isa):
    store = Store(dtype, heads, kv_heads, dim, kv_len + 5)
    q, sums = torch.randn(rows, heads, dim), store.sums(kv_len)
    assert store.tokens._ops
    store.add(q, 5, kv_len, sums)
    assert not sums[0].any()
    assert np.abs(sums - store.with_torch(q, 5, kv_len)).max() < 1e-5 * rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("sharpness", [1.0, 40.0])
def test_the_bits_do_not_depend_on_the_cut(dtype, sharpness):
    store = Store(dtype, 6, 2, 64, 300)
    q, whole = torch.randn(37, 6, 64) * sharpness, store.sums(300)
    store.add(q, 0, 300, whole)
    for cut in ((1,) * 37, (20, 2, 15)):
        parts, at = store.sums(300), 0
        for rows in cut:
            store.add(q[at : at + rows], 0, 263 + at + rows, parts)
            at += rows
        assert np.array_equal(whole, parts)
    assert whole.any()


@pytest.mark.parametrize("sign", [1, -1], ids=["rising", "falling"])
def test_weights_where_scores_rise_and_fall_far(sign, isa):
    store = Store(torch.float32, 4, 2, 64, 300)
    k = store.tokens._layers[1][:, 0]
    k += sign * 8.0 * torch.arange(300).div(64).floor()[:, None, None]
    q, sums = 1.0 + torch.rand(20, 4, 64), store.sums(300)
    store.add(q, 0, 300, sums)
    assert np.abs(sums - store.with_torch(q, 0, 300)).max() < 1e-3 * 20


def test_noise_temperature_and_soft_cap():
    store = Store(torch.float32, 4, 2, 64, 90, soft_cap=3.0)
    q, sums = torch.randn(5, 4, 64), store.sums(90)
    noise = np.random.default_rng(1).gumbel(size=sums.shape).astype(np.float32)
    changes = {"noise": noise, "sharpness": np.linspace(1.0, 0.5, 5, dtype=np.float32)}
    store.add(q, 0, 90, sums, **changes)
    expected = store.with_torch(q, 0, 90, **changes)
    assert np.abs(sums - expected).max() < 1e-4
    assert np.abs(store.with_torch(q, 0, 90) - expected).max() > 0.05


def test_other_heads_are_scored_by_torch():
    store = Store(torch.float32, 4, 2, 24, 50)
    assert not store.tokens._ops
    sums = store.sums(50)
    store.add(torch.randn(3, 4, 24), 0, 50, sums)
    assert abs(sums.sum() - 12) < 1e-3
