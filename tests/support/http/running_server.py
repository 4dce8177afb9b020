"""HTTP servers over an engine for tests, and a client that sends raw bytes."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import aiohttp
import uvloop

from serve.http import HttpServer, HttpSettings
from tests.support.http.fake_engine import FakeEngine


@dataclass
class RawAnswer:
    status: int
    headers: dict[str, str]
    body: bytes
    is_closed: bool

    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


async def send_raw(host: str, port: int, data: bytes, *, timeout_s: float = 3.0) -> RawAnswer:
    """Sends bytes as they are and reads one answer with a Content-Length."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(data)
        async with asyncio.timeout(timeout_s):
            head = await reader.readuntil(b"\r\n\r\n")
            lines = head.decode("latin-1").split("\r\n")
            headers = {
                name.lower(): value.strip()
                for name, _, value in (line.partition(":") for line in lines[1:] if line)
            }
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            is_closed = headers.get("connection") == "close"
            if is_closed:
                writer.write_eof()
                await reader.read()
        return RawAnswer(int(lines[0].split()[1]), headers, body, is_closed)
    finally:
        writer.close()


def parse_events(body: bytes) -> list[Any]:
    """Returns the data of each event; "[DONE]" stays a string."""
    events = []
    for block in body.decode().split("\n\n"):
        if block:
            assert block.startswith("data: ")
            assert "\n" not in block
            data = block.removeprefix("data: ")
            events.append(data if data == "[DONE]" else json.loads(data))
    return events


def run_with_server(
    engine: FakeEngine, check: Callable[[Served], Awaitable[None]], **settings: Any
) -> None:
    """Runs `check` against a server over the fake engine, in a fresh uvloop."""

    async def main() -> None:
        server = HttpServer(engine, HttpSettings(port=0, **settings))  # type: ignore[arg-type]
        async with server, aiohttp.ClientSession(server.url) as session, asyncio.timeout(20):
            await check(Served(server, engine, session))

    # short waits for open connections, since nothing is checked after a test
    with (
        mock.patch("serve.http.server.FLUSH_S", 0.02),
        mock.patch("serve.http.edge.connection.REST_S", 0.02),
    ):
        uvloop.run(main())


@dataclass
class Served:
    """A running server and a client session at its root."""

    server: HttpServer
    engine: FakeEngine
    session: aiohttp.ClientSession

    @property
    def port(self) -> int:
        return int(self.server.url.rpartition(":")[2])

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, dict[str, Any]]:
        async with self.session.post(path, json=body, **options) as response:
            return response.status, await response.json()

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        async with self.session.post(path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            return parse_events(await response.read())

    async def raw(self, data: bytes, *, timeout_s: float = 3.0) -> RawAnswer:
        return await send_raw("127.0.0.1", self.port, data, timeout_s=timeout_s)

    async def until(self, condition: Callable[[], bool], timeout_s: float = 3.0) -> float:
        """Waits until the condition holds and returns the seconds."""
        start_s = time.monotonic()
        while not condition():
            assert time.monotonic() - start_s < timeout_s, "the condition does not become true"
            await asyncio.sleep(0.002)
        return time.monotonic() - start_s


class ServerThread:
    """A server in its own thread, for blocking clients. url: its root."""

    def __init__(self, engine: Any, settings: HttpSettings | None = None) -> None:
        self._engine = engine
        self._settings = settings or HttpSettings(port=0)
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._failure: BaseException | None = None
        self.url = ""

    def __enter__(self) -> ServerThread:
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        uvloop.run(self._main())

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        try:
            async with HttpServer(self._engine, self._settings) as server:
                self.url = server.url
                self._started.set()
                await self._stop.wait()
        except BaseException as exc:
            self._failure = exc
            raise
        finally:
            self._started.set()
