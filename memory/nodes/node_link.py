"""The engine's end of a connection to one memory node: it attaches, sends plans and rows, and
receives partial results."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from memory.nodes.attach import STRIPE_TOKENS, AttachRequest
from memory.nodes.errors import NodesLostError
from memory.nodes.node_health import MAX_STALLED_S, AnswerPace
from memory.nodes.outgoing import Outgoing
from memory.nodes.placement import Shard, largest_lists
from memory.nodes.wire import (
    FULL_WIRE,
    ErrorCode,
    Header,
    Kind,
    NodePlan,
    WireError,
    WireFormat,
    WireType,
    pack_json,
    pack_plan,
    read_header,
    read_json,
)
from memory.nodes.wire_rows import largest_message
from transport.base import (
    HEARTBEAT_S,
    Endpoint,
    Frame,
    Segment,
    TransportError,
    TransportTimeoutError,
)
from transport.control import printable
from transport.messages import post_bytes, view_of

if TYPE_CHECKING:
    from memory.nodes.engine_lanes import EngineLanes, LaneOffer, LaneStep, LinkLane

logger = logging.getLogger(__name__)

_OLD_PLANS = 8  # answers to earlier plans are dropped
DEFAULT_ANSWER_S = 30.0
_POLL_S = 0.25
_LATE_S = 1.0  # an answer that takes longer is late
_STALL_S = 2 * HEARTBEAT_S  # silence after which a node that has to answer has stalled
_LAST_MESSAGES = 4  # that are looked for when a connection ends
_ANSWERS = (Kind.RESULT, Kind.PARTIAL, Kind.TILES)


class NodeError(TransportError):
    """The node reported an error, or broke the protocol."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(f"{code.name}: {text}")
        self.code = code


class NodeLink:
    """A connection to a node and the shard of K/V on it. One thread uses it."""

    def __init__(
        self,
        url: str,
        endpoint: Endpoint,
        shard: Shard,
        clock: Callable[[], float] = time.monotonic,
        answer_s: float = DEFAULT_ANSWER_S,
        pace: AnswerPace | None = None,
        lanes: EngineLanes | None = None,
    ) -> None:
        """A node that is alive but does not answer for answer_s counts as lost, and so does one
        whose answers stall for MAX_STALLED_S between two resets of stalled_s. pace: that of the
        node's answers so far."""
        self.url = url
        self.shard = shard
        self.endpoint = endpoint
        self.is_leaving = False  # the node has asked the engine to leave
        self.num_mappings = 0  # that the node promises
        self.was_late = False  # an answer took longer than _LATE_S; the reader resets it
        # waited for answers while heartbeats were missing, or beyond the usual time; likewise
        self.stalled_s = 0.0
        self.unanswered_s = 0.0  # how long it has not answered a query
        self.answer_s = answer_s
        self.lane: LinkLane | None = None
        self._why_no_lane = "only GPUs over rdma:// have lanes"
        self._lanes = lanes
        self._clock = clock
        self._pace = AnswerPace() if pace is None else pace
        self._asked_s = clock()  # when the last query was sent
        self._epoch = 0
        self._outgoing = Outgoing()
        self._arrived: dict[tuple[int, int], tuple[Header, Frame]] = {}

    @property
    def rows_by(self) -> str:
        """How rows travel: "lane", or "endpoint: " and the reason. Any thread may read it."""
        return "lane" if self.lane is not None else f"endpoint: {self._why_no_lane}"

    @property
    def is_lost(self) -> bool:
        return self.endpoint.is_lost

    def attach(self, request: AttachRequest, timeout_s: float, wire: WireFormat = FULL_WIRE) -> int:
        """Attaches and returns the number of granted pages. wire is the format of later rows.
        Raises NodeError and TransportError."""
        self._epoch = request.epoch
        most = self.endpoint.max_message_bytes
        largest = largest_message(request.layers, request.max_rows, wire)
        if request.stripe is not None:
            num_tiles = request.num_places[0] * request.page_tokens[0] // STRIPE_TOKENS
            largest = max(largest, largest_lists(request.layers, num_tiles, request.max_rows))
        if largest > most:
            text = f"steps of {request.max_rows} rows take messages of {largest} bytes"
            raise NodeError(ErrorCode.SHAPE, f"{text}, its window has room for {most}")
        content, offer = request.to_json(), self._offer(request, wire)
        if offer is not None:
            content["lane"] = offer.to_json()
        post_bytes(self.endpoint, pack_json(Kind.ATTACH, request.epoch, content))
        try:
            content = self._attached(request, timeout_s)
        except BaseException:
            if offer is not None:
                offer.offer.close()
            raise
        if offer is not None:
            self._accept(offer, content.get("lane"))
        return int(str(content["num_pages"]))

    def _attached(self, request: AttachRequest, timeout_s: float) -> dict[str, object]:
        """Returns the content of the node's answer."""
        frame = self.endpoint.poll(timeout_s)
        if frame is None:
            raise TransportTimeoutError(f"{self.url} did not answer within {timeout_s:.3g} s")
        try:
            header = self._header(frame)
            if header.kind is not Kind.ATTACHED:
                raise WireError(ErrorCode.FORM, f"{header.kind.name} instead of ATTACHED")
            content = read_json(view_of(frame))
            num_pages, num_mappings = content.get("num_pages"), content.get("num_mappings")
            if type(num_pages) is not int or not (
                request.min_pages <= num_pages <= request.num_pages
            ):
                raise WireError(ErrorCode.RANGE, f"{num_pages!r} pages")
            if type(num_mappings) is not int:
                raise WireError(ErrorCode.FORM, f"{num_mappings!r} mappings")
            policy = request.kv_policy
            if policy is not None and content.get("kv_policy") != request.policy_answer:
                text = (
                    f"the node does not know kv_policy {policy.name}: it is of an earlier version"
                )
                raise WireError(ErrorCode.SHAPE, text)
            self.num_mappings = num_mappings
        except WireError as error:
            raise NodeError(error.code, str(error)) from error
        finally:
            self.endpoint.release(frame)
        return content

    def _offer(self, request: AttachRequest, wire: WireFormat) -> LaneOffer | None:
        if self._lanes is None or request.is_question:
            return None
        try:
            return self._lanes.offer(self.endpoint, request, wire)
        except TransportError as error:
            self._host_posts(error)
            return None

    def _accept(self, offer: LaneOffer, answer: object) -> None:
        assert self._lanes is not None
        try:
            self.lane = self._lanes.accept(offer, answer, self)
        except TransportError as error:
            self._host_posts(error)
            return
        rows = offer.layout.terms.num_rows
        logger.info("memory node %s: the stream sends up to %d rows of a step", self.url, rows)

    def _host_posts(self, reason: TransportError) -> None:
        self._why_no_lane = str(reason)
        logger.info("memory node %s: the host posts rows: %s", self.url, reason)

    def begin_lane(self, number: int, num_queries: int, num_appends: int) -> LaneStep | None:
        """Returns a slot for the rows of plan `number`, which is posted next; None if the host
        posts them. Raises TransportError."""
        if self.lane is None:
            return None
        return self.lane.begin(number, num_queries, num_appends)

    def check_lane(self) -> None:
        """Raises TransportError if a step's results are not those of the node."""
        if self.lane is not None and self.lane.failure:
            self.look()  # the node may have said why
            self.lane.check()

    def post_plan(self, number: int, plan: NodePlan) -> None:
        for key in [key for key in self._arrived if key[0] + _OLD_PLANS < number]:
            self.endpoint.release(self._arrived.pop(key)[1])
        fields = (0, 0) if self.lane is None else self.lane.plan_fields(number)
        post_bytes(self.endpoint, pack_plan(self._epoch, number, plan, fields))

    def post_rows(
        self,
        kind: Kind,
        number: int,
        layer: int,
        dtype: WireType,
        num_rows: int,
        segments: Sequence[Segment],
    ) -> None:
        """Sends a QUERY, OWN, UPDATE or CHOICE of plan `number`."""
        header = Header(kind, self._epoch, number, layer, dtype, num_rows)
        self._outgoing.post(self.endpoint, header, list(segments))
        if kind is not Kind.UPDATE:
            self._asked_s = self._clock()

    def answer(self, number: int, layer: int, work: float = 1.0) -> tuple[Header, Frame]:
        """Waits for the RESULT, PARTIAL or TILES of a layer; the caller releases the frame. work:
        the sum of the rows' keys. Raises NodeError and TransportError."""
        key = (number, layer)
        began_s = now_s = self._clock()
        before_s, waited_s, silent_s = self.stalled_s, 0.0, 0.0
        while key not in self._arrived:
            polled_s = now_s
            frame = self.endpoint.poll(_POLL_S)
            if frame is not None:
                self._arrive(frame, number)
            now_s = self._clock()
            waited_s += min(now_s - polled_s, _POLL_S)  # no more, since this process may have slept
            if frame is None and self.endpoint.silence_s >= _STALL_S:
                silent_s += _POLL_S
            self.stalled_s = before_s + max(silent_s, self._pace.stalled_s(work, waited_s))
            if key in self._arrived:
                break
            if self.stalled_s > MAX_STALLED_S:
                raise TransportTimeoutError(f"{self.url}: it stalls for {self.stalled_s:.3g} s")
            self.unanswered_s = now_s - began_s
            self.was_late |= self.unanswered_s >= _LATE_S
            if self.unanswered_s >= self.answer_s:
                raise TransportTimeoutError(f"{self.url}: no answer for {self.answer_s:.3g} s")
        self.unanswered_s = 0.0
        self._pace.learn(work, self._clock() - self._asked_s)
        return self._arrived.pop(key)

    def _arrive(self, frame: Frame, number: int) -> None:
        try:
            header = self._header(frame)
        except WireError as error:
            raise NodeError(error.code, str(error)) from error
        if header.kind in _ANSWERS and header.plan + _OLD_PLANS >= number:
            key = header.plan, header.layer
            if key in self._arrived:
                raise NodeError(ErrorCode.FORM, f"two answers for layer {key[1]} of plan {key[0]}")
            self._arrived[key] = header, frame
            return
        if header.kind is Kind.DRAIN:
            logger.info("memory node %s is shutting down", self.url)
            self.is_leaving = True
        self.endpoint.release(frame)
        if header.kind not in (*_ANSWERS, Kind.DRAIN):
            raise NodeError(ErrorCode.FORM, f"{header.kind.name} from a node")

    def _header(self, frame: Frame) -> Header:
        """Reads a header. Raises WireError, and NodeError for an ERROR message."""
        message = view_of(frame)
        header = read_header(message)
        is_early = header.kind is Kind.ERROR and not header.epoch  # the request was not understood
        if header.epoch != self._epoch and not is_early:
            raise WireError(ErrorCode.STALE, f"epoch {header.epoch}, not {self._epoch}")
        if header.kind is Kind.ERROR:
            content = read_json(message)
            code, text = content.get("code"), content.get("text")
            if isinstance(code, int) and code in ErrorCode.__members__.values():
                raise NodeError(ErrorCode(code), printable(text, 500))
            raise WireError(ErrorCode.FORM, "an error without a code")
        return header

    def look(self) -> None:
        """Handles a message that may have arrived unsolicited: DRAIN, ERROR, or the end of the
        connection."""
        frame = self.endpoint.poll(0.0)
        if frame is not None:
            self._arrive(frame, 0)

    def close(self) -> None:
        self._arrived.clear()
        if self.lane is not None:
            self.lane.is_retired = True
        self.endpoint.close()


def lost(link: NodeLink, error: Exception) -> NodesLostError:
    """Closes a link after any error on it; returns the error to raise."""
    with contextlib.suppress(TransportError):
        for _ in range(_LAST_MESSAGES):  # a lender says why it ends a session
            link.look()
    link.close()
    return NodesLostError(f"memory node {link.url}: {error}")
