"""The states of each layer in all records of a reservation, as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from memory.attention.seam import LayerState
from memory.states.layout import StateLayer, StateLayout
from ops.states import NO_RECORD, StateSegments


class LayerRecords(NamedTuple):
    """One layer in all records. conv: [R, inputs, channels]; heads: [R, heads, key dim, value dim]
    or None; drafts: [R, drafted rows, values]."""

    conv: Tensor
    heads: Tensor | None
    drafts: Tensor


def layers_in_records(layout: StateLayout, flat: Tensor) -> list[LayerRecords]:
    """Returns views of all layers. flat: the records one after the other, fp32. Only those in
    mapped pages may be accessed."""
    num_records = flat.numel() // layout.record_values

    def view(shape: Sequence[int], offset: int) -> Tensor:
        strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
        return flat.as_strided(
            (num_records, *shape),
            (layout.record_values, *strides),
            flat.storage_offset() + offset,
        )

    return [
        LayerRecords(
            view(layer.conv, conv_at),
            None if layer.heads is None else view(layer.heads, heads_at),
            view((layout.num_drafts, layer.row_values), drafts_at),
        )
        for layer, (conv_at, heads_at, drafts_at) in zip(layout.layers, layout.offsets, strict=True)
    ]


class RecordStates:
    """Implements StepStates for steps without drafts."""

    def __init__(self, layers: Sequence[LayerRecords], segments: StateSegments) -> None:
        self._layers = layers
        self._segments = segments

    def layer(self, number: int) -> LayerState:
        records = self._layers[number]
        return LayerState(records.conv, records.heads, self._segments)


def unkept_states(
    layers: Sequence[StateLayer], num_rows: int, device: torch.device
) -> RecordStates:
    """Returns states for all num_rows rows of one sequence, which are not kept after them."""

    def one(shape: Sequence[int]) -> Tensor:
        return torch.zeros(1, *shape, device=device)

    records = [
        LayerRecords(
            one(layer.conv),
            None if layer.heads is None else one(layer.heads),
            one((0, layer.row_values)),
        )
        for layer in layers
    ]
    columns = [0, num_rows], [NO_RECORD], [NO_RECORD], [0, 1]
    return RecordStates(
        records, StateSegments(*(torch.tensor(column, device=device) for column in columns))
    )
