"""A server that sends scripted bytes, and the load generator's client for it."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import uvloop

from bench.load.client.answer import CallError
from bench.load.client.record import Record
from bench.load.client.targets import ServerSettings, ServerTarget
from bench.load.workload.work import Work

CLOSE = "close"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = STREAM + b"Transfer-Encoding: chunked\r\n\r\n"
UNTIL_CLOSED = STREAM + b"Connection: close\r\n\r\n"

Reply = list[bytes | float | str]


def framed(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)


def text(value: str, finish: str | None = None) -> bytes:
    return json.dumps({"choices": [{"text": value, "finish_reason": finish}]}).encode()


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


USAGE = json.dumps(
    {
        "choices": [],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }
).encode()
DONE = event(b"[DONE]")
GOOD = event(text("a")) + event(text("b", "stop")) + event(USAGE) + DONE


class RawServer:
    """Answers the requests of all connections with the replies in turn.

    A reply is a list of bytes to send, of pauses in seconds, and of CLOSE, which closes the
    connection.
    """

    def __init__(self, *replies: Reply, tls: ssl.SSLContext | None = None) -> None:
        self.replies = list(replies)
        self.requests: list[tuple[bytes, Any]] = []
        self.num_connections = 0
        self._tls = tls
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> RawServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"{'https' if self._tls else 'http'}://localhost:{port}"
        if self._tls is None:
            self.url = f"http://127.0.0.1:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()
        await asyncio.sleep(0.01)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._writers.append(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = 0
                for line in head.split(b"\r\n"):
                    if line.lower().startswith(b"content-length:"):
                        size = int(line[15:])
                body = await reader.readexactly(size)
                self.requests.append((head, json.loads(body) if body else None))
                for part in self.replies.pop(0):
                    if part == CLOSE:
                        writer.close()
                        return
                    if isinstance(part, float):
                        await asyncio.sleep(part)
                    else:
                        assert isinstance(part, bytes)
                        writer.write(part)
                        await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, IndexError):
            writer.close()


def with_server(
    server: RawServer, use: Callable[[ServerTarget], Awaitable[Any]], **settings: Any
) -> Any:
    async def run() -> Any:
        async with server:
            target_settings = ServerSettings(server.url, **{"model": "m", **settings})
            async with ServerTarget(target_settings) as target:
                return await use(target)

    return uvloop.run(run())


def send_all(
    *replies: Reply, times: int = 1, **settings: Any
) -> tuple[list[Record], list[str], RawServer]:
    """Returns the records and errors of sequential requests, and the server."""
    server = RawServer(*replies)
    records: list[Record] = []
    errors: list[str] = []

    async def use(target: ServerTarget) -> None:
        for number in range(times):
            records.append(Record(number, 0.0))
            try:
                await target.send(target.prepare(Work(prompt="Hi", max_tokens=3)), records[-1])
                errors.append("")
            except CallError as exc:
                errors.append(f"{exc.status} {exc.code}: {exc}")
            await asyncio.sleep(0.02)  # time to notice that the server closed the connection

    with_server(server, use, **settings)
    return records, errors, server


def send_one(*parts: bytes | float | str, **settings: Any) -> tuple[Record, str]:
    """Returns the record and error of one request with this reply."""
    records, errors, _ = send_all(list(parts), **settings)
    return records[0], errors[0]
