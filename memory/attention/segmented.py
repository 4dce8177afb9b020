"""The attention seam over segments: partial results of each segment, folded in order.

Segments are in this machine's memory or on holders. While no sequence of a step is longer than a
segment, the step is planned as if there were none.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from memory.attention.partial import OwnPart, PartialAttention, PrefixPart
from memory.attention.seam import (
    Attention,
    AttentionLayer,
    AttentionStep,
    Pending,
    PlannedAttention,
    Rotation,
    Ticket,
)
from memory.attention.segments import Pieces, cut, in_order
from ops.backend import Backend, Partial


class HeldParts(Protocol):
    """The parts of one step on holders."""

    def begin(self, layer: int, q: Tensor) -> None:
        """Sends q of all rows that need these parts."""

    def finish(
        self, layer: int, k: Tensor | None, v: Tensor | None, rotation: Rotation | None
    ) -> None:
        """Sends k and v of the rows whose own keys are there."""

    def receive(self, layer: int) -> Mapping[int, Partial]:
        """Waits for the results of each of the step's `Pieces`, by its number."""


class Holders(Protocol):
    """Other memory that holds segments and attends over them."""

    def has_first(self, start: int) -> bool:
        """Returns whether even the first segment of the sequence whose range begins there is not in
        this machine's memory."""

    def plan(self, pieces: Mapping[int, Pieces]) -> HeldParts:
        """Prepares the pieces of a step, by number, that are not in this machine's memory."""


class SegmentedAttention:
    """Implements PlannedAttention over segments of layers without windows."""

    is_remote = False

    def __init__(
        self,
        inner: PlannedAttention,
        partial: PartialAttention,
        layers: Sequence[AttentionLayer],
        backend: Backend,
        segment_tokens: int,
        holders: Holders | None = None,
    ) -> None:
        """inner, partial: attention over this machine's memory. holders: they hold all segments but
        the first of each sequence, and some of these; without them this machine has all."""
        self._inner, self._partial = inner, partial
        self.layers = list(layers)
        self.backend = backend
        self._segment_tokens = segment_tokens
        self._holders = holders

    def plan(self, step: AttentionStep) -> Attention:
        holders = self._holders
        away = {start for start in step.starts if holders is not None and holders.has_first(start)}
        if not away and max(step.kv_lens) <= self._segment_tokens:
            return self._inner.plan(step)
        local: dict[int, _LocalPieces] = {}
        held: dict[int, Pieces] = {}
        groups: list[Pieces] = []
        for both in in_order(cut(step, self._segment_tokens)):
            for is_held, pieces in self._divided(both, away):
                if is_held:
                    held[len(groups)] = pieces
                else:
                    local[len(groups)] = self._plan_here(pieces)
                groups.append(pieces)
        remote = None if holders is None else holders.plan(held)
        return SegmentedPlan(self, groups, local, remote)

    def _divided(self, pieces: Pieces, away: Container[int]) -> Iterator[tuple[bool, Pieces]]:
        """Yields the pieces on holders (True) and those here. away: the starts of sequences whose
        first segment is on a holder."""
        if pieces.segment:
            yield self._holders is not None, pieces
            return
        for is_held in (False, True):
            items = [item for item in pieces.items if (item.start in away) is is_held]
            if items:
                yield is_held, replace(pieces, items=items)

    def _plan_here(self, pieces: Pieces) -> _LocalPieces:
        offset = pieces.segment * self._segment_tokens
        step = AttentionStep(
            0,
            [item.start + offset for item in pieces.items],
            [item.num_rows for item in pieces.items],
            [item.num_keys for item in pieces.items],
        )
        rows = torch.tensor(pieces.rows)
        if pieces.is_own:
            return _LocalPieces(rows, own=self._partial.own(step))
        return _LocalPieces(rows, prefix=self._partial.prefix(step))


@dataclass(slots=True)
class _LocalPieces:
    """Planned pieces in this machine's memory; one of own and prefix is set."""

    rows: Tensor
    own: OwnPart | None = None
    prefix: PrefixPart | None = None


class SegmentedPlan:
    """Attention for one step's rows."""

    def __init__(
        self,
        parent: SegmentedAttention,
        groups: Sequence[Pieces],
        local: Mapping[int, _LocalPieces],
        remote: HeldParts | None,
    ) -> None:
        self.parent = parent
        self.groups = groups
        self.rows = [torch.tensor(pieces.rows) for pieces in groups]
        self._local = local
        self.remote = remote

    def begin(self, layer: int, q: Tensor) -> Ticket:
        if self.remote is not None:
            self.remote.begin(layer, q)
        return Ticket(layer, q)

    def finish(
        self, ticket: Ticket, k: Tensor | None, v: Tensor | None, rotation: Rotation | None
    ) -> Pending:
        layer, q, _ = ticket
        if self.remote is not None:
            self.remote.finish(layer, k, v, rotation)
        found: dict[int, Partial] = {}
        for number, pieces in self._local.items():
            if pieces.own is not None:
                at = pieces.rows
                own_k, own_v = (None if x is None else x[at] for x in (k, v))
                turned = None if rotation is None else (rotation[0][at], rotation[1][at])
                begun = pieces.own.begin(layer, q[at])
                found[number] = pieces.own.finish(begun, own_k, own_v, turned)
        for number, pieces in self._local.items():  # after all of the step's keys are written
            if pieces.prefix is not None:
                found[number] = pieces.prefix.attend(layer, q[pieces.rows])
        return SegmentedPending(self, layer, q, found)


@dataclass(slots=True)
class SegmentedPending:
    """A layer's attention while holders compute their parts. found: the local parts, by number."""

    plan: SegmentedPlan
    layer: int
    q: Tensor
    found: dict[int, Partial]

    def wait(self) -> Tensor:
        plan, parent, q = self.plan, self.plan.parent, self.q
        if plan.remote is not None:
            self.found.update(plan.remote.receive(self.layer))
        shape = parent.layers[self.layer]
        out = torch.empty(*q.shape[:2], shape.value_dim or q.shape[2], dtype=torch.float32)
        total = Partial(out, torch.empty(q.shape[:2], dtype=torch.float32))
        for number, pieces in enumerate(plan.groups):
            part, rows = self.found[number], plan.rows[number]
            if pieces.begins:
                total.out[rows], total.lse[rows] = part.out, part.lse
            else:
                parent.backend.merge_into(total, part, rows)
        return total.out.to(q.dtype)
