"""The attention seam over memory nodes: the engine sends q, k and v and receives results.

`begin` sends q of the rows whose K/V is on the nodes. Meanwhile the model projects k and v, which
`finish` sends, without waiting. It also attends here over prompts that are in the prompt tail cache
(prompt_tail_cache.py), and `wait` receives the nodes' results. A node that has all tokens of a
sequence computes what local attention would compute, with the same kernels on the same numbers, so
that results have the same bits.

In partition mode `sequence` a node has only some tokens. There the nodes compute prefix attention,
which needs q alone, `finish` computes the new-token attention locally, and `wait` merges the
results by their log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import torch

from memory.attention.seam import AttentionLayer, AttentionStep
from memory.nodes.errors import NodesLostError
from memory.nodes.new_token_attention import NewTokenAttention
from memory.nodes.node_link import NodeLink, lost
from memory.nodes.node_set import NodeSet
from memory.nodes.prompt_tail_cache import PromptTailCache, TailSpan
from memory.nodes.remote_plan import (
    LayerShard,
    NodeRows,
    PlannedRows,
    PrefixPlan,
    RemotePlan,
    layer_shard,
)
from memory.nodes.staging import HOST_STAGING, Staging
from memory.nodes.wire import Append, NodePlan, Query, WireFormat
from ops.backend import Backend
from transport.base import TransportError


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
        wire: WireFormat,
        tail_cache: PromptTailCache | None = None,
        staging: Staging = HOST_STAGING,
    ) -> None:
        """num_ranges is the number of ranges in each partition. staging: moves rows between the
        model's memory and this machine's."""
        self.staging = staging
        self.layers = list(layers)
        self.new_token_attention = new_token_attention
        self.backend = backend
        self.wire = wire
        self.tail_cache = tail_cache
        self._nodes = nodes
        self._range_tokens = range_tokens
        self._partition_tokens = range_tokens * num_ranges
        self._parts: dict[NodeLink, list[LayerShard]] = {}
        self._numbers = count(1)
        for partition in nodes.partitions:
            partition.edits.on_release = self._send_edits

    def _parts_of(self, link: NodeLink) -> list[LayerShard]:
        parts = self._parts.get(link)
        if parts is None:
            parts = [layer_shard(link.shard, layer) for layer in self.layers]
            self._parts = {old: self._parts[old] for old in self._parts if not old.is_lost}
            self._parts[link] = parts
        return parts

    def plan(self, step: AttentionStep) -> RemotePlan | PrefixPlan:
        number = next(self._numbers)
        self.staging.reset()
        spans, num_keys = self._extend_tails(step)
        planned: list[NodeRows] = []
        for index, partition in enumerate(self._nodes.partitions):
            edits = partition.edits.take()
            for link in partition.links:
                node, plan = self._plan_rows(link, step, index, num_keys)
                if not (edits or plan.queries or plan.appends):
                    continue
                try:
                    link.look()
                    node.lane = link.begin_lane(number, node.num_queries, node.num_appends)
                    link.post_plan(number, plan._replace(edits=edits))
                except TransportError as error:
                    raise lost(link, error) from error
                planned.append(node)
            if not partition.links and index in self._partitions_of(step):
                raise NodesLostError("no memory node holds this K/V")
        if self._nodes.prefix_only:
            new = self.new_token_attention.plan(step.num_decodes, step.num_rows, spans)
            rows = PlannedRows([], self.new_token_attention, new)
            return PrefixPlan(
                number, planned, self.wire, self.backend, self.layers, self.staging, rows
            )
        tails = self._plan_tails(step, spans)
        return RemotePlan(
            number, planned, self.wire, self.backend, self.layers, self.staging, tails
        )

    def check_lanes(self) -> None:
        """Raises NodesLostError if a stream was released since the last step was planned, so that
        the step's results are void."""
        for partition in self._nodes.partitions:
            for link in partition.links:
                try:
                    link.check_lane()
                except TransportError as error:
                    raise lost(link, error) from error

    def _plan_tails(self, step: AttentionStep, spans: Sequence[TailSpan | None]) -> PlannedRows:
        """Returns the rows whose prompts are in the prompt tail cache."""
        runs: list[tuple[int, int]] = []
        row = 0
        for num_rows, span in zip(step.num_rows, spans, strict=True):
            if span is not None:
                _extend_runs(runs, row, num_rows)
            row += num_rows
        num_rows_of = [n for n, span in zip(step.num_rows, spans, strict=True) if span is not None]
        kept = [span for span in spans if span is not None]
        plan = self.new_token_attention.plan(0, num_rows_of, kept) if runs else None
        return PlannedRows(runs, self.new_token_attention, plan)

    def _extend_tails(self, step: AttentionStep) -> tuple[list[TailSpan | None], list[int]]:
        """Updates the prompt tail cache. Returns each sequence's span in it, and the number of
        its tokens over which the nodes attend."""
        spans: list[TailSpan | None] = [None] * len(step.starts)
        num_prefix = [n - rows for n, rows in zip(step.kv_lens, step.num_rows, strict=True)]
        num_keys = num_prefix if self._nodes.prefix_only else [*step.kv_lens]
        tail_cache = self.tail_cache
        if tail_cache is None:
            return spans, num_keys
        if any(partition.is_local for partition in self._nodes.partitions):
            tail_cache.clear()  # the local node uses this memory now
            return spans, num_keys
        for i, start in enumerate(step.starts):
            if i < step.num_decodes:
                tail_cache.drop(start)
                continue
            kept = tail_cache.extend(start, step.kv_lens[i] - step.num_rows[i], step.num_rows[i])
            if kept is not None:
                spans[i], num_keys[i] = kept
        return spans, num_keys

    def _partitions_of(self, step: AttentionStep) -> set[int]:
        return {start // self._partition_tokens for start in step.starts}

    def _plan_rows(
        self, link: NodeLink, step: AttentionStep, partition: int, num_keys: Sequence[int]
    ) -> tuple[NodeRows, NodePlan]:
        """num_keys: the tokens of each sequence over which the nodes attend."""
        shard, row = link.shard, 0
        range_tokens = self._range_tokens
        first_start = partition * self._partition_tokens
        end = first_start + self._partition_tokens
        queries: list[Query] = []
        appends: list[Append] = []
        query_runs: list[tuple[int, int]] = []
        append_runs: list[tuple[int, int]] = []
        for start, num_rows, kv_len, attended in zip(
            step.starts, step.num_rows, step.kv_lens, num_keys, strict=True
        ):
            if not first_start <= start < end:
                row += num_rows
                continue
            index, position = (start - first_start) // range_tokens, kv_len - num_rows
            keys = shard.num_tokens(attended)
            if keys:
                queries.append(Query(index, num_rows, keys))
                _extend_runs(query_runs, row, num_rows)
            num_appends = 0
            is_own = keys and not self._nodes.prefix_only
            for first, length in [] if is_own else shard.runs(position, kv_len):
                _extend_runs(append_runs, row + first - position, length)
                num_appends += length
            if num_appends:
                appends.append(Append(index, num_appends, shard.num_tokens(position)))
            row += num_rows
        num_queries = sum([n for _, n in query_runs])
        rows = None
        if num_queries < row:
            indices = [i for at, n in query_runs for i in range(at, at + n)]
            rows = self.staging.receive(torch.tensor(indices, dtype=torch.int64))
        node = NodeRows(
            link,
            self._parts_of(link),
            query_runs,
            append_runs,
            num_queries,
            sum([n for _, n in append_runs]),
            rows,
            sum([query.num_rows * query.num_keys for query in queries]),
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


def _extend_runs(runs: list[tuple[int, int]], first: int, length: int) -> None:
    if runs and sum(runs[-1]) == first:
        runs[-1] = runs[-1][0], runs[-1][1] + length
    else:
        runs.append((first, length))
