"""Every operator of the CPU back end agrees with the reference in higher precision."""

from __future__ import annotations

import itertools

import pytest
import torch

from ops import BACKENDS, get_backend
from ops.backend import KeyValues, Partial
from ops.cpu.backend import CpuBackend
from ops.reference import ReferenceBackend

REFERENCE = ReferenceBackend()
DTYPES = [torch.float32, torch.bfloat16]
# bf16 keeps 8 bits: half a unit in the last place of the result, times a few roundings
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.fixture(scope="module", params=["fast", "torch", "fallback"])
def cpu(request):
    backend = CpuBackend()
    assert backend._packed_types >= {torch.float32}
    assert backend._flash_types == {torch.float32, torch.bfloat16}
    if request.param == "torch":
        backend._has_native = False
    if request.param == "fallback":
        backend._packed_types = backend._flash_types = set()
        backend._has_native = False
    return backend


def close(actual, expected, dtype):
    expected = expected.double()
    assert actual.shape == expected.shape
    bound = TOLERANCE[dtype] * (1 + expected.abs())
    assert bool(((actual.double() - expected).abs() <= bound).all())


def cache_of(length, kv_heads, dim, dtype, layers=3):
    """Returns K/V as they lie in a range, with all layers of a token side by side."""
    flat = torch.randn(length, layers, 2, kv_heads, dim).to(dtype)
    k, v = (flat[:, 1, i].permute(1, 0, 2)[None] for i in (0, 1))
    return KeyValues(k, v)


def wide(cache):
    return KeyValues(cache.k.double(), cache.v.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("m", "k", "n"), [(0, 8, 8), (1, 64, 33), (5, 17, 64), (130, 96, 128)])
def test_linear(cpu, dtype, bias, m, k, n):
    x, w = torch.randn(m, k).to(dtype), (torch.randn(n, k) / k**0.5).to(dtype)
    b = torch.randn(n).to(dtype) if bias else None
    expected = REFERENCE.pack_linear(w.double(), None if b is None else b.double())(x.double())
    close(cpu.pack_linear(w, b)(x), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3])
def test_norms_and_activations(cpu, dtype, rows):
    x, w, b = (torch.randn(s).to(dtype) for s in ((rows, 40), (40,), (40,)))
    wx, ww, wb = x.double(), w.double(), b.double()
    close(cpu.rms_norm(x, w, 1e-5), REFERENCE.rms_norm(wx, ww, 1e-5), dtype)
    close(cpu.layer_norm(x, w, b, 1e-5), REFERENCE.layer_norm(wx, ww, wb, 1e-5), dtype)
    close(cpu.layer_norm(x, w, None, 1e-5), REFERENCE.layer_norm(wx, ww, None, 1e-5), dtype)
    for kind in ("silu", "relu", "gelu", "gelu_tanh", "relu2", "swiglu_oai"):
        if kind != "swiglu_oai":
            close(cpu.activation(x.clone(), kind), REFERENCE.activation(wx, kind), dtype)
        for size in (1, 4):  # the larger reaches the clamps
            gated = REFERENCE.gated_activation(wx * size, kind)
            close(cpu.gated_activation(x * size, kind), gated, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotated", [16, 8])
def test_rotary(cpu, dtype, rotated):
    x = torch.randn(5, 3, 16).to(dtype)
    angle = torch.randn(5, rotated // 2)
    cos, sin = angle.cos(), angle.sin()
    close(cpu.rotary(x.clone(), cos, sin), REFERENCE.rotary(x.double(), cos, sin), dtype)
    back = cpu.rotary(cpu.rotary(x.clone(), cos, sin), cos, -sin)
    close(back, x, dtype)


def test_store_kv_writes_its_rows_and_no_others(cpu):
    flat = torch.zeros(20, 3, 2, 2, 8)
    cache = flat[:, 1]
    k, v = torch.randn(4, 2, 8), torch.randn(4, 2, 8)
    rows = torch.tensor([3, 4, 17, 0])
    cpu.store_kv(k, v, cache, rows)
    expected = torch.zeros_like(flat)
    expected[rows, 1, 0], expected[rows, 1, 1] = k, v
    assert torch.equal(flat, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 16), (8, 2, 64), (6, 1, 20)])
def test_decode_attention(cpu, dtype, heads, kv_heads, dim):
    lengths = [1, 7, 64, 300]
    q = torch.randn(len(lengths), heads, dim).to(dtype)
    caches = [cache_of(n, kv_heads, dim, dtype) for n in lengths]
    got = cpu.decode_attention(q, caches, dim**-0.5)
    expected = REFERENCE.decode_attention(q.double(), [wide(c) for c in caches], dim**-0.5)
    close(got.out, expected.out, dtype)
    close(got.lse, expected.lse, dtype)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 5, 100])
@pytest.mark.parametrize(("n", "past"), [(1, 0), (2, 0), (7, 30), (80, 0), (80, 55), (200, 3)])
def test_prefill_attention(cpu, dtype, window, n, past):
    q = torch.randn(n, 8, 32).to(dtype)
    cache = cache_of(past + n, 2, 32, dtype)
    got = cpu.prefill_attention(q, cache, 0.2, window)
    expected = REFERENCE.prefill_attention(q.double(), wide(cache), 0.2, window)
    close(got.out, expected.out, dtype)
    close(got.lse, expected.lse, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize(("n", "past"), [(1, 0), (3, 0), (1, 9), (7, 30), (80, 3), (30, 150)])
def test_prefix_attention(cpu, dtype, window, n, past):
    q = torch.randn(n, 8, 32).to(dtype)
    cache = cache_of(past, 2, 32, dtype)
    got = cpu.prefix_attention(q, cache, 0.2, window)
    expected = REFERENCE.prefix_attention(q.double(), wide(cache), 0.2, window)
    close(got.out, expected.out, dtype)
    seen = expected.lse > float("-inf")
    assert torch.equal(got.lse > float("-inf"), seen)
    close(got.lse[seen], expected.lse[seen], dtype)
    num_seeing = n if window is None else min(n, window - 1)
    assert seen[:, 0].tolist() == [past > 0 and i < num_seeing for i in range(n)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [32, 20])
def test_prefix_and_own_keys_merge_to_the_whole(cpu, dtype, dim):
    """Only some of the step's rows have a prefix."""
    q, cache = torch.randn(12, 8, dim).to(dtype), cache_of(40, 2, dim, dtype)
    whole = cpu.prefill_attention(q, cache, 0.2, 20)
    own = KeyValues(cache.k[:, :, 28:], cache.v[:, :, 28:])
    total = Partial(torch.randn(17, 8, dim).to(dtype), torch.randn(17, 8))
    rows = torch.arange(17).flip(0)[:12]
    before = Partial(total.out[:5].clone(), total.lse[:5].clone())
    total.out[rows], total.lse[rows] = cpu.prefill_attention(q, own, 0.2, 20)
    past = KeyValues(cache.k[:, :, :28], cache.v[:, :, :28])
    cpu.merge_into(total, cpu.prefix_attention(q, past, 0.2, 20), rows)
    close(total.out[rows], whole.out, dtype)
    close(total.lse[rows], whole.lse, dtype)
    assert torch.equal(total.out[:5], before.out)
    assert torch.equal(total.lse[:5], before.lse)


def test_a_decode_row_without_keys(cpu):
    q, caches = torch.randn(2, 4, 16), [cache_of(n, 2, 16, torch.float32) for n in (9, 0)]
    got = cpu.decode_attention(q, caches, 0.25)
    close(got.out[:1], cpu.decode_attention(q[:1], caches[:1], 0.25).out, torch.float32)
    assert bool((got.out[1] == 0).all()) and bool((got.lse[1] == float("-inf")).all())
    merged = cpu.merge_partials([Partial(got.out[1:], got.lse[1:])] * 2)
    assert bool((merged.out == 0).all()) and bool((merged.lse == float("-inf")).all())


def test_merging_parts_is_attending_to_all(cpu):
    q, cache = torch.randn(3, 4, 16), cache_of(90, 2, 16, torch.float32)
    cuts = [0, 1, 40, 90]
    parts = [
        cpu.decode_attention(q, [KeyValues(cache.k[:, :, a:b], cache.v[:, :, a:b])] * 3, 0.25)
        for a, b in itertools.pairwise(cuts)
    ]
    merged = cpu.merge_partials(parts)
    whole = cpu.decode_attention(q, [cache] * 3, 0.25)
    close(merged.out, whole.out, torch.float32)
    close(merged.lse, whole.lse, torch.float32)
    huge = [Partial(p.out, p.lse + 5000) for p in parts]
    assert bool(torch.isfinite(cpu.merge_partials(huge).out).all())


def test_back_ends_are_found_by_name():
    assert get_backend("auto").name == "cpu"
    for name in BACKENDS:
        assert get_backend(name).name == name
    with pytest.raises(ValueError, match="known: auto, cpu"):
        get_backend("gpu")
