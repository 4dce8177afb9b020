"""A call through Ray Serve that goes on at another replica where its own is lost, as it does behind
`serve front` (docs/fleet.md): the stream comes with a journal of its tokens, which is taken out
here, and the next replica gets the same body with its continuation.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import orjson
from aiohttp import web

from serve.cluster.front.answer_log import AnswerLog, scores_room
from serve.cluster.front.refusals import ELSEWHERE, error_code, goes_elsewhere, last_error
from serve.cluster.front.replicas import JOURNAL

logger = logging.getLogger(__name__)

MAX_BREAKS = 8  # one after the other without a token: the call itself may be what kills servers
WAIT_S = 60.0
"""How long a call waits for a replica that goes on."""
_PAUSE_S, _MAX_PAUSE_S = 0.1, 2.0
_STREAM = "text/event-stream"

Headers = list[tuple[str, str]]


class Head(NamedTuple):
    """The beginning of an answer."""

    status: int
    headers: Headers


class _BrokenOffError(Exception):
    """A replica did not end an answer."""


class ContinuedCall:
    """One call. send: sends a body and headers to some replica, and returns what the `call` of a
    ServerReplica yields. `head` comes first, then `rest`."""

    def __init__(
        self,
        send: Callable[[bytes, Headers], AsyncIterator[Any]],
        path: str,
        headers: Headers,
        body: bytes,
    ) -> None:
        self._send = send
        self._path = path
        self._headers = [*headers, *JOURNAL.items()]
        self._body = body
        self._log = AnswerLog(scores_room(len(body)))
        self._parts = self._run()
        self._num_breaks = 0
        self._due_s: float | None = None
        self.num_continued = 0

    async def head(self) -> Head:
        """Returns the head of the answer. Raises what the last replica has raised if there is
        none."""
        head = await anext(self._parts)
        assert isinstance(head, Head)
        return head

    async def rest(self) -> AsyncIterator[bytes]:
        """Yields the bytes that the client gets."""
        async for part in self._parts:
            assert isinstance(part, bytes)
            yield part

    async def _run(self) -> AsyncIterator[Head | bytes]:
        begun = False
        while True:
            try:
                answer = self._send(self._next_body(), self._headers)
                status, headers = await anext(answer)
                is_stream = dict(_lower(headers)).get("content-type", "").startswith(_STREAM)
                if is_stream:
                    async for events in self._events(answer):
                        if not begun:
                            begun = True
                            yield Head(status, headers)
                        yield events
                    return
                if not begun and status == 200:
                    first = await anext(answer, b"")  # it may break before that
                    begun = True
                    yield Head(status, headers)
                    yield first
                    async for content in answer:
                        yield content
                    return
                content = b"".join([part async for part in answer])
            except Exception as error:
                if begun and not self._log.has_sent:
                    raise  # a part of a whole answer has been sent
                if not await self._may_go_on(repr(error)):
                    if not begun:
                        raise
                    yield last_error(self._path)
                    return
                continue
            refusal = web.Response(status=status, body=content, headers=_lower(headers))
            self._take_continuation(refusal)
            may_retry = begun or goes_elsewhere(refusal)
            if may_retry and await self._may_go_on(error_code(refusal) or str(status)):
                continue
            if begun:
                yield last_error(self._path)
                return
            yield Head(status, headers)
            yield content
            return

    async def _events(self, answer: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yields a stream's events. Raises _BrokenOffError unless it ends in order, and
        JournalError."""
        log = self._log
        log.begin_stream()
        async for data in answer:
            ready = log.feed(data)
            if ready:
                self._num_breaks, self._due_s = 0, None
                yield ready
        if log.is_handed_over or log.error_code in ELSEWHERE:
            raise _BrokenOffError(log.error_code or "handover")
        last = log.end()
        if not last and not log.has_sent:
            raise _BrokenOffError("an empty stream")
        yield last

    def _take_continuation(self, refusal: web.Response) -> None:
        """Takes what a replica that shuts down hands over of an answer that is not streamed."""
        if error_code(refusal) == "handed_over":
            assert isinstance(refusal.body, bytes)
            continuation = orjson.loads(refusal.body).get("continuation")
            if continuation is not None:
                self._log.use(continuation)

    async def _may_go_on(self, reason: str) -> bool:
        """Waits a moment after a break, longer each time. Returns whether to try again."""
        loop = asyncio.get_running_loop()
        self._num_breaks += 1
        self._due_s = loop.time() + WAIT_S if self._due_s is None else self._due_s
        if self._num_breaks >= MAX_BREAKS or loop.time() >= self._due_s:
            logger.error("a call is given up: %s", reason)
            return False
        self.num_continued += 1
        logger.warning("a call goes on at another replica: %s", reason)
        pause_s = min(_MAX_PAUSE_S, _PAUSE_S * 2.0 ** (self._num_breaks - 1))
        await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
        return True

    def _next_body(self) -> bytes:
        continuation = self._log.continuation
        if continuation is None:
            return self._body
        at = self._body.rindex(b"}")
        return self._body[:at] + b',"continuation":' + orjson.dumps(continuation) + b"}"


def _lower(headers: Headers) -> Headers:
    return [(name.lower(), value) for name, value in headers]
