"""One engine's session on a memory node: its pages, its ranges, and its attention.

The session is synchronous and has no clock or socket: it takes messages and returns answers, so the
same code serves connections, the engine's local fallback and simulations. It trusts no message: it
checks every page slot, page, length and size against what was granted and is mapped, before it
reads or writes anything.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from memory.attention.seam import Attention, AttentionStep, Ticket
from memory.attention.tiled import TiledKVLayout
from memory.nodes.attach import AttachRequest, NodeLayout
from memory.nodes.server.node_attention import NodeAttention, PlainNodeAttention, TiledNodeAttention
from memory.nodes.server.node_segments import BegunSegments, SegmentQueries
from memory.nodes.server.page_slots import PageSlots
from memory.nodes.wire import (
    HEADER_BYTES,
    Append,
    Edit,
    EditKind,
    ErrorCode,
    Header,
    Kind,
    NodePlan,
    Query,
    WireError,
    read_header,
    read_plan,
)
from memory.nodes.wire_rows import WireRows, encode
from memory.pages.layer_groups import READ_BLOCK
from memory.pages.virtual_memory import VirtualMemory
from ops.backend import Backend, Partial

_MAX_PLANS = 8  # the newest plans, which may be in use at the same time
_MAX_VIEWS = 1 << 17  # views of layers' K/V in all plans; each is an object or two
_MAX_EDITED = 1 << 24  # page slots that one plan edits
_MAX_ANSWERS = 2  # answers whose memory must stay until the next ones


class Answer(NamedTuple):
    """A message to the engine: its header, and the tensors of its body in order."""

    header: Header
    parts: list[Tensor]


@dataclass(slots=True)
class PlannedRows:
    """The rows of a plan that is in use."""

    queries: list[object]  # by layer group
    appends: list[object]
    num_query_rows: int
    num_own_rows: int  # of the query rows, those whose k and v OWN has
    num_append_rows: int
    num_views: int
    queried: set[int] = field(default_factory=set)  # layers whose QUERY has arrived
    updated: set[int] = field(default_factory=set)


class NodeSession:
    """One engine's K/V, and attention over it. One thread at a time uses it."""

    def __init__(
        self,
        request: AttachRequest,
        memory: VirtualMemory,
        backend: Backend,
        num_mappings: int = 1 << 62,
        most_mappings: Callable[[], int] = lambda: 1 << 62,
    ) -> None:
        """memory has the layout's page size and at least request.num_pages pages; `close` closes
        it. The engine was promised num_mappings mappings; beyond those, most_mappings returns its
        current limit."""
        self.request = request
        self.layout = layout = NodeLayout(request)
        assert memory.page_bytes == layout.page_bytes, f"{memory.page_bytes=}"
        self._memory = memory
        self._slots = PageSlots(layout, request.num_pages)
        self._selection = request.selection
        address = memory.reserve(layout.total_bytes)
        self._groups = [self._group(i, address, backend) for i in range(len(layout.groups))]
        self._layer_index = {
            layer: (group, index)
            for group, ids in enumerate(request.group_layers)
            for index, layer in enumerate(ids)
        }
        self._plans: OrderedDict[int, PlannedRows] = OrderedDict()
        self._last_plan = 0
        self._begun: tuple[Header, Ticket | BegunSegments] | None = None  # QUERY, k and v are due
        self._rows = [WireRows.of(layer) for layer in request.layers]
        self._answers: deque[object] = deque(maxlen=_MAX_ANSWERS)
        self._own_mappings = num_mappings
        self._most_mappings = most_mappings
        self.num_queries = 0
        self.num_edits = 0

    def _group(self, number: int, address: int, backend: Backend) -> NodeAttention:
        layout = self.layout.groups[number]
        start, end = self.layout.group_offsets[number : number + 2]
        range_bytes = self.layout.range_bytes(number)
        if isinstance(layout, TiledKVLayout):
            return TiledNodeAttention(layout, address + start, range_bytes, self._selection)
        return PlainNodeAttention(layout, address + start, range_bytes, end - start, backend)

    def close(self) -> None:
        """Frees the memory."""
        self._groups.clear()
        self._plans.clear()
        self._begun = None
        self._memory.close()

    def header(self, message: memoryview) -> Header:
        """Reads a header. Raises WireError for another version or epoch."""
        header = read_header(message)
        if header.epoch != self.request.epoch:
            raise WireError(ErrorCode.STALE, f"epoch {header.epoch}, not {self.request.epoch}")
        return header

    # ---- plans

    def plan(self, header: Header, message: memoryview) -> None:
        """Applies the edits and prepares the queries and updates. The caller has applied all
        updates of earlier plans. Raises WireError, and OSError if there is no memory."""
        if header.plan <= self._last_plan:
            raise WireError(ErrorCode.STALE, f"plan {header.plan} after {self._last_plan}")
        self._last_plan = header.plan
        is_striped = self.request.stripe is not None
        plan = read_plan(message, selects=self._selection is not None, is_striped=is_striped)
        self._check_counts(plan)
        num_rows = self._num_rows(plan.queries), self._num_rows(plan.appends)
        for edit in plan.edits:
            self._slots.check_edit(edit)
            self._edit(edit)
        self.num_edits += len(plan.edits)
        self._check_queries(plan)
        self._check_appends(plan.appends)
        num_views = len(plan.queries) * len(self._rows)
        num_live = sum([old.num_views for old in self._plans.values()])
        while self._plans and (len(self._plans) >= _MAX_PLANS or num_live + num_views > _MAX_VIEWS):
            num_live -= self._plans.popitem(last=False)[1].num_views
        self._plans[header.plan] = self._prepare(plan, *num_rows, num_views)

    def _prepare(
        self, plan: NodePlan, num_query_rows: int, num_append_rows: int, num_views: int
    ) -> PlannedRows:
        return PlannedRows(
            [self._plan_queries(g, plan) if plan.queries else None for g in self._groups],
            [g.plan_appends(plan.appends) if plan.appends else None for g in self._groups],
            num_query_rows,
            self._num_own_rows(plan.queries),
            num_append_rows,
            num_views,
        )

    def _plan_queries(self, group: NodeAttention, plan: NodePlan) -> object:
        queries = plan.queries
        if self.request.prefix_only:
            return group.plan_queries(queries)
        if self.request.by_segment:
            return SegmentQueries(group.partial, group.range_tokens, queries)
        step = AttentionStep(
            sum([item.num_rows == 1 for item in queries]),
            [item.range * group.range_tokens for item in queries],
            [item.num_rows for item in queries],
            [item.num_keys for item in queries],
            plan.prompt_lens if self._selection is not None else None,
            plan.policies or None,
        )
        return group.local.plan(step)

    def _check_counts(self, plan: NodePlan) -> None:
        """Checks that each range is queried and written at most once, and bounds the plan's
        work."""
        named = [(item.range, bool(item.num_own)) for item in plan.queries]
        for ranges in (named, [item.range for item in plan.appends]):
            if len(set(ranges)) < len(ranges):
                raise WireError(ErrorCode.SHAPE, "a range occurs twice")
        if self.request.by_segment and plan.appends:
            raise WireError(ErrorCode.SHAPE, "appends to segments")
        if sum([edit.num_pages for edit in plan.edits]) > _MAX_EDITED:
            raise WireError(ErrorCode.RANGE, "edits of too many page slots")
        if len(plan.queries) * len(self._rows) > _MAX_VIEWS:
            raise WireError(ErrorCode.SHAPE, f"{len(plan.queries)} queries are too many")

    def _edit(self, edit: Edit) -> None:
        kind, part, slot, page, count = edit
        if kind is EditKind.COPY:
            self._memory.copy_page(slot, page)
            return
        if kind is EditKind.RELEASE:
            self._memory.release(page, count)
            return
        offset = self.layout.part_offset(part) + slot * self.layout.page_bytes
        if kind is EditKind.MAP:
            self._memory.map(offset, page, count)
        else:
            self._plans.clear()  # they were checked against mappings that end here
            self._memory.unmap(offset, count)
        self._slots.record(edit)
        if self.num_mappings > self._own_mappings and self.num_mappings > self._most_mappings():
            raise WireError(ErrorCode.FULL, f"{self.num_mappings} mappings are too many")

    @property
    def num_mappings(self) -> int:
        return self._slots.num_mappings

    def _check_queries(self, plan: NodePlan) -> None:
        last = (True, False)  # whether own rows may follow, whether there are several rows
        by_segment, prefix_only = self.request.by_segment, self.request.prefix_only
        for index, num_rows, num_keys, num_own in plan.queries:
            self._check_range(index, num_rows)
            kind = (bool(num_own), num_rows > 1)
            if num_own not in (0, num_rows if by_segment else 0) or kind[0] > last[0]:
                raise WireError(ErrorCode.SHAPE, f"{num_own} own rows of {num_rows}")
            if not num_keys or (kind[0] == last[0] and kind[1] < last[1]):
                raise WireError(ErrorCode.SHAPE, f"{num_rows} rows over {num_keys} keys")
            last = kind
            is_prefix = prefix_only or (by_segment and not num_own)
            if not is_prefix and num_rows > num_keys:
                raise WireError(ErrorCode.SHAPE, f"{num_rows} rows of {num_keys} keys")
            self._require(index, num_keys if is_prefix else num_keys - num_rows, num_keys)

    def _num_own_rows(self, queries: Sequence[Query]) -> int:
        if self.request.by_segment:
            return sum([query.num_own for query in queries])
        return sum([query.num_rows for query in queries])

    def _check_appends(self, appends: Sequence[Append]) -> None:
        for index, num_rows, position in appends:
            self._check_range(index, num_rows)
            self._require(index, position, position + num_rows, is_append=True)

    def _check_range(self, index: int, num_rows: int) -> None:
        if index >= self.request.num_ranges or num_rows < 1:
            raise WireError(ErrorCode.RANGE, f"{num_rows} rows of range {index}")

    def _num_rows(self, items: Sequence[Query] | Sequence[Append]) -> int:
        """Returns the sum of the items' rows, if it is within max_rows. It is cheap, because
        nothing else has been checked yet."""
        num_rows, most = sum([item.num_rows for item in items]), self.request.max_rows
        if num_rows > most or len(items) > most:
            raise WireError(ErrorCode.SHAPE, f"{num_rows} rows in {len(items)}, {most} at most")
        return num_rows

    def _require(self, index: int, first_row: int, end: int, is_append: bool = False) -> None:
        """Requires pages for every token that the kernels touch: up to `end`, from the first token
        that `first_row` sees, or with is_append from `first_row` itself."""
        for number, window in enumerate(self.layout.windows):
            tokens = self.request.page_tokens[number]
            first = first_row if is_append else self._first_visible(window, first_row)
            part = number * self.request.num_ranges + index
            self._slots.require(part, first // tokens, -(-end // tokens))

    @staticmethod
    def _first_visible(window: int | None, row: int) -> int:
        if window is None or row < window:
            return 0
        first = row + 1 - window
        return first - first % READ_BLOCK

    # ---- rows

    def has_plan(self, number: int) -> bool:
        """Returns whether rows of this plan may still come."""
        return number in self._plans

    def rows_of(self, number: int) -> tuple[int, int]:
        """Returns the numbers of querying and of appending rows of a plan that is in use."""
        plan = self._plans[number]
        return plan.num_query_rows, plan.num_append_rows

    def _planned(self, header: Header) -> PlannedRows:
        plan = self._plans.get(header.plan)
        if plan is None:
            raise WireError(ErrorCode.STALE, f"plan {header.plan} is unknown or over")
        if header.layer >= len(self._rows):
            raise WireError(ErrorCode.RANGE, f"layer {header.layer}")
        return plan

    def answers_at_once(self, header: Header) -> bool:
        """Returns whether a QUERY is answered before k and v: by prefix attention, or because the
        layer or the rows have none of their own."""
        if self.request.prefix_only or self._has_no_kv(header.layer):
            return True
        plan = self._plans.get(header.plan)
        return plan is not None and not plan.num_own_rows

    def _has_no_kv(self, layer: int) -> bool:
        layers = self.request.layers
        return layer < len(layers) and layers[layer].shares is not None

    def query(self, header: Header, message: memoryview) -> Answer:
        """Attends with q alone; returns a PARTIAL over the prefix, or else a RESULT, which the
        caller sends before the next call."""
        plan, q = self._read_q(header, message)
        group, index = self._layer_index[header.layer]
        if self.request.by_segment:
            return self._partial(header, self._segments(plan, group).attend(index, q))
        if not self.request.prefix_only:
            attention = self._attention(plan, group)
            found = attention.finish(attention.begin(index, q), None, None, None).wait()
            return self._answer(Kind.RESULT, header, encode(found, header.dtype))
        out, lse = self._groups[group].query(plan.queries[group], index, q)
        return self._answer(Kind.PARTIAL, header, [*encode(out, header.dtype), lse])

    def begin(self, header: Header, message: memoryview) -> None:
        """Attends over earlier keys with q of a layer, whose k and v follow (`finish`). An earlier
        q that still waits for its k and v is dropped: they are sent one after the other."""
        self._begun = None
        plan, q = self._read_q(header, message)
        group, index = self._layer_index[header.layer]
        q = q.clone()  # the message is released
        if self.request.by_segment:
            self._begun = header, self._segments(plan, group).begin(index, q)
        else:
            self._begun = header, self._attention(plan, group).begin(index, q)

    def finish(self, header: Header, message: memoryview) -> Answer:
        """Writes k and v of the querying rows and attends; returns a RESULT or PARTIAL, which the
        caller sends before the next call."""
        plan, rows = self._planned(header), self._rows[header.layer]
        group, _ = self._layer_index[header.layer]
        begun, self._begun = self._begun, None
        if begun is None or _layer_of(begun[0]) != _layer_of(header):
            raise WireError(ErrorCode.STALE, f"k and v of layer {header.layer} without its q")
        if header.rows != plan.num_own_rows:
            text = f"{header.rows} rows of k and v, {plan.num_own_rows} due"
            raise WireError(ErrorCode.STALE, text)
        k, v = rows.read_kv(message[HEADER_BYTES:], header)
        query, ticket = begun
        if isinstance(ticket, BegunSegments):
            return self._partial(query, self._segments(plan, group).finish(ticket, k, v))
        out = self._attention(plan, group).finish(ticket, k, v, None).wait()
        return self._answer(Kind.RESULT, query, encode(out, query.dtype))

    @staticmethod
    def _attention(plan: PlannedRows, group: int) -> Attention:
        planned: Attention = plan.queries[group]  # type: ignore[assignment]
        return planned

    @staticmethod
    def _segments(plan: PlannedRows, group: int) -> SegmentQueries:
        planned: SegmentQueries = plan.queries[group]  # type: ignore[assignment]
        return planned

    def _partial(self, query: Header, part: Partial) -> Answer:
        return self._answer(Kind.PARTIAL, query, [*encode(part.out, query.dtype), part.lse])

    def _read_q(self, header: Header, message: memoryview) -> tuple[PlannedRows, Tensor]:
        plan = self._planned(header)
        if header.rows != plan.num_query_rows or not header.rows:
            raise WireError(ErrorCode.SHAPE, f"{header.rows} rows of q, {plan.num_query_rows} due")
        _check_first(plan.queried, header)
        return plan, self._rows[header.layer].read_q(message[HEADER_BYTES:], header)

    def _answer(self, kind: Kind, query: Header, parts: list[Tensor]) -> Answer:
        self.num_queries += 1
        parts = [part.contiguous() for part in parts]  # padded heads come as views
        self._answers.append(parts)
        return Answer(query._replace(kind=kind), parts)

    def check_update(self, header: Header, message: memoryview) -> None:
        """Checks an update before it is deferred. Raises WireError if `update` would not accept
        it."""
        plan = self._planned(header)
        if self._has_no_kv(header.layer):
            raise WireError(ErrorCode.SHAPE, f"layer {header.layer} has no k and v of its own")
        if header.rows != plan.num_append_rows or not header.rows:
            raise WireError(
                ErrorCode.SHAPE, f"{header.rows} rows of k and v, {plan.num_append_rows} due"
            )
        self._rows[header.layer].check_kv(len(message) - HEADER_BYTES, header)
        _check_first(plan.updated, header)

    def update(self, header: Header, message: memoryview) -> None:
        """Writes k and v of a layer, which `check_update` has accepted."""
        k, v = self._rows[header.layer].read_kv(message[HEADER_BYTES:], header)
        group, index = self._layer_index[header.layer]
        self._groups[group].append(self._plans[header.plan].appends[group], index, k, v)


def _layer_of(header: Header) -> tuple[int, int]:
    return header.plan, header.layer


def _check_first(layers: set[int], header: Header) -> None:
    """Refuses a repeated message, because other sequences may own its rows by now."""
    if header.layer in layers:
        raise WireError(ErrorCode.STALE, f"layer {header.layer} of plan {header.plan} once more")
    layers.add(header.layer)
