"""The operators of ops/states.py, written to be read."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as functional
from torch import Tensor

from ops.states import NO_RECORD, Recurrence, StateSegments

UNIT_KEY_EPS = 1e-6


class ReferenceStates:
    """Implements StateOps in fp32, or in the states' type if that is wider."""

    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None,
        states: Tensor,
        segments: StateSegments,
    ) -> Tensor:
        wide = x.to(states.dtype)
        out = torch.empty_like(wide)
        for first, end, source, target in _each(segments):
            before = torch.zeros_like(states[0]) if source == NO_RECORD else states[source]
            inputs = torch.cat((before, wide[first:end]))
            windows = inputs.unfold(0, weight.shape[1], 1)  # [rows, C, W]
            total = (windows * weight).sum(-1)
            total = total if bias is None else total + bias
            out[first:end] = functional.silu(total) if activation == "silu" else total
            if target != NO_RECORD:
                states[target] = inputs[len(inputs) - len(before) :]
        return out.to(x.dtype)

    def linear_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor | None,
        rule: Recurrence,
        states: Tensor,
        segments: StateSegments,
    ) -> Tensor:
        rows, heads, value_dim = v.shape
        wide = states.dtype
        q, k = (_unit(x.to(wide), rule).repeat_interleave(heads // x.shape[1], 1) for x in (q, k))
        dt = functional.softplus(a.to(wide) + rule.bias).clamp(rule.dt_min, rule.dt_max)
        rates = rule.rates if rule.bias.ndim == 1 else rule.rates[:, None]
        decay = torch.exp(-rates * dt).view(rows, heads, -1, 1)
        values = v.to(wide)
        out = torch.empty(rows, heads, value_dim, dtype=wide)
        for first, end, source, target in _each(segments):
            state = torch.zeros_like(states[0]) if source == NO_RECORD else states[source].clone()
            for t in range(first, end):
                state = decay[t] * state
                if b is None:
                    added = dt[t].view(heads, 1) * values[t]
                else:
                    beta = torch.sigmoid(b[t].to(wide)) * rule.beta_scale
                    known = (k[t][:, :, None] * state).sum(1)
                    added = beta[:, None] * (values[t] - known)
                state = state + k[t][:, :, None] * added[:, None, :]
                out[t] = rule.scale * (q[t][:, :, None] * state).sum(1)
            if target != NO_RECORD:
                states[target] = state
        if rule.skip is not None:
            out += rule.skip[:, None] * values
        return out.to(v.dtype)

    def gated_norm(
        self,
        x: Tensor,
        gate: Tensor,
        weight: Tensor | None,
        eps: float,
        *,
        group: int,
        activation: str,
        gates_first: bool = False,
    ) -> Tensor:
        wide, opening = x.float(), gate.float()
        opening = functional.silu(opening) if activation == "silu" else opening.sigmoid()
        if weight is None:
            return (wide * opening).to(x.dtype)
        if gates_first:
            wide = wide * opening
        grouped = wide.reshape(len(x), -1, group)
        mean_square = (grouped * grouped).mean(-1, keepdim=True)
        wide = (grouped * torch.rsqrt(mean_square + eps)).view(x.shape) * weight
        return (wide if gates_first else wide * opening).to(x.dtype)


def _unit(x: Tensor, rule: Recurrence) -> Tensor:
    if not rule.has_unit_keys:
        return x
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + UNIT_KEY_EPS)


def _each(segments: StateSegments) -> Iterator[tuple[int, int, int, int]]:
    """Yields (first row, end, source, target) of each segment."""
    firsts = segments.firsts.tolist()
    yield from zip(
        firsts[:-1], firsts[1:], segments.sources.tolist(), segments.targets.tolist(), strict=True
    )
