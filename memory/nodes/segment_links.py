"""The engine's side of segments on memory nodes: plans, q, k and v go out, partial results come
back. Every number is sent in fp32, which keeps all of its bits."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from memory.attention.kv_layout import rotate_keys
from memory.attention.seam import AttentionLayer, Rotation
from memory.attention.segments import Piece, Pieces
from memory.nodes.errors import NodesLostError
from memory.nodes.node_link import NodeLink, lost
from memory.nodes.node_set import NodePartition
from memory.nodes.outgoing import segment_of
from memory.nodes.wire import (
    HEADER_BYTES,
    ErrorCode,
    Kind,
    NodePlan,
    Query,
    WireError,
    WireType,
)
from memory.nodes.wire_rows import WireRows
from ops.backend import Backend, Partial
from transport.base import TransportError
from transport.messages import view_of

Locate = Callable[[int, int], tuple[int, int]]
"""Returns the holder of a segment and its range there, by the start of its sequence's range."""


class HasPartitions(Protocol):
    """Nodes, each of which has one partition of the K/V."""

    @property
    def partitions(self) -> Sequence[NodePartition]: ...


class SegmentLinks:
    """Implements Holders: partition i of the nodes is holder i."""

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        nodes: HasPartitions,
        backend: Backend,
        locate: Locate,
        begun_away: Container[int] = (),
        *,
        rotates_wide: bool,
    ) -> None:
        """begun_away: the starts of ranges of sequences whose first segment is on a holder, at any
        time. rotates_wide: keys are rotated in fp32, as int8 K/V does; else in their own type."""
        self.layers = list(layers)
        self.rows = [WireRows.of(layer) for layer in layers]
        self.backend = backend
        self.rotates_wide = rotates_wide
        self._nodes = nodes
        self._locate = locate
        self.has_first = begun_away.__contains__
        self._numbers = count(1)
        for partition in nodes.partitions:
            partition.edits.on_release = self._send_edits

    def plan(self, pieces: Mapping[int, Pieces]) -> HeldSegments:
        number = next(self._numbers)
        wanted: dict[int, list[_Wanted]] = {}  # by holder
        for group, found in pieces.items():
            place = 0
            for piece in found.items:
                holder, index = self._locate(piece.start, piece.segment)
                wanted.setdefault(holder, []).append(_Wanted(group, place, piece, index))
                place += piece.num_rows
        planned: list[_HolderRows] = []
        for holder, partition in enumerate(self._nodes.partitions):
            items = sorted(wanted.get(holder, []), key=_order)
            if items and not partition.links:
                raise NodesLostError(f"no node holds the segments of {partition.urls[0]}")
            edits = partition.edits.take()
            for link in partition.links if edits or items else ():
                queries = [item.query for item in items]
                try:
                    link.look()
                    link.post_plan(number, NodePlan(edits, queries, []))
                except TransportError as error:
                    raise lost(link, error) from error
                if items:
                    planned.append(_holder_rows(link, items))
        return HeldSegments(self, number, planned)

    def _send_edits(self) -> None:
        """Sends edits outside of a step, so that nodes return released memory to the system."""
        number = next(self._numbers)
        for partition in self._nodes.partitions:
            edits = partition.edits.take()
            for link in partition.links if edits else ():
                try:
                    link.post_plan(number, NodePlan(edits, [], []))
                except TransportError:
                    link.close()  # the next step fails, because pages differ now
                    break


@dataclass(slots=True)
class _HolderRows:
    """A step's rows for one holder: their numbers in the step, those with own k and v first.
    groups: for each `Pieces`, its rows in the answer, and their places among all of its rows.
    num_keys: the sum of the rows' keys."""

    link: NodeLink
    rows: Tensor
    own: Tensor
    groups: dict[int, tuple[Tensor, Tensor]]
    num_keys: int


class _Wanted(NamedTuple):
    """A piece on a holder: the number of its `Pieces`, the place of its first row among theirs, and
    its range on the holder."""

    group: int
    place: int
    piece: Piece
    range: int

    @property
    def query(self) -> Query:
        piece = self.piece
        num_own = piece.num_rows if piece.is_own else 0
        return Query(self.range, piece.num_rows, piece.num_keys, num_own)


def _order(item: _Wanted) -> tuple[bool, bool]:
    return not item.piece.is_own, item.piece.num_rows > 1


def _holder_rows(link: NodeLink, items: Sequence[_Wanted]) -> _HolderRows:
    rows: list[int] = []
    groups: dict[int, tuple[list[int], list[int]]] = {}
    num_own = num_keys = 0
    for group, place, piece, _ in items:
        at, places = groups.setdefault(group, ([], []))
        at.extend(range(len(rows), len(rows) + piece.num_rows))
        places.extend(range(place, place + piece.num_rows))
        rows.extend(range(piece.first, piece.first + piece.num_rows))
        num_own += piece.num_rows if piece.is_own else 0
        num_keys += piece.num_rows * piece.num_keys
    own = torch.tensor(rows)[:num_own]
    made = {key: (torch.tensor(at), torch.tensor(to)) for key, (at, to) in groups.items()}
    return _HolderRows(link, torch.tensor(rows), own, made, num_keys)


class HeldSegments:
    """Implements HeldParts for one step."""

    def __init__(self, parent: SegmentLinks, number: int, holders: Sequence[_HolderRows]) -> None:
        self._parent = parent
        self._number = number
        self._holders = holders

    def begin(self, layer: int, q: Tensor) -> None:
        for holder in self._holders:
            self._post(holder, Kind.QUERY, layer, [q[holder.rows]])

    def finish(
        self, layer: int, k: Tensor | None, v: Tensor | None, rotation: Rotation | None
    ) -> None:
        for holder in self._holders:
            at = holder.own
            if k is None or not len(at):
                continue
            turned = None if rotation is None else (rotation[0][at], rotation[1][at])
            own = [self._rotated(layer, k[at], turned)]
            self._post(holder, Kind.OWN, layer, own if v is None else [*own, v[at]])

    def _rotated(self, layer: int, k: Tensor, rotation: Rotation | None) -> Tensor:
        parent = self._parent
        k = k.float() if parent.rotates_wide else k
        return rotate_keys(parent.backend, parent.layers[layer], k, rotation)

    def _post(self, holder: _HolderRows, kind: Kind, layer: int, parts: Sequence[Tensor]) -> None:
        link, num_rows = holder.link, len(parts[0])
        sent = [part.float().contiguous() for part in parts]
        segments = [segment_of(part) for part in sent]
        try:
            link.post_rows(kind, self._number, layer, WireType.FLOAT32, num_rows, segments)
        except TransportError as error:
            raise lost(link, error) from error

    def receive(self, layer: int) -> Mapping[int, Partial]:
        found: dict[int, list[tuple[Partial, Tensor]]] = {}
        for holder in self._holders:
            link = holder.link
            try:
                header, frame = link.answer(self._number, layer, holder.num_keys)
                if (header.kind, header.rows) != (Kind.PARTIAL, len(holder.rows)):
                    text = f"{header.kind.name} of {header.rows} rows, not {len(holder.rows)}"
                    raise WireError(ErrorCode.SHAPE, text)
                body = view_of(frame)[HEADER_BYTES:]
                out, lse = self._parent.rows[layer].read_partial(body, header)
            except (TransportError, WireError) as error:
                raise lost(link, error) from error
            for group, (at, places) in holder.groups.items():
                found.setdefault(group, []).append((Partial(out[at], lse[at]), places))
            link.endpoint.release(frame)
        return {group: _joined(parts) for group, parts in found.items()}


def _joined(parts: Sequence[tuple[Partial, Tensor]]) -> Partial:
    """Returns the rows of several holders in the order of their places."""
    if len(parts) == 1:
        return parts[0][0]
    order = torch.cat([places for _, places in parts]).argsort()
    out = torch.cat([part.out for part, _ in parts])
    return Partial(out[order], torch.cat([part.lse for part, _ in parts])[order])
