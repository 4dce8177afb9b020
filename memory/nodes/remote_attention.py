"""The attention seam over memory nodes: the engine sends q and receives partial results.

`begin` sends q of the rows that have a prefix on the nodes. Meanwhile the model projects k and v.
`finish` sends those, without waiting, and computes the new-token attention locally. `wait` receives
the nodes' partial results and merges them by their log-sum-exp. So the engine waits only for prefix
attention, and not at all for a prompt's first chunk. Lamina's nodes (arXiv 2405.01814, section 4.3)
answer only after they have k and v.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from memory.attention.seam import AttentionLayer, AttentionStep, Rotation, Ticket
from memory.nodes.new_token_attention import NewTokenAttention
from memory.nodes.node_link import NodeLink
from memory.nodes.node_loop import view_of
from memory.nodes.node_set import NodeSet
from memory.nodes.placement import Shard
from memory.nodes.prompt_tail_cache import PromptTailCache, TailSpan
from memory.nodes.wire import (
    HEADER_BYTES,
    Append,
    ErrorCode,
    Kind,
    NodePlan,
    Query,
    WireError,
    WireType,
)
from memory.nodes.wire_rows import WireRows, encode, float_type, kv_type
from ops.backend import Backend, Partial
from transport.base import Segment, TransportError


class NodesLostError(Exception):
    """K/V on a memory node cannot be reached and has to be computed again."""


class _LayerShard(NamedTuple):
    """A layer's heads and K/V heads on a node, and their rows in messages. own selects them among
    all heads; it is None if the node has all."""

    first_head: int
    num_heads: int
    first_kv_head: int
    num_kv_heads: int
    rows: WireRows
    own: slice | None


@dataclass(slots=True)
class _NodeRows:
    """The step's rows for one node. parts is indexed by layer. query_runs and append_runs are runs
    (first row, length) of the step's rows. rows has the indices of the query rows; it is None if
    all rows query."""

    link: NodeLink
    parts: list[_LayerShard]
    query_runs: list[tuple[int, int]]
    append_runs: list[tuple[int, int]]
    num_queries: int
    num_appends: int
    rows: Tensor | None


class RemoteAttention:
    """PlannedAttention over the links of one placement."""

    is_remote = True

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        new_token_attention: NewTokenAttention,
        backend: Backend,
        nodes: NodeSet,
        range_tokens: int,
        num_ranges: int,
        wire: WireType,
        tail_cache: PromptTailCache | None = None,
    ) -> None:
        """num_ranges is the number of ranges in each partition."""
        self.layers = list(layers)
        self.new_token_attention = new_token_attention
        self.backend = backend
        self.wire = wire
        self.tail_cache = tail_cache
        self._nodes = nodes
        self._range_tokens = range_tokens
        self._partition_tokens = range_tokens * num_ranges
        self._parts: dict[NodeLink, list[_LayerShard]] = {}
        self._numbers = count(1)
        for partition in nodes.partitions:
            partition.edits.on_release = self._send_edits

    def _parts_of(self, link: NodeLink) -> list[_LayerShard]:
        parts = self._parts.get(link)
        if parts is None:
            parts = [_layer_shard(link.shard, layer) for layer in self.layers]
            self._parts = {old: self._parts[old] for old in self._parts if not old.is_lost}
            self._parts[link] = parts
        return parts

    def plan(self, step: AttentionStep) -> RemotePlan:
        number = next(self._numbers)
        spans, num_prefix_tokens = self._extend_tails(step)
        planned: list[_NodeRows] = []
        for index, partition in enumerate(self._nodes.partitions):
            edits = partition.edits.take()
            for link in partition.links:
                node, plan = self._plan_rows(link, step, index, num_prefix_tokens)
                if not (edits or plan.queries or plan.appends):
                    continue
                try:
                    link.look()
                    link.post_plan(number, plan._replace(edits=edits))
                except TransportError as error:
                    raise lost(link, error) from error
                planned.append(node)
            if not partition.links and index in self._partitions_of(step):
                raise NodesLostError("no memory node holds this K/V")
        new = self.new_token_attention.plan(step.num_decodes, step.num_rows, spans)
        return RemotePlan(self, number, planned, new)

    def _extend_tails(self, step: AttentionStep) -> tuple[list[TailSpan | None], list[int]]:
        """Updates the prompt tail cache. Returns each sequence's span in it, and the number of
        tokens before the span, which only the nodes have."""
        spans: list[TailSpan | None] = [None] * len(step.starts)
        num_prefix_tokens = [
            length - n for length, n in zip(step.kv_lens, step.num_rows, strict=True)
        ]
        tail_cache = self.tail_cache
        if tail_cache is None:
            return spans, num_prefix_tokens
        if any(partition.is_local for partition in self._nodes.partitions):
            tail_cache.clear()  # the local node uses this memory now
            return spans, num_prefix_tokens
        for i, start in enumerate(step.starts):
            if i < step.num_decodes:
                tail_cache.drop(start)
                continue
            kept = tail_cache.extend(start, num_prefix_tokens[i], step.num_rows[i])
            if kept is not None:
                spans[i], num_prefix_tokens[i] = kept
        return spans, num_prefix_tokens

    def _partitions_of(self, step: AttentionStep) -> set[int]:
        return {start // self._partition_tokens for start in step.starts}

    def _plan_rows(
        self, link: NodeLink, step: AttentionStep, partition: int, num_prefix_tokens: Sequence[int]
    ) -> tuple[_NodeRows, NodePlan]:
        """num_prefix_tokens: the prefix tokens of each sequence over which the nodes attend."""
        shard, row = link.shard, 0
        range_tokens = self._range_tokens
        first_start = partition * self._partition_tokens
        end = first_start + self._partition_tokens
        queries: list[Query] = []
        appends: list[Append] = []
        query_runs: list[tuple[int, int]] = []
        append_runs: list[tuple[int, int]] = []
        for start, num_rows, kv_len, num_prefix in zip(
            step.starts, step.num_rows, step.kv_lens, num_prefix_tokens, strict=True
        ):
            if not first_start <= start < end:
                row += num_rows
                continue
            index, position = (start - first_start) // range_tokens, kv_len - num_rows
            keys = shard.num_tokens(num_prefix)
            if keys:
                queries.append(Query(index, num_rows, keys))
                _extend(query_runs, row, num_rows)
            num_appends = 0
            for first, length in shard.runs(position, kv_len):
                _extend(append_runs, row + first - position, length)
                num_appends += length
            if num_appends:
                appends.append(Append(index, num_appends, shard.num_tokens(position)))
            row += num_rows
        num_queries = sum([n for _, n in query_runs])
        rows = None
        if num_queries < row:
            rows = torch.tensor([i for at, n in query_runs for i in range(at, at + n)])
        node = _NodeRows(
            link,
            self._parts_of(link),
            query_runs,
            append_runs,
            num_queries,
            sum([n for _, n in append_runs]),
            rows,
        )
        return node, NodePlan([], queries, appends)

    def _send_edits(self) -> None:
        """Sends edits outside of a step, so that nodes return released memory to the system."""
        if self.tail_cache is not None:
            self.tail_cache.trim()
        number = next(self._numbers)
        for partition in self._nodes.partitions:
            edits = partition.edits.take()
            for link in partition.links:
                try:
                    link.post_plan(number, NodePlan(edits, [], []))
                except TransportError:
                    link.close()  # the next step fails, because pages differ now
                    break


class RemotePlan:
    """The planned attention of one step."""

    def __init__(
        self, parent: RemoteAttention, number: int, nodes: list[_NodeRows], new: object
    ) -> None:
        self._parent = parent
        self._number = number
        self._nodes = nodes
        self._new = new

    def begin(self, layer: int, q: Tensor) -> Ticket:
        parent = self._parent
        queried = [node for node in self._nodes if node.num_queries]
        tensors = encode(_dense(q), parent.wire) if queried else []
        for node in queried:
            part = node.parts[layer]
            segments: list[Segment] = []
            for x in tensors:
                segments += _pieces(x, node.query_runs, part.first_head, part.num_heads)
            self._post(node, Kind.QUERY, layer, node.num_queries, segments)
        return Ticket(layer, q)

    def finish(
        self, ticket: Ticket, k: Tensor, v: Tensor, rotation: Rotation | None
    ) -> RemotePending:
        layer, q = ticket
        parent = self._parent
        if rotation is not None:
            k = parent.backend.rotary(k, *rotation)
        dtype = float_type(parent.wire)
        wire_k, wire_v = _dense(k.to(dtype)), _dense(v.to(dtype))
        for node in self._nodes:
            if node.num_appends:
                part = node.parts[layer]
                segments: list[Segment] = []
                for x in (wire_k, wire_v):
                    segments += _pieces(x, node.append_runs, part.first_kv_head, part.num_kv_heads)
                self._post(node, Kind.UPDATE, layer, node.num_appends, segments)
        out, lse = parent.new_token_attention.attend(self._new, layer, q, wire_k, wire_v)
        return RemotePending(self, layer, Partial(out, lse), q.dtype)

    def _post(
        self, node: _NodeRows, kind: Kind, layer: int, num_rows: int, segments: list[Segment]
    ) -> None:
        wire = self._parent.wire
        dtype = wire if kind is Kind.QUERY else kv_type(wire)
        try:
            node.link.post_rows(kind, self._number, layer, dtype, num_rows, segments)
        except TransportError as error:
            raise lost(node.link, error) from error

    def merge(self, layer: int, total: Partial) -> None:
        """Waits for the nodes' partial results and merges them into `total`."""
        for node in self._nodes:
            if not node.num_queries:
                continue
            link, (*_, rows, own) = node.link, node.parts[layer]
            try:
                header, frame = link.answer(self._number, layer)
                if header.rows != node.num_queries:
                    raise WireError(ErrorCode.SHAPE, f"{header.rows} rows, not {node.num_queries}")
                body = view_of(frame)[HEADER_BYTES:]
                out, lse = rows.read_partial(body, header)
            except (TransportError, WireError) as error:
                raise lost(link, error) from error
            mine = total if own is None else Partial(total.out[:, own], total.lse[:, own])
            self._parent.backend.merge_into(mine, Partial(out, lse), node.rows)
            del out, lse, body
            link.endpoint.release(frame)


class RemotePending:
    """A layer's attention while nodes compute it."""

    def __init__(self, plan: RemotePlan, layer: int, total: Partial, dtype: torch.dtype) -> None:
        self._plan = plan
        self._layer = layer
        self._total = total
        self._dtype = dtype

    def wait(self) -> Tensor:
        self._plan.merge(self._layer, self._total)
        return self._total.out.to(self._dtype)


def lost(link: NodeLink, error: Exception) -> NodesLostError:
    """Closes a link after any error on it; returns the error to raise."""
    link.close()
    return NodesLostError(f"memory node {link.url}: {error}")


def _layer_shard(shard: Shard, layer: AttentionLayer) -> _LayerShard:
    first, kv_heads = shard.heads(layer)
    group = layer.num_heads // layer.num_kv_heads
    heads = group * kv_heads
    own = slice(first * group, first * group + heads) if heads < layer.num_heads else None
    rows = WireRows(heads, kv_heads, layer.head_dim)
    return _LayerShard(first * group, heads, first, kv_heads, rows, own)


def _extend(runs: list[tuple[int, int]], first: int, length: int) -> None:
    if runs and sum(runs[-1]) == first:
        runs[-1] = runs[-1][0], runs[-1][1] + length
    else:
        runs.append((first, length))


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
