"""Layers of different heads, windows, soft caps and sinks, and layers that share K/V, through the
seam: locally, in bf16, fp32 and int8, eagerly and in groups, and on CUDA's kernels."""

from __future__ import annotations

import ctypes
import importlib.util
from dataclasses import replace
from functools import partial

import pytest
import torch

from memory.attention.grouped import GroupedAttention, group_layers
from memory.attention.kv_layout import KVLayout
from memory.attention.layouts import local_attention, make_layout
from memory.attention.seam import AttentionLayer, AttentionStep, kv_owner, layers_in
from memory.attention.tiled import TILED_TYPES, RecentStore, TiledKVLayout
from ops import get_backend
from ops.cpu import native_library
from ops.reference import attention_fp64, round_kv, round_kv4
from quant.kv import RECENT_BLOCK, fitting_group, fitting_int4_group
from tests.support.memory.int8_kv import out_error4, rounded_query4
from tests.support.memory.recent_kv import recent_attention_fp64

pytestmark = pytest.mark.usefixtures("seeded")
MAX_LEN = 320
SINKS = (0.5, -1.0, 2.0, 6.0, 0.0, 1.0, 3.0, -4.0)
LAYERS = [
    AttentionLayer(8, 2, 80, 0.1, None, soft_cap=2.0, sinks=SINKS),
    AttentionLayer(4, 4, 96, 0.1, 40),
    AttentionLayer(6, 1, 192, 0.07, None),
    AttentionLayer(4, 2, 256, 0.06, 40, soft_cap=30.0, sinks=SINKS[:4]),
    AttentionLayer(2, 1, 512, 0.04, None),
    AttentionLayer(8, 4, 96, 0.1, 40, sinks=SINKS, shares=1),
    AttentionLayer(2, 2, 80, 0.2, 100, shares=0),
    AttentionLayer(4, 1, 512, 0.05, None, soft_cap=5.0, shares=4),
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
    """Attention of LAYERS over ranges of MAX_LEN tokens, with a group for each window. The kind
    "int4, recent int8" has recent tokens in a store of all layers."""

    def __init__(self, kind: str, is_eager: bool = False) -> None:
        groups = group_layers(LAYERS, MAX_LEN)
        assert [window for window, _ in groups] == [None, 40]
        parts = []
        self.buffers = []
        kind, has_recent = kind.split(",")[0], "," in kind
        recent = None
        if has_recent:
            whole = make_layout(LAYERS, "int8", 64)
            assert isinstance(whole, TiledKVLayout)
            recent = RecentStore(whole, self._reserve(whole)[0])
        for _, ids in groups:
            layout = make_layout(layers_in(LAYERS, ids), kind, 64)
            address, size = self._reserve(layout)
            more = {"recent": recent.of(ids)} if recent else {"is_eager": is_eager}
            parts.append(local_attention(layout, address, size, get_backend("cpu"), **more))
        self.attention = GroupedAttention(parts, [ids for _, ids in groups])

    def _reserve(self, layout) -> tuple[int, int]:
        """Returns the address and the size of memory for three ranges."""
        size = 3 * MAX_LEN * layout.token_bytes
        self.buffers.append(ctypes.create_string_buffer(size + 64))
        address = ctypes.addressof(self.buffers[-1])
        return address + -address % 64, size


def run(attention, dtype, check, only=None, *, layers=LAYERS, steps=STEPS):
    """Runs steps and calls check(layer, sequence, q, k and v so far, result) for each sequence.
    only: the sequence whose rows alone are computed; the numbers stay the same."""
    generator = torch.Generator().manual_seed(3)
    kept = {(i, s): ([], []) for i in range(len(layers)) for s in range(3)}
    lengths = [0, 0, 0]
    for rows in steps:
        inputs = {
            (i, s): [torch.randn(n, h, x.head_dim, generator=generator).to(dtype) for h in heads]
            for s, n in rows
            for i, x in enumerate(layers)
            for heads in [(x.num_heads, x.num_kv_heads, x.num_kv_heads)]
        }
        for s, n in rows:
            lengths[s] += n
        chosen = [(s, n) for s, n in rows if only in (None, s)]
        if not chosen:
            continue
        plan = attention.plan(
            AttentionStep(
                sum(n == 1 for _, n in chosen),
                [s * MAX_LEN for s, _ in chosen],
                [n for _, n in chosen],
                [lengths[s] for s, _ in chosen],
            )
        )
        for i, layer in enumerate(layers):
            q, k, v = (torch.cat([inputs[i, s][j] for s, _ in chosen]) for j in range(3))
            ticket = plan.begin(i, q)
            given = (k.clone(), v) if layer.shares is None else (None, None)
            out = plan.finish(ticket, *given, None).wait()
            row = 0
            for s, n in chosen:
                if layer.shares is None:
                    for at, part in zip(kept[i, s], inputs[i, s][1:], strict=True):
                        at.append(part)
                owner = kept[kv_owner(layers, i), s]
                ks, vs = (torch.cat(parts) for parts in owner)
                check(i, s, q[row : row + n], ks, vs, out[row : row + n])
                row += n


def against_fp64(rounded, tolerance, layers=LAYERS):
    def check(i, s, q, k, v, out):
        layer = layers[i]
        k, v = rounded(k.double(), layer), rounded(v.double(), layer)
        options = {"window": layer.window, "soft_cap": layer.soft_cap, "sinks": layer.sinks}
        expected = attention_fp64(q, k, v, layer.scale, **options).out
        assert out.dtype == q.dtype
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=tolerance)

    return check


def as_stored(x, layer):
    return round_kv(x, fitting_group(layer.head_dim, 64))


def as_stored4(x, layer):
    return round_kv4(x.float(), fitting_int4_group(layer.head_dim, 64)).double()


def as_given(x, layer):
    return x


def against_recent_fp64(i, s, q, k, v, out):
    layer = LAYERS[i]
    groups = fitting_int4_group(layer.head_dim, 64), fitting_group(layer.head_dim, 64)
    options = {"window": layer.window, "soft_cap": layer.soft_cap, "sinks": layer.sinks}
    expected, _ = recent_attention_fp64(q, rounded_query4(q), k, v, groups, layer.scale, **options)
    atol = out_error4(as_stored4(v, layer))
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol)
    if len(k) <= RECENT_BLOCK:
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=3e-3)


RECENT = "int4, recent int8"
KINDS = [
    ("float32", torch.float32, as_given, 1e-5),
    ("bfloat16", torch.bfloat16, as_given, 3e-2),
    ("int8", torch.float32, as_stored, 3e-3),
    ("int4", torch.float32, as_stored4, 5e-2),  # q is rounded to 8 bits
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("is_eager", [False, True])
@pytest.mark.parametrize(("kind", "dtype", "rounded", "tolerance"), KINDS)
def test_local_attention_equals_the_reference(kind, dtype, rounded, tolerance, is_eager):
    if kind in TILED_TYPES and not native_library.is_available():
        pytest.skip("native kernels not built")
    memory = Memory(kind, is_eager)
    run(memory.attention, dtype, against_fp64(rounded, tolerance))


@pytest.mark.exhaustive
@pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built")
def test_recent_tokens_are_int8_in_every_kind_of_layer():
    memory = Memory(RECENT)
    run(memory.attention, torch.float32, against_recent_fp64)


def results(kind, dtype, is_eager=False, only=None):
    """Returns the results of each layer and sequence, in the order of steps."""
    found = {}
    memory = Memory(kind, is_eager)
    run(
        memory.attention,
        dtype,
        lambda i, s, q, k, v, out: found.setdefault((i, s), []).append(out),
        only,
    )
    return found


@pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built")
@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, dtype) for kind, dtype, *_ in KINDS), (RECENT, torch.float32)]
)
def test_a_row_has_the_same_bits_alone(kind, dtype):
    together = results(kind, dtype)
    for only in range(3):
        alone = results(kind, dtype, is_eager=only == 1, only=only)
        assert len(alone) == len(LAYERS)
        for key, outs in alone.items():
            assert all(torch.equal(a, b) for a, b in zip(outs, together[key], strict=True))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")
@pytest.mark.parametrize("kind", ["int8", pytest.param("float32", marks=pytest.mark.exhaustive)])
def test_cuda_attention_equals_the_reference(kind):
    from memory.attention.cuda import CudaAttention, CudaKVLayout, step_arrays
    from tests.support.cuda.cuda_kv import DEVICE  # sets the interpreter before Triton's import

    if DEVICE != "cpu":
        pytest.skip("the tensors of this test are on the CPU")
    layers = layers_in(LAYERS, [0, 1, 4, 5, 6, 7])
    groups = group_layers(layers, MAX_LEN)
    layouts = [CudaKVLayout(layers_in(layers, ids), getattr(torch, kind), 64) for _, ids in groups]
    memory = [torch.zeros(3 * MAX_LEN * x.token_bytes + 64, dtype=torch.uint8) for x in layouts]
    arrays = step_arrays(
        LAYERS, max_rows=256, max_seqs=4, max_len=MAX_LEN, device=torch.device("cpu")
    )
    assert len(arrays.rows_per_tile) > 1
    bases = [x.data_ptr() + -x.data_ptr() % 16 for x in memory]
    attention = CudaAttention(layouts, [ids for _, ids in groups], bases, arrays)
    rounded, tolerance = (as_stored, 3e-3) if kind == "int8" else (as_given, 1e-5)
    steps = [[(0, 5), (1, 50)], [(0, 1), (2, 18)]]
    check = against_fp64(rounded, tolerance, layers)
    run(attention, torch.float32, check, layers=layers, steps=steps)


# ---- sizes and errors


@pytest.mark.parametrize("kind", ["int8", "int4", "float32"])
def test_a_shared_layer_takes_no_memory(kind):
    layout = partial(make_layout, kv_dtype=kind, group=64)
    own = [layer for layer in LAYERS if layer.shares is None]
    assert layout(LAYERS).token_bytes == layout(own).token_bytes
    assert layout(LAYERS).offsets[5:] == [layout(LAYERS).offsets[i] for i in (1, 0, 4)]


def test_a_shared_layer_is_in_the_group_of_its_owner():
    groups = group_layers(LAYERS, MAX_LEN)
    assert groups == [(None, [0, 2, 4, 6, 7]), (40, [1, 3, 5])]
    shares = [layer.shares for layer in layers_in(LAYERS, groups[0][1])]
    assert shares == [None, None, None, 0, 2]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"shares": 7}, "layer 7 cannot share the K/V of layer 7"),
        ({"shares": 9}, "layer 7 cannot share the K/V of layer 9"),
        ({"shares": 5}, "layer 7 cannot share the K/V of layer 5"),
        ({"shares": 2}, "layers 2 and 7 share K/V, but differ in their heads"),
        ({"shares": 1, "num_kv_heads": 4, "head_dim": 96}, "layer 7 sees keys that layer 1 does"),
    ],
)
def test_a_layer_that_cannot_share_is_an_error(change, text):
    layers = [*LAYERS[:7], replace(LAYERS[7], **change)]
    with pytest.raises(ValueError, match=text):
        KVLayout(layers, torch.float32)
