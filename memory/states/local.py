"""States in this machine's memory, and attention beside them."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import replace

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
from memory.states.records import layers_in_records
from memory.states.segments import Draft, StepSegments, drafted_segments, segments_of


class LocalStates:
    """The states of all records of a reservation."""

    def __init__(self, layout: StateLayout, address: int, num_bytes: int) -> None:
        """It maps no memory: the caller has committed what a step reads and writes."""
        self.layout = layout
        buffer = (ctypes.c_char * num_bytes).from_address(address)
        flat = torch.frombuffer(buffer, dtype=torch.float32)
        self.layers = layers_in_records(layout, flat)
        self._drafts: dict[int, Draft] = {}

    def plan(self, step: AttentionStep) -> StepStates:
        interval, decodes = self.layout.interval, step.num_rows[: step.num_decodes]
        if self._drafts or sum(decodes) > len(decodes):
            return StepStates(self, drafted_segments(step, interval, self._drafts))
        return StepStates(self, StepSegments(segments_of(step, interval)))


class StepStates:
    """Implements the seam's StepStates."""

    def __init__(self, states: LocalStates, plan: StepSegments) -> None:
        self._states = states
        self._plan = plan

    def layer(self, number: int) -> LayerState:
        conv, heads, drafts = self._states.layers[number]
        plan = self._plan
        if plan.own is None and plan.drafted is None:
            return LayerState(conv, heads, plan.segments)
        return LayerState(conv, heads, plan.segments, LayerDrafts(drafts, plan))


class LayerDrafts:
    """Implements DraftedRows."""

    def __init__(self, drafts: Tensor, plan: StepSegments) -> None:
        self._drafts = drafts
        self._plan = plan

    def merged(self, rows: Tensor) -> Tensor:
        merged, accepted, drafted = rows, self._plan.accepted, self._plan.drafted
        if accepted is not None and self._plan.own is not None:
            count = len(rows) + len(accepted.rows)
            merged = rows.new_empty(count, rows.shape[1])
            merged[self._plan.own] = rows
            merged[accepted.rows] = self._drafts[accepted.records, accepted.slots].to(rows.dtype)
        if drafted is not None:  # after the last draft's rows were read from there
            self._drafts[drafted.records, drafted.slots] = rows[drafted.rows].float()
        return merged

    def own(self, out: Tensor) -> Tensor:
        return out if self._plan.own is None else out[self._plan.own]


class StatefulAttention:
    """Implements PlannedAttention for a model whose other layers have states."""

    def __init__(
        self,
        attention: PlannedAttention,
        states: LocalStates,
        record_start: Callable[[int], int] | None = None,
    ) -> None:
        """record_start: returns where the states of a sequence begin, by the start of its K/V;
        None: there, too."""
        self._attention = attention
        self._states = states
        self._record_start = record_start

    @property
    def is_remote(self) -> bool:
        return self._attention.is_remote

    def plan(self, step: AttentionStep) -> StatefulPlan:
        attention = self._attention.plan(step)
        if self._record_start is not None:
            step = replace(step, starts=[self._record_start(start) for start in step.starts])
        return StatefulPlan(attention, self._states, step)


class StatefulPlan:
    """Attention for one step's rows, and their states. A head that drafts asks for none."""

    def __init__(self, attention: Attention, states: LocalStates, step: AttentionStep) -> None:
        self._attention = attention
        self._states = states
        self._step = step

    @functools.cached_property
    def states(self) -> StepStates:
        return self._states.plan(self._step)

    def begin(self, layer: int, q: Tensor) -> Ticket:
        return self._attention.begin(layer, q)

    def finish(
        self, ticket: Ticket, k: Tensor | None, v: Tensor | None, rotation: Rotation | None
    ) -> Pending:
        return self._attention.finish(ticket, k, v, rotation)
