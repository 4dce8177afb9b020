"""The attention seam over memory nodes: the engine sends q, k and v and receives results.

`begin` sends q of the rows whose K/V is on the nodes. Meanwhile the model projects k and v, which
`finish` sends, without waiting. It also attends here over prompts that are in the prompt tail cache
(prompt_tail_cache.py), and `wait` receives the nodes' results. A node that has all tokens of a
sequence computes what local attention would compute, with the same kernels on the same numbers, so
that results have the same bits.

With a kv_policy the nodes choose what rows of answers read, by the rule of local attention: they
are told where each sequence's prompt ends. Single rows choose with q alone, among earlier tiles.

In partition mode `sequence` a node has only some tokens. There the nodes compute prefix attention,
which needs q alone, `finish` computes the new-token attention locally, and `wait` merges the
results by their log-sum-exp. With a kv_policy `wait` first chooses what rows of answers read
(split_plan.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

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
    RemotePlan,
    extend_runs,
    layer_shard,
)
from memory.nodes.split_plan import (
    ChoosingPlan,
    ChoosingRows,
    PrefixPlan,
    choosing_rows_on,
    selects,
    whole_rows,
)
from memory.nodes.staging import HOST_STAGING, Staging
from memory.nodes.wire import Append, NodePlan, Query, WireFormat
from memory.policies.selection import Selection
from memory.policies.setting import KVPolicy
from ops.backend import Backend
from quant.kv import TILE_TOKENS
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
        selection: Selection | None = None,
    ) -> None:
        """num_ranges is the number of ranges in each partition. staging: moves rows between the
        model's memory and this machine's. selection: that of the nodes' kv_policy."""
        self.staging = staging
        self.selection = selection
        self.layers = list(layers)
        self.new_token_attention = new_token_attention
        self.backend = backend
        self._choosing_heads = max(
            [x.num_kv_heads for i, x in enumerate(layers) if selects(layers, i)], default=1
        )
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

    def plan(self, step: AttentionStep) -> RemotePlan | PrefixPlan | ChoosingPlan:
        number = next(self._numbers)
        self.staging.reset()
        spans, num_keys = self._extend_tails(step)
        selected = choosing = None
        if self._nodes.prefix_only:
            choosing = self._choose(step)
        else:
            selected = self._select(step, num_keys)
        planned: list[NodeRows] = []
        for index, partition in enumerate(self._nodes.partitions):
            edits = partition.edits.take()
            for link in partition.links:
                node, plan = (
                    self._plan_rows(link, step, index, num_keys, selected)
                    if choosing is None
                    else choosing_rows_on(
                        link, self._parts_of(link), step, num_keys, choosing, self._range_tokens
                    )
                )
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
        common = number, planned, self.wire, self.backend, self.layers, self.staging
        if choosing is not None:
            return ChoosingPlan(*common, self._plan_whole(step, spans, choosing), choosing)
        if self._nodes.prefix_only:
            new = self.new_token_attention.plan(step.num_decodes, step.num_rows, spans)
            return PrefixPlan(*common, PlannedRows([], self.new_token_attention, new))
        return RemotePlan(*common, self._plan_tails(step, spans))

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
                extend_runs(runs, row, num_rows)
            row += num_rows
        num_rows_of = [n for n, span in zip(step.num_rows, spans, strict=True) if span is not None]
        kept = [span for span in spans if span is not None]
        plan = self.new_token_attention.plan(0, num_rows_of, kept) if runs else None
        return PlannedRows(runs, self.new_token_attention, plan)

    def _choose(self, step: AttentionStep) -> ChoosingRows | None:
        """Returns the rows that choose among the tiles of all nodes; None if none does."""
        if self.selection is None or step.prompt_lens is None:
            return None
        counts, budgets = self.selection.plan(
            step.num_rows, step.kv_lens, step.prompt_lens, TILE_TOKENS, step.policies
        )
        choosing = ChoosingRows(step, counts, budgets, self._choosing_heads)
        return choosing if choosing.positions else None

    def _plan_whole(
        self, step: AttentionStep, spans: Sequence[TailSpan | None], choosing: ChoosingRows
    ) -> PlannedRows:
        """Returns the rows that do not choose, which attend here over each other."""
        runs, whole = whole_rows(step, choosing)
        kept = [(n, span) for n, span in zip(whole, spans, strict=True) if n]
        num_decodes = sum([n > 0 for n in whole[: step.num_decodes]])
        plan = None
        if kept:
            plan = self.new_token_attention.plan(num_decodes, *zip(*kept, strict=True))
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
        ends = None if self.selection is None else step.prompt_lens
        for i, start in enumerate(step.starts):
            # rows of an answer that are computed again select what they read, which nodes do
            if i < step.num_decodes or (ends is not None and step.kv_lens[i] > ends[i]):
                tail_cache.drop(start)
                continue
            kept = tail_cache.extend(start, step.kv_lens[i] - step.num_rows[i], step.num_rows[i])
            if kept is not None:
                spans[i], num_keys[i] = kept
        return spans, num_keys

    def _select(self, step: AttentionStep, num_keys: Sequence[int]) -> _Selected | None:
        """Returns what rows select on the nodes, and counts their tiles; None without a policy.
        num_keys: the tokens of each sequence over which the nodes attend."""
        if self.selection is None:
            return None
        if step.prompt_lens is None:
            return _Selected(step.kv_lens, None, [0] * len(num_keys))
        counts, budgets = self.selection.plan(
            step.num_rows, step.kv_lens, step.prompt_lens, TILE_TOKENS, step.policies
        )
        num_skipped, at = [], 0
        for selecting, keys in zip(counts, num_keys, strict=True):
            # the bounds of a tile take about as many bytes as one of its tokens
            num_read = sum(budgets[at : at + selecting]) * TILE_TOKENS
            num_read += selecting * (keys // TILE_TOKENS)
            num_skipped.append(max(0, selecting * keys - num_read))
            at += selecting
        return _Selected(step.prompt_lens, step.policies, num_skipped)

    def _partitions_of(self, step: AttentionStep) -> set[int]:
        return {start // self._partition_tokens for start in step.starts}

    def _plan_rows(
        self,
        link: NodeLink,
        step: AttentionStep,
        partition: int,
        num_keys: Sequence[int],
        selected: _Selected | None,
    ) -> tuple[NodeRows, NodePlan]:
        """num_keys: the tokens of each sequence over which the nodes attend. selected: what the
        sequences' rows select."""
        shard, row = link.shard, 0
        range_tokens = self._range_tokens
        first_start = partition * self._partition_tokens
        end = first_start + self._partition_tokens
        queries: list[Query] = []
        appends: list[Append] = []
        query_runs: list[tuple[int, int]] = []
        append_runs: list[tuple[int, int]] = []
        queried: list[int] = []
        sequences = zip(step.starts, step.num_rows, step.kv_lens, num_keys, strict=True)
        for i, (start, num_rows, kv_len, attended) in enumerate(sequences):
            if not first_start <= start < end:
                row += num_rows
                continue
            index, position = (start - first_start) // range_tokens, kv_len - num_rows
            keys = shard.num_tokens(attended)
            if keys:
                queried.append(i)
                queries.append(Query(index, num_rows, keys))
                extend_runs(query_runs, row, num_rows)
            num_appends = 0
            is_own = keys and not self._nodes.prefix_only
            for first, length in [] if is_own else shard.runs(position, kv_len):
                extend_runs(append_runs, row + first - position, length)
                num_appends += length
            if num_appends:
                appends.append(Append(index, num_appends, shard.num_tokens(position)))
            row += num_rows
        num_queries = sum([n for _, n in query_runs])
        rows = None
        if num_queries < row:
            indices = [place for at, n in query_runs for place in range(at, at + n)]
            rows = self.staging.receive(torch.tensor(indices, dtype=torch.int64))
        all_keys = sum([query.num_rows * query.num_keys for query in queries])
        chosen, num_skipped = _NONE_SELECTED if selected is None else selected.of(queried)
        node = NodeRows(
            link,
            self._parts_of(link),
            query_runs,
            append_runs,
            num_queries,
            sum([n for _, n in append_runs]),
            rows,
            all_keys - num_skipped,
        )
        return node, NodePlan([], queries, appends, *chosen)

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


class _Selected(NamedTuple):
    """What rows select on the nodes. prompt_lens: of each sequence; the rows after it select.
    policies: as in AttentionStep. num_skipped: how many keys they do not read, about, the sum over
    the rows of a sequence."""

    prompt_lens: Sequence[int]
    policies: Sequence[KVPolicy | None] | None
    num_skipped: Sequence[int]

    def of(self, numbers: Sequence[int]) -> tuple[_Chosen, int]:
        """Returns what a plan says of some sequences: the lengths of their prompts and their
        budgets; and how many keys they do not read."""
        policies = () if self.policies is None else [self.policies[i] for i in numbers]
        own = policies if any(policies) else ()
        skipped = sum([self.num_skipped[i] for i in numbers])
        return ([self.prompt_lens[i] for i in numbers], own), skipped


_Chosen = tuple[Sequence[int], Sequence[KVPolicy | None]]
_NONE_SELECTED: tuple[_Chosen, int] = ([], ()), 0
