"""torch's own attention runs unmodified on ranges: it needs no block table and no copy, and
pages can be shared by two ranges."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from memory.attention.kv_layout import KVCache, KVLayout
from memory.attention.seam import AttentionLayer
from memory.kv_manager import KVManager
from memory.pages.linux_vmm import LinuxMemory
from memory.prefix.index import PrefixHasher

PAGE = 4096
HEADS, KV_HEADS, DIM = 4, 2, 16
LAYERS = [AttentionLayer(HEADS, KV_HEADS, DIM, DIM**-0.5)] * 2
PROMPT = list(range(70))


def expected(q, k, v, is_causal: bool):
    """Returns softmax(q k^T / sqrt D) v in float64, computed head by head; [H, T, D]."""
    q, k, v = q.double(), k.double(), v.double()
    heads = []
    for head in range(HEADS):
        group = head // (HEADS // KV_HEADS)
        scores = q[head] @ k[group].T / math.sqrt(DIM)
        if is_causal:
            scores += torch.full_like(scores, -math.inf).triu(1)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        heads.append(weights / weights.sum(-1, keepdim=True) @ v[group])
    return torch.stack(heads)


class Sequence:
    """A range and the K and V that it must hold: [layers, 2, Hk, tokens, D]."""

    def __init__(self, kv, cache, hasher, tokens, shared=None):
        self.kv, self.cache = kv, cache
        keys: list[bytes] = []
        hasher.extend(keys, tokens)
        hit = kv.match(keys, len(tokens) - 1)
        self.num_hit = hit.num_tokens if hit else 0
        self.num_copied = len(hit.parts[0].copied) if hit else 0
        self.item = kv.open(len(tokens), hit)
        assert kv.grow(self.item, len(tokens))
        kv.commit()
        shape = (len(LAYERS), 2, KV_HEADS, len(tokens), DIM)
        self.values = torch.randn(shape).to(cache.layout.dtype)
        if shared is not None:
            self.values[:, :, :, : self.num_hit] = shared.values[:, :, :, : self.num_hit]
        for layer, (k, v) in enumerate(self.views(len(tokens))):
            k[0, :, self.num_hit :] = self.values[layer, 0, :, self.num_hit :]
            v[0, :, self.num_hit :] = self.values[layer, 1, :, self.num_hit :]
        kv.insert_prefix(self.item, keys, len(tokens))

    def views(self, num_tokens: int):
        return self.cache.views(self.item.start, num_tokens)

    def check(self, num_rows: int, tolerance: float) -> None:
        num_tokens = self.values.shape[3]
        for layer, (k, v) in enumerate(self.views(num_tokens)):
            q = torch.randn(HEADS, num_rows, DIM).to(k.dtype)
            is_causal = num_rows > 1
            assert not is_causal or num_rows == num_tokens
            out = scaled_dot_product_attention(q[None], k, v, is_causal=is_causal, enable_gqa=True)
            right = expected(q, *self.values[layer], is_causal)
            torch.testing.assert_close(out[0].double(), right, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_an_unmodified_kernel_runs_on_ranges_that_share_pages(dtype, tolerance):
    torch.manual_seed(0)
    layout = KVLayout(LAYERS, dtype)
    memory = LinuxMemory(PAGE, 32)
    kv = KVManager(
        memory, num_pages=32, num_ranges=3, max_model_len=128, token_bytes=layout.token_bytes
    )
    cache = KVCache(layout, memory.reserve(kv.total_bytes), kv.total_bytes)
    hasher = PrefixHasher(kv.page_end, b"secret")
    first = Sequence(kv, cache, hasher, [*PROMPT, 5, 6, 7])
    second = Sequence(kv, cache, hasher, [*PROMPT, 8, 9], shared=first)
    third = Sequence(kv, cache, hasher, PROMPT[:64], shared=first)
    pages = [set(sequence.item.pages) for sequence in (first, second, third)]
    assert len(pages[0] & pages[1]) >= 2 and len(pages[0] & pages[2]) >= 2
    assert second.num_hit >= 64 and third.num_hit == 63
    assert (second.num_copied, third.num_copied) == (0, 1), (
        "the last page is copied, since its last token is written again"
    )
    starts = [sequence.views(1)[0].k.data_ptr() for sequence in (first, second, third)]
    assert len(set(starts)) == 3, "one page is at three addresses"
    for sequence in (first, second, third):
        sequence.check(1, tolerance)  # one row, as in decode
        sequence.check(sequence.values.shape[3], tolerance)  # all rows, as in prefill
    del cache
    kv.close_all()
    memory.close()
