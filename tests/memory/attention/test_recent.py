"""Recent tokens of int4 K/V through the seam: in chunks, and in parts of a sequence."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from memory.attention.chunked import ChunkedAttention
from memory.attention.layouts import local_attention
from memory.attention.partial import partial_attention
from memory.attention.seam import AttentionLayer, AttentionStep, PlannedAttention
from memory.attention.segmented import SegmentedAttention
from memory.attention.tiled import RecentStore, TiledKVLayout
from ops import get_backend
from ops.cpu import native_library
from ops.reference import attention_fp64
from tests.support.memory.int8_kv import rounded_query4
from tests.support.memory.recent_kv import recent_attention_fp64

pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
    pytest.mark.usefixtures("seeded"),
]
TOKENS, LENGTH = 1024, 700
BACKEND = get_backend("cpu")


class Stores:
    """Both stores of a model of one layer, for one sequence of TOKENS tokens."""

    def __init__(self, layer: AttentionLayer) -> None:
        self.layer = layer
        self._buffers: list[object] = []
        self.layout = TiledKVLayout([layer], "int4", 64)
        self.address = self._reserve(self.layout)
        recent = TiledKVLayout([layer], "int8", 64)
        self.recent = RecentStore(recent, self._reserve(recent)).of([0])
        self.size = TOKENS * self.layout.token_bytes
        self.local = local_attention(
            self.layout, self.address, self.size, BACKEND, recent=self.recent
        )

    def _reserve(self, layout: TiledKVLayout) -> int:
        self._buffers.append(ctypes.create_string_buffer(TOKENS * layout.token_bytes + 64))
        address = ctypes.addressof(self._buffers[-1])
        return address + -address % 64

    def run(self, attention: PlannedAttention, inputs: list[Tensor], rows: int) -> Tensor:
        """Computes the sequence in steps of so many rows."""
        found = []
        for begin in range(0, LENGTH, rows):
            end = min(LENGTH, begin + rows)
            plan = attention.plan(AttentionStep(int(rows == 1), [0], [end - begin], [end]))
            q, k, v = (x[begin:end].clone() for x in inputs)
            found.append(plan.finish(plan.begin(0, q), k, v, None).wait())
        return torch.cat(found)


def inputs_of(layer: AttentionLayer) -> list[Tensor]:
    heads = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
    return [torch.randn(LENGTH, count, layer.head_dim) for count in heads]


def test_a_chunk_has_blocks_of_its_own() -> None:
    layer = AttentionLayer(4, 2, 64, 0.125, chunk=256)
    stores, inputs = Stores(layer), inputs_of(layer)
    whole = stores.run(ChunkedAttention(stores.local, 256), inputs, LENGTH)
    for begin in range(0, LENGTH, 256):
        q, k, v = (x[begin : begin + 256] for x in inputs)
        expected, _ = recent_attention_fp64(q, rounded_query4(q), k, v, (32, 64), layer.scale)
        assert float((whole[begin : begin + 256] - expected).norm() / expected.norm()) < 0.01
    for rows in (1, 100):
        other = Stores(layer)
        assert torch.equal(other.run(ChunkedAttention(other.local, 256), inputs, rows), whole)


def test_a_segment_has_blocks_of_its_own_and_later_rows_read_it_in_int4() -> None:
    layer = AttentionLayer(4, 2, 64, 0.125)
    inputs = inputs_of(layer)

    def segmented(stores: Stores) -> SegmentedAttention:
        partial = partial_attention(
            stores.layout, stores.address, stores.size, BACKEND, recent=stores.recent
        )
        return SegmentedAttention(stores.local, partial, [layer], BACKEND, 256)

    stores = Stores(layer)
    whole = stores.run(segmented(stores), inputs, LENGTH)
    q, k, v = inputs
    expected, _ = recent_attention_fp64(q, rounded_query4(q), k, v, (32, 64), layer.scale)
    plain, _ = attention_fp64(q, k, v, layer.scale)
    error = float((whole - expected).norm() / expected.norm())
    assert error < 0.01 < float((whole - plain).norm() / plain.norm())
    for rows in (1, 100):
        other = Stores(layer)
        assert torch.equal(other.run(segmented(other), inputs, rows), whole)
