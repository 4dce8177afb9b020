"""The weights that rows give to keys in int8 tiles, against torch, and the move of tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from memory.policies.eviction import EVICTION_POLICIES
from ops.cpu.native_key_scores import KeyScoring, ScorePlan
from tests.support.memory.int8_kv import Cache

SHAPES = [(4, 2, 64, 64), (6, 1, 32, 8), (2, 2, 80, 16), (14, 2, 128, 32)]


class Scored:
    """A cache with random K/V of one sequence, and what scores its keys."""

    def __init__(self, heads, kv_heads, dim, group, tokens, sequences=1, **switches):
        torch.manual_seed(tokens)
        shape = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "group": group}
        self.cache = Cache(**shape, tokens=tokens, sequences=sequences)
        self.k, self.v = torch.randn(2, tokens, kv_heads, dim)
        self.cache.fill(self.k, self.v)
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.op = KeyScoring(
            offset_bytes=self.cache.tile_bytes // 2,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            group=self.cache.group,
            scale=dim**-0.5,
            **switches,
        )

    def stored_k(self):
        """Returns K as it is stored: rounded by group."""
        groups = self.k.unflatten(-1, (-1, self.cache.group))
        scale = (groups.abs().amax(-1, keepdim=True) / 127).half().float()
        return (groups / scale).round().clamp(-127, 127).mul(scale).flatten(-2)

    def add(self, q, kv_len, sums, noise=None, sharpness=None):
        plan = ScorePlan(self.cache.tile_bytes)
        wide = None if noise is None else noise[None]
        plan.add(self.cache.address, 0, len(q), kv_len, sums[None], wide, sharpness)
        self.op.add(plan, 0, q)


def as_bytes(q):
    """Returns queries as they are multiplied: rounded to 127 steps of the largest number."""
    top = q.abs().amax(-1, keepdim=True)
    return (q * (127.0 / top)).round() * (top / 127.0)


def expected_sums(scored, q, kv_len, *, cap=0.0, noise=None, sharpness=None, is_exact=False):
    q = q if is_exact else as_bytes(q)
    sums = torch.zeros(scored.kv_heads, kv_len, dtype=torch.float64)
    group = scored.heads // scored.kv_heads
    k = scored.stored_k().double()
    for row in range(len(q)):
        length = kv_len - len(q) + row + 1
        for head in range(scored.heads):
            scores = k[:length, head // group] @ q[row, head].double() * scored.dim**-0.5
            if cap:
                scores = torch.tanh(scores / cap) * cap
            if noise is not None:
                scores = scores + torch.from_numpy(noise[head // group, :length])
            if sharpness is not None:
                scores = scores * float(sharpness[row])
            sums[head // group, :length] += torch.softmax(scores, 0)
    return sums


def sums_for(kv_heads, kv_len):
    return np.zeros((kv_heads, -(-kv_len // 16) * 16), dtype=np.float32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("kv_len", "rows"), [(1, 1), (15, 3), (16, 16), (17, 1), (200, 33)])
def test_sums_are_those_of_torch(shape, kv_len, rows, isa):
    scored = Scored(*shape, tokens=kv_len)
    q = torch.randn(rows, shape[0], shape[2])
    sums = sums_for(shape[1], kv_len)
    scored.add(q, kv_len, sums)
    expected = expected_sums(scored, q, kv_len)
    assert np.abs(sums[:, :kv_len] - expected.numpy()).max() < 2e-3 * rows
    exact = expected_sums(scored, q, kv_len, is_exact=True)
    assert np.abs(sums[:, :kv_len] - exact.numpy()).max() < 1e-2 * rows
    assert not sums[:, kv_len:].any()
    assert abs(sums.sum() - rows * shape[0]) < 1e-3 * rows * shape[0]


def test_the_bytes_of_queries_choose_the_tokens_that_exact_scores_choose():
    scored = Scored(8, 2, 64, 64, 512)
    q = 4.0 * torch.randn(32, 8, 64)  # scores are far apart, as in a trained model
    q[..., :3] *= 4.0  # a few dimensions have much larger numbers than the others
    sums = sums_for(2, 512)
    scored.add(q, 512, sums)
    keep = EVICTION_POLICIES["h2o"].keep
    exact = keep(expected_sums(scored, q, 512, is_exact=True).float().numpy(), 64)

    def share(found):
        kept = keep(found, 64)
        pairs = zip(kept, exact, strict=True)
        return np.mean([len(np.intersect1d(*pair)) / 64 for pair in pairs])

    step = q.abs().amax(-1, keepdim=True) / 7
    coarse = (q / step).round() * step
    of_four_bits = share(expected_sums(scored, coarse, 512, is_exact=True).float().numpy())
    assert share(sums) > 0.98 > of_four_bits


def test_noise_temperature_and_soft_cap():
    scored = Scored(4, 2, 64, 64, tokens=90, soft_cap=3.0)
    q, sums = torch.randn(5, 4, 64), sums_for(2, 90)
    noise = np.random.default_rng(1).gumbel(size=sums.shape).astype(np.float32)
    sharpness = np.linspace(1.0, 0.5, 5, dtype=np.float32)
    scored.add(q, 90, sums, noise, sharpness)
    expected = expected_sums(scored, q, 90, cap=3.0, noise=noise, sharpness=sharpness)
    assert np.abs(sums[:, :90] - expected.numpy()).max() < 2e-2
    plain = expected_sums(scored, q, 90)
    assert np.abs(expected.numpy() - plain.numpy()).max() > 0.05


@pytest.mark.parametrize("cut", [(1,) * 45, (3, 16, 1, 25), (31, 14)], ids=len)
@pytest.mark.parametrize("sharpness", [1.0, 40.0])
def test_the_bits_do_not_depend_on_the_cut(cut, sharpness, isa):
    """With sharp rows, some stretches have scores far above those of all earlier ones."""
    scored = Scored(6, 2, 64, 64, tokens=333)
    q, whole, parts = torch.randn(45, 6, 64) * sharpness, sums_for(2, 333), sums_for(2, 333)
    scored.add(q, 333, whole)
    at = 0
    for rows in cut:
        scored.add(q[at : at + rows], 288 + at + rows, parts)
        at += rows
    assert np.array_equal(whole, parts)
    assert abs(whole.sum() - 45 * 6) < 1e-2
    if sharpness == 1.0:
        expected = expected_sums(scored, q, 333)
        assert np.abs(whole[:, :333] - expected.numpy()).max() < 2e-3 * 45


def test_blocks_of_few_tokens_over_many_keys():
    """So many keys that a block has fewer tokens than the call."""
    scored = Scored(8, 1, 32, 32, tokens=9000)
    q, whole, alone = torch.randn(7, 8, 32), sums_for(1, 9000), sums_for(1, 9000)
    scored.add(q, 9000, whole)
    for row in range(7):
        scored.add(q[row : row + 1], 8994 + row, alone)
    assert np.array_equal(whole, alone)
    assert abs(whole.sum() - 56) < 1e-2


@pytest.mark.parametrize("sign", [1, -1], ids=["rising", "falling"])
def test_weights_where_scores_rise_and_fall_far(sign, isa):
    scored = Scored(6, 1, 32, 32, 300)
    q = 1.0 + torch.rand(20, 6, 32)
    level = sign * 20.0 * torch.arange(300).div(64).floor()[:, None, None]
    scored.k = (scored.k.clamp(-2.0, 2.0) * 4.0).round() + level
    scored.k[..., 0] = 127.0  # so that K is stored exactly
    scored.k *= 0.25
    q[..., 0] = 0.0
    scored.cache.fill(scored.k, scored.v)
    sums = sums_for(1, 300)
    scored.add(q, 300, sums)
    expected = expected_sums(scored, q, 300).numpy()
    assert np.abs(sums[:, :300] - expected).max() < 2e-3 * 20


def test_keys_that_no_row_sees_change_no_bit(isa):
    scored = Scored(6, 1, 32, 32, 48)
    q = torch.randn(3, 6, 32)
    alone, beside = sums_for(1, 37), sums_for(1, 37)
    scored.add(q, 37, alone)
    scored.k[37:] *= 1e3
    scored.cache.fill(scored.k, scored.v)
    scored.add(q, 37, beside)
    assert np.array_equal(alone, beside)


def test_several_sequences_of_a_step_and_another_layer():
    """The sums of the first layer stay as they are."""
    scored = Scored(4, 2, 64, 64, tokens=60, sequences=2)
    scored.cache.fill(scored.k[:33], scored.v[:33], sequence=1)
    q = torch.randn(7, 4, 64)
    one, other = (np.zeros((2, 2, 64), dtype=np.float32) for _ in range(2))
    plan = ScorePlan(scored.cache.tile_bytes)
    plan.add(scored.cache.address, 1, 1, 60, one)
    plan.add(scored.cache.address + scored.cache.range_bytes, 3, 4, 33, other)
    scored.op.add(plan, 1, q)
    for sums, rows, kv_len in ((one, q[1:2], 60), (other, q[3:7], 33)):
        assert not sums[0].any()
        alone = sums_for(2, kv_len)
        scored.add(rows, kv_len, alone)
        assert np.array_equal(sums[1, :, :kv_len], alone[:, :kv_len])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_moved_tokens_are_attended_to_as_if_they_were_alone(shape, isa):
    """In place and into other memory; each head keeps tokens of its own."""
    heads, kv_heads, dim, _ = shape
    scored = Scored(*shape, tokens=150, sequences=3)
    cache = scored.cache
    rng = np.random.default_rng(2)
    kept = np.stack([np.sort(rng.choice(150, 61, replace=False)) for _ in range(kv_heads)])
    kept = np.ascontiguousarray(kept.astype(np.int32))
    rows = torch.from_numpy(kept.astype(np.int64))
    alone = [torch.stack([x[rows[h], h] for h in range(kv_heads)], 1) for x in (scored.k, scored.v)]
    cache.fill(*alone, sequence=1)
    q = torch.randn(1, heads, dim)
    expected = cache.attend(q, 61, sequence=1)
    other = cache.address + 2 * cache.range_bytes
    scored.op.gather(cache.address, other, cache.tile_bytes, kept)
    assert torch.equal(cache.attend(q, 61, sequence=2), expected)
    scored.op.gather(cache.address, cache.address, cache.tile_bytes, kept)
    assert torch.equal(cache.attend(q, 61, sequence=0), expected)
