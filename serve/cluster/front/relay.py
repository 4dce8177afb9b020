"""One call, from the client to a replica, and on to another where that one does not end it."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

import aiohttp
import orjson
from aiohttp import web

from serve.cluster.front.answer_log import AnswerLog, JournalError, scores_room
from serve.cluster.front.held import Held
from serve.cluster.front.parting import Parting
from serve.cluster.front.prefill import AWAITING, CLIENT_ONLY, PromptAhead, compute_prompt
from serve.cluster.front.prompt import NO_PROMPT, WHOLE_APART, Prompt, read_prompt, read_usage
from serve.cluster.front.proxy import NOT_FORWARDED, forwarded_headers
from serve.cluster.front.refusals import (
    ELSEWHERE,
    body_bytes,
    error_code,
    goes_elsewhere,
    last_error,
)
from serve.cluster.front.replicas import JOURNAL, Choice, Replica, ReplicaSet
from serve.http.edge.hop import HOP_HEADER, prompt_token
from serve.http.edge.settings import HttpSettings
from serve.http.edge.sse import EventStream

logger = logging.getLogger(__name__)

MAX_READ_BYTES = 256 << 10
"""Larger bodies are not looked into: a thread that parses holds up all streams as well, and what it
makes is many times as large."""
MAX_BREAKS = 8  # one after the other without a token: the call itself may be what kills servers
_PAUSE_S = 0.1
_MAX_PAUSE_S = 2.0


@dataclass(slots=True)
class RelayCounts:
    """What the hop has done. num_at_copies: streams that went on where their K/V had been copied.
    longest_gap_s: of a stream that went on elsewhere, in which its client got nothing."""

    num_calls: int = 0
    num_failed: int = 0
    num_continued: dict[str, int] = field(default_factory=dict)
    num_replayed_tokens: int = 0
    num_at_copies: int = 0
    longest_gap_s: float = 0.0

    def continued(self, reason: str) -> None:
        self.num_continued[reason] = self.num_continued.get(reason, 0) + 1


class _BrokenOffError(Exception):
    """A replica did not end an answer; str() names why, in the words of the metric."""


class _MovedError(Exception):
    """The prompt is computed, and the answer goes on at another replica."""


class NoReplicaError(Exception):
    """No replica takes the call within the time for that."""


class Relay:
    """Answers one POST. wait_s: how long it waits for a replica that is ready."""

    def __init__(
        self,
        request: web.BaseRequest,
        body: bytes,
        parting: Parting,
        session: aiohttp.ClientSession,
        counts: RelayCounts,
        *,
        wait_s: float,
        http: HttpSettings,
        hop_token: str = "",
    ) -> None:
        self._request = request
        self._body = body
        self._parting = parting
        self._replicas: ReplicaSet = parting.replicas
        self._session = session
        self._counts = counts
        self._wait_s = wait_s
        self._log = AnswerLog(scores_room(len(body)))
        self._http = http
        self._hop_token = hop_token
        self._events: EventStream | None = None
        self._prompt = NO_PROMPT
        self._is_first = True
        self._next: Replica | None = None  # where the answer goes on after its prompt
        self._moves_on = False  # once the first token has come
        self._left: Replica | None = None  # where the prompt was computed
        self._move: tuple[Replica, Replica] | None = None  # until its first events
        self._ahead: PromptAhead | None = None
        self._more = b""  # fields of the next body
        self._decodes_at: Replica | None = None
        self._moved_s: float | None = None
        self._broke_off_s: float | None = None
        self._num_breaks = 0
        self._pause_s = _PAUSE_S
        self._choice: Choice | None = None  # until the first events
        self._sent_s = 0.0
        self._due_s: float | None = None  # when a call that no replica goes on with has failed

    async def run(self) -> web.StreamResponse:
        """Returns the answer. Raises NoReplicaError if nothing was sent yet."""
        try:
            return await self._run()
        finally:
            if self._ahead is not None:
                await self._ahead.stop()

    async def _run(self) -> web.StreamResponse:
        self._prompt = await self._read_prompt()
        refused: dict[Replica, web.Response] = {}
        while True:
            choice = await self._choose(refused)
            if choice is None:
                final = [answer for answer in refused.values() if answer.status not in (409, 503)]
                if final and not self._log.has_sent:
                    return final[0]  # all are too busy, or none has the response that is named
                refused.clear()
                if not await self._wait():
                    return await self._give_up()
                continue
            replica = choice.replica
            replica.num_calls += 1
            self._choice, self._sent_s = choice, asyncio.get_running_loop().time()
            try:
                answer = await self._try(replica)
            except _MovedError:
                self._left = replica
                self._moved_s = self._sent_s = asyncio.get_running_loop().time()
                continue
            except _BrokenOffError as error:
                self._note_no_move("")
                if str(error) != "journal":
                    self._replicas.refused(replica)
                self._note_break(str(error))
                if self._num_breaks >= MAX_BREAKS:
                    return await self._give_up()
                continue
            finally:
                replica.num_calls -= 1
                self._stop_decoding()
                if self._choice is not None:
                    self._replicas.note_end(self._choice)
                    self._choice = None
            if not isinstance(answer, web.Response):
                return answer
            if self._events is not None:  # whatever it refuses, others may not
                self._num_breaks += 1
                if self._num_breaks >= MAX_BREAKS:
                    return await self._give_up()
            elif not goes_elsewhere(answer):
                self._learn(answer)
                return answer
            refused[replica] = answer
            self._note_no_move(error_code(answer))
            self._take_refusal(replica, answer)

    async def _read_prompt(self) -> Prompt:
        """Reads of the body what the choice depends on."""
        if len(self._body) <= self._http.parse_inline_bytes:
            looks = self._replicas.looks_at_prompts or self._parting.is_on
            return read_prompt(self._request, self._body) if looks else NO_PROMPT
        if not self._parting.is_on or len(self._body) > MAX_READ_BYTES:
            return NO_PROMPT
        # it would hold up all streams while it is parsed
        return await asyncio.to_thread(read_prompt, self._request, self._body)

    async def _choose(self, refused: Mapping[Replica, web.Response]) -> Choice | None:
        """Returns the next server. The first time it decides whether the call is parted. If the
        second server need not wait for long, it gets the call now; else one that is no stream has
        its prompt computed here."""
        following, self._next, self._moves_on, self._move = self._next, None, False, None
        self._more = b""
        if following is not None and following.is_ready:
            if self._left is not None:
                self._move = self._left, following
            return self._replicas.take(following, self._names, 0.0)
        if not self._is_first:
            return self._choose_next(refused)
        now_s = asyncio.get_running_loop().time()
        choice, following = self._parting.choose(self._prompt, refused, now_s)
        self._is_first = choice is None
        if choice is None or following is None:
            return choice
        computing = self._session, self._request, self._replicas, choice, self._body
        is_soon = self._parting.is_soon(self._prompt, choice, following)
        if is_soon and self._request.path in WHOLE_APART:
            self._ahead = PromptAhead(*computing)
            self._more = AWAITING
        elif self._prompt.is_stream:
            self._moves_on = True
            return choice
        else:
            more = await compute_prompt(*computing)
            if more is None:
                return self._replicas.choose(self._names, refused)
            following = self._parting.next_server(self._prompt, choice.replica) or following
            self._more = more
        self._move = choice.replica, following
        self._left = choice.replica
        return self._replicas.take(following, self._names, 0.0)

    def _choose_next(self, refused: Mapping[Replica, web.Response]) -> Choice | None:
        """Returns the server that goes on with a call that was at another one before."""
        log = self._log
        if not log.has_sent or not log.num_prompt_tokens:
            return self._replicas.choose(self._names, refused)
        num_prompt, left = log.num_prompt_tokens, self._left
        at = "" if left is None else left.url
        held = Held(num_prompt + log.num_tokens, num_prompt, *log.copied, at)
        choice = self._replicas.choose_next(self._names, refused, held)
        load = None if choice is None else choice.replica.load
        if load is not None and load.engine == held.copied_by:
            self._counts.num_at_copies += 1
        return choice

    @property
    def _names(self) -> list[bytes]:
        return self._prompt.names if self._replicas.looks_at_prompts else []

    def _stop_decoding(self) -> None:
        if self._decodes_at is not None:
            self._decodes_at.num_streams -= 1
            self._decodes_at = None

    async def _wait(self) -> bool:
        """Waits until a replica is ready, for wait_s at most; returns whether one is."""
        loop = asyncio.get_running_loop()
        if self._due_s is None:
            self._due_s = loop.time() + self._wait_s
        self._pause_s = min(_MAX_PAUSE_S, 1.5 * self._pause_s)
        await asyncio.sleep(self._pause_s * random.uniform(0.5, 1.0))
        return await self._replicas.wait_for_one(self._due_s - loop.time())

    async def _try(self, replica: Replica) -> web.StreamResponse:
        """Returns a replica's answer, after the stream has ended. Raises _BrokenOffError."""
        headers = forwarded_headers(self._request.headers, CLIENT_ONLY)
        headers.update(JOURNAL)
        if self._hop_token and self._log.continuation is not None:
            headers[HOP_HEADER] = self._hop_token
        elif self._hop_token and self._more:
            headers[HOP_HEADER] = prompt_token(self._hop_token)
        try:
            # ReplicaSet.lost() ends it
            url, next_body = replica.url + self._request.raw_path, self._next_body()
            async with asyncio.timeout(None) as attempt:
                replica.attempts.add(attempt)
                try:
                    async with self._session.post(url, data=next_body, headers=headers) as response:
                        if response.content_type == "text/event-stream":
                            return await self._pass_on(replica, response)
                        body = await response.read()
                finally:
                    replica.attempts.discard(attempt)
        except aiohttp.ClientConnectorError as error:
            self._replicas.lost(replica, type(error).__name__)
            raise _BrokenOffError("unreachable") from error
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, ConnectionError) and self._is_client_gone:
                raise
            raise _BrokenOffError("broken") from error
        except JournalError as error:
            logger.error("%s: %s", replica.url, error)
            raise _BrokenOffError("journal") from error
        if self._events is not None and response.status == 200:
            raise _BrokenOffError("journal")  # it was to be a stream
        return web.Response(
            status=response.status,
            body=body,
            headers=forwarded_headers(response.headers, NOT_FORWARDED),
        )

    async def _pass_on(
        self, replica: Replica, response: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        """Sends a stream's events to the client until its end, or until it is to go on elsewhere.
        Raises _MovedError then."""
        log = self._log
        log.begin_stream()
        async for data in response.content.iter_any():
            ready = log.feed(data)
            if ready:
                await self._send(ready, response.headers)
                if self._moves_on and log.num_tokens and not log.is_over:
                    self._moves_on = False
                    self._next = self._parting.next_server(self._prompt, replica)
                    if self._next is not None:
                        raise _MovedError
        if log.is_handed_over:
            raise _BrokenOffError("handover")
        if log.error_code in ELSEWHERE:
            raise _BrokenOffError("engine")
        await self._send(log.end(), response.headers)
        self._parting.lengths.learn(self._prompt, log.num_prompt_tokens, log.num_tokens)
        assert self._events is not None and self._events.response is not None
        if log.error_code is not None:
            self._events.response.force_close()
        return await self._events.finish()

    async def _send(self, events: bytes, headers: Mapping[str, str]) -> None:
        if self._events is None:
            self._events = EventStream(
                self._request,
                headers.get("x-request-id", ""),
                write_timeout_s=self._http.write_timeout_s,
                send_buffer_bytes=self._http.send_buffer_bytes,
                headers=forwarded_headers(headers, NOT_FORWARDED),
            )
            await self._events.start()
        if self._choice is not None:
            seconds = asyncio.get_running_loop().time() - self._sent_s
            replica = self._choice.replica
            if self._moved_s is None and self._ahead is not None:
                self._note_first_after(self._ahead, self._choice)
            elif self._moved_s is None:
                self._replicas.note_first(self._choice, seconds)
            else:
                self._replicas.note_end(self._choice)
                self._parting.moved(self._prompt, self._choice, seconds)
            self._choice, self._moved_s, self._move = None, None, None
            self._decodes_at = replica
            replica.num_streams += 1
        self._due_s, self._num_breaks, self._pause_s = None, 0, _PAUSE_S
        if self._broke_off_s is not None:
            gap_s = asyncio.get_running_loop().time() - self._broke_off_s
            self._counts.longest_gap_s = max(self._counts.longest_gap_s, gap_s)
            self._broke_off_s = None
        await self._events.send(events)

    def _next_body(self) -> bytes:
        """Returns the client's body, with what is known of its answer."""
        continuation = self._log.continuation
        more = self._more
        if continuation is not None:
            more += b',"continuation":' + orjson.dumps(continuation)
        if not more:
            return self._body
        at = self._body.rindex(b"}")
        return self._body[:at] + more + b"}"

    def _note_break(self, reason: str) -> None:
        self._counts.continued(reason)
        self._num_breaks += reason not in ("handover", "unreachable")
        self._counts.num_replayed_tokens += self._log.num_tokens
        if self._broke_off_s is None:
            self._broke_off_s = asyncio.get_running_loop().time()

    def _note_first_after(self, ahead: PromptAhead, choice: Choice) -> None:
        """Learns from the first token of a call whose prompt was computed meanwhile."""
        self._replicas.note_end(choice)
        seconds = ahead.seconds_since()
        if seconds is not None and self._move is not None:
            self._parting.moved(self._prompt, choice, seconds)

    def _note_no_move(self, code: str | None) -> None:
        """Notes that a server has not gone on with the call, if it was to. code: its refusal."""
        if self._move is not None:
            self._parting.not_moved(self._prompt, *self._move, code)
        self._moved_s = self._move = None

    def _learn(self, answer: web.Response) -> None:
        """Learns lengths from a whole answer, if it is small."""
        body = body_bytes(answer.body)
        is_small = len(body) <= self._http.parse_inline_bytes
        if self._parting.is_on and answer.status == 200 and is_small:
            self._parting.lengths.learn(self._prompt, *read_usage(body))

    def _take_refusal(self, replica: Replica, answer: web.Response) -> None:
        if answer.status == 503:
            self._replicas.refused(replica)
        if error_code(answer) == "handed_over":
            self._note_break("handover")
            continuation = orjson.loads(body_bytes(answer.body)).get("continuation")
            if continuation is not None:
                self._log.use(continuation)

    async def _give_up(self) -> web.StreamResponse:
        self._counts.num_failed += 1
        if self._events is None:
            raise NoReplicaError
        await self._events.send_last(last_error(self._request.path))
        return await self._events.finish()

    @property
    def _is_client_gone(self) -> bool:
        transport = self._request.transport
        return transport is None or transport.is_closing()
