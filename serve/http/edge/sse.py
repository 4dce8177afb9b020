"""Server-sent events: one streaming answer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, Protocol, cast

import orjson
from aiohttp import web
from aiohttp.http_writer import StreamWriter

from serve.errors import drop_frames
from serve.http.edge.errors import ApiError, common_headers, to_api_error

DONE = b"data: [DONE]\n\n"


def named_event(name: str, value: Any) -> bytes:
    """Returns an event with a name and a JSON value."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), orjson.dumps(value))


class Journal(Protocol):
    """Tells the reader of a stream which tokens its events are made of."""

    def commit(self, events: bytes) -> bytes: ...
    def failed(self, last: bytes, code: str | None) -> bytes: ...


class EventStream:
    """One streaming answer. Writes never block on a reader that keeps up."""

    def __init__(
        self,
        request: web.BaseRequest,
        request_id: str,
        *,
        write_timeout_s: float,
        send_buffer_bytes: int,
        headers: Mapping[str, str] | None = None,
        journal: Journal | None = None,
    ) -> None:
        self._request = request
        self._headers = headers or {}
        self._journal = journal
        self._request_id = request_id
        self._write_timeout_s = write_timeout_s
        self._send_buffer_bytes = send_buffer_bytes
        self._writer = cast(StreamWriter, request.writer)
        self._protocol = request.protocol
        self.response: web.StreamResponse | None = None

    async def start(self) -> None:
        """Sends the head. After that an error can only be an event."""
        self._limit_send_buffer()
        response = web.StreamResponse(
            headers={
                **common_headers(self._request_id),
                "Content-Type": "text/event-stream; charset=utf-8",
                "X-Accel-Buffering": "no",
                **self._headers,
            }
        )
        await response.prepare(self._request)
        self.response = response

    async def send(self, data: bytes) -> None:
        """Raises ConnectionError if the client has left or reads nothing for the write timeout."""
        await self._writer.write(data, drain=False)
        if self._protocol.writing_paused:
            await self._wait_for_reader(self._writer.drain())

    async def send_all(
        self, parts: AsyncGenerator[bytes, None], failed: Callable[[ApiError], bytes]
    ) -> web.StreamResponse:
        """Sends the parts, and starts with the first that is not empty. An error raises until then;
        after that it becomes the last event, which `failed` makes."""
        try:
            async with aclosing(parts):
                async for data in parts:
                    if self._journal is not None:
                        data = self._journal.commit(data)
                    if data:
                        if self.response is None:
                            await self.start()
                        await self.send(data)
        except ConnectionError:
            raise
        except Exception as exc:
            if self.response is None:
                raise
            error = to_api_error(exc, self._request_id)
            last = failed(error)
            if self._journal is not None:
                last = self._journal.failed(last, error.code)
            drop_frames(exc)
            await self.send_last(last)
        return await self.finish()

    async def send_last(self, data: bytes) -> None:
        """Sends the last event of a stream that has failed; the connection closes after it."""
        await self.send(data)
        if self.response is not None:
            self.response.force_close()

    async def finish(self) -> web.StreamResponse:
        assert self.response is not None, "start() comes first"
        await self._wait_for_reader(self.response.write_eof())
        return self.response

    async def _wait_for_reader(self, writing: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await writing
        except TimeoutError:
            transport = self._request.transport
            if transport is not None:
                transport.abort()  # close() would wait for the reader again
            raise ConnectionResetError("the reader of a stream made no progress") from None

    def _limit_send_buffer(self) -> None:
        transport = self._request.transport
        sock = transport.get_extra_info("socket") if transport is not None else None
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._send_buffer_bytes)
