"""Handles one engine's messages on a node, in order.

Writes of k and v for which no answer waits are deferred: their message stays in the window until
the node is idle or the next plan arrives, which may read them. So answers, for which the engine
waits, come first, and a long prompt's K/V is written between them. The number and bytes of deferred
messages are bounded.
"""

from __future__ import annotations

import logging
from collections import deque
from contextlib import AbstractContextManager

from memory.nodes.outgoing import Outgoing, segment_of
from memory.nodes.server.node_session import Answer, NodeSession
from memory.nodes.server.striped_session import StripedSession
from memory.nodes.wire import ErrorCode, Header, Kind, WireError, pack_json
from transport.base import Endpoint, Frame
from transport.messages import post_bytes, view_of

logger = logging.getLogger(__name__)

# Deferred messages must leave room in the window.
_DEFERRED_FRACTION = 0.5
_MAX_DEFERRED = 24
_CHOOSING = (Kind.QUERY, Kind.OWN, Kind.CHOICE)


class NodeLoop:
    """Handles an attached engine's messages. It holds the lock `computing` while it computes."""

    def __init__(
        self,
        session: NodeSession,
        endpoint: Endpoint,
        window_bytes: int,
        computing: AbstractContextManager[object],
    ) -> None:
        self._session = session
        self._endpoint = endpoint
        self._computing = computing
        self._outgoing = Outgoing()
        self._deferred: deque[tuple[Header, Frame]] = deque()
        self._deferred_bytes = 0
        self._max_deferred_bytes = int(_DEFERRED_FRACTION * window_bytes)

    @property
    def has_deferred(self) -> bool:
        return bool(self._deferred)

    def take(self, frame: Frame) -> None:
        """Handles a message and releases its frame, now or after a deferred write. Raises
        WireError, which ends the session, and OSError if a page gets no memory."""
        message = view_of(frame)
        header = self._session.header(message)
        kind = header.kind
        if kind is Kind.UPDATE:
            self._session.check_update(header, message)
            self._deferred.append((header, frame))
            self._deferred_bytes += frame.num_bytes
            while (
                self._deferred_bytes > self._max_deferred_bytes
                or len(self._deferred) > _MAX_DEFERRED
            ):
                self.run_deferred()
            return
        try:
            if isinstance(self._session, StripedSession) and kind in _CHOOSING:
                self._take_choosing(self._session, header, message)
            elif kind is Kind.QUERY and self._session.answers_at_once(header):
                with self._computing:
                    answer = self._session.query(header, message)
                self._post(answer)
            elif kind is Kind.QUERY:
                with self._computing:
                    self._session.begin(header, message)
            elif kind is Kind.OWN:
                with self._computing:
                    answer = self._session.finish(header, message)
                self._post(answer)
            elif kind is Kind.PLAN:
                while self._deferred:
                    self.run_deferred()
                self._session.plan(header, message)
            else:
                raise WireError(ErrorCode.FORM, f"{kind.name} from an engine")
        finally:
            self._endpoint.release(frame)

    def _take_choosing(self, session: StripedSession, header: Header, message: memoryview) -> None:
        with self._computing:
            answer = session.take(header, message)
        if answer is not None:
            self._post(answer)
            if answer.header.kind is Kind.TILES:
                with self._computing:
                    session.rest()

    def run_deferred(self) -> None:
        """Writes the oldest deferred k and v."""
        header, frame = self._deferred.popleft()
        self._deferred_bytes -= frame.num_bytes
        try:
            with self._computing:
                self._session.update(header, view_of(frame))
        finally:
            self._endpoint.release(frame)

    def close(self) -> None:
        """Frees what is beside the endpoint."""

    def _post(self, answer: Answer) -> None:
        segments = [segment_of(part) for part in answer.parts if part.numel()]
        self._outgoing.post(self._endpoint, answer.header, segments)


def post_error(endpoint: Endpoint, epoch: int, error: WireError) -> None:
    """Reports an error to the engine before the connection ends."""
    content: dict[str, object] = {"code": int(error.code), "text": str(error)}
    post_bytes(endpoint, pack_json(Kind.ERROR, epoch, content))
