"""Writes the answer to a chat, whole or as events, in the shape of any API."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from aiohttp import web

from serve.chat.answer_reader import ChatStep
from serve.http.calls.chat_run import ChatRun
from serve.http.edge.errors import ApiError
from serve.http.edge.sse import EventStream


class Counts(Protocol):
    """Token counts of a chat. cached_tokens is valid from the first step on; reasoning_tokens are
    those of the answer up to now."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def reasoning_tokens(self) -> int: ...


class AnswerWriter(Protocol):
    """Collects an answer. Each call returns the events to send; the first start the stream."""

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
    """Sends the answer as events. An error raises until the head is sent; after that it becomes
    the last event."""

    async def parts() -> AsyncGenerator[bytes, None]:
        async with aclosing(run.steps()) as steps:
            async for step in steps:
                yield writer.step(step)
        yield writer.end()

    return await events.send_all(parts(), writer.failed)
