"""One choice of a chat to an answer, whole or as events, in whatever API's words."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from aiohttp import web

from serve.http.calls.chat_run import ChatRun, ChatStep
from serve.http.edge.errors import ApiError
from serve.http.edge.sse import EventStream


class Counts(Protocol):
    """Tokens of a prompt; cached ones are known with the first step. And those of the answer, up
    to now, that are reasoning."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def reasoning_tokens(self) -> int: ...


class AnswerWriter(Protocol):
    """Gathers an answer. Each call returns the events to send; the first one's begin the stream."""

    def step(self, step: ChatStep) -> bytes: ...
    def end(self) -> bytes: ...
    def failed(self, error: ApiError) -> bytes: ...


async def write_whole(run: ChatRun, writer: AnswerWriter) -> None:
    async with aclosing(run.steps()) as steps:
        async for step in steps:
            writer.step(step)
    writer.end()


async def write_stream(
    run: ChatRun, writer: AnswerWriter, events: EventStream
) -> web.StreamResponse:
    """Until the head is sent an error raises; after that it is the last event."""

    async def parts() -> AsyncGenerator[bytes, None]:
        async with aclosing(run.steps()) as steps:
            async for step in steps:
                yield writer.step(step)
        yield writer.end()

    return await events.send_all(parts(), writer.failed)
