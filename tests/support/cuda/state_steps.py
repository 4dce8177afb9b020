"""Steps of layers with a state, for tests of their kernels."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ops.reference_states import ReferenceStates
from ops.states import NO_RECORD, Recurrence, StateSegments

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Piece = tuple[int, int, int]
"""Rows, source and target of a segment."""


def segments_of(*sequences: Sequence[Piece]) -> StateSegments:
    """Returns the segments of sequences that follow one another in a step."""
    firsts, sources, targets, begins = [0], [], [], [0]
    for pieces in sequences:
        for rows, source, target in pieces:
            firsts.append(firsts[-1] + rows)
            sources.append(source)
            targets.append(target)
        begins.append(len(sources))
    parts = (firsts, sources, targets, begins)
    return StateSegments(*(torch.tensor(part, device=DEVICE) for part in parts))


def random_pieces(rng: random.Random, rows: int, record: int, spare: int) -> list[Piece]:
    """Returns `rows` rows of a sequence that begins without a state, cut at random. Its state is in
    `record`; some states go to the record `spare` and are read from there."""
    pieces, source, left = [], NO_RECORD, rows
    while left or not pieces:
        size = min(left, rng.choice((0, 1, 2, 3, 7, 20)))
        target = rng.choice((record, spare))
        pieces.append((size, source, target if left > size else record))
        source, left = pieces[-1][2], left - size
    return pieces


class Operands(NamedTuple):
    """What StateOps.linear_attention takes before the rule."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor | None

    def rows(self, first: int, end: int) -> Operands:
        return Operands(*(None if x is None else x[first:end] for x in self))


class Shape(NamedTuple):
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int


def make_rule(kind: str, shape: Shape) -> Recurrence:
    """Returns a rule with random rates. kind: "delta" (the gated delta rule), "kimi", "mamba", or
    "free" for the delta rule without unit keys."""
    heads = shape.heads
    rates = 0.05 + torch.rand(heads, device=DEVICE)
    bias = torch.randn(heads, device=DEVICE)
    scale = shape.key_dim**-0.5
    if kind == "delta":
        return Recurrence(rates, bias, True, scale, has_unit_keys=True)
    if kind == "free":
        return Recurrence(rates, bias, True, scale, beta_scale=2.0)
    if kind == "kimi":
        bias = torch.randn(heads, shape.key_dim, device=DEVICE)
        return Recurrence(rates, bias, True, scale, has_unit_keys=True)
    skip = torch.randn(heads, device=DEVICE)
    return Recurrence(rates, bias, False, 1.0, dt_min=0.2, dt_max=1.5, skip=skip)


def make_operands(rows: int, shape: Shape, rule: Recurrence, dtype: torch.dtype) -> Operands:
    """Returns random rows, each a part of a wider row as a product leaves them."""
    heads, key_heads, key_dim, value_dim = shape

    def part(*dims: int) -> Tensor:
        size = torch.Size(dims).numel()
        wide = torch.randn(rows, size + 8, device=DEVICE).to(dtype)
        return wide[:, 4 : 4 + size].unflatten(1, dims)

    shrink = 1.0 if rule.has_unit_keys else key_dim**-0.5
    q, k = part(key_heads, key_dim), part(key_heads, key_dim)
    k.mul_(shrink)
    a = part(*rule.bias.shape)
    return Operands(q, k, part(heads, value_dim), a, part(heads) if rule.is_delta else None)


def make_states(records: int, *dims: int) -> Tensor:
    """Returns the states of one of three layers that share records, at a multiple of 16 bytes."""
    size = prod(dims)
    distance = -(-size // 4) * 4
    shared = torch.randn(records, 3, distance, device=DEVICE)
    return shared[:, 1, :size].unflatten(1, dims)


def exact_attention(
    operands: Operands, rule: Recurrence, states: Tensor, segments: StateSegments
) -> tuple[Tensor, Tensor]:
    """Returns the outputs and the states afterwards in fp64."""

    def wide(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.cpu().double() if x.is_floating_point() else x.cpu()
        return x

    after = wide(states).clone()
    cpu_rule = Recurrence(*map(wide, rule))
    found = ReferenceStates().linear_attention(
        *map(wide, operands), cpu_rule, after, StateSegments(*map(wide, segments))
    )
    return found, after
