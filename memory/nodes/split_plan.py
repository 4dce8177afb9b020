"""Split attention of one step: nodes have some tokens of a sequence, and their partial results are
merged.

Nodes attend over the prefix, the engine with the step's rows over each other. With a kv_policy some
rows choose among the tiles of all nodes (ops/cpu/native_tile_lists.py): nodes list their tiles, the
engine tells each how many of its best ones are chosen, and nodes attend to these and to the rows'
own tiles, whose keys they all have. So each row reads the tiles that it would read in local memory.
The lists are made while k and v are projected, unless the step itself completes tiles that its rows
may choose: then they are made when k and v are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from memory.attention.seam import (
    AttentionLayer,
    AttentionStep,
    Pending,
    Rotation,
    Ticket,
    kv_owner,
)
from memory.attention.tiled import is_selectable
from memory.nodes.node_link import NodeLink, lost
from memory.nodes.outgoing import segment_of
from memory.nodes.placement import Shard, choosing_parts, choosing_row
from memory.nodes.remote_plan import (
    LayerShard,
    NodeRows,
    NodesPlan,
    PlannedRows,
    copy_rows,
    extend_runs,
    rows_of,
)
from memory.nodes.staging import Staging
from memory.nodes.wire import (
    HEADER_BYTES,
    Append,
    ErrorCode,
    Kind,
    NodePlan,
    Query,
    WireError,
    WireFormat,
)
from memory.nodes.wire_rows import WireRows, expect
from ops.backend import Backend, Partial
from ops.cpu.native_tile_lists import TileList, TileShares, count_tiles
from quant.kv import TILE_TOKENS
from transport.base import Frame, TransportError
from transport.messages import view_of

_WORD_BYTES = 4  # of a number in a list of tiles


class ChoosingRows:
    """The rows of a step that choose what they read."""

    def __init__(
        self, step: AttentionStep, counts: Sequence[int], budgets: Sequence[int], num_kv_heads: int
    ) -> None:
        """counts, budgets: what Selection.plan returns. num_kv_heads: the most of a layer whose
        rows choose. As in local memory, a sequence's rows read everything if each of them may."""
        self.num_of: list[int] = []
        """How many of each sequence's last rows choose."""
        self.positions: list[int] = []
        self.wanted: list[int] = []
        """How many tiles each choosing row reads beside its own."""
        at = 0
        for count, kv_len in zip(counts, step.kv_lens, strict=True):
            those = budgets[at : at + count]
            at += count
            first = kv_len - count
            chooses = any(n * TILE_TOKENS <= first + i for i, n in enumerate(those))
            self.num_of.append(count if chooses else 0)
            if chooses:
                self.positions += range(first, kv_len)
                self.wanted += [n - 1 for n in those]
        self.parts = choosing_parts(self.positions, num_kv_heads)
        """The rows that choose together."""

    def shares_on(self, link: NodeLink) -> list[TileShares]:
        """Returns what the rows of each part may choose on a node."""
        num_tiles = [choosing_row(link.shard, position).num_tiles for position in self.positions]
        return [TileShares(num_tiles[rows], self.wanted[rows]) for rows in self.parts]

    def work_on(self, num_nodes: int) -> int:
        """Returns about how many keys these rows read on a node."""
        return sum([(n // num_nodes + 1) * TILE_TOKENS for n in self.wanted])


class PrefixPlan(NodesPlan):
    """The planned attention of one step, where nodes compute prefix attention. All rows attend here
    over each other."""

    _kv_kinds: Sequence[Kind] = (Kind.UPDATE,)

    def finish(
        self, ticket: Ticket, k: Tensor | None, v: Tensor | None, rotation: Rotation | None
    ) -> Pending:
        layer, q, _ = ticket
        k, v = self.store(layer, k, v, rotation)
        out, lse = self._here.attend(layer, q, k, v)
        return PrefixPending(self, layer, Partial(out, lse), q.dtype, self._backend)


@dataclass(slots=True)
class PrefixPending:
    """A layer's attention while nodes compute prefix attention. total: attention over the step's
    own tokens."""

    plan: PrefixPlan
    layer: int
    total: Partial
    dtype: torch.dtype
    backend: Backend

    def wait(self) -> Tensor:
        self.plan.receive(Kind.PARTIAL, self.layer, WireRows.read_partial, self._merge)
        return self.total.out.to(self.dtype)

    def _merge(self, node: NodeRows, found: Sequence[Tensor]) -> None:
        own, total = node.parts[self.layer].own, self.total
        out, lse = found
        mine = total if own is None else Partial(total.out[:, own], total.lse[:, own])
        self.backend.merge_into(mine, Partial(out, lse), node.rows)


class ChoosingPlan(PrefixPlan):
    """The planned attention of one step, some of whose rows choose among the tiles of all nodes."""

    _kv_kinds = (Kind.OWN, Kind.UPDATE)

    def __init__(
        self,
        number: int,
        nodes: list[NodeRows],
        wire: WireFormat,
        backend: Backend,
        layers: Sequence[AttentionLayer],
        staging: Staging,
        here: PlannedRows,
        choosing: ChoosingRows,
    ) -> None:
        """nodes: all, in the order of their shards. here: the rows that do not choose."""
        super().__init__(number, nodes, wire, backend, layers, staging, here)
        self._choosing = choosing
        self._shares = [choosing.shares_on(node.link) for node in nodes]

    def finish(
        self, ticket: Ticket, k: Tensor | None, v: Tensor | None, rotation: Rotation | None
    ) -> Pending:
        layer, q, _ = ticket
        k, v = self.store(layer, k, v, rotation)
        shape = self._layers[layer]
        # what rows have before the nodes' results: nothing but sinks
        out = torch.zeros(*q.shape[:2], shape.value_dim or q.shape[2])
        lse = torch.full(q.shape[:2], -torch.inf)
        if shape.sinks is not None:
            lse[:] = torch.tensor(shape.sinks)
        if runs := self._here.runs:
            own_v = None if v is None else rows_of(v, runs)
            here = self._here.attend(layer, rows_of(q, runs), rows_of(k, runs), own_v)
            for found, total in zip(here, (out, lse), strict=True):
                copy_rows(found, total, runs)
        return ChoosingPending(self, layer, Partial(out, lse), q.dtype, self._backend)

    def choose(self, layer: int) -> None:
        """Chooses tiles from the nodes' lists, and tells each node how many of its own are
        chosen."""
        if not selects(self._layers, layer):
            return
        self.staging.flush()
        heads = self._layers[layer].num_kv_heads
        for number in range(len(self._choosing.parts)):
            lists: list[TileList] = []
            frames: list[Frame] = []
            for node, shares in zip(self._nodes, self._shares, strict=True):
                words, frame = self._list_of(node, layer, shares[number])
                lists.append(TileList(shares[number], words))
                frames.append(frame)
            counts = count_tiles(lists, heads)
            lists.clear()
            for node, frame, count in zip(self._nodes, frames, counts, strict=True):
                node.link.endpoint.release(frame)
                self.post(node, Kind.CHOICE, layer, len(count), [segment_of(count)])

    def _list_of(self, node: NodeRows, layer: int, shares: TileShares) -> tuple[Tensor, Frame]:
        link = node.link
        try:
            header, frame = link.answer(self._number, layer, shares.num_tiles_all)
            if (header.kind, header.rows) != (Kind.TILES, shares.num_rows):
                text = f"{header.kind.name} of {header.rows} rows, not {shares.num_rows}"
                raise WireError(ErrorCode.SHAPE, text)
            body = view_of(frame)[HEADER_BYTES:]
            heads = self._layers[layer].num_kv_heads
            expect(len(body), shares.num_words * heads * _WORD_BYTES, header)
        except (TransportError, WireError) as error:
            raise lost(link, error) from error
        if not shares.num_words:
            return torch.empty(0, dtype=torch.int32), frame
        return torch.frombuffer(body, dtype=torch.int32), frame


@dataclass(slots=True)
class ChoosingPending(PrefixPending):
    """A layer's attention while nodes list their tiles. total: of rows that choose, the sinks
    alone."""

    plan: ChoosingPlan

    def wait(self) -> Tensor:
        self.plan.choose(self.layer)
        return PrefixPending.wait(self)


def selects(layers: Sequence[AttentionLayer], number: int) -> bool:
    """Returns whether the rows of a layer choose what they read."""
    return is_selectable(layers[number]) and is_selectable(layers[kv_owner(layers, number)])


@dataclass(slots=True)
class _Rows:
    """Queries and appends of one kind, and the runs of rows that they have in the step."""

    queries: list[Query] = field(default_factory=list)
    query_runs: list[tuple[int, int]] = field(default_factory=list)
    appends: list[Append] = field(default_factory=list)
    append_runs: list[tuple[int, int]] = field(default_factory=list)

    def append(self, shard: Shard, index: int, row: int, position: int, kv_len: int) -> None:
        """Adds the rows of a sequence from `position` to kv_len whose tokens are in a shard. row:
        the first one in the step."""
        length = 0
        for first, count in shard.runs(position, kv_len):
            extend_runs(self.append_runs, row + first - position, count)
            length += count
        if length:
            self.appends.append(Append(index, length, shard.num_tokens(position)))


def choosing_rows_on(
    link: NodeLink,
    parts: list[LayerShard],
    step: AttentionStep,
    num_keys: Sequence[int],
    choosing: ChoosingRows,
    range_tokens: int,
) -> tuple[NodeRows, NodePlan]:
    """Returns a step's rows for one node, and its plan. num_keys: the tokens of each sequence over
    which the nodes attend with rows that do not choose."""
    shard, row = link.shard, 0
    own, rest = _Rows(), _Rows()
    firsts: list[int] = []
    sequences = zip(
        step.starts, step.num_rows, step.kv_lens, num_keys, choosing.num_of, strict=True
    )
    for start, num_rows, kv_len, attended, num_own in sequences:
        index, whole = start // range_tokens, num_rows - num_own
        keys = shard.num_tokens(attended)
        if whole and keys:
            rest.queries.append(Query(index, whole, keys))
            extend_runs(rest.query_runs, row, whole)
        if num_own:
            own.queries.append(Query(index, num_own, shard.num_tokens(kv_len), num_own))
            extend_runs(own.query_runs, row + whole, num_own)
            firsts.append(kv_len - num_own)
        (own if num_own else rest).append(shard, index, row, kv_len - num_rows, kv_len)
        row += num_rows
    runs = [*own.query_runs, *rest.query_runs]
    indices = [place for first, n in runs for place in range(first, first + n)]
    work = sum([query.num_rows * query.num_keys for query in rest.queries])
    node = NodeRows(
        link,
        parts,
        runs,
        rest.append_runs,
        len(indices),
        sum([n for _, n in rest.append_runs]),
        torch.tensor(indices, dtype=torch.int64),
        work + choosing.work_on(link.shard.count),
        own_runs=own.append_runs,
    )
    queries, appends = [*own.queries, *rest.queries], [*own.appends, *rest.appends]
    return node, NodePlan([], queries, appends, positions=firsts, wanted=choosing.wanted)


def whole_rows(
    step: AttentionStep, choosing: ChoosingRows
) -> tuple[list[tuple[int, int]], list[int]]:
    """Returns the rows of a step that do not choose: their runs, and how many each sequence has."""
    runs: list[tuple[int, int]] = []
    row = 0
    whole = [n - own for n, own in zip(step.num_rows, choosing.num_of, strict=True)]
    for num_rows, count in zip(step.num_rows, whole, strict=True):
        if count:
            extend_runs(runs, row, count)
        row += num_rows
    return runs, whole
