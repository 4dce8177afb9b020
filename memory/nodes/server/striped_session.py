"""A session of an engine that puts some tiles of each sequence here, and whose rows choose among
those of all nodes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from memory.nodes.attach import STRIPE_TOKENS, AttachRequest
from memory.nodes.placement import Shard, largest_lists
from memory.nodes.server.node_attention import TiledNodeAttention
from memory.nodes.server.node_session import Answer, NodeSession, PlannedRows
from memory.nodes.server.node_stripes import StripedQueries
from memory.nodes.wire import (
    HEADER_BYTES,
    Append,
    ErrorCode,
    Header,
    Kind,
    NodePlan,
    WireError,
)
from memory.nodes.wire_rows import expect
from memory.pages.virtual_memory import VirtualMemory
from ops.backend import Backend, Partial

_MAX_BEGUN = 2  # layers whose rows are about to choose: an engine has two batches in flight
_COUNT_BYTES = 4


@dataclass(slots=True)
class _BegunLayer:
    """A layer whose QUERY has arrived. is_written: whether k and v of the sequences whose rows
    choose are there. lists: those of the part `len(found)`, once they are sent. found: the results
    of earlier parts; rest: that of the rows that do not choose."""

    query: Header
    q: Tensor
    is_written: bool
    lists: Tensor | None = None
    found: list[Partial] = field(default_factory=list)
    rest: Partial | None = None
    has_rest: bool = False


class StripedSession(NodeSession):
    """A NodeSession with a stripe."""

    def __init__(
        self,
        request: AttachRequest,
        memory: VirtualMemory,
        backend: Backend,
        num_mappings: int = 1 << 62,
        most_mappings: Callable[[], int] = lambda: 1 << 62,
    ) -> None:
        assert request.stripe is not None, "a session with a stripe"
        self._shard = Shard("sequence", *request.stripe)
        self._layers_begun: OrderedDict[int, _BegunLayer] = OrderedDict()  # by plan
        super().__init__(request, memory, backend, num_mappings, most_mappings)

    def close(self) -> None:
        self._layers_begun.clear()
        super().close()

    # ---- plans

    def _check_queries(self, plan: NodePlan) -> None:
        positions = iter(plan.positions)
        may_choose = True
        for index, num_rows, num_keys, num_own in plan.queries:
            self._check_range(index, num_rows)
            if num_own not in (0, num_rows) or (num_own and not may_choose):
                raise WireError(ErrorCode.SHAPE, f"{num_own} choosing rows of {num_rows}")
            may_choose = bool(num_own)
            due = num_keys or 1  # a prefix is never empty
            if num_own:
                due = self._shard.num_tokens(next(positions) + num_rows)
            if num_keys != due:
                raise WireError(ErrorCode.SHAPE, f"{num_rows} rows over {num_keys} keys, not {due}")
            if num_keys:
                self._require(index, 0, num_keys)

    def _prepare(
        self, plan: NodePlan, num_query_rows: int, num_append_rows: int, num_views: int
    ) -> PlannedRows:
        chosen = {query.range for query in plan.queries if query.num_own}
        own = [item for item in plan.appends if item.range in chosen]
        if own != list(plan.appends[: len(own)]):
            raise WireError(ErrorCode.SHAPE, "appends to ranges whose rows choose come first")
        others, num_own = plan.appends[len(own) :], sum([item.num_rows for item in own])
        return PlannedRows(
            [self._queries(group, plan, own) for group in self._groups],
            [group.plan_appends(others) if others else None for group in self._groups],
            num_query_rows,
            num_own,
            num_append_rows - num_own,
            num_views,
        )

    def _queries(
        self, group: object, plan: NodePlan, own: Sequence[Append]
    ) -> StripedQueries | None:
        if not plan.queries:
            return None
        assert isinstance(group, TiledNodeAttention), "K/V in tiles"
        return StripedQueries(group, plan, own, self._shard)

    # ---- rows

    def take(self, header: Header, message: memoryview) -> Answer | None:
        """Takes a QUERY, OWN or CHOICE. Returns the answer, if one is due, which the caller sends
        before the next call."""
        if header.kind is Kind.QUERY:
            return self._take_query(header, message)
        if header.kind is Kind.OWN:
            return self._take_own(header, message)
        return self._take_choice(header, message)

    def _take_query(self, header: Header, message: memoryview) -> Answer | None:
        plan, q = self._read_q(header, message)
        queries, index = self._queries_of(plan, header)
        has_kv = plan.num_own_rows > 0 and not self._has_no_kv(header.layer)
        begun = _BegunLayer(header, q, is_written=not has_kv)
        if not queries.num_rows:
            return self._result(begun, queries, index)
        begun.q = q.clone()  # the message is released
        self._layers_begun.pop(header.plan, None)
        while len(self._layers_begun) >= _MAX_BEGUN:
            self._layers_begun.popitem(last=False)
        self._layers_begun[header.plan] = begun
        return self._advance(begun, queries, index)

    def _take_own(self, header: Header, message: memoryview) -> Answer | None:
        plan = self._planned(header)
        begun = self._begun_layer(header)
        if begun.is_written or header.rows != plan.num_own_rows:
            text = f"{header.rows} rows of k and v, {plan.num_own_rows} due once"
            raise WireError(ErrorCode.STALE, text)
        k, v = self._rows[header.layer].read_kv(message[HEADER_BYTES:], header)
        queries, index = self._queries_of(plan, header)
        queries.write(index, k, v)
        begun.is_written = True
        return self._advance(begun, queries, index) if begun.lists is None else None

    def _take_choice(self, header: Header, message: memoryview) -> Answer | None:
        plan = self._planned(header)
        begun = self._begun_layer(header)
        queries, index = self._queries_of(plan, header)
        lists, number = begun.lists, len(begun.found)
        if lists is None or not begun.is_written:
            raise WireError(ErrorCode.STALE, f"a choice of layer {header.layer} without its lists")
        counts = self._read_counts(header, message[HEADER_BYTES:], queries, number)
        begun.found.append(queries.attend_listed(index, begun.q, number, lists, counts))
        begun.lists = None
        if len(begun.found) < len(queries.parts):
            return self._advance(begun, queries, index)
        return self._result(begun, queries, index)

    def _read_counts(
        self, header: Header, body: memoryview, queries: StripedQueries, number: int
    ) -> Tensor:
        part = queries.parts[number]
        heads = self.request.layers[header.layer].num_kv_heads
        if header.rows != part.num_rows:
            raise WireError(ErrorCode.SHAPE, f"{header.rows} rows choose, {part.num_rows} due")
        expect(len(body), header.rows * heads * _COUNT_BYTES, header)
        counts = torch.frombuffer(body, dtype=torch.int32).view(header.rows, heads)
        if bool((counts < 0).any()) or bool((counts > part.shares.listed[:, None]).any()):
            raise WireError(ErrorCode.RANGE, "more tiles are chosen than are listed")
        return counts

    def _advance(self, begun: _BegunLayer, queries: StripedQueries, index: int) -> Answer | None:
        """Returns the next answer, or None if k and v have to be there first."""
        if not queries.selects(index):
            if not begun.is_written:
                return None
            begun.found.append(queries.attend_all(index, begun.q))
            return self._result(begun, queries, index)
        if queries.is_late and not begun.is_written:
            return None
        number = len(begun.found)
        begun.lists = queries.list(index, begun.q, number)
        query = begun.query._replace(rows=queries.parts[number].num_rows)
        return self._answer(Kind.TILES, query, [begun.lists])

    def rest(self) -> None:
        """Attends with the rows that do not choose, while the engine chooses for others."""
        for number, begun in self._layers_begun.items():
            plan = self._plans.get(number)
            if plan is not None and not begun.has_rest:
                queries, index = self._queries_of(plan, begun.query)
                begun.rest, begun.has_rest = queries.attend_rest(index, begun.q), True

    def _result(self, begun: _BegunLayer, queries: StripedQueries, index: int) -> Answer:
        """Returns the results of all rows."""
        if not begun.has_rest:
            begun.rest = queries.attend_rest(index, begun.q)
        self._layers_begun.pop(begun.query.plan, None)
        parts = begun.found if begun.rest is None else [*begun.found, begun.rest]
        if len(parts) == 1:
            return self._partial(begun.query, parts[0])
        outs, lses = zip(*parts, strict=True)
        return self._partial(begun.query, Partial(torch.cat(outs), torch.cat(lses)))

    def _begun_layer(self, header: Header) -> _BegunLayer:
        begun = self._layers_begun.get(header.plan)
        if begun is None or begun.query.layer != header.layer:
            text = f"{header.kind.name} of layer {header.layer} without its q"
            raise WireError(ErrorCode.STALE, text)
        return begun

    def _queries_of(self, plan: PlannedRows, header: Header) -> tuple[StripedQueries, int]:
        group, index = self._layer_index[header.layer]
        queries = plan.queries[group]
        assert isinstance(queries, StripedQueries), "a plan with queries"
        return queries, index


def check_lists(request: AttachRequest, most: int) -> None:
    """Raises WireError if lists of tiles may be longer than messages of this node, so that it makes
    none that it cannot send."""
    num_tiles = request.num_places[0] * request.page_tokens[0] // STRIPE_TOKENS
    if (largest := largest_lists(request.layers, num_tiles, request.max_rows)) > most:
        raise WireError(ErrorCode.SHAPE, f"lists of {largest} bytes, messages have {most} at most")


def open_session(
    request: AttachRequest,
    memory: VirtualMemory,
    backend: Backend,
    num_mappings: int,
    most_mappings: Callable[[], int],
) -> NodeSession:
    """Returns the session of an engine that attaches; the arguments are those of NodeSession."""
    kind = NodeSession if request.stripe is None else StripedSession
    return kind(request, memory, backend, num_mappings, most_mappings)
