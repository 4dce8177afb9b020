"""Attention over int8 latents on every instruction set, against float64 and against itself."""

from __future__ import annotations

import pytest
import torch

from ops.cpu import native_library
from ops.cpu.native_latent_attention import LatentAttention
from ops.cpu.native_tiled_attention import TiledAttentionStep
from ops.reference import ReferenceBackend, attention_fp64, round_latent
from quant.kv import TILE_TOKENS, latent_format
from tests.support.memory.int8_kv import out_error, score_error

pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
    pytest.mark.usefixtures("seeded"),
]
SCALE = 0.07
BEFORE = 64  # bytes of another layer in front of this one

CASES = [
    {"heads": 16, "value_dim": 512, "rope_dim": 64, "length": 300},
    {"heads": 20, "value_dim": 256, "rope_dim": 32, "length": 1100},
    {"heads": 3, "value_dim": 48, "rope_dim": 16, "length": 2100},
    {"heads": 40, "value_dim": 80, "rope_dim": 96, "length": 270},
    {"heads": 1, "value_dim": 16, "rope_dim": 16, "length": 70, "group": 8},
    {"heads": 17, "value_dim": 128, "rope_dim": 128, "length": 520, "group": 128},
]


class Latents:
    """Ranges of int8 latents in memory of random bytes, and one layer's kernel."""

    def __init__(self, heads, value_dim, rope_dim, tokens, group=64, ranges=1):
        self.form = latent_format(value_dim, value_dim + rope_dim, group)
        self.heads, self.dim, self.value_dim = heads, value_dim + rope_dim, value_dim
        self.tile_bytes = BEFORE + self.form.tile_bytes + 128
        self.range_bytes = -(-tokens // TILE_TOKENS) * self.tile_bytes
        size = ranges * self.range_bytes
        self.memory = torch.randint(0, 256, (size + 64,), dtype=torch.uint8)
        self.address = self.memory.data_ptr() + -self.memory.data_ptr() % 64
        self.op = LatentAttention(
            offset_bytes=BEFORE,
            num_heads=heads,
            value_dim=value_dim,
            rope_dim=rope_dim,
            group=self.form.group,
            rope_group=self.form.rope_group,
            scale=SCALE,
        )

    def step(self, rows, lengths, ranges=(0,), **options):
        starts = [index * self.range_bytes for index in ranges]
        return TiledAttentionStep(
            self.address, self.tile_bytes, starts, list(rows), list(lengths), **options
        )

    def append(self, k, index=0, end=None, rotation=None):
        """Appends k, [n, 1, D], up to position `end`."""
        step = self.step([len(k)], [len(k) if end is None else end], [index])
        self.op.append(step, k, None, rotation)

    def attend(self, q, length, index=0, lse=None, **options):
        return self.op.attend(self.step([len(q)], [length], [index]), q, lse, **options)

    def rounded(self, k):
        return round_latent(k, self.value_dim, self.form.group, self.form.rope_group)


def made(case, **changes):
    case = dict(case) | changes
    length = case.pop("length")
    latents = Latents(tokens=length, **case)
    k = torch.randn(length, 1, latents.dim)
    q = torch.randn(length, latents.heads, latents.dim)
    # the two parts have magnitudes of their own
    q[..., latents.value_dim :] *= 30
    k[..., latents.value_dim :] /= 30
    return latents, q, k, length


@pytest.mark.covering(1)
@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(f"{k}{v}" for k, v in c.items()))
def test_attention(isa, case):
    latents, q, k, length = made(case)
    q = q[-60:]
    latents.append(k)
    lse = torch.empty(q.shape[:2])
    found = latents.attend(q, length, lse=lse)
    stored = latents.rounded(k)
    values = stored[..., : latents.value_dim]
    expected, expected_lse = attention_fp64(q, stored, values, SCALE)
    parts = (slice(0, latents.value_dim), slice(latents.value_dim, None))
    of_score = sum(score_error(q[..., part], stored[..., part], SCALE) for part in parts)
    assert float((found - expected).abs().max()) <= out_error(of_score, values)
    assert float((lse - expected_lse).abs().max()) <= of_score + 1e-4
    # any division of the rows gives the same bits
    for first in (length - 1, length - 3, length - 37):
        assert torch.equal(latents.attend(q[first - length :], length), found[first - length :])
    for end in (length - 59, length - 30, length - 1):
        cut = latents.attend(q[: 60 - (length - end)], end)
        assert torch.equal(cut, found[: 60 - (length - end)]), f"to {end}"


@pytest.mark.parametrize("case", CASES[:4], ids=lambda c: f"{c['heads']}-{c['value_dim']}")
def test_matrix_instructions_give_the_same_bits(case):
    if not native_library.library().may_use_matrix():
        pytest.skip("this processor has no matrix instructions")
    latents, q, k, length = made(case)
    latents.append(k)
    for rows in (1, 60):
        one, other = (latents.attend(q[-rows:], length, with_matrix=x) for x in (True, False))
        assert torch.equal(one, other)


def test_a_row_has_the_same_bits_in_any_batch(isa):
    latents = Latents(20, 128, 32, tokens=1300, ranges=5)
    lengths = [1300, 1024, 1025, 17, 1]
    for index, length in enumerate(lengths):
        latents.append(torch.randn(length, 1, latents.dim), index)
    q = torch.randn(sum((1, 1, 5, 1, 1)), 20, latents.dim)
    rows, whole_lse = [1, 1, 5, 1, 1], torch.empty(9, 20)
    whole = latents.op.attend(latents.step(rows, lengths, range(5)), q, whole_lse)
    first = 0
    for index, (count, length) in enumerate(zip(rows, lengths, strict=True)):
        own, lse = q[first : first + count], torch.empty(count, 20)
        assert torch.equal(latents.attend(own, length, index, lse), whole[first : first + count])
        assert torch.equal(lse, whole_lse[first : first + count])
        first += count


@pytest.mark.parametrize("rows", [1, 9])
def test_the_number_of_threads_does_not_change_bits(rows):
    latents, q, k, length = made(CASES[1])
    before = native_library.num_threads()
    found = []
    try:
        for threads in (1, 2):
            native_library.set_num_threads(threads)
            latents.append(k)
            found.append(latents.attend(q[-rows:], length))
    finally:
        native_library.set_num_threads(before)
    assert torch.equal(*found)


def test_the_heads_of_a_row_do_not_change_one_another(isa):
    latents, q, k, length = made(CASES[1])
    latents.append(k)
    few = Latents(3, 256, 32, tokens=length)
    few.append(k)
    for rows in (1, 7):
        whole = latents.attend(q[-rows:], length)
        assert torch.equal(few.attend(q[-rows:, 5:8], length), whole[:, 5:8])


def test_rows_that_attend_to_a_prefix(isa):
    """As on a memory node: the rows follow all keys, and append writes after them."""
    latents, q, k, _ = made(CASES[2], length=1200)
    latents.append(k[:1190], end=1190)
    step = latents.step([10], [1190], prefix_only=True)
    lse = torch.empty(10, 3)
    part = latents.op.attend(step, q[-10:], lse)
    latents.op.append(step, k[1190:], None, None)
    whole = latents.attend(q[-10:], 1200)
    stored = latents.rounded(k)
    values = stored[..., : latents.value_dim]
    own = attention_fp64(q[-10:], stored[1190:], values[1190:], SCALE)
    own = type(own)(own.out.float(), own.lse.float())
    merged = ReferenceBackend().merge_partials([type(own)(part, lse), own])
    torch.testing.assert_close(merged.out, whole, rtol=0, atol=2e-4)


def test_a_row_without_keys():
    latents = Latents(5, 48, 16, tokens=32)
    step = latents.step([1, 2], [0, 0], (0, 0), prefix_only=True)
    lse = torch.empty(3, 5)
    found = latents.op.attend(step, torch.randn(3, 5, 64), lse)
    assert torch.equal(found, torch.zeros(3, 5, 48))
    assert torch.equal(lse, torch.full((3, 5), float("-inf")))


@pytest.mark.parametrize("half", [8, 16, 24])
def test_append_rotates_the_numbers_after_the_values(isa, half):
    latents = Latents(2, 64, 48, tokens=40)
    k = torch.randn(40, 1, 112)
    angle = torch.randn(40, half)
    rotation = (angle.cos(), angle.sin())
    turned = torch.cat((k[..., :64], ReferenceBackend().rotary(k[..., 64:], *rotation)), -1)
    latents.append(k.clone(), rotation=rotation)
    rotated = latents.memory.clone()
    latents.append(turned)
    changed = (latents.memory.int() - rotated.int()).abs()
    # the order of operations may differ in the last bit before a value is rounded
    assert int((changed > 1).sum()) == 0 and float((changed > 0).float().mean()) < 1e-3


def test_keys_that_a_row_does_not_see_do_not_reach_it(isa):
    """Also not if they are not numbers."""
    latents, q, k, length = made(CASES[0])
    latents.append(k)
    expected = latents.attend(q[-40:-20], length - 20)
    bad = k[-20:].clone()
    bad[3:] = float("nan")
    bad[9, :, 5] = float("inf")
    latents.append(bad, end=length)
    found = latents.attend(q[-40:], length)
    assert torch.equal(found[:20], expected)
    assert bool(torch.isfinite(found[20:23]).all()) and bool(torch.isnan(found[23:]).all())


@pytest.mark.parametrize("group", [16, 32, 64, 128])
def test_the_format_keeps_few_bytes_more_than_the_numbers(group):
    for value_dim, rope_dim in ((512, 64), (256, 64), (256, 32)):
        form = latent_format(value_dim, value_dim + rope_dim, group)
        assert form.tile_bytes <= 1.15 * TILE_TOKENS * (value_dim + rope_dim)


def test_sizes_that_have_no_format():
    assert latent_format(24, 40, 64) is None
    assert latent_format(64, 72, 64) is None
    assert latent_format(64, 64, 64) is None
    assert latent_format(1024, 1088, 64) is None
