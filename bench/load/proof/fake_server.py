"""A server with an OpenAI API and no model. It answers at scripted times and logs when it really
read and wrote, to prove the load generator's figures and to try it out.

    python -m bench.load.proof.fake_server --port 8000
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import heapq
import itertools
import signal
import ssl
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from typing import Any, Self

import httptools
import orjson
import uvloop

from bench.load.client.timer import Timer
from bench.load.proof.fake_script import Fault, Profile, Script, after_stall, index_of, script_of

MODEL = "fake"
_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


@dataclass(slots=True)
class Served:
    """One request as the server saw it, with times of time.perf_counter. written_s are the times of
    chunks with text."""

    index: int | None
    arrived_s: float
    written_s: list[float] = field(default_factory=list)
    due_s: list[float] = field(default_factory=list)
    is_closed: bool = False


class _Exchange:
    """The part of an answer that is not written yet."""

    def __init__(self, connection: _Connection, served: Served, script: Script) -> None:
        self.connection = connection
        self.served = served
        self.script = script
        self.has_head = False
        self.is_chat = False
        self.has_usage = False


class _Connection(asyncio.Protocol):
    def __init__(self, server: FakeServer) -> None:
        self._server = server
        self._parser: Any = httptools.HttpRequestParser(self)
        self._transport: Any = None
        self._url = b""
        self._body = b""
        self._now_s = 0.0
        self.exchange: _Exchange | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        if self.exchange is not None:
            self.exchange.served.is_closed = True
        self._parser = self._transport = None

    def data_received(self, data: bytes) -> None:
        self._now_s = time.perf_counter()
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._url = self._body = b""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._url.endswith(b"/completions"):
            self._server.take(self, self._url, self._body, self._now_s)
        elif self._url == b"/v1/models":
            self.answer(200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})
        elif self._url == b"/fake/log":
            self.answer(200, [asdict(served) for served in self._server.log])
        else:
            self.answer(404, {"error": {"message": "no such path", "code": "not_found"}})

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def answer(self, status: int, value: Any) -> None:
        body = orjson.dumps(value)
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n"
        self.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class FakeServer:
    """The server, used inside `async with`. url is its address; log has what it did."""

    def __init__(
        self, profile: Profile, *, port: int = 0, host: str = "127.0.0.1", tls: Any = None
    ) -> None:
        self._profile = profile
        self._host, self._port = host, port
        self._tls: ssl.SSLContext | None = tls
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._zero_s: float | None = None
        self._batch: dict[_Connection, list[bytes]] = {}
        self.connections: set[_Connection] = set()
        self.log: list[Served] = []

    async def __aenter__(self) -> Self:
        self._timer = Timer(self._run)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Connection(self), self._host, self._port, ssl=self._tls, backlog=4096
        )
        port = self._server.sockets[0].getsockname()[1]
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.url = f"{'https' if self._tls else 'http'}://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for connection in list(self.connections):
            connection.close()
        self._timer.close()

    def take(self, connection: _Connection, url: bytes, body: bytes, now_s: float) -> None:
        index = index_of(body)
        script = script_of(self._profile, -1 if index is None else index)
        served = Served(index, now_s)
        self.log.append(served)
        if index is None:  # answers warm-ups and probes at once
            script = Script([0.0], [1], 1, None, Fault.NONE)
        elif self._zero_s is None:
            self._zero_s = now_s
        if script.fault is Fault.REFUSED:
            error = {"message": "too many", "type": "rate_limit", "code": "rate_limit_exceeded"}
            connection.answer(429, {"error": error})
            return
        exchange = _Exchange(connection, served, script)
        exchange.is_chat = b"/chat/" in url
        exchange.has_usage = b'"include_usage":true' in body
        connection.exchange = exchange
        if script.empty_s is not None:
            self._at(
                now_s + script.empty_s, partial(self._write, exchange, _text(0, exchange.is_chat))
            )
        for number, at_s in enumerate(script.chunks_s):
            due_s = self._at(now_s + at_s, partial(self._chunk, exchange, number))
            served.due_s.append(due_s)
        self._timer.set(self._queue[0][0])

    def _at(self, due_s: float, call: Callable[[], None]) -> float:
        """Schedules a call at due_s or after the stall. Returns its time."""
        if self._zero_s is not None and self._profile.stall_s:
            due_s = self._zero_s + after_stall(self._profile, due_s - self._zero_s)
        heapq.heappush(self._queue, (due_s, next(self._order), call))
        return due_s

    def _run(self) -> None:
        """Writes the chunks that are due, with one write per connection."""
        queue = self._queue
        while queue and queue[0][0] <= time.perf_counter():
            heapq.heappop(queue)[2]()
        for connection, parts in self._batch.items():
            connection.write(b"".join(parts))
        self._batch.clear()
        if queue:
            self._timer.set(queue[0][0])

    def _chunk(self, exchange: _Exchange, number: int) -> None:
        script, served = exchange.script, exchange.served
        is_last = number == len(script.chunks_s) - 1
        if is_last and script.fault is Fault.BROKEN:
            exchange.connection.close()
            return
        if is_last and script.fault is Fault.ERROR:
            event = b'data: {"error":{"message":"a bad step","code":"internal_error"}}\n\n'
            self._write(exchange, _framed(event) + b"0\r\n\r\n")
            return
        data = _text(script.chunk_tokens[number], exchange.is_chat)
        if is_last:
            data += _end(exchange)
            exchange.connection.exchange = None
        served.written_s.append(time.perf_counter())
        self._write(exchange, data)

    def _write(self, exchange: _Exchange, data: bytes) -> None:
        if not exchange.has_head:
            exchange.has_head = True
            data = _HEAD + data
        self._batch.setdefault(exchange.connection, []).append(data)


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _event(choices: list[dict[str, Any]], *, is_chat: bool, **more: Any) -> bytes:
    kind = "chat.completion.chunk" if is_chat else "text_completion"
    chunk = {"id": "fake-0", "object": kind, "created": 0, "model": MODEL, "choices": choices}
    return _framed(b"data: " + orjson.dumps({**chunk, **more}) + b"\n\n")


@cache
def _text(num_tokens: int, is_chat: bool) -> bytes:
    text = " word" * num_tokens
    part: dict[str, Any] = {"delta": {"content": text}} if is_chat else {"text": text}
    return _event([{"index": 0, **part, "finish_reason": None}], is_chat=is_chat)


def _end(exchange: _Exchange) -> bytes:
    """Returns the finish reason, usage if it was requested, and the end of the body."""
    part: dict[str, Any] = {"delta": {}} if exchange.is_chat else {"text": ""}
    choices = [{"index": 0, **part, "finish_reason": "length"}]
    data = _event(choices, is_chat=exchange.is_chat)
    if exchange.has_usage:
        script = exchange.script
        num_tokens = sum(script.chunk_tokens)
        usage = {
            "prompt_tokens": script.prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": script.prompt_tokens + num_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        data += _event([], is_chat=exchange.is_chat, usage=usage)
    return data + _framed(b"data: [DONE]\n\n") + b"0\r\n\r\n"


async def _serve(profile: Profile, host: str, port: int) -> None:
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)
    async with FakeServer(profile, port=port, host=host) as server:
        print(server.url, flush=True)
        gc.freeze()
        gc.disable()
        await over.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: any free one")
    parser.add_argument("--profile", default="{}", help="JSON; see fake_script.Profile")
    arguments = parser.parse_args()
    profile = Profile(**orjson.loads(arguments.profile))
    uvloop.run(_serve(profile, arguments.host, arguments.port))


if __name__ == "__main__":
    main()
