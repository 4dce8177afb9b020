"""Gives the layers of a file over the memory in which their weights will be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ops.backend import NO_FUSION, ExpertsOp, Fusion, LinearOp
from ops.cpu.native_stored import LayerKind, restore
from serve.loading.streaming.placement import head_cuts
from serve.loading.streaming.units import ModelUses, Use
from serve.models.loaded_tensors import LoadedTensors
from serve.models.packed_cache.layout import LayerEntry, Span
from serve.models.packed_cache.sources import KeptTensors, call_name
from serve.models.parts import Part

PANEL = 32
"""Outputs of a panel of packed weights."""


Using = Callable[[], AbstractContextManager[None]]


class HeadPart(NamedTuple):
    """A part of the last product. using: keeps its weights in memory; None: they are resident."""

    entry: LayerEntry
    using: Using | None


class StreamedHead:
    """The last product in parts of its outputs, each of which is computed when it is in memory."""

    def __init__(self, parts: Sequence[tuple[LinearOp, Using | None]]) -> None:
        self._parts = parts

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        found = []
        for op, using in self._parts:
            with nullcontext() if using is None else using():
                found.append(op(x))
        out = found[0] if len(found) == 1 else torch.cat(found, 1)
        return out if residual is None else residual + out


class StreamedTensors(KeptTensors):
    """Gives what a file has, over memory that is filled later.

    where: the memory of every span by its first byte in the file. experts: what computes the
    mixture of a layer, for those whose experts have slots. head: the parts of the last product.
    """

    def __init__(
        self,
        loaded: LoadedTensors,
        uses: ModelUses,
        where: Mapping[int, Tensor],
        experts: Mapping[int, ExpertsOp],
        head: Sequence[HeadPart],
    ) -> None:
        super().__init__(loaded, torch.empty(0, dtype=torch.uint8), [u.entry for u in uses.uses])
        self._where, self._streamed, self._head = where, experts, head
        self._layer = 0

    def product(
        self,
        parts: Sequence[Part],
        num_in: int,
        *,
        has_bias: bool = False,
        fusion: Fusion = NO_FUSION,
        scale: float = 1.0,
        is_head: bool = False,
    ) -> LinearOp:
        if parts[0].expert is not None and self._layer in self._streamed:
            self._next(call_name("product", parts[0].module))
            return NOTHING
        if is_head and self._head:
            self._next(call_name("product", parts[0].module))
            ops = [
                (restore(part.entry.kind, list(map(self._bytes, part.entry.buffers)), fusion), part)
                for part in self._head
            ]
            return StreamedHead([(op, part.using) for op, part in ops])
        return super().product(
            parts, num_in, has_bias=has_bias, fusion=fusion, scale=scale, is_head=is_head
        )

    def experts(
        self, ups: Sequence[LinearOp], downs: Sequence[LinearOp], *, scales_input: bool
    ) -> ExpertsOp:
        op = self._streamed.get(self._layer)
        return super().experts(ups, downs, scales_input=scales_input) if op is None else op

    def end_layer(self) -> None:
        super().end_layer()
        self._layer += 1

    def _bytes(self, span: Span) -> Tensor:
        if not span.num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        return self._where[span.start]


class _Nothing:
    """Stands for the product of an expert, which has a slot only while it is used."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        raise AssertionError("the product of an expert without a slot")


NOTHING = _Nothing()


def slot_layer(entry: LayerEntry, memory: Tensor, fusion: Fusion) -> LinearOp:
    """Returns a layer of an entry's form over memory whose first byte is that of the entry."""
    first = entry.buffers[0].start
    spans = [
        memory[span.start - first : span.start - first + span.num_bytes] for span in entry.buffers
    ]
    return restore(entry.kind, spans, fusion)


def can_split(use: Use) -> bool:
    """Returns whether a product can be divided into parts by its outputs."""
    parts = use.entry.parts
    return len(parts) == 1 and isinstance(parts[0], LayerEntry) and parts[0].kind.num_out > PANEL


def split_layer(entry: LayerEntry, largest_layer: int) -> list[LayerEntry]:
    """Divides a product without gates by its outputs, as `head_cuts` says."""
    kind, panels = entry.kind, -(-entry.kind.num_out // PANEL)
    total = sum(span.num_bytes for span in entry.buffers)
    found = []
    for first, end in pairwise(head_cuts(total, panels, largest_layer)):
        spans = []
        for span in entry.buffers:
            size = span.num_bytes // panels
            spans.append(Span(span.start + first * size, (end - first) * size))
        num_out = min(end * PANEL, kind.num_out) - first * PANEL
        own = LayerKind(kind.name, kind.num_in, num_out, kind.group, kind.codes)
        found.append(LayerEntry(own, tuple(spans)))
    return found
