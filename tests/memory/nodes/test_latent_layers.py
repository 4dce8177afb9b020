"""Layers that keep one latent for K and V, on memory nodes."""

from __future__ import annotations

import random
from dataclasses import asdict

import pytest
import torch

from memory.attention.seam import AttentionLayer
from memory.nodes.attach import AttachRequest
from memory.nodes.placement import PlacementError, resolve_partition
from memory.nodes.wire import FULL_WIRE, WireError, WireFormat, WireType
from tests.memory.nodes.test_layer_kinds import request, same_bits
from tests.memory.nodes.test_own_rows import Local, steps_of
from tests.support.nodes.remote_rig import RemoteRig

LAYERS = [
    AttentionLayer(8, 1, 80, 0.2, value_dim=64),
    AttentionLayer(3, 1, 160, 0.1, value_dim=128),
    AttentionLayer(4, 2, 32, 0.1),
]


def run(rig: RemoteRig, local: Local, dtype, compare) -> None:
    generator = torch.Generator().manual_seed(1)
    items = {name: rig.kv.open(700) for name in range(4)}
    for rows in steps_of(random.Random(5), items):
        count = sum(n for _, n, _ in rows)
        inputs = []
        for layer in LAYERS:
            q, k, v = (
                torch.randn(count, heads, layer.head_dim, generator=generator).to(dtype)
                for heads in (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
            )
            inputs.append((q, k, None if layer.value_dim else v))
        expected = local.step(rows, inputs)
        found = rig.step([(items[name], n, length) for name, n, length in rows], inputs)
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == other.dtype
            compare(one, other)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("names", ["a", "abc"])
@pytest.mark.parametrize("tail_bytes", [0, 1 << 22])
def test_results_have_the_bits_of_local_attention(kv_dtype, names, tail_bytes):
    dtype = torch.float32 if kv_dtype == "int8" else getattr(torch, kv_dtype)
    kind = WireType.BFLOAT16 if dtype is torch.bfloat16 else WireType.FLOAT32
    wire = WireFormat(kind, kind)
    rig = RemoteRig(LAYERS, tuple(names), "request", kv_dtype, wire, tail_bytes=tail_bytes)
    run(rig, Local(LAYERS, kv_dtype), dtype, same_bits)
    rig.close()


@pytest.mark.parametrize(("kv_dtype", "tolerance"), [("float32", 2e-5), ("int8", 3e-3)])
@pytest.mark.parametrize("tail_bytes", [0, 1 << 22])
def test_merged_results_are_close_to_local_attention(kv_dtype, tolerance, tail_bytes):
    rig = RemoteRig(LAYERS, ("a", "b"), "sequence", kv_dtype, FULL_WIRE, tail_bytes=tail_bytes)

    def compare(one, other):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance)

    run(rig, Local(LAYERS, kv_dtype), torch.float32, compare)
    rig.close()


def test_rows_in_8_bits():
    wire = WireFormat(WireType.INT8, WireType.FLOAT32)
    rig = RemoteRig(LAYERS, ("a", "b"), "request", "float32", wire)
    run(
        rig,
        Local(LAYERS, "float32"),
        torch.float32,
        lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0.1),
    )
    rig.close()


def test_one_head_is_not_divided():
    assert resolve_partition("auto", LAYERS, 2) == "request"
    assert resolve_partition("head", LAYERS, 1) == "head"
    with pytest.raises(PlacementError, match="use request or sequence"):
        resolve_partition("head", LAYERS, 2)


def test_a_request_brings_value_dim():
    layers = [asdict(layer) for layer in LAYERS]
    sent = request() | {"layers": layers, "group_layers": [[0, 1, 2]]}
    assert AttachRequest.from_json(sent).layers == LAYERS
    for change in ({"num_kv_heads": 2}, {"window": 64}, {"value_dim": 90}):
        changed = sent | {"layers": [layers[0] | change, *layers[1:]]}
        with pytest.raises(WireError):
            AttachRequest.from_json(changed)
