"""The attention of one step over memory nodes, layer by layer: it posts q, k and v, and puts the
nodes' results together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from memory.attention.kv_layout import rotate_keys
from memory.attention.seam import AttentionLayer, Pending, Rotation, Ticket
from memory.nodes.new_token_attention import NewTokenAttention
from memory.nodes.node_link import NodeLink, lost
from memory.nodes.node_loop import view_of
from memory.nodes.placement import Shard
from memory.nodes.wire import HEADER_BYTES, ErrorCode, Header, Kind, WireError, WireFormat
from memory.nodes.wire_rows import WireRows, encode, float_type
from ops.backend import Backend, Partial
from transport.base import Segment, TransportError


class LayerShard(NamedTuple):
    """A layer's heads and K/V heads on a node, and their rows in messages. own selects them among
    all heads; it is None if the node has all."""

    first_head: int
    num_heads: int
    first_kv_head: int
    num_kv_heads: int
    rows: WireRows
    own: slice | None


@dataclass(slots=True)
class NodeRows:
    """The step's rows for one node. parts is indexed by layer. query_runs and append_runs are runs
    (first row, length) of the step's rows. rows has the indices of the query rows; it is None if
    all rows query. num_keys is the sum of these rows' keys. k and v of the query rows are not among
    the appended ones, unless nodes compute prefix attention."""

    link: NodeLink
    parts: list[LayerShard]
    query_runs: list[tuple[int, int]]
    append_runs: list[tuple[int, int]]
    num_queries: int
    num_appends: int
    rows: Tensor | None
    num_keys: int


@dataclass(slots=True)
class PlannedRows:
    """Rows of a step that the engine computes: their runs (first row, length) and their plan."""

    runs: list[tuple[int, int]]
    attention: NewTokenAttention
    plan: object

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.attention.attend(self.plan, layer, q, k, v)


class _NodesPlan:
    """The part of a step's planned attention that computes nothing here."""

    def __init__(
        self,
        number: int,
        nodes: list[NodeRows],
        wire: WireFormat,
        backend: Backend,
        layers: Sequence[AttentionLayer],
    ) -> None:
        self._layers = layers
        # k and v of layers that others share
        self._owners = {layer.shares for layer in layers if layer.shares is not None}
        self._kept: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._number = number
        self._nodes = nodes
        self._wire = wire
        self._backend = backend

    def begin(self, layer: int, q: Tensor) -> Ticket:
        queried = [node for node in self._nodes if node.num_queries]
        tensors = encode(_dense(q), self._wire.rows) if queried else []
        for node in queried:
            part = node.parts[layer]
            segments: list[Segment] = []
            for x in tensors:
                segments += _pieces(x, node.query_runs, part.first_head, part.num_heads)
            self._post(node, Kind.QUERY, layer, node.num_queries, segments)
        return Ticket(layer, q)

    def _rotated(
        self, layer: int, k: Tensor, v: Tensor | None, rotation: Rotation | None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns k, rotated, and v in the type in which they are sent."""
        dtype = float_type(self._wire.kv)
        if rotation is not None:
            is_wider = dtype.itemsize > k.dtype.itemsize
            k = k.to(dtype) if is_wider else k
            k = rotate_keys(self._backend, self._layers[layer], k, rotation)
        return _dense(k.to(dtype)), None if v is None else _dense(v.to(dtype))

    def _keys(
        self, layer: int, k: Tensor | None, v: Tensor | None, rotation: Rotation | None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns k and v of the step's rows, as `_rotated`, of the layer whose K/V is read."""
        shares = self._layers[layer].shares
        if shares is not None:
            return self._kept[shares]
        assert k is not None
        found = self._rotated(layer, k, v, rotation)
        if layer in self._owners:
            self._kept[layer] = found
        return found

    def _post_kv(self, kind: Kind, layer: int, k: Tensor, v: Tensor | None) -> None:
        """Sends k and v, or k alone: with OWN of the query rows, with UPDATE of the appended
        ones."""
        for node in self._nodes:
            is_own = kind is Kind.OWN
            runs = node.query_runs if is_own else node.append_runs
            num_rows = node.num_queries if is_own else node.num_appends
            if num_rows:
                part = node.parts[layer]
                segments: list[Segment] = []
                for x in (k,) if v is None else (k, v):
                    segments += _pieces(x, runs, part.first_kv_head, part.num_kv_heads)
                self._post(node, kind, layer, num_rows, segments)

    def _post(
        self, node: NodeRows, kind: Kind, layer: int, num_rows: int, segments: list[Segment]
    ) -> None:
        dtype = self._wire.rows if kind is Kind.QUERY else self._wire.kv
        try:
            node.link.post_rows(kind, self._number, layer, dtype, num_rows, segments)
        except TransportError as error:
            raise lost(node.link, error) from error

    def receive(
        self, kind: Kind, layer: int, take: Callable[[NodeRows, Header, memoryview], None]
    ) -> None:
        """Waits for the nodes' answers, in order; take(node, header, body) reads each of them."""
        for node in self._nodes:
            if not node.num_queries:
                continue
            link = node.link
            try:
                header, frame = link.answer(self._number, layer, node.num_keys)
                if (header.kind, header.rows) != (kind, node.num_queries):
                    text = f"{header.kind.name} of {header.rows} rows, not {node.num_queries}"
                    raise WireError(ErrorCode.SHAPE, text)
                take(node, header, view_of(frame)[HEADER_BYTES:])
            except (TransportError, WireError) as error:
                raise lost(link, error) from error
            link.endpoint.release(frame)


class RemotePlan(_NodesPlan):
    """The planned attention of one step, where a node has all tokens of its sequences."""

    def __init__(
        self,
        number: int,
        nodes: list[NodeRows],
        wire: WireFormat,
        backend: Backend,
        layers: Sequence[AttentionLayer],
        tails: PlannedRows,
    ) -> None:
        """tails: the rows to compute here."""
        super().__init__(number, nodes, wire, backend, layers)
        self._tails = tails

    def finish(
        self, ticket: Ticket, k: Tensor | None, v: Tensor | None, rotation: Rotation | None
    ) -> Pending:
        layer, q, _ = ticket
        k, v = self._keys(layer, k, v, rotation)
        shape = self._layers[layer]
        if shape.shares is None:
            self._post_kv(Kind.OWN, layer, k, v)
            self._post_kv(Kind.UPDATE, layer, k, v)
        out = torch.empty(*q.shape[:2], shape.value_dim or q.shape[2], dtype=q.dtype)
        if runs := self._tails.runs:
            own_v = None if v is None else _rows_of(v, runs)
            here, _ = self._tails.attend(layer, _rows_of(q, runs), _rows_of(k, runs), own_v)
            _copy(here, out, runs)
        return RemotePending(self, layer, out)


@dataclass(slots=True)
class RemotePending:
    """A layer's attention while nodes compute it. out has the rows that were computed here."""

    plan: RemotePlan
    layer: int
    out: Tensor

    def wait(self) -> Tensor:
        self.plan.receive(Kind.RESULT, self.layer, self._take)
        return self.out

    def _take(self, node: NodeRows, header: Header, body: memoryview) -> None:
        part = node.parts[self.layer]
        out = part.rows.read_result(body, header)
        _copy(out, self.out if part.own is None else self.out[:, part.own], node.query_runs)


class PrefixPlan(_NodesPlan):
    """The planned attention of one step, where nodes compute prefix attention."""

    def __init__(
        self,
        number: int,
        nodes: list[NodeRows],
        wire: WireFormat,
        backend: Backend,
        layers: Sequence[AttentionLayer],
        new: PlannedRows,
    ) -> None:
        """new: all rows, which attend here over each other."""
        super().__init__(number, nodes, wire, backend, layers)
        self._new = new

    def finish(
        self, ticket: Ticket, k: Tensor | None, v: Tensor | None, rotation: Rotation | None
    ) -> Pending:
        layer, q, _ = ticket
        k, v = self._keys(layer, k, v, rotation)
        if self._layers[layer].shares is None:
            self._post_kv(Kind.UPDATE, layer, k, v)
        out, lse = self._new.attend(layer, q, k, v)
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
        self.plan.receive(Kind.PARTIAL, self.layer, self._merge)
        return self.total.out.to(self.dtype)

    def _merge(self, node: NodeRows, header: Header, body: memoryview) -> None:
        part, total = node.parts[self.layer], self.total
        own = part.own
        mine = total if own is None else Partial(total.out[:, own], total.lse[:, own])
        self.backend.merge_into(mine, Partial(*part.rows.read_partial(body, header)), node.rows)


def layer_shard(shard: Shard, layer: AttentionLayer) -> LayerShard:
    first, kv_heads = shard.heads(layer)
    group = layer.num_heads // layer.num_kv_heads
    heads = group * kv_heads
    own = slice(first * group, first * group + heads) if heads < layer.num_heads else None
    rows = WireRows(heads, kv_heads, layer.head_dim, layer.value_dim)
    return LayerShard(first * group, heads, first, kv_heads, rows, own)


def _rows_of(x: Tensor, runs: Sequence[tuple[int, int]]) -> Tensor:
    parts = [x[first : first + length] for first, length in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _copy(rows: Tensor, to: Tensor, runs: Sequence[tuple[int, int]]) -> None:
    """Copies rows to these runs of rows."""
    at = 0
    for first, length in runs:
        to[first : first + length] = rows[at : at + length]
        at += length


def _dense(x: Tensor) -> Tensor:
    """Returns x [T, H, D] with adjacent heads; rows may be strided."""
    if x.is_contiguous() or x.stride()[1:] == (x.shape[2], 1):
        return x
    return x.contiguous()


def _pieces(
    x: Tensor, runs: Sequence[tuple[int, int]], first_head: int, num_heads: int
) -> list[Segment]:
    """Returns segments for these rows and heads of x, [T, H, D] or [T, H]."""
    size = x.element_size()
    row_stride, head_stride, *_ = x.stride()
    stride, head_bytes = row_stride * size, head_stride * size
    address = x.data_ptr() + first_head * head_bytes
    return [
        Segment(address + row * stride, num_rows, num_heads * head_bytes, stride)
        for row, num_rows in runs
    ]
