"""One API call to one or more engine requests, and their deltas to an answer or a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohttp import web

from serve.errors import GenerationError, MemoryLostError
from serve.http import shapes
from serve.http.errors import draining, to_api_error
from serve.http.sse import DONE, ChunkFormat, EventStream
from serve.recovery import NO_MEMORY
from serve.request import FinishReason, Request, TokenDelta

if TYPE_CHECKING:
    from serve.engine import RequestStream

CHOICES_IN_FLIGHT = 4


@dataclass(frozen=True, slots=True)
class AnswerKind:
    """What differs between chat and plain completions."""

    name: str
    id_prefix: str
    object_name: str


CHAT = AnswerKind("chat", "chatcmpl-", "chat.completion")
COMPLETION = AnswerKind("completion", "cmpl-", "text_completion")


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The part of an answer known before any token."""

    kind: AnswerKind
    answer_id: str
    created: int
    model: str
    request_id: str
    fingerprint: str | None = None


class Generation:
    """The engine requests of one API call. Choice `p * n + i` is sequence i of prompt p.

    Use it in a `with` block: leaving it aborts whatever still runs.
    """

    def __init__(self, streams: Sequence[RequestStream], n: int) -> None:
        self._streams = streams
        self._n = n
        self.requests: list[Request] = []
        self.prompt_tokens = 0

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self._streams:
            stream.abort()

    @property
    def cached_tokens(self) -> int:
        """Of the prompts, taken from the prefix cache. Known with the first tokens."""
        return sum(stream.metrics.num_cached_tokens for stream in self._streams)

    @property
    def num_choices(self) -> int:
        return len(self._streams) * self._n

    async def accepted(self) -> None:
        """Waits until every prompt is tokenized and checked; raises what was wrong with one."""
        for stream in self._streams:
            request = await stream.accepted()
            self.requests.append(request)
            self.prompt_tokens += len(request.prompt_token_ids)

    async def deltas(self) -> AsyncGenerator[tuple[int, TokenDelta], None]:
        """(choice, delta) in order of arrival. Raises for sequences that did not end well."""
        if len(self._streams) == 1:
            async for delta in self._streams[0]:
                yield delta.index, _checked(delta)
            return
        queue: asyncio.Queue[tuple[int, TokenDelta] | Exception | None] = asyncio.Queue(
            CHOICES_IN_FLIGHT * len(self._streams)
        )
        pumps = [
            asyncio.create_task(_pump(stream, position * self._n, queue))
            for position, stream in enumerate(self._streams)
        ]
        running = len(pumps)
        try:
            while running:
                item = await queue.get()
                if item is None:
                    running -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item[0], _checked(item[1])
        finally:
            for pump in pumps:
                pump.cancel()


async def _pump(
    stream: RequestStream,
    first_choice: int,
    queue: asyncio.Queue[tuple[int, TokenDelta] | Exception | None],
) -> None:
    try:
        async for delta in stream:
            await queue.put((first_choice + delta.index, delta))
    except Exception as exc:  # raised again by the consumer
        await queue.put(exc)
    else:
        await queue.put(None)


def _checked(delta: TokenDelta) -> TokenDelta:
    """Only the server aborts a sequence whose client still listens."""
    if delta.finish_reason is FinishReason.ERROR:
        if delta.error in NO_MEMORY:
            raise MemoryLostError(delta.error)
        raise GenerationError(delta.error or "the engine failed")
    if delta.finish_reason is FinishReason.ABORT:
        raise draining()
    return delta


async def collect(
    generation: Generation, head: AnswerHead, tokenizer: shapes.TokenTexts
) -> dict[str, Any]:
    """The whole answer of a chat at once."""
    outputs = [shapes.Choice() for _ in range(generation.num_choices)]
    async with aclosing(generation.deltas()) as deltas:
        async for choice, delta in deltas:
            outputs[choice].extend(delta)
    completion_tokens = sum(output.num_tokens for output in outputs)
    return {
        "id": head.answer_id,
        "object": head.kind.object_name,
        "created": head.created,
        "model": head.model,
        "system_fingerprint": head.fingerprint,
        "choices": [
            shapes.chat_choice(index, output, tokenizer) for index, output in enumerate(outputs)
        ],
        "usage": shapes.usage(
            generation.prompt_tokens, completion_tokens, generation.cached_tokens
        ),
    }


class Streaming:
    """Writes the deltas of one chat as events."""

    def __init__(
        self,
        generation: Generation,
        head: AnswerHead,
        tokenizer: shapes.TokenTexts,
        *,
        include_usage: bool,
    ) -> None:
        self._generation = generation
        self._head = head
        self._tokenizer = tokenizer
        self._include_usage = include_usage
        self._format = ChunkFormat(
            head.kind.name, head.answer_id, head.created, head.model, usage=include_usage
        )
        self._opened: set[int] = set()
        self._completion_tokens = 0

    async def run(self, events: EventStream) -> web.StreamResponse:
        """Until the head is sent an error raises; after that it is the last event."""
        try:
            async with aclosing(self._generation.deltas()) as deltas:
                async for choice, delta in deltas:
                    data = self._encode(choice, delta)
                    if data:
                        if events.response is None:
                            await events.start()
                        await events.send(data)
            if events.response is None:
                await events.start()
            await events.send(self._ending())
        except ConnectionError:
            raise
        except Exception as exc:
            if events.response is None:
                raise
            await events.send_error(to_api_error(exc, self._head.request_id))
        return await events.finish()

    def _encode(self, choice: int, delta: TokenDelta) -> bytes:
        data = b""
        if choice not in self._opened:
            self._opened.add(choice)
            data = self._format.role(choice)
        self._completion_tokens += len(delta.token_ids)
        if delta.logprobs is not None:
            if delta.logprobs or delta.text:
                logprobs = shapes.chat_logprobs(delta.logprobs, self._tokenizer)
                data += self._format.text_with_logprobs(choice, delta.text, logprobs)
        elif delta.text:
            data += self._format.text(choice, delta.text)
        if delta.finish_reason is not None:
            data += self._format.finish(choice, delta.finish_reason.value)
        return data

    def _ending(self) -> bytes:
        if not self._include_usage:
            return DONE
        generation = self._generation
        counts = shapes.usage(
            generation.prompt_tokens, self._completion_tokens, generation.cached_tokens
        )
        return self._format.usage(counts) + DONE
