"""The engine's lanes to memory nodes: a CUDA stream sends q, k and v of decode steps and waits for
the results, with no host in between (lane_layout.py, transport/lane.py).

The plan of a step goes by the endpoint as always, and names the slot in which the node finds the
rows. Steps that do not fit into a slot go by the endpoint as a whole. The host launches all layers
without waiting; a thread watches the nodes meanwhile. When a node is lost, it writes the numbers
for which the stream waits, so that the stream runs to its end with whatever lies in the places. The
step's results are then discarded, and recovery goes on as for any lost node. Memory of a lane is
given back when the stream has passed everything that uses it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from memory.nodes.attach import AttachRequest
from memory.nodes.lane_layout import (
    NUM_SLOTS,
    VERSION,
    LaneLayout,
    LanePlace,
    LaneTerms,
    fitting_rows,
)
from memory.nodes.node_health import MAX_STALLED_S
from memory.nodes.wire import WireError, WireFormat, WireType
from memory.nodes.wire_rows import float_type
from transport.base import HEARTBEAT_S, Endpoint, PeerLostError, TransportError
from transport.control import printable
from transport.gpu import GpuUnavailableError
from transport.lane import DeviceMemory, LaneOpener, StreamLane, StreamOffer

logger = logging.getLogger(__name__)

_TICK_S = 0.005
_LATE_S = 1.0
_STALL_S = 2 * HEARTBEAT_S
_DRAIN_S = 5.0


class WatchedLink(Protocol):
    """What the watching thread needs of a NodeLink."""

    url: str
    endpoint: Endpoint
    was_late: bool
    stalled_s: float
    unanswered_s: float
    answer_s: float
    """The longest time without an answer."""


class LaneStep:
    """A step's rows for one node, in a slot. The compute thread uses it."""

    def __init__(self, lane: LinkLane, number: int, slot: int, num_rows: int, num_kv: int) -> None:
        """num_rows: of q and of results; num_kv: of k and v."""
        self.number = number
        self.is_complete = False
        self._lane, self._slot = lane, slot
        self._num_rows, self._num_kv = num_rows, num_kv

    @property
    def has_kv(self) -> bool:
        return bool(self._num_kv)

    def send_queries(self, layer: int, rows: Sequence[Tensor]) -> None:
        """Sends q [R, H, D], which is given as its runs of rows. Raises TransportError."""
        lane = self._lane
        lane.check()
        size = lane.layout.rows[layer].q_bytes(self._num_rows, lane.wire.rows)
        self._send(lane.layout.q[self._slot][layer], size, [rows], float_type(lane.wire.rows))

    def send_kv(self, layer: int, tensors: Sequence[Sequence[Tensor]]) -> None:
        """Sends k, or k and v, [A, Hk, D], each as its runs of rows. Raises TransportError."""
        lane = self._lane
        lane.check()
        size = lane.layout.rows[layer].kv_bytes(self._num_kv, lane.wire.kv)
        self._send(lane.layout.kv[self._slot][layer], size, tensors, float_type(lane.wire.kv))

    def _send(
        self, place: LanePlace, size: int, tensors: Sequence[Sequence[Tensor]], dtype: torch.dtype
    ) -> None:
        lane, at = self._lane, place.at
        for rows in tensors:
            for run in rows:
                end = at + run.numel() * dtype.itemsize
                lane.source[at:end].view(dtype).view(run.shape).copy_(run)
                at = end
        assert at == place.at + size, f"{at - place.at} bytes of rows, not {size}"
        lane.send(place, size, self.number)

    def receive(self, layer: int) -> list[Tensor]:
        """Makes the stream wait for a layer's result; returns out [R, H, D] and, of a partial
        one, lse [R, H] fp32. They may be read until the slot is used again. Raises
        TransportError."""
        lane, layout = self._lane, self._lane.layout
        place, rows = layout.out[self._slot][layer], layout.rows[layer]
        lane.wait(place, self.number)
        out_bytes = rows.out_bytes(self._num_rows, lane.wire.rows)
        body = lane.window[place.at : place.at + layout.out_bytes(rows, self._num_rows)]
        out = body[:out_bytes].view(float_type(lane.wire.rows))
        found = [out.view(self._num_rows, rows.num_heads, -1)]
        if layout.is_partial:
            lse = body[out_bytes:].view(torch.float32)
            found.append(lse.view(self._num_rows, rows.num_heads))
        self.is_complete = layer == len(layout.rows) - 1
        return found


class LinkLane:
    """The lane of one link."""

    def __init__(
        self,
        link: WatchedLink,
        lane: StreamLane,
        layout: LaneLayout,
        source: Tensor,
        window: Tensor,
        clock: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        """wake: makes the watching thread look at lanes that wait."""
        self._wake = wake
        self.layout, self.source, self.window = layout, source, window
        self.wire = layout.terms.wire
        self.failure = ""  # why the stream was released
        self.is_retired = False
        self.num_steps = 0
        self._link, self._lane, self._clock = link, lane, clock
        self._steps: list[LaneStep | None] = [None] * layout.terms.num_slots
        self._enqueued = 0  # waits
        self._is_closed = False
        self._looking = threading.Lock()
        self._seen, self._since_s = 0, clock()

    # ---- the compute thread

    def begin(self, number: int, num_queries: int, num_appends: int) -> LaneStep | None:
        """Takes a slot for a step, whose plan is posted next; None if its rows do not fit."""
        self.check()
        is_partial, most = self.layout.is_partial, self.layout.terms.num_rows
        if not 0 < num_queries <= most or num_appends > (most if is_partial else 0):
            return None
        self._lane.collect()
        slot = self.num_steps % len(self._steps)
        self.num_steps += 1
        num_kv = num_appends if is_partial else num_queries
        step = self._steps[slot] = LaneStep(self, number, slot, num_queries, num_kv)
        return step

    def plan_fields(self, number: int) -> tuple[int, int]:
        """Returns what the header of a plan says of the lane: its own slot and 1, or 0; and a bit
        for each other slot whose step the node has to finish first."""
        own = finished = 0
        for slot, step in enumerate(self._steps):
            if step is None:
                continue
            if step.number == number:
                own = slot + 1
            elif step.is_complete:
                finished |= 1 << slot
        return own, finished

    def check(self) -> None:
        """Raises TransportError if the stream was released."""
        if self.failure:
            raise PeerLostError(self.failure)

    def send(self, place: LanePlace, num_bytes: int, number: int) -> None:
        # each reports, so that the send queue has room again whatever becomes of the step
        self._lane.send(place.at, num_bytes, place.number_at, number, reports=True)

    def wait(self, place: LanePlace, number: int) -> None:
        self.check()
        if self.is_waiting:
            self._enqueued += 1
        else:
            self._since_s = self._clock()
            self._enqueued += 1
            self._wake()
        self._lane.wait(place.number_at, number)
        self._lane.mark(self._enqueued)
        self.check()  # where a stream is this thread

    @property
    def is_waiting(self) -> bool:
        """Whether the stream may wait for the node."""
        return self._lane.progress < self._enqueued

    def settle(self) -> None:
        """Makes the stream tell when it has passed everything that uses the lane."""
        self._enqueued += 1
        self._lane.mark(self._enqueued)

    def close(self) -> None:
        """The stream has passed everything. Raises TransportError, after which the node may still
        write the window."""
        with self._looking:  # a release writes the window
            self._is_closed = True
            self._lane.close()

    # ---- the watching thread

    def look(self) -> None:
        """Notes how long the node has not answered; releases the stream if the node is lost.
        Raises TransportError."""
        with self._looking:
            if not self._is_closed:
                self._look()

    def _look(self) -> None:
        progress, now_s, link = self._lane.progress, self._clock(), self._link
        if progress != self._seen:
            self._seen, self._since_s = progress, now_s
        if not self.is_waiting:
            link.unanswered_s = 0.0
            return
        waited_s = link.unanswered_s = now_s - self._since_s
        link.was_late |= waited_s >= _LATE_S
        if link.endpoint.silence_s >= _STALL_S:
            link.stalled_s += _TICK_S
        if not self.failure:
            self.failure = self._reason(waited_s)
        if self.failure:
            link.endpoint.close()
            self._release()

    def _reason(self, waited_s: float) -> str:
        link = self._link
        if self.is_retired or link.endpoint.is_lost:
            return "the connection has ended"
        if waited_s >= link.answer_s:
            return f"no answer for {link.answer_s:.3g} s"
        if link.stalled_s > MAX_STALLED_S:
            return f"it stalls for {link.stalled_s:.3g} s"
        return ""

    def _release(self) -> None:
        for slot, step in enumerate(self._steps):
            for place in self.layout.out[slot] if step is not None else ():
                self._lane.release(place.number_at, step.number if step is not None else 0)


class LaneOffer:
    """A lane that the node has not accepted yet, and its memory."""

    def __init__(
        self, offer: StreamOffer, layout: LaneLayout, source: Tensor, window: Tensor
    ) -> None:
        self.offer, self.layout, self.source, self.window = offer, layout, source, window

    def to_json(self) -> dict[str, object]:
        return self.layout.terms.to_json() | {"peer": dict(self.offer.terms)}


class EngineLanes:
    """Opens the lanes of an engine's stream, and watches them."""

    def __init__(
        self,
        opener: LaneOpener,
        allocate: Callable[[int], Tensor],
        max_rows: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """allocate(n) returns [n] uint8 of device memory in whole pages. max_rows: of a decode
        step."""
        self._opener, self._allocate = opener, allocate
        self._max_rows, self._clock = max_rows, clock
        self._lanes: list[LinkLane] = []
        self._watched: list[LinkLane] = []  # that waited when they were looked at
        self._unfreed: list[LinkLane] = []  # whose memory a node may still write
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def offer(self, endpoint: Endpoint, request: AttachRequest, wire: WireFormat) -> LaneOffer:
        """Prepares a lane beside an endpoint. Raises TransportError with the reason if there can be
        none."""
        self._sweep()
        if WireType.INT8 in wire:
            raise GpuUnavailableError("memory_wire is int8, which the host makes")
        if request.by_segment:
            raise GpuUnavailableError("ranges are segments")
        num_rows = fitting_rows(request.layers, wire, min(self._max_rows, request.max_rows))
        if not num_rows:
            raise GpuUnavailableError("a row is too large")
        terms = LaneTerms(VERSION, NUM_SLOTS, num_rows, int(wire.rows), int(wire.kv))
        try:
            layout = LaneLayout(request.layers, terms, is_partial=request.prefix_only)
        except WireError as error:
            raise GpuUnavailableError(str(error)) from error
        source, window = self._allocate(layout.node_bytes), self._allocate(layout.engine_bytes)
        num_messages = 2 * NUM_SLOTS * len(request.layers)
        blocks = [DeviceMemory(x.data_ptr(), x.numel()) for x in (window, source)]
        made = self._opener.offer(endpoint, blocks[0], blocks[1], num_messages)
        return LaneOffer(made, layout, source, window)

    def accept(self, offer: LaneOffer, answer: object, link: WatchedLink) -> LinkLane:
        """Connects the lane by the node's answer. Raises TransportError with the reason."""
        answer = answer if isinstance(answer, dict) else {"refused": "the node knows no lanes"}
        try:
            if "peer" not in answer:
                raise GpuUnavailableError(printable(answer.get("refused"), 200))
            lane = offer.offer.connect(answer["peer"])
        except BaseException:
            offer.offer.close()
            raise
        memory = offer.source, offer.window
        made = LinkLane(link, lane, offer.layout, *memory, self._clock, self._wake)
        with self._news:
            self._lanes.append(made)
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="mergestep-lanes", daemon=True)
            self._thread.start()
        return made

    def _wake(self) -> None:
        with self._news:
            self._news.notify()

    def _watch(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._is_closed or self._watched or self._waiting())
                # that a lane waits no more is seen, too
                last, self._watched = self._watched, self._waiting()
                if self._is_closed and not self._watched:
                    return
            for lane in dict.fromkeys((*self._watched, *last)):
                try:
                    self._opener.enter()
                    lane.look()
                except Exception:  # if the device is lost, nothing waits any more
                    logger.warning("a stream cannot be released", exc_info=True)
            time.sleep(_TICK_S)

    def _waiting(self) -> list[LinkLane]:
        return [lane for lane in self._lanes if lane.is_waiting]

    def _sweep(self) -> None:
        """Frees retired lanes. The compute thread calls it when no step is launched."""
        retired = [lane for lane in self._lanes if lane.is_retired]
        for lane in retired:
            try:
                lane.settle()
                self._wake()
                deadline = self._clock() + _DRAIN_S
                while lane.is_waiting and self._clock() < deadline:
                    time.sleep(_TICK_S)
                if lane.is_waiting:
                    logger.warning("a stream does not leave a lost node; its memory stays in use")
                    continue
                lane.close()
            except TransportError as error:
                logger.warning("a lane could not be closed; its memory stays in use: %s", error)
                self._unfreed.append(lane)
            with self._news:
                self._lanes.remove(lane)

    def close(self) -> None:
        """Frees all lanes; their links are closed."""
        for lane in self._lanes:
            lane.is_retired = True
        self._sweep()
        with self._news:
            self._is_closed = True
            self._news.notify()
        if self._thread is not None:
            self._thread.join(_DRAIN_S)
        if not self._lanes:
            try:
                self._opener.close()
            except TransportError as error:
                logger.warning("a stream could not be closed: %s", error)
