"""Halves of blocks that keep a state of fixed size, with their weights.

Rows are packed along dim 0; only the operators know sequences. Each half has a number among the
layers with states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from memory.attention.seam import Attention, Finished, HasStates, LayerState, Pending
from ops.backend import Backend, LinearOp
from ops.states import Recurrence
from serve.models.families.state_spec import DeltaNetSpec, MambaSpec
from serve.models.layers.blocks import AttentionHalf, RowInputs


class Conv(NamedTuple):
    """A causal convolution. weight: [C, W] fp32; bias: [C] fp32 or None."""

    weight: Tensor
    bias: Tensor | None = None


def _heads(x: Tensor, heads: int, dim: int) -> Tensor:
    """Returns [T, heads, dim] of x: [T, heads * dim], whose rows may be strided."""
    return x.view(len(x), heads, dim)


def state_of(attention: Attention, number: int) -> LayerState:
    assert isinstance(attention, HasStates), "the plan of a model with states"
    return attention.states.layer(number)


def merged(state: LayerState, rows: Tensor) -> Tensor:
    """Returns the rows with those of accepted drafts."""
    return rows if state.drafted is None else state.drafted.merged(rows)


def own(state: LayerState, out: Tensor) -> Tensor:
    """Returns the step's rows of what was computed for merged ones."""
    return out if state.drafted is None else state.drafted.own(out)


@dataclass(slots=True)
class ShortConv:
    """A gated short convolution. inputs: the product that gives b, c and x side by side."""

    number: int
    backend: Backend
    inputs: LinearOp
    conv: Conv
    o: LinearOp
    sinks: tuple[float, ...] | None = None

    def attend(self, index: int, x: Tensor, inputs: RowInputs, attention: Attention) -> Pending:
        state = state_of(attention, self.number)
        b, c, value = self.inputs(x).chunk(3, dim=1)
        rows = merged(state, b * value)
        mixed = self.backend.states.causal_conv(rows, *self.conv, None, state.conv, state.segments)
        return Finished(c * own(state, mixed))

    def output(self, attended: Tensor, x: Tensor, residual: Tensor | None) -> Tensor:
        return self.o(attended, residual=residual)


@dataclass(slots=True)
class DeltaNet:
    """A gated delta net. inputs: the product that gives q, k, v and, unless the latter have a low
    rank, the gate z; gates: the one that gives b and a. low_a, low_z: the products of low rank,
    each the second half of two."""

    number: int
    spec: DeltaNetSpec
    backend: Backend
    inputs: LinearOp
    gates: LinearOp
    conv: Conv
    rule: Recurrence
    norm: Tensor
    o: LinearOp
    low_a: LinearOp | None = None
    low_z: LinearOp | None = None
    sinks: tuple[float, ...] | None = None

    def attend(self, index: int, x: Tensor, inputs: RowInputs, attention: Attention) -> Pending:
        spec, ops = self.spec, self.backend.states
        state = state_of(attention, self.number)
        assert state.heads is not None, "a delta net has heads"
        mixed, gates = self.inputs(x), self.gates(x)
        z = mixed[:, spec.conv_size :]
        if self.low_z is not None:
            z = self.low_z(gates[:, -spec.low_rank :])
        mixed = mixed[:, : spec.conv_size]
        gates = gates[:, : spec.num_gates].to(mixed.dtype)
        if state.drafted is not None:
            rows = state.drafted.merged(torch.cat((mixed, gates), dim=1))
            mixed, gates = torch.split(rows, [spec.conv_size, spec.num_gates], 1)
        b, a = gates[:, : spec.num_heads], gates[:, spec.num_heads :]
        if self.low_a is not None:
            a = _heads(self.low_a(a), spec.num_heads, spec.key_dim)
        mixed = ops.causal_conv(mixed, *self.conv, "silu", state.conv, state.segments)
        q, k, v = torch.split(mixed, [spec.key_size, spec.key_size, spec.value_size], 1)
        out = ops.linear_attention(
            _heads(q, spec.num_key_heads, spec.key_dim),
            _heads(k, spec.num_key_heads, spec.key_dim),
            _heads(v, spec.num_heads, spec.value_dim),
            a.to(mixed.dtype),
            b,
            self.rule,
            state.heads,
            state.segments,
        )
        normed = ops.gated_norm(
            own(state, out).flatten(1),
            z,
            self.norm,
            spec.norm_eps,
            group=spec.value_dim,
            activation=spec.gate,
        )
        return Finished(normed)

    def output(self, attended: Tensor, x: Tensor, residual: Tensor | None) -> Tensor:
        return self.o(attended, residual=residual)


@dataclass(slots=True)
class Mamba:
    """A Mamba-2 mixer. inputs: the product that gives z, x, B, C and dt side by side. scales: their
    factors, [columns], or None."""

    number: int
    spec: MambaSpec
    backend: Backend
    inputs: LinearOp
    conv: Conv
    rule: Recurrence
    norm: Tensor | None
    o: LinearOp
    scales: Tensor | None = None
    sinks: tuple[float, ...] | None = None

    def attend(self, index: int, x: Tensor, inputs: RowInputs, attention: Attention) -> Pending:
        spec, ops = self.spec, self.backend.states
        state = state_of(attention, self.number)
        assert state.heads is not None, "a Mamba-2 mixer has heads"
        projected = self.inputs(x)
        if self.scales is not None:
            projected = (projected * self.scales).to(projected.dtype)
        inner, _, keys, _, _ = spec.part_sizes
        z, rows = torch.split(projected, [inner, spec.conv_size + spec.num_heads], 1)
        mixed, dt = torch.split(merged(state, rows), [spec.conv_size, spec.num_heads], 1)
        mixed = ops.causal_conv(mixed, *self.conv, "silu", state.conv, state.segments)
        value, k, q = torch.split(mixed, [inner, keys, keys], 1)
        out = ops.linear_attention(
            _heads(q, spec.num_groups, spec.state_size),
            _heads(k, spec.num_groups, spec.state_size),
            _heads(value, spec.num_heads, spec.head_dim),
            dt,
            None,
            self.rule,
            state.heads,
            state.segments,
        )
        normed = ops.gated_norm(
            own(state, out).flatten(1),
            z,
            self.norm,
            spec.norm_eps,
            group=spec.norm_group or inner,
            activation="silu",
            gates_first=spec.gates_first,
        )
        return Finished(normed)

    def output(self, attended: Tensor, x: Tensor, residual: Tensor | None) -> Tensor:
        return self.o(attended, residual=residual)


@dataclass(slots=True)
class Beside:
    """Attention and a state that read the same input, and whose outputs are added (Falcon-H1).
    state_size: the values of a row that the state gives."""

    attention: AttentionHalf
    state: AttentionHalf
    state_size: int
    sinks: tuple[float, ...] | None = None

    def attend(self, index: int, x: Tensor, inputs: RowInputs, attention: Attention) -> Pending:
        pending = self.attention.attend(index, x, inputs, attention)
        return _Both(pending, self.state.attend(index, x, inputs, attention))

    def output(self, attended: Tensor, x: Tensor, residual: Tensor | None) -> Tensor:
        sizes = [attended.shape[1] - self.state_size, self.state_size]
        first, second = torch.split(attended, sizes, 1)
        added = self.state.output(second.contiguous(), x, residual)
        return self.attention.output(first.contiguous(), x, added)


@dataclass(slots=True)
class _Both:
    """The results of two halves side by side, [T, all values]."""

    first: Pending
    second: Pending

    def wait(self) -> Tensor:
        return torch.cat((self.first.wait().flatten(1), self.second.wait()), dim=1)
