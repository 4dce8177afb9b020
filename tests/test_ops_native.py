"""Our own kernels on every instruction set of this machine, against float64 and against themselves.

Bounds follow from the scales: half a step for every rounded factor.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import Tensor

from ops import Edges, Norm, native
from ops.native import MAX_INT8_INPUTS, Int8Attention, Int8AttentionStep, Int8Linear
from ops.reference import ReferenceBackend
from quant.kv import GROUPS, TILE_TOKENS, Int8KVFormat, fitting_group

pytestmark = [
    pytest.mark.skipif(not native.is_available(), reason="native kernels not built"),
    pytest.mark.usefixtures("seeded"),
]
REFERENCE = ReferenceBackend()


# -- linear layers


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as whole numbers from -127 to 127, and their steps, as the kernels round them."""
    largest = x.abs().amax(-1, keepdim=True)
    step = torch.where(largest > 0, 127.0 / largest, torch.zeros(()))
    return (x * step).round(), largest / 127.0


def expected_product(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """x @ weight.T in float64, and how far rounding both factors may lead away from it."""
    _, x_step = quantized(x)
    _, w_step = quantized(weight)
    x, weight, x_step, w_step = (t.double() for t in (x, weight, x_step, w_step))
    ones_x, ones_w = torch.ones_like(x), torch.ones_like(weight)
    bound = 0.5 * (x.abs() @ (ones_w * w_step).T) + 0.5 * ((ones_x * x_step) @ weight.abs().T)
    return x @ weight.T, bound + 0.25 * x.shape[1] * x_step * w_step.T + 1e-6


SHAPES = [(1, 64, 32), (3, 100, 70), (13, 640, 96), (16, 2048, 33), (40, 1024, 300), (200, 96, 32)]


@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_is_within_the_bound_of_its_scales(isa, m, k, n, dtype):
    x, weight = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
    y = Int8Linear(weight, None)(x)
    exact, bound = expected_product(x.float(), weight.float())
    assert bool(((y - exact).abs() <= bound).all())


@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_linear_sums_exactly(isa, m, k, n):
    """On whole numbers nothing is rounded: the sums must be right to the last bit of fp32."""
    x = torch.randint(-127, 128, (m, k)).float()
    weight = torch.randint(-127, 128, (n, k)).float()
    x[:, 0], weight[:, 0] = 127.0, -127.0
    y = Int8Linear(weight, None)(x)
    assert torch.allclose(y.double(), x.double() @ weight.double().T, rtol=1e-6, atol=0)


def test_a_row_does_not_depend_on_the_others(isa):
    layer = Int8Linear(torch.randn(150, 700), torch.randn(150))
    x = torch.randn(300, 700)
    alone = torch.cat([layer(x[i : i + 1]) for i in range(300)])
    for m in (2, 5, 12, 13, 24, 31, 64, 129, 300):
        assert torch.equal(layer(x[:m]), alone[:m]), f"{m} rows"
    threads = native.num_threads()
    native.set_num_threads(1)
    assert torch.equal(layer(x), alone)
    native.set_num_threads(threads)


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("is_gated", [False, True])
def test_activation_and_bias_are_fused(isa, kind, is_gated):
    """Without rounding of the factors: whole numbers, scaled so that activations bend them."""
    x = torch.randint(-127, 128, (5, 64)).float()
    weight = torch.randint(-127, 128, (90, 64)).float()
    x[:, 0], weight[:, 0] = 127.0, 127.0
    weight, bias = weight / 4e4, torch.randn(90)
    y = Int8Linear(weight, bias, Edges(None, kind, is_gated))(x)
    plain = REFERENCE.pack_linear(weight.double(), bias.double(), Edges(None, kind, is_gated))
    expected = plain(x.double())
    assert y.dtype == torch.bfloat16
    assert torch.allclose(y.double(), expected, rtol=5e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("size", [64, 100, 2048])
def test_norm_is_fused(isa, kind, size):
    norm_bias = torch.randn(size) if kind == "layer" else None
    norm = Norm(kind, torch.rand(size) + 0.5, norm_bias, 1e-5)
    x, weight = torch.randn(7, size) * 3 + 1, torch.randn(40, size)
    y = Int8Linear(weight, None, Edges(norm))(x)
    wide = Norm(kind, norm.weight.double(), None if norm_bias is None else norm_bias.double(), 1e-5)
    normed = REFERENCE.pack_linear(torch.eye(size).double(), None, Edges(wide))(x.double())
    exact, bound = expected_product(normed.float(), weight)
    assert bool(((y - exact).abs() <= bound + 1e-3).all())


def test_residual_is_added_in_place(isa):
    x, weight, residual = torch.randn(9, 64), torch.randn(50, 64), torch.randn(9, 50)
    layer = Int8Linear(weight, None)
    expected = residual + layer(x)
    got = layer(x, residual=residual)
    assert got is residual
    assert torch.equal(got, expected)


def test_zeros_and_empty_and_strided_rows(isa):
    layer = Int8Linear(torch.randn(40, 64), None)
    assert torch.equal(layer(torch.zeros(3, 64)), torch.zeros(3, 40))
    assert layer(torch.empty(0, 64)).shape == (0, 40)
    wide = torch.randn(4, 200)
    assert torch.equal(layer(wide[:, 30:94]), layer(wide[:, 30:94].contiguous()))
    assert torch.equal(
        Int8Linear(torch.zeros(40, 64), None)(torch.randn(2, 64)), torch.zeros(2, 40)
    )


# -- attention


def rounded_kv(x: Tensor, group: int) -> Tensor:
    """[..., D] as it is stored: fp16 scales rounded up, values to the nearest step."""
    parts = x.reshape(*x.shape[:-1], -1, group)
    wanted = parts.abs().amax(-1, keepdim=True) / 127.0
    scale = wanted.half()
    above = (scale.view(torch.int16) + 1).view(torch.float16)
    scale = torch.where(scale.float() < wanted, above, scale).float()
    return ((parts / scale).round().clamp(-127, 127) * scale).reshape(x.shape)


class Cache:
    """K/V of one or more sequences in two layers; only the second is used."""

    def __init__(self, *, heads, kv_heads, dim, group=64, tokens, sequences=1, **switches):
        form = Int8KVFormat(kv_heads, dim, fitting_group(dim, group))
        self.group, self.heads = form.group, heads
        self.tile_bytes = 2 * form.tile_bytes
        self.range_bytes = -(-tokens // TILE_TOKENS) * self.tile_bytes
        # 0x7f7f is not a number in fp16: whoever reads what was not written finds out
        self.memory = torch.full((sequences * self.range_bytes + 64,), 0x7F, dtype=torch.uint8)
        self.address = self.memory.data_ptr() + -self.memory.data_ptr() % 64
        self.op = Int8Attention(
            offset_bytes=form.tile_bytes,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            group=form.group,
            scale=dim**-0.5,
            **switches,
        )

    def step(self, sequences, num_rows, kv_lens) -> Int8AttentionStep:
        starts = [i * self.range_bytes for i in sequences]
        return Int8AttentionStep(self.address, self.tile_bytes, starts, num_rows, kv_lens)

    def fill(self, k: Tensor, v: Tensor, sequence=0, chunk=10**9) -> None:
        for at in range(0, len(k), chunk):
            part = slice(at, min(at + chunk, len(k)))
            step = self.step([sequence], [part.stop - at], [part.stop])
            self.op.append(step, k[part], v[part], None)

    def attend(self, q: Tensor, kv_len: int, sequence=0, lse=None) -> Tensor:
        return self.op.attend(self.step([sequence], [len(q)], [kv_len]), q, lse)


def attention64(q, k, v, scale, *, window=None, soft_cap=0.0, slopes=None, sinks=None):
    """(out, lse) in float64. q: [n, H, D], the last n positions; k, v: [L, Hk, D]."""
    n, heads, _ = q.shape
    length = len(k)
    k, v = (x.double().repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q.double(), k) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    row, key = torch.arange(length - n, length)[:, None], torch.arange(length)[None]
    if slopes is not None:
        scores = scores + torch.tensor(slopes).double()[:, None, None] * (key - row)
    seen = key <= row if window is None else (key <= row) & (key > row - window)
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        extra = torch.tensor(sinks).double()[:, None, None].expand(heads, n, 1)
        scores = torch.cat((scores, extra), -1)
    weights = scores.softmax(-1)[..., :length]
    return torch.einsum("hnl,lhd->nhd", weights, v), scores.logsumexp(-1).T


CASES = [
    {"heads": 4, "kv_heads": 2, "dim": 64, "length": 37},
    {"heads": 8, "kv_heads": 2, "dim": 64, "length": 700, "group": 32},
    {"heads": 4, "kv_heads": 4, "dim": 128, "length": 1100},
    {"heads": 4, "kv_heads": 1, "dim": 32, "length": 65, "group": 16},
    {"heads": 4, "kv_heads": 2, "dim": 16, "length": 530, "group": 8},
    {"heads": 6, "kv_heads": 2, "dim": 80, "length": 200, "group": 16},
    {"heads": 14, "kv_heads": 2, "dim": 96, "length": 130, "group": 32},
    {"heads": 24, "kv_heads": 2, "dim": 256, "length": 70, "group": 256},
    {"heads": 8, "kv_heads": 2, "dim": 64, "length": 900, "window": 100},
    {"heads": 8, "kv_heads": 2, "dim": 64, "length": 90, "soft_cap": 2.0},
    {"heads": 4, "kv_heads": 2, "dim": 64, "length": 600, "slopes": [0.5, 0.25, 0.1, 0.01]},
    {"heads": 4, "kv_heads": 2, "dim": 64, "length": 600, "sinks": [0.0, 3.0, -5.0, 60.0]},
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(f"{k}{v}" for k, v in c.items()))
def test_attention(isa, case):
    case = dict(case)
    length, heads, kv_heads, dim = (case.pop(x) for x in ("length", "heads", "kv_heads", "dim"))
    group = case.pop("group", 64)
    cache = Cache(heads=heads, kv_heads=kv_heads, dim=dim, group=group, tokens=length, **case)
    q = torch.randn(length, heads, dim)
    k, v = torch.randn(2, length, kv_heads, dim)
    cache.fill(k, v)
    lse = torch.empty(length, heads)
    whole = cache.attend(q, length, lse=lse)
    stored_k, stored_v = rounded_kv(k, cache.group), rounded_kv(v, cache.group)
    expected, expected_lse = attention64(q, stored_k, stored_v, dim**-0.5, **case)
    # q is rounded to 1 / 32,512 of its largest; weights to 1 / 65,534 of a stretch's largest,
    # 64 of them against values up to 127 steps
    step = q.abs().max() / 32512
    score_error = float(dim**-0.5 * step * stored_k.abs().sum(-1).max()) + 1e-5
    bound = float(stored_v.abs().max()) * (2 * score_error + 64 / 65534) + 1e-5
    assert float((whole - expected).abs().max()) <= bound
    assert float((lse - expected_lse).abs().max()) <= score_error + 1e-4
    # the same bits in whatever pieces the rows are computed
    for first in (length - 1, length - 3, length // 2):
        assert torch.equal(cache.attend(q[first:], length), whole[first:]), f"from {first}"
    for last in (1, length // 3, length // 2 + 1):
        assert torch.equal(cache.attend(q[last - 1 : last], last), whole[last - 1 : last])


@pytest.mark.parametrize("rest", [0.1, 0.01, 0.001])
def test_a_sink_with_small_values_leaves_the_others_their_precision(isa, rest):
    """One token has nearly all the weight and a hundredth of the others' values."""
    length, dim = 256, 64
    cache = Cache(heads=1, kv_heads=1, dim=dim, group=64, tokens=length)
    k = torch.full((length, 1, dim), 1e-7)
    k[0, 0, 0] += math.log((1 - rest) / rest * (length - 1))
    q = torch.zeros(length, 1, dim)
    q[:, 0, 0] = dim**0.5
    v = torch.randn(length, 1, dim) + 0.3
    v[0] *= 0.01
    cache.fill(k, v)
    found = cache.attend(q, length)
    stored_k, stored_v = rounded_kv(k, 64), rounded_kv(v, 64)
    expected, _ = attention64(q, stored_k, stored_v, dim**-0.5)
    for row in (63, 200, length - 1):
        error = (found[row] - expected[row]).norm() / expected[row].norm()
        assert float(error) < 1e-3, f"row {row}"
        assert torch.equal(cache.attend(q[row : row + 1], row + 1), found[row : row + 1])


def test_rows_of_other_sequences_change_nothing(isa):
    lengths = [1, 5, 17, 64, 300, 513, 700]
    cache = Cache(heads=4, kv_heads=2, dim=32, tokens=700, sequences=len(lengths))
    k, v = torch.randn(2, len(lengths), 700, 2, 32)
    for i, length in enumerate(lengths):
        cache.fill(k[i, :length], v[i, :length], i, chunk=[7, 100, 1000][i % 3])
    rows = [1, 1, 1, 1, 40, 2, 700]
    q = torch.randn(sum(rows), 4, 32)
    together = cache.op.attend(cache.step(range(len(lengths)), rows, lengths), q)
    threads = native.num_threads()
    native.set_num_threads(1)
    assert torch.equal(cache.op.attend(cache.step(range(len(lengths)), rows, lengths), q), together)
    native.set_num_threads(threads)
    first = 0
    for i, (n, length) in enumerate(zip(rows, lengths, strict=True)):
        part = slice(first, first + n)
        assert torch.equal(cache.attend(q[part], length, i), together[part]), f"sequence {i}"
        first += n


def test_chunks_store_the_same_bytes(isa):
    k, v = torch.randn(2, 100, 2, 48)
    caches = [Cache(heads=2, kv_heads=2, dim=48, tokens=100) for _ in range(3)]
    for cache, chunk in zip(caches, (1000, 1, 7), strict=True):
        cache.fill(k, v, chunk=chunk)
    used = [c.memory[c.address - c.memory.data_ptr() :][: c.range_bytes] for c in caches]
    assert torch.equal(used[0], used[1])
    assert torch.equal(used[0], used[2])


def test_append_rotates_and_touches_nothing_else(isa):
    length, dim = 40, 64
    plain = Cache(heads=2, kv_heads=2, dim=dim, tokens=64)
    turned = Cache(heads=2, kv_heads=2, dim=dim, tokens=64)
    k, v = torch.randn(2, length, 2, dim)
    angle = torch.randn(length, dim // 2)
    rotation = (angle.cos(), angle.sin())
    turned.op.append(turned.step([0], [length], [length]), k, v, rotation)
    plain.fill(REFERENCE.rotary(k, *rotation), v)
    assert torch.equal(plain.memory[64:-64], turned.memory[64:-64])
    first_layer = turned.memory[turned.address - turned.memory.data_ptr() :][
        : turned.tile_bytes // 2
    ]
    assert bool((first_layer == 0x7F).all()), "another layer was written"
    rest = turned.memory[-(turned.tile_bytes // 2) :]  # the last tile holds no token
    assert bool((rest == 0x7F).all())


@pytest.mark.parametrize("group", [g for g in GROUPS if g <= 64])
def test_stored_values_are_within_half_a_step(isa, group):
    """Weights that pick one token give back its V."""
    cache = Cache(heads=1, kv_heads=1, dim=64, group=group, tokens=16)
    k, v = torch.zeros(1, 1, 64), torch.randn(1, 1, 64) * 5
    cache.fill(k, v)
    out = cache.attend(torch.zeros(1, 1, 64), 1)
    step = v.reshape(-1, group).abs().amax(-1, keepdim=True) / 127
    bound = (0.51 * step + 1e-4 * v.abs().max()).expand(-1, group).reshape(-1)
    assert bool(((out - v).abs().reshape(-1) <= bound).all())


def test_threads_are_limited_to_the_processors():
    before = native.num_threads()
    native.set_num_threads(10_000)
    assert native.num_threads() <= len(os.sched_getaffinity(0))
    native.set_num_threads(1)
    assert native.num_threads() == 1
    assert Int8Linear(torch.randn(64, 64), None)(torch.randn(3, 64)).shape == (3, 64)
    native.set_num_threads(before)
    assert native.num_threads() == before


FORKED = """
import os, sys, time, torch
from ops import native
from ops.native import Int8Linear
torch.set_num_threads(1)  # libgomp does not survive a fork; our team has to
layer, x = Int8Linear(torch.ones(4096, 64), None), torch.ones(64, 64)
expected = layer(x)
time.sleep(0.05)  # the helpers sleep
child = os.fork()
if child == 0:
    native.set_num_threads(2)
    for _ in range(3):
        assert torch.equal(layer(x), expected)
        time.sleep(0.01)
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert torch.equal(layer(x), expected)
"""


def test_a_forked_child_goes_on_alone():
    """It has none of the helpers, and waited for them for ever."""
    subprocess.run([sys.executable, "-c", FORKED], timeout=30, check=True)


def test_two_callers_at_once():
    """One has the team, the other works alone; both are right."""
    layers = [Int8Linear(torch.randn(500, 128), None) for _ in range(2)]
    x = torch.randn(40, 128)
    expected = [layer(x) for layer in layers]
    wrong: list[int] = []

    def call(index: int) -> None:
        for _ in range(300):
            if not torch.equal(layers[index](x), expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=call, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_an_empty_step(isa):
    cache = Cache(heads=4, kv_heads=2, dim=64, tokens=16)
    step = cache.step([], [], [])
    nothing = torch.empty(0, 2, 64)
    cache.op.append(step, nothing, nothing, None)
    assert cache.op.attend(step, torch.empty(0, 4, 64)).shape == (0, 4, 64)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("norm", [None, Norm("rms", torch.ones(100), None, 1e-5)])
def test_a_row_with_a_nan_or_an_infinity_shows_it(isa, bad, norm):
    """And only that row does."""
    x = torch.randn(5, 100)
    layer = Int8Linear(torch.randn(40, 100), None, Edges(norm))
    expected = layer(x)
    for at in (0, 17, 31, 63, 99):
        spoilt = x.clone()
        spoilt[2, at] = bad
        y = layer(spoilt)
        assert not bool(y[2].isfinite().any()), f"{bad} at {at}"
        assert torch.equal(y[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_a_nan_spoils_the_rows_that_see_it(isa, which):
    length, at = 150, 70
    q, k, v = torch.randn(length, 4, 64), torch.randn(length, 2, 64), torch.randn(length, 2, 64)
    clean = Cache(heads=4, kv_heads=2, dim=64, tokens=length)
    clean.fill(k, v)
    expected = clean.attend(q, length)
    {"q": q, "k": k, "v": v}[which][at, 1, 5] = math.nan
    cache = Cache(heads=4, kv_heads=2, dim=64, tokens=length)
    cache.fill(k, v)
    out = cache.attend(q, length)
    spoilt = torch.zeros(length, 4, dtype=torch.bool)
    if which == "q":
        spoilt[at, 1] = True
    else:
        spoilt[at:, 2:] = True  # the second K/V head
    assert not bool(out[spoilt].isfinite().any())
    assert torch.equal(out[~spoilt], expected[~spoilt])


def test_what_would_overflow_or_be_read_beyond_its_end_is_refused():
    assert MAX_INT8_INPUTS * 127 * 128 < 2**31
    with pytest.raises(ValueError, match="132,104"):
        Int8Linear(torch.ones(32, MAX_INT8_INPUTS + 1), None)
    x = torch.randn(2, 64)
    with pytest.raises(AssertionError):
        Int8Linear(torch.ones(40, 64), torch.ones(1))
    with pytest.raises(AssertionError):
        Int8Linear(torch.ones(40, 64), None, Edges(Norm("rms", torch.ones(8), None, 1e-5)))
    with pytest.raises(AssertionError):
        Int8Linear(torch.ones(40, 64), None)(x, torch.ones(40, 2).T)
    with pytest.raises(AssertionError):
        Int8Linear(torch.ones(41, 64), None, Edges(None, "silu", True))
    with pytest.raises(AssertionError):
        Int8Linear(torch.ones(40, 64), None, Edges(None, "silu", True))(x, torch.ones(2, 20))


def test_python_goes_on_while_a_kernel_runs():
    layer, x = Int8Linear(torch.ones(4096, 4096), None), torch.ones(2048, 4096)
    ticks: list[float] = []
    is_done = threading.Event()

    def tick() -> None:
        while not is_done.wait(0.001):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    began = time.perf_counter()
    layer(x)
    ended = time.perf_counter()
    is_done.set()
    thread.join()
    margin = 0.1 * (ended - began)
    assert any(began + margin < at < ended - margin for at in ticks)


def test_unknown_instruction_sets_are_refused():
    assert not native.library().choose_instruction_set("mmx")
