"""The states of each layer in all records of a reservation, as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from torch import Tensor

from memory.states.layout import StateLayout


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
