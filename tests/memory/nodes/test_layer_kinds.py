"""Layers of different heads, with soft caps and sinks, and layers that share K/V, on memory nodes.

Results have the bits of local attention where a node has all tokens of a sequence, and are close to
them where results are merged.
"""

from __future__ import annotations

import random
from dataclasses import asdict

import pytest
import torch

from memory.attention.seam import AttentionLayer
from memory.attention.tiled import TILED_TYPES
from memory.nodes.attach import AttachRequest, NodeLayout
from memory.nodes.wire import FULL_WIRE, ErrorCode, WireError, WireFormat, WireType
from tests.memory.nodes.test_own_rows import Local, steps_of
from tests.support.nodes.remote_rig import RemoteRig


def layers_with(window: int | None) -> list[AttentionLayer]:
    sinks = (0.5, -1.0, 2.0, 6.0, 0.0, 1.0, 3.0, -4.0)
    return [
        AttentionLayer(8, 4, 32, 0.2, None, soft_cap=1.5, sinks=sinks),
        AttentionLayer(6, 2, 80, 0.1, window, sinks=sinks[:6]),
        AttentionLayer(4, 4, 64, 0.1, window, soft_cap=5.0),
        AttentionLayer(8, 4, 32, 0.3, None, shares=0),
        AttentionLayer(12, 2, 80, 0.1, window, sinks=sinks + sinks[:4], soft_cap=2.0, shares=1),
    ]


def run(rig: RemoteRig, local: Local, layers, dtype, compare) -> None:
    generator = torch.Generator().manual_seed(1)
    items = {name: rig.kv.open(700) for name in range(4)}
    for rows in steps_of(random.Random(5), items):
        count = sum(n for _, n, _ in rows)
        inputs = []
        for layer in layers:
            q, k, v = (
                torch.randn(count, heads, layer.head_dim, generator=generator).to(dtype)
                for heads in (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
            )
            inputs.append((q, k, v) if layer.shares is None else (q, None, None))
        expected = local.step(rows, inputs)
        found = rig.step([(items[name], n, length) for name, n, length in rows], inputs)
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == other.dtype
            compare(one, other)


def same_bits(one, other) -> None:
    assert torch.equal(one, other)


def close(one, other) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=2e-5)


@pytest.mark.covering(2)
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("names", ["a", "ab"])
@pytest.mark.parametrize(("window", "tail_bytes"), [(None, 0), (None, 1 << 22), (40, 0)])
def test_results_have_the_bits_of_local_attention(kv_dtype, names, window, tail_bytes):
    layers = layers_with(window)
    dtype = torch.float32 if kv_dtype in TILED_TYPES else getattr(torch, kv_dtype)
    kind = WireType.BFLOAT16 if dtype is torch.bfloat16 else WireType.FLOAT32
    wire = WireFormat(kind, kind)
    rig = RemoteRig(layers, tuple(names), "head", kv_dtype, wire, tail_bytes=tail_bytes)
    run(rig, Local(layers, kv_dtype), layers, dtype, same_bits)
    rig.close()


@pytest.mark.parametrize("kv_dtype", ["float32", "int8", "int4"])
def test_a_node_with_all_heads(kv_dtype):
    layers = layers_with(40)
    rig = RemoteRig(layers, ("a",), "request", kv_dtype, FULL_WIRE)
    run(rig, Local(layers, kv_dtype), layers, torch.float32, same_bits)
    rig.close()


@pytest.mark.parametrize("tail_bytes", [0, 1 << 22])
@pytest.mark.parametrize("names", ["a", "abc"])
def test_merged_results_are_close_to_local_attention(names, tail_bytes):
    """Sinks and soft caps count once, in the part with the row's own key."""
    layers = layers_with(None)
    rig = RemoteRig(layers, tuple(names), "sequence", "float32", FULL_WIRE, tail_bytes=tail_bytes)
    run(rig, Local(layers, "float32"), layers, torch.float32, close)
    rig.close()


@pytest.mark.parametrize(("kv_dtype", "tolerance"), [("int8", 3e-3), ("int4", 6e-2)])
def test_merged_results_of_rounded_kv_are_close_to_local_attention(kv_dtype, tolerance):
    layers = layers_with(None)
    rig = RemoteRig(layers, ("a", "b"), "sequence", kv_dtype, FULL_WIRE)
    local = Local(layers, kv_dtype)
    run(
        rig,
        local,
        layers,
        torch.float32,
        lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=tolerance),
    )
    rig.close()


# ---- the request


def request(**changes) -> dict[str, object]:
    layers = [asdict(layer) for layer in layers_with(None)]
    for number, change in changes.pop("layers", {}).items():
        layers[number] |= change
    content: dict[str, object] = {
        "engine": "test",
        "epoch": 1,
        "kv_dtype": "float32",
        "kv_group": 64,
        "layers": [x | {"sinks": x["sinks"] and list(x["sinks"])} for x in layers],
        "group_layers": [[0, 1, 2, 3, 4]],
        "page_tokens": [16],
        "num_places": [4],
        "num_ranges": 2,
        "num_pages": 8,
        "min_pages": 1,
        "max_rows": 32,
        "prefix_only": False,
        "by_segment": False,
        "is_question": False,
    }
    return content | changes


@pytest.mark.parametrize(("window", "reach"), [(9, 40), (None, None)])
def test_a_group_keeps_the_keys_of_its_largest_window(window, reach):
    """Windows beyond the context length count as none, so one group may have several."""
    windows = {number: {"window": 40, "shares": None} for number in range(5)}
    layout = NodeLayout(AttachRequest.from_json(request(layers=windows | {2: {"window": window}})))
    assert layout.windows == [reach]


def test_a_request_brings_every_field_of_a_layer():
    assert AttachRequest.from_json(request()).layers == layers_with(None)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"layers": {0: {"soft_cap": -1.0}}}, "soft_cap must not be negative"),
        ({"layers": {0: {"soft_cap": float("nan")}}}, "soft_cap must be a number"),
        ({"layers": {0: {"sinks": [1.0]}}}, "a number for each of 8 heads"),
        ({"layers": {0: {"sinks": [True] * 8}}}, "sinks must be a number"),
        ({"layers": {3: {"shares": 4}}}, "layer 3 cannot share the K/V of layer 4"),
        ({"layers": {3: {"shares": 2}}}, "layers 2 and 3 share K/V, but differ"),
        ({"layers": {4: {"shares": 3}}}, "layer 4 cannot share the K/V of layer 3"),
        ({"layers": {3: {"shares": -1}}}, "shares must be an integer"),
        ({"layers": {0: {"window": 9}}}, "layer 3 sees keys that layer 0 does not keep"),
        (
            {"group_layers": [[1, 2, 3, 4], [0]], "page_tokens": [16, 16], "num_places": [4, 4]},
            "layer 0 must be in the group of layer 3",
        ),
        ({"group_layers": [[3, 0, 1, 2, 4]]}, "layer 0 must be in the group of layer 3, before"),
    ],
)
def test_a_bad_request_names_the_field(changes, text):
    with pytest.raises(WireError, match=text) as caught:
        AttachRequest.from_json(request(**changes))
    assert caught.value.code is ErrorCode.SHAPE
