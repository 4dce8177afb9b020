"""Layers that keep one latent for K and V (multi-head latent attention), through the seam."""

from __future__ import annotations

import ctypes
import importlib.util
from dataclasses import replace

import pytest
import torch

from memory.attention.layouts import local_attention, make_layout
from memory.attention.seam import AttentionLayer, AttentionStep
from memory.attention.tiled import TiledKVLayout
from ops import get_backend
from ops.cpu import native_library
from ops.reference import ReferenceBackend, attention_fp64, round_latent
from quant.kv import latent_format

pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
    pytest.mark.usefixtures("seeded"),
]
MAX_LEN = 320
LAYERS = [
    AttentionLayer(16, 1, 576, 0.07, value_dim=512),
    AttentionLayer(20, 1, 288, 0.1, value_dim=256),
    AttentionLayer(3, 1, 80, 0.2, value_dim=48),
    AttentionLayer(4, 2, 64, 0.1),  # K and V, as other layers of a model may have
]
# (sequence, rows) of each step, decode rows first
STEPS = [
    [(0, 20), (1, 131)],
    [(0, 1), (2, 50), (1, 60)],
    [(0, 1), (1, 1), (2, 45)],
    [(2, 1), (0, 1), (1, 1)],
    [(1, 1), (0, 129)],
]


class Memory:
    def __init__(self, kind, layers=LAYERS, is_eager=False):
        self.layout = make_layout(layers, kind, 64)
        size = 3 * MAX_LEN * self.layout.token_bytes
        self.buffer = ctypes.create_string_buffer(size + 64)
        address = ctypes.addressof(self.buffer)
        address += -address % 64
        backend = get_backend("cpu")
        self.attention = local_attention(self.layout, address, size, backend, is_eager=is_eager)
        self.attention.buffer = self.buffer  # which lives as long as the attention


def inputs_of(layer, count, generator, dtype):
    shapes = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
    q, k, v = (torch.randn(count, n, layer.head_dim, generator=generator) for n in shapes)
    return q.to(dtype), k.to(dtype), None if layer.value_dim else v.to(dtype)


def run(attention, dtype, only=None):
    """Returns the results and inputs of each layer and sequence, over all steps. only: the sequence
    whose rows alone are computed; the numbers stay the same."""
    generator = torch.Generator().manual_seed(3)
    outs, kept, lengths = {}, {}, [0, 0, 0]
    for rows in STEPS:
        inputs = {
            (i, s): inputs_of(layer, n, generator, dtype)
            for s, n in rows
            for i, layer in enumerate(LAYERS)
        }
        for s, n in rows:
            lengths[s] += n
        chosen = [(s, n) for s, n in rows if only in (None, s)]
        if not chosen:
            continue
        step = AttentionStep(
            sum(n == 1 for _, n in chosen),
            [s * MAX_LEN for s, _ in chosen],
            [n for _, n in chosen],
            [lengths[s] for s, _ in chosen],
        )
        plan = attention.plan(step)
        for i, layer in enumerate(LAYERS):
            own = [inputs[i, s] for s, _ in chosen]
            q, k = (torch.cat([x[j] for x in own]) for j in (0, 1))
            v = None if layer.value_dim else torch.cat([x[2] for x in own])
            out = plan.finish(plan.begin(i, q), k, v, None).wait()
            assert out.dtype == dtype
            for (s, _), x, part in zip(chosen, own, out.split([n for _, n in chosen]), strict=True):
                kept.setdefault((i, s), []).append(x)
                outs.setdefault((i, s), []).append(part)
    joined = {
        key: [None if x[0] is None else torch.cat(x) for x in zip(*parts, strict=True)]
        for key, parts in kept.items()
    }
    return {key: torch.cat(parts) for key, parts in outs.items()}, joined


@pytest.mark.covering(1)
@pytest.mark.parametrize("is_eager", [False, True])
@pytest.mark.parametrize(
    ("kind", "tolerance"), [("float32", 2e-5), ("bfloat16", 0.03), ("int8", 2e-3)]
)
def test_results_are_close_to_fp64(kind, tolerance, is_eager):
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    outs, inputs = run(Memory(kind, is_eager=is_eager).attention, dtype)
    for (i, s), out in outs.items():
        layer = LAYERS[i]
        if not layer.value_dim:
            continue
        q, k, _ = inputs[i, s]
        if kind == "int8":
            form = latent_format(layer.value_dim, layer.head_dim, 64)
            k = round_latent(k.double(), layer.value_dim, form.group, form.rope_group)
        expected = attention_fp64(q, k, k[..., : layer.value_dim], layer.scale).out
        assert out.shape == expected.shape
        assert float((out.double() - expected).abs().max()) <= tolerance, (i, s)


def test_int8_keeps_the_accuracy_of_latents():
    """The error against exact latents is that of 127 steps of each group's largest value."""
    outs, inputs = run(Memory("int8").attention, torch.float32)
    for (i, s), out in outs.items():
        layer = LAYERS[i]
        if layer.value_dim:
            q, k, _ = inputs[i, s]
            exact = attention_fp64(q, k, k[..., : layer.value_dim], layer.scale).out
            error = (out - exact).square().mean().sqrt() / exact.square().mean().sqrt()
            assert error < 0.015, (i, s, float(error))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_a_sequence_has_the_same_bits_alone(kind):
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    together, _ = run(Memory(kind).attention, dtype)
    for only in range(3):
        alone, _ = run(Memory(kind).attention, dtype, only)
        for (i, s), out in alone.items():
            assert torch.equal(out, together[i, s])


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_the_rotation_turns_the_values_after_value_dim(kind):
    layer = LAYERS[1]
    angle = torch.randn(30, 16)
    rotation = (angle.cos(), angle.sin())
    q, k, _ = inputs_of(layer, 30, None, torch.float32)
    turned = k.clone()
    turned[..., 256:] = ReferenceBackend().rotary(k[..., 256:], *rotation)
    found = []
    for keys, by in ((k.clone(), rotation), (turned, None)):
        attention = Memory(kind, [layer]).attention
        plan = attention.plan(AttentionStep(0, [0], [30], [30]))
        found.append(plan.finish(plan.begin(0, q), keys, None, by).wait())
    torch.testing.assert_close(*found, rtol=0, atol=2e-2 if kind == "int8" else 1e-5)


@pytest.mark.parametrize(("kind", "item"), [("float32", 4), ("bfloat16", 2), ("int8", 1)])
def test_only_the_latent_is_kept(kind, item):
    for dim, value_dim in ((576, 512), (288, 256)):
        layers = [AttentionLayer(16, 1, dim, 0.1, value_dim=value_dim)] * 5
        assert Memory(kind, layers).layout.token_bytes <= 1.15 * item * 5 * dim


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")
@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [pytest.param("float32", 2e-5, marks=pytest.mark.exhaustive), ("int8", 3e-3)],
)
def test_cuda_attention_equals_the_reference(kind, tolerance):
    """Latents of two sizes and layers with K and V share the tiles and the step."""
    from memory.attention.cuda import CudaAttention, CudaKVLayout, step_arrays
    from tests.support.cuda.cuda_kv import DEVICE  # sets the interpreter before Triton's import

    if DEVICE != "cpu":
        pytest.skip("the tensors of this test are on the CPU")
    layers = [LAYERS[2], replace(LAYERS[3], shares=None), replace(LAYERS[1], num_heads=5)]
    layers.append(replace(layers[0], shares=0))
    layout = CudaKVLayout(layers, getattr(torch, kind), 64)
    memory = torch.zeros(2 * 64 * layout.token_bytes + 64, dtype=torch.uint8)
    arrays = step_arrays(layers, max_rows=64, max_seqs=4, max_len=64, device=torch.device("cpu"))
    base = memory.data_ptr() + -memory.data_ptr() % 16
    attention = CudaAttention([layout], [[0, 1, 2, 3]], [base], arrays)
    kept, lengths = {}, [0, 0]
    for rows in ([(0, 5), (1, 9)], [(0, 1), (1, 3)], [(1, 1), (0, 1)]):
        for s, n in rows:
            lengths[s] += n
        starts, counts = [64 * s for s, _ in rows], [n for _, n in rows]
        decodes = sum(n == 1 for n in counts)
        plan = attention.plan(AttentionStep(decodes, starts, counts, [lengths[s] for s, _ in rows]))
        for i, layer in enumerate(layers):
            q, k, v = inputs_of(layer, sum(counts), None, torch.float32)
            if layer.shares is not None:
                k = None
            out = plan.finish(plan.begin(i, q), k, v, None).wait()
            assert out.shape == (sum(counts), layer.num_heads, layer.value_dim or layer.head_dim)
            first = 0
            for s, n in rows:
                own = slice(first, first + n)
                first += n
                if layer.value_dim is None:
                    continue
                if k is not None:
                    kept[i, s] = torch.cat((kept.get((i, s), k[:0]), k[own]))
                keys = kept[0 if layer.shares is not None else i, s].double()
                if kind == "int8":
                    form = latent_format(layer.value_dim, layer.head_dim, 64)
                    keys = round_latent(keys, layer.value_dim, form.group, form.rope_group)
                values = keys[..., : layer.value_dim]
                expected = attention_fp64(q[own], keys, values, layer.scale).out
                assert float((out[own].double() - expected).abs().max()) <= tolerance, (i, s)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")
@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"window": 16}, "float32"),
        ({"soft_cap": 2.0}, "float32"),
        ({"num_kv_heads": 3}, "float32"),
        ({"head_dim": 1040}, "float32"),
        ({"value_dim": 40}, "int8"),
    ],
)
def test_layers_that_cuda_does_not_support(change, kind):
    from memory.attention.cuda import CudaKVLayout

    with pytest.raises(ValueError, match="latents"):
        CudaKVLayout([replace(LAYERS[2], **change)], getattr(torch, kind), 64)


def test_layers_that_int8_does_not_support():
    whole = AttentionLayer(4, 1, 64, 0.1, value_dim=48)
    assert TiledKVLayout.supports([whole], "int8")
    for changed in (
        AttentionLayer(4, 1, 64, 0.1, value_dim=40),
        AttentionLayer(4, 2, 64, 0.1, value_dim=48),
        AttentionLayer(4, 1, 64, 0.1, 100, value_dim=48),
        AttentionLayer(4, 1, 64, 0.1, soft_cap=2.0, value_dim=48),
    ):
        assert not TiledKVLayout.supports([whole, changed], "int8")
