"""Clients that close their sending half after a request, as `nc -N` does."""

from __future__ import annotations

import asyncio
import socket

import pytest
import uvloop

from bench.common.instant import load_instant
from serve import Engine
from serve.http import HttpServer, HttpSettings
from tests.support.http.fake_engine import FakeEngine
from tests.support.http.raw_requests import RAW_BODY, request
from tests.support.http.running_server import Served, run_with_server

pytestmark = pytest.mark.usefixtures("nothing_in_the_log")


async def ask(served: Served, data: bytes, *, pause_s: float | None = None) -> bytes:
    """Sends the data, closes the sending half and returns all that comes back. Without a pause the
    server, which has the same event loop, finds the data and their end at once."""
    connection = socket.create_connection(("127.0.0.1", served.port))
    connection.sendall(data)
    if pause_s is not None:
        await asyncio.sleep(pause_s)
    connection.shutdown(socket.SHUT_WR)
    reader, writer = await asyncio.open_connection(sock=connection)
    async with asyncio.timeout(3):
        answer = await reader.read()
    writer.close()
    return answer


def get(path: str, method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/openapi.json", "/nowhere"])
def test_a_get_is_answered(path: str) -> None:
    async def check(served: Served) -> None:
        expected = b"404" if path == "/nowhere" else b"200"
        for pause_s in (None, 0.0, 0.001, 0.1):
            answer = await ask(served, get(path), pause_s=pause_s)
            head, _, body = answer.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 " + expected)
            (length,) = [line for line in head.split(b"\r\n") if b"Content-Length" in line]
            assert len(body) == int(length.split()[1])
        assert (await ask(served, get(path, "HEAD"))).startswith(b"HTTP/1.1 " + expected)
        assert served.server.app.num_calls == 0

    run_with_server(FakeEngine(), check)


def test_a_damaged_request_is_answered() -> None:
    async def check(served: Served) -> None:
        assert b" 400 " in (await ask(served, b"HELLO\r\n\r\n")).splitlines()[0]

    run_with_server(FakeEngine(), check)


def test_an_idle_connection_and_an_incomplete_head_are_closed() -> None:
    async def check(served: Served) -> None:
        assert await ask(served, b"") == b""
        assert await ask(served, get("/health")[:-4]) == b""
        answer = await ask(served, get("/health"), pause_s=0.2)  # answered, then closed
        assert answer.startswith(b"HTTP/1.1 200")

    run_with_server(FakeEngine(), check)


def test_a_post_is_abandoned() -> None:
    async def check(served: Served) -> None:
        assert await ask(served, request(RAW_BODY), pause_s=0.1) == b""
        await served.until(lambda: not served.engine.running)
        assert len(served.engine.aborted) == 1
        answer = await ask(served, get("/health") + request(RAW_BODY), pause_s=0.1)
        assert answer.count(b"HTTP/1.1") == 1  # the answer to the GET
        await served.until(lambda: not served.engine.running)
        assert len(served.engine.aborted) == 2

    run_with_server(FakeEngine(step_s=0.01, repeat=1000), check)


def test_an_endless_answer_ends_when_the_client_is_gone() -> None:
    async def main() -> None:
        engine = Engine(load=load_instant, served_model_name="m")
        async with HttpServer(engine, HttpSettings(port=0)) as server, asyncio.timeout(10):
            port = int(server.url.rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(get("/live"))
            writer.write_eof()
            for _ in range(3):
                await reader.readuntil(b"data: ")
            assert server.app.num_calls == 1
            writer.close()
            while server.app.num_calls:
                await asyncio.sleep(0.02)

    uvloop.run(main())
