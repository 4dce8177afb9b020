"""Two plans in flight give the same bits as one: layers of two micro-batches run in turn."""

from __future__ import annotations

import ctypes

import pytest
import torch

from memory.attention.grouped import GroupedAttention
from memory.attention.layouts import local_attention, make_layout
from memory.attention.seam import Attention, AttentionLayer, AttentionStep, PlannedAttention
from memory.attention.tiled import TILED_TYPES
from ops import get_backend
from ops.cpu import native_library
from tests.support.nodes.remote_rig import RemoteRig, layers_of

pytestmark = [
    pytest.mark.usefixtures("seeded"),
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
]
MAX_LEN = 256
# (sequences, rows of each), decode rows first; lengths grow from step to step
STEPS = [([0, 1, 2, 3], [30, 45, 17, 64]), ([0, 2, 1, 3], [1, 1, 1, 20]), ([3, 1, 0, 2], [1] * 4)]


class Local:
    """Ranges of MAX_LEN tokens in plain memory, for one or two groups of layers."""

    def __init__(self, kind: str) -> None:
        self.layers = layers_of(3, windows=(None, 40, 40)) if kind == "grouped" else layers_of()
        ids = [[0], [1, 2]] if kind == "grouped" else [[0, 1]]
        self._buffers: list[object] = []
        parts = [self._part([self.layers[i] for i in group], kind) for group in ids]
        self.attention: PlannedAttention = parts[0]
        if kind == "grouped":
            self.attention = GroupedAttention(parts, ids)

    def _part(self, layers: list[AttentionLayer], kind: str) -> PlannedAttention:
        layout = make_layout(layers, kind if kind in TILED_TYPES else "float32", 32)
        size = 4 * MAX_LEN * layout.token_bytes
        buffer = ctypes.create_string_buffer(size + 64)
        self._buffers.append(buffer)
        address = -(-ctypes.addressof(buffer) // 64) * 64
        return local_attention(layout, address, size, get_backend("cpu"))

    def starts(self, lengths: dict[int, int], past: dict[int, int]) -> list[int]:
        return [number * MAX_LEN for number in lengths]

    def close(self) -> None:
        """Has nothing to release."""


class Remote(RemoteRig):
    def __init__(self, kind: str) -> None:
        _, partition, kv_dtype = kind.split("/")
        super().__init__(layers_of(), ("a", "b"), partition, kv_dtype)
        self.items = [self.kv.open(MAX_LEN) for _ in range(4)]

    def starts(self, lengths: dict[int, int], past: dict[int, int]) -> list[int]:
        for number, length in lengths.items():
            assert self.kv.grow(self.items[number], length, past[number])
        self.kv.commit()
        return [self.items[number].start for number in lengths]


def attend(plan: Attention, layer: int, rows: tuple[torch.Tensor, ...], indices: list[int]):
    """Attends with some of the step's rows and returns the pending result."""
    q, k, v = (x[indices].clone() for x in rows)
    return plan.finish(plan.begin(layer, q), k, v, None)


def run(rig: Local | Remote, seed: int, *, is_split: bool) -> list[torch.Tensor]:
    """Returns each layer's result in each step, with rows in the step's order."""
    generator = torch.Generator().manual_seed(seed)
    past = dict.fromkeys(range(4), 0)
    results = []
    for sequences, num_rows in STEPS:
        lengths = {s: past[s] + n for s, n in zip(sequences, num_rows, strict=True)}
        starts = rig.starts(lengths, past)
        past |= lengths
        rows_of, total = [], 0
        for n in num_rows:
            rows_of.append(list(range(total, total + n)))
            total += n
        micro_batches = [[0, 3], [1, 2]] if is_split else [[0, 1, 2, 3]]
        plans, indices = [], []
        for group in micro_batches:
            counts = [num_rows[i] for i in group]
            step = AttentionStep(
                counts.count(1),
                [starts[i] for i in group],
                counts,
                [lengths[sequences[i]] for i in group],
            )
            plans.append(rig.attention.plan(step))
            indices.append([row for i in group for row in rows_of[i]])
        for layer, shape in enumerate(rig.layers):
            heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
            rows = tuple(torch.randn(total, h, shape.head_dim, generator=generator) for h in heads)
            pending = [
                attend(plan, layer, rows, own) for plan, own in zip(plans, indices, strict=True)
            ]
            out = torch.empty_like(rows[0])
            for one, own in zip(pending, indices, strict=True):
                out[own] = one.wait()
            results.append(out)
    return results


KINDS = ["plain", "int8", "int4", "grouped"]
KINDS += [
    f"remote/{partition}/{dtype}"
    for partition in ("head", "sequence")
    for dtype in ("float32", "int8", "int4")
]


@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_two_micro_batches_in_turn(kind: str) -> None:
    results = []
    for is_split in (False, True):
        rig = Remote(kind) if kind.startswith("remote") else Local(kind)
        results.append(run(rig, 5, is_split=is_split))
        rig.close()
    for whole, split in zip(*results, strict=True):
        assert torch.isfinite(whole).all()
        assert torch.equal(whole, split)


def test_is_remote_is_false_for_local_attention() -> None:
    assert not any(Local(kind).attention.is_remote for kind in ("plain", "int8", "grouped"))
    assert RemoteRig(layers_of()).attention.is_remote
