"""States in this machine's memory, and attention beside them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from memory.attention.seam import (
    Attention,
    AttentionStep,
    LayerState,
    Pending,
    PlannedAttention,
    Rotation,
    Ticket,
)
from memory.states.layout import StateLayout
from ops.states import NO_RECORD, StateSegments


class LocalStates:
    """The states of all records of a reservation."""

    def __init__(self, layout: StateLayout, address: int, num_bytes: int) -> None:
        """It maps no memory: the caller has committed what a step reads and writes."""
        self.layout = layout
        buffer = (ctypes.c_char * num_bytes).from_address(address)
        self._flat = torch.frombuffer(buffer, dtype=torch.float32)
        self._num_records = num_bytes // layout.record_bytes
        self.layers = [self._layer(number) for number in range(len(layout.layers))]

    def _layer(self, number: int) -> tuple[Tensor, Tensor | None]:
        layer, (conv_at, heads_at) = self.layout.layers[number], self.layout.offsets[number]
        conv = self._view(layer.conv, conv_at)
        return conv, None if layer.heads is None else self._view(layer.heads, heads_at)

    def _view(self, shape: Sequence[int], offset: int) -> Tensor:
        strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
        return self._flat.as_strided(
            (self._num_records, *shape), (self.layout.record_values, *strides), offset
        )

    def plan(self, step: AttentionStep) -> StepStates:
        return StepStates(self, segments_of(step, self.layout.interval))


class StepStates:
    """Implements the seam's StepStates."""

    def __init__(self, states: LocalStates, segments: StateSegments) -> None:
        self._states = states
        self._segments = segments

    def layer(self, number: int) -> LayerState:
        conv, heads = self._states.layers[number]
        return LayerState(conv, heads, self._segments)


def segments_of(step: AttentionStep, interval: int) -> StateSegments:
    """Returns the segments of a step whose ranges begin at multiples of the interval: rows are cut
    where an interval ends, whose record keeps the state there."""
    firsts: list[int] = []
    sources: list[int] = []
    targets: list[int] = []
    sequences: list[int] = []
    row = 0
    for start, num_rows, length in zip(step.starts, step.num_rows, step.kv_lens, strict=True):
        sequences.append(len(firsts))
        position, end = length - num_rows, length
        source = NO_RECORD if position == 0 else (start + position - 1) // interval
        while position < end:
            target = (start + position) // interval
            stop = min(end, (position // interval + 1) * interval)
            firsts.append(row)
            sources.append(source)
            targets.append(target)
            row += stop - position
            position, source = stop, target
    firsts.append(row)
    sequences.append(len(sources))
    columns = (firsts, sources, targets, sequences)
    return StateSegments(*[torch.tensor(column, dtype=torch.int64) for column in columns])


class StatefulAttention:
    """Implements PlannedAttention for a model whose other layers have states."""

    def __init__(self, attention: PlannedAttention, states: LocalStates) -> None:
        self._attention = attention
        self._states = states

    @property
    def is_remote(self) -> bool:
        return self._attention.is_remote

    def plan(self, step: AttentionStep) -> StatefulPlan:
        return StatefulPlan(self._attention.plan(step), self._states.plan(step))


class StatefulPlan:
    """Attention for one step's rows, and their states."""

    def __init__(self, attention: Attention, states: StepStates) -> None:
        self._attention = attention
        self.states = states

    def begin(self, layer: int, q: Tensor) -> Ticket:
        return self._attention.begin(layer, q)

    def finish(
        self, ticket: Ticket, k: Tensor | None, v: Tensor | None, rotation: Rotation | None
    ) -> Pending:
        return self._attention.finish(ticket, k, v, rotation)
