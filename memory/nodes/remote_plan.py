"""The attention of one step over memory nodes, layer by layer: it posts q, k and v, and puts the
nodes' results together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from memory.attention.kv_layout import rotate_keys
from memory.attention.seam import AttentionLayer, Pending, Rotation, Ticket
from memory.nodes.new_token_attention import NewTokenAttention
from memory.nodes.node_link import NodeLink, lost
from memory.nodes.placement import Shard
from memory.nodes.staging import Staging
from memory.nodes.wire import HEADER_BYTES, ErrorCode, Header, Kind, WireError, WireFormat, WireType
from memory.nodes.wire_rows import WireRows, encode, float_type
from ops.backend import Backend
from transport.base import Segment, TransportError
from transport.messages import view_of

if TYPE_CHECKING:
    from memory.nodes.engine_lanes import LaneStep


class LayerShard(NamedTuple):
    """A layer's heads and K/V heads on a node, and their rows in messages. own selects them among
    all heads; it is None if the node has all."""

    first_head: int
    num_heads: int
    first_kv_head: int
    num_kv_heads: int
    rows: WireRows
    own: slice | None


ReadAnswer = Callable[[WireRows, memoryview, Header], Iterable[Tensor]]


@dataclass(slots=True)
class NodeRows:
    """The step's rows for one node. parts is indexed by layer. query_runs and append_runs are runs
    (first row, length) of the step's rows. rows has the indices of the query rows; it is None if
    all rows query. num_keys is the sum of the keys that these rows read. k and v of the query rows
    are not among the appended ones, unless nodes compute prefix attention. own_runs has the rows
    whose k and v OWN has, if these are not the query rows."""

    link: NodeLink
    parts: list[LayerShard]
    query_runs: list[tuple[int, int]]
    append_runs: list[tuple[int, int]]
    num_queries: int
    num_appends: int
    rows: Tensor | None
    num_keys: int
    lane: LaneStep | None = None
    """Set if the stream sends the rows and receives the results."""
    own_runs: list[tuple[int, int]] | None = None

    def kv_runs(self, kind: Kind) -> list[tuple[int, int]]:
        """Returns the runs of rows whose k and v are sent with OWN or UPDATE."""
        if kind is Kind.OWN:
            return self.query_runs if self.own_runs is None else self.own_runs
        return self.append_runs


TakeAnswer = Callable[[NodeRows, Sequence[Tensor]], None]


@dataclass(slots=True)
class PlannedRows:
    """Rows of a step that the engine computes: their runs (first row, length) and their plan."""

    runs: list[tuple[int, int]]
    attention: NewTokenAttention
    plan: object

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.attention.attend(self.plan, layer, q, k, v)


class NodesPlan:
    """What all planned attention of one step over nodes has in common."""

    _kv_kinds: Sequence[Kind]
    """The messages with which k and v are sent."""

    def __init__(
        self,
        number: int,
        nodes: list[NodeRows],
        wire: WireFormat,
        backend: Backend,
        layers: Sequence[AttentionLayer],
        staging: Staging,
        here: PlannedRows,
    ) -> None:
        """here: the rows that attend in this process."""
        self._layers, self._here = layers, here
        self.staging = staging
        # k and v of layers that others share
        self._owners = {layer.shares for layer in layers if layer.shares is not None}
        self._kept: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._number = number
        self._nodes = nodes
        staged = [node for node in nodes if node.lane is None]
        self._posted = staged
        self._queried = [node for node in staged if node.num_queries]
        self._query_span = _span([node.query_runs for node in self._queried])
        self._kv_span = _span([node.kv_runs(kind) for node in staged for kind in self._kv_kinds])
        self._wire = wire
        self._backend = backend

    def begin(self, layer: int, q: Tensor) -> Ticket:
        for node, lane in self._by_lane():
            part = node.parts[layer]
            rows = _heads_of(q, node.query_runs, part.first_head, part.num_heads)
            with _losing(node.link):
                lane.send_queries(layer, rows)
        if self._query_span is not None:
            # int8 is made by this machine's kernels; other types where q is
            is_float = self._wire.rows is not WireType.INT8
            tensors = encode(_dense(q), self._wire.rows) if is_float else [_dense(q)]
            self.staging.send(tensors, self._query_span, partial(self._post_queries, layer))
        return Ticket(layer, q)

    def _by_lane(self) -> list[tuple[NodeRows, LaneStep]]:
        return [(node, node.lane) for node in self._nodes if node.lane is not None]

    def _post_queries(self, layer: int, tensors: Sequence[Tensor]) -> None:
        if self._wire.rows is WireType.INT8:
            tensors = encode(tensors[0], WireType.INT8)
        for node in self._queried:
            part = node.parts[layer]
            segments: list[Segment] = []
            for x in tensors:
                segments += _pieces(x, node.query_runs, part.first_head, part.num_heads)
            self.post(node, Kind.QUERY, layer, node.num_queries, segments)

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

    def store(
        self, layer: int, k: Tensor | None, v: Tensor | None, rotation: Rotation | None
    ) -> tuple[Tensor, Tensor | None]:
        """Sends k and v of a layer, without attention. Returns them as they were sent."""
        k, v = self._keys(layer, k, v, rotation)
        if self._layers[layer].shares is None:
            self._send_kv(layer, k, v)
        return k, v

    def _send_kv(self, layer: int, k: Tensor, v: Tensor | None) -> None:
        """Sends k and v, or k alone: with OWN of the query rows, with UPDATE of the appended
        ones."""
        tensors = [k] if v is None else [k, v]
        for node, lane in self._by_lane():
            if lane.has_kv:  # by a lane it is either OWN or UPDATE
                part, runs = node.parts[layer], node.kv_runs(self._kv_kinds[0])
                first, count = part.first_kv_head, part.num_kv_heads
                with _losing(node.link):
                    lane.send_kv(layer, [_heads_of(x, runs, first, count) for x in tensors])
        if self._kv_span is not None:
            self.staging.send(tensors, self._kv_span, partial(self._post_kv, layer))

    def _post_kv(self, layer: int, tensors: Sequence[Tensor]) -> None:
        for kind in self._kv_kinds:
            for node in self._posted:
                runs = node.kv_runs(kind)
                if num_rows := sum([count for _, count in runs]):
                    part = node.parts[layer]
                    segments: list[Segment] = []
                    for x in tensors:
                        segments += _pieces(x, runs, part.first_kv_head, part.num_kv_heads)
                    self.post(node, kind, layer, num_rows, segments)

    def post(
        self, node: NodeRows, kind: Kind, layer: int, num_rows: int, segments: list[Segment]
    ) -> None:
        dtype = self._wire.rows if kind is Kind.QUERY else self._wire.kv
        try:
            node.link.post_rows(kind, self._number, layer, dtype, num_rows, segments)
        except TransportError as error:
            raise lost(node.link, error) from error

    def receive(self, kind: Kind, layer: int, read: ReadAnswer, take: TakeAnswer) -> None:
        """Waits for the nodes' answers, in order. read returns the tensors of a body, which are
        passed to take where the model computes."""
        self.staging.flush()
        for node in self._nodes:
            if not node.num_queries:
                continue
            link = node.link
            if node.lane is not None:
                with _losing(link):
                    found = node.lane.receive(layer)
                take(node, found)
                continue
            try:
                header, frame = link.answer(self._number, layer, node.num_keys)
                if (header.kind, header.rows) != (kind, node.num_queries):
                    text = f"{header.kind.name} of {header.rows} rows, not {node.num_queries}"
                    raise WireError(ErrorCode.SHAPE, text)
                found = list(read(node.parts[layer].rows, view_of(frame)[HEADER_BYTES:], header))
                take(node, [self.staging.receive(x) for x in found])
            except (TransportError, WireError) as error:
                raise lost(link, error) from error
            link.endpoint.release(frame)


class RemotePlan(NodesPlan):
    """The planned attention of one step, where a node has all tokens of its sequences."""

    _kv_kinds = (Kind.OWN, Kind.UPDATE)

    def finish(
        self, ticket: Ticket, k: Tensor | None, v: Tensor | None, rotation: Rotation | None
    ) -> Pending:
        layer, q, _ = ticket
        k, v = self.store(layer, k, v, rotation)
        shape = self._layers[layer]
        out = q.new_empty(*q.shape[:2], shape.value_dim or q.shape[2])
        if runs := self._here.runs:
            own_v = None if v is None else rows_of(v, runs)
            here, _ = self._here.attend(layer, rows_of(q, runs), rows_of(k, runs), own_v)
            copy_rows(here, out, runs)
        return RemotePending(self, layer, out)


@dataclass(slots=True)
class RemotePending:
    """A layer's attention while nodes compute it. out has the rows that were computed here."""

    plan: RemotePlan
    layer: int
    out: Tensor

    def wait(self) -> Tensor:
        self.plan.receive(Kind.RESULT, self.layer, _read_result, self._take)
        return self.out

    def _take(self, node: NodeRows, found: Sequence[Tensor]) -> None:
        part, [out] = node.parts[self.layer], found
        copy_rows(out, self.out if part.own is None else self.out[:, part.own], node.query_runs)


def _read_result(rows: WireRows, body: memoryview, header: Header) -> list[Tensor]:
    return [rows.read_result(body, header)]


@contextmanager
def _losing(link: NodeLink) -> Iterator[None]:
    """Makes an error of a transport the loss of the node."""
    try:
        yield
    except TransportError as error:
        raise lost(link, error) from error


def layer_shard(shard: Shard, layer: AttentionLayer) -> LayerShard:
    first, kv_heads = shard.heads(layer)
    group = layer.num_heads // layer.num_kv_heads
    heads = group * kv_heads
    own = slice(first * group, first * group + heads) if heads < layer.num_heads else None
    rows = WireRows(heads, kv_heads, layer.head_dim, layer.value_dim)
    return LayerShard(first * group, heads, first, kv_heads, rows, own)


def _span(runs_of: Sequence[Sequence[tuple[int, int]]]) -> tuple[int, int] | None:
    """Returns the first row of all runs and the row after the last one; None without runs."""
    ends = [(first, first + length) for runs in runs_of for first, length in runs]
    return (min(first for first, _ in ends), max(end for _, end in ends)) if ends else None


def rows_of(x: Tensor, runs: Sequence[tuple[int, int]]) -> Tensor:
    parts = [x[first : first + length] for first, length in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def copy_rows(rows: Tensor, to: Tensor, runs: Sequence[tuple[int, int]]) -> None:
    """Copies rows to these runs of rows."""
    at = 0
    for first, length in runs:
        to[first : first + length] = rows[at : at + length]
        at += length


def _heads_of(
    x: Tensor, runs: Sequence[tuple[int, int]], first_head: int, num_heads: int
) -> list[Tensor]:
    """Returns views of these rows and heads of x [T, H, D], by run."""
    heads = x[:, first_head : first_head + num_heads]
    return [heads[first : first + length] for first, length in runs]


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


def extend_runs(runs: list[tuple[int, int]], first: int, length: int) -> None:
    """Adds rows to runs (first row, length) that end before them."""
    if runs and sum(runs[-1]) == first:
        runs[-1] = runs[-1][0], runs[-1][1] + length
    else:
        runs.append((first, length))
