"""Server-sent events: what one stream costs per token.

Everything around the text of a chunk is the same for the whole stream, so it is formatted
once; a token costs one orjson call on its text and one write.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from typing import Any, cast

import orjson
from aiohttp import web
from aiohttp.http_writer import StreamWriter

from serve.http.errors import ApiError, common_headers

DONE = b"data: [DONE]\n\n"


def named_event(name: str, value: Any) -> bytes:
    """An event with a name, and a value that is told as JSON."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), orjson.dumps(value))


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
    ) -> None:
        self._request = request
        self._headers = headers or {}
        self._request_id = request_id
        self._write_timeout_s = write_timeout_s
        self._send_buffer_bytes = send_buffer_bytes
        self._writer = cast(StreamWriter, request.writer)
        self._protocol = request.protocol
        self.response: web.StreamResponse | None = None

    async def start(self) -> None:
        """Sends the head. From here on an error can only be an event."""
        self._limit_send_buffer()
        response = web.StreamResponse(
            headers={
                **common_headers(self._request_id),
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                **self._headers,
            }
        )
        await response.prepare(self._request)
        self.response = response

    async def send(self, data: bytes) -> None:
        """ConnectionError when the client is gone or reads nothing for the write timeout."""
        await self._writer.write(data, drain=False)
        if self._protocol.writing_paused:
            await self._wait_for_reader()

    async def send_error(self, error: ApiError) -> None:
        """The last event of a stream that cannot go on; no [DONE] follows."""
        await self.send_last(b"data: " + error.body() + b"\n\n")

    async def send_last(self, data: bytes) -> None:
        """What ends a stream that cannot go on; the connection closes behind it."""
        await self.send(data)
        if self.response is not None:
            self.response.force_close()

    async def finish(self) -> web.StreamResponse:
        assert self.response is not None, "start() comes first"
        await self.response.write_eof()
        return self.response

    async def _wait_for_reader(self) -> None:
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await self._writer.drain()
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


class ChunkFormat:
    """Bytes of the chunks of one stream. `kind` is "chat" or "completion"."""

    def __init__(self, kind: str, answer_id: str, created: int, model: str, *, usage: bool) -> None:
        self._is_chat = kind == "chat"
        head = {
            "id": answer_id,
            "object": "chat.completion.chunk" if self._is_chat else "text_completion",
            "created": created,
            "model": model,
        }
        self._head = b"data: " + orjson.dumps(head)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if usage else b"]}\n\n"
        plain = b',"logprobs":null,"finish_reason":null}'
        self._after_text = (b"}" if self._is_chat else b"") + plain + self._tail
        self._before_text: dict[int, bytes] = {}

    def role(self, index: int) -> bytes:
        """The first chunk of a chat choice; nothing for completions."""
        return self.delta(index, {"role": "assistant", "content": ""}) if self._is_chat else b""

    def delta(self, index: int, delta: dict[str, Any]) -> bytes:
        """Whatever a chat choice gained."""
        return self._chunk(
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        )

    def text(self, index: int, text: str) -> bytes:
        before = self._before_text.get(index)
        if before is None:
            before = self._before_text[index] = self._prefix(index)
        return before + orjson.dumps(text) + self._after_text

    def text_with_logprobs(self, index: int, text: str, logprobs: Any) -> bytes:
        choice: dict[str, Any] = {"index": index}
        choice["delta" if self._is_chat else "text"] = {"content": text} if self._is_chat else text
        return self._chunk({**choice, "logprobs": logprobs, "finish_reason": None})

    def finish(self, index: int, reason: str) -> bytes:
        choice: dict[str, Any] = {"index": index}
        choice["delta" if self._is_chat else "text"] = {} if self._is_chat else ""
        return self._chunk({**choice, "logprobs": None, "finish_reason": reason})

    def usage(self, usage: dict[str, int]) -> bytes:
        return self._head + b'],"usage":' + orjson.dumps(usage) + b"}\n\n"

    def _prefix(self, index: int) -> bytes:
        field = b',"delta":{"content":' if self._is_chat else b',"text":'
        return self._head + b'{"index":%d' % index + field

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return self._head + orjson.dumps(choice) + self._tail
