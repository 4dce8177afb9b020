"""A node's end of a lane: rows of decode steps that an engine's stream writes into this memory
(memory/nodes/lane_layout.py), and results that are written into the engine's.

A plan that comes by the endpoint says in which slot its rows will be. From then on the node looks
for the numbers of the plan's layers in turn, besides the endpoint's messages. A slot's earlier step
ends with that: either it is complete, or the engine has given it up.
"""

from __future__ import annotations

import ctypes
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from memory.nodes.attach import AttachRequest
from memory.nodes.lane_layout import LaneLayout, LanePlace, LaneTerms
from memory.nodes.server.node_loop import NodeLoop
from memory.nodes.server.node_session import Answer, NodeSession
from memory.nodes.wire import HEADER_BYTES, ErrorCode, Header, Kind, WireError, WireType
from transport.base import Endpoint, Frame, PeerLostError, TransportError
from transport.lane import HostLane
from transport.messages import view_of
from transport.rdma_lane import accept

_FINISH_S = 10.0  # for the rest of a step whose rows have been sent
_SPIN_S = 2e-3  # without a message; then a look at the numbers sleeps
_SLEEP_S = 50e-6
_IDLE_S = 1.0  # without a message; then the rest of a step has probably been given up
_IDLE_SLEEP_S = 1e-3


class NodeLane(NamedTuple):
    """A lane, and the places in it."""

    lane: HostLane
    layout: LaneLayout


def open_loop(
    session: NodeSession,
    endpoint: Endpoint,
    computing: AbstractContextManager[object],
    offer: object,
) -> tuple[NodeLoop, dict[str, object] | None]:
    """Returns the loop of an engine that attaches, with a lane if its offer (None: there is none)
    is accepted. The other result answers the offer: the node's own terms, or why there is no
    lane."""
    window_bytes = endpoint.max_message_bytes
    if offer is None:
        return NodeLoop(session, endpoint, window_bytes, computing), None
    try:
        lane = _accept(session.request, endpoint, offer)
    except (WireError, TransportError) as error:
        return NodeLoop(session, endpoint, window_bytes, computing), {"refused": str(error)}
    answer: dict[str, object] = {"peer": dict(lane.lane.terms)}
    return LaneLoop(session, endpoint, window_bytes, computing, lane), answer


def _accept(request: AttachRequest, endpoint: Endpoint, offer: object) -> NodeLane:
    terms = LaneTerms.from_json(offer)
    if request.by_segment or request.stripe is not None:
        raise WireError(ErrorCode.SHAPE, "a lane of segments or stripes")
    layout = LaneLayout(request.layers, terms, is_partial=request.prefix_only)
    theirs = offer.get("peer") if isinstance(offer, dict) else None
    return NodeLane(accept(endpoint, theirs, layout.node_bytes, layout.engine_bytes), layout)


@dataclass(slots=True)
class _Step:
    """A plan whose rows come by the lane: the layer that is due, and whether its q has come."""

    number: int
    slot: int
    num_queries: int
    num_kv: int
    layer: int = 0
    has_q: bool = False


class LaneLoop(NodeLoop):
    """A NodeLoop beside whose endpoint there is a lane."""

    def __init__(
        self,
        session: NodeSession,
        endpoint: Endpoint,
        window_bytes: int,
        computing: AbstractContextManager[object],
        lane: NodeLane,
    ) -> None:
        super().__init__(session, endpoint, window_bytes, computing)
        self._lane, self._layout = lane.lane, lane.layout
        self._steps: dict[int, _Step] = {}  # by slot
        self._last_s = 0.0  # when the last message came by the lane

    @property
    def has_deferred(self) -> bool:
        return bool(self._steps or self._deferred)

    def take(self, frame: Frame) -> None:
        header = self._session.header(view_of(frame))
        is_plan = header.kind is Kind.PLAN
        if is_plan:
            self._before_plan(header)
        super().take(frame)
        if is_plan and header.layer:
            self._begin(header)

    def run_deferred(self) -> None:
        """Handles a message of the lane, or else a deferred write; without one it rests."""
        if self._look():
            self._last_s = time.monotonic()
        elif self._deferred:
            super().run_deferred()
        elif (rest_s := time.monotonic() - self._last_s) > _SPIN_S:
            time.sleep(_SLEEP_S if rest_s < _IDLE_S else _IDLE_SLEEP_S)

    def close(self) -> None:
        self._steps.clear()
        self._lane.close()

    def _before_plan(self, header: Header) -> None:
        """Finishes the steps that the plan names. Their rows have been sent or will be, whatever
        becomes of this plan."""
        own, finished = header.layer - 1, header.rows
        num_slots = self._layout.terms.num_slots
        if own >= num_slots or finished >> num_slots:
            raise WireError(ErrorCode.RANGE, f"slot {own} or slots {finished:#x} of a lane")
        self._steps.pop(own, None)
        deadline = time.monotonic() + _FINISH_S
        while any(finished >> slot & 1 for slot in self._steps):
            if self._look():
                continue
            if self._endpoint.is_lost:
                raise PeerLostError("the connection has ended")
            if time.monotonic() > deadline:
                raise WireError(ErrorCode.STALE, "rows of an earlier plan have not arrived")
            time.sleep(_SLEEP_S)

    def _begin(self, header: Header) -> None:
        num_queries, num_appends = self._session.rows_of(header.plan)
        most = self._layout.terms.num_rows
        num_kv = num_appends if self._layout.is_partial else num_queries
        if not 0 < num_queries <= most or num_kv > most:
            raise WireError(ErrorCode.SHAPE, f"{num_queries} rows by a lane of {most}")
        slot = header.layer - 1
        self._steps[slot] = _Step(header.plan, slot, num_queries, num_kv)
        self._last_s = time.monotonic()

    def _look(self) -> bool:
        """Handles a message that is due, if one has come."""
        due = next(filter(self._has_come, self._steps.values()), None)
        if due is None:
            return False
        if not due.has_q:
            # k and v are sent before the next plan's q, so those of an earlier q are here by now
            begun = [step for step in self._steps.values() if step.has_q]
            due = next(filter(self._has_come, begun), due)
        if self._session.has_plan(due.number):
            self._handle(due, self._place(due))
        else:
            del self._steps[due.slot]  # the engine has given it up, and has other plans
        return True

    def _place(self, step: _Step) -> LanePlace:
        slots = self._layout.kv if step.has_q else self._layout.q
        return slots[step.slot][step.layer]

    def _has_come(self, step: _Step) -> bool:
        return self._lane.number(self._place(step).number_at) == step.number

    def _handle(self, step: _Step, place: LanePlace) -> None:
        layout, layer = self._layout, step.layer
        rows, wire = layout.rows[layer], layout.terms.wire
        # Taking the lock orders the reads of the body after that of its number.
        with self._computing:
            if not step.has_q:
                size = rows.q_bytes(step.num_queries, wire.rows)
                header = self._header(step, Kind.QUERY, wire.rows)
                answer = self._query(header, self._at(place, size))
            else:
                size = rows.kv_bytes(step.num_kv, wire.kv)
                kind = Kind.UPDATE if layout.is_partial else Kind.OWN
                answer = self._kv(self._header(step, kind, wire.kv), self._at(place, size))
        if answer is not None:  # only now, because a lease may have ended while it was computed
            self._write(step, answer)
        step.has_q = not step.has_q and bool(step.num_kv) and layout.has_kv[layer]
        if not step.has_q:
            step.layer += 1
        if step.layer == len(layout.rows):
            del self._steps[step.slot]

    def _query(self, header: Header, message: memoryview) -> Answer | None:
        if self._session.answers_at_once(header):
            return self._session.query(header, message)
        self._session.begin(header, message)
        return None

    def _kv(self, header: Header, message: memoryview) -> Answer | None:
        if header.kind is Kind.OWN:
            return self._session.finish(header, message)
        self._session.check_update(header, message)
        self._session.update(header, message)
        return None

    def _header(self, step: _Step, kind: Kind, dtype: WireType) -> Header:
        num_rows = step.num_queries if kind is Kind.QUERY else step.num_kv
        epoch = self._session.request.epoch
        return Header(kind, epoch, step.number, step.layer, dtype, num_rows)

    def _at(self, place: LanePlace, num_bytes: int) -> memoryview:
        """Returns a body where it lies, after room for a header, as the session takes messages."""
        return self._lane.window[place.at - HEADER_BYTES : place.at + num_bytes]

    def _write(self, step: _Step, answer: Answer) -> None:
        place, at = self._layout.out[step.slot][step.layer], 0
        for part in answer.parts:
            size = part.numel() * part.element_size()
            first = place.at + at
            self._lane.outgoing[first : first + size] = _bytes_of(part)
            at += size
        self._lane.write(place.at, at, place.number_at, step.number)


def _bytes_of(x: Tensor) -> memoryview:
    """Returns the bytes of a dense tensor."""
    assert x.is_contiguous()
    size = x.numel() * x.element_size()
    return memoryview((ctypes.c_char * size).from_address(x.data_ptr())).cast("B")
