"""Answers of a server that loads, serves, drains or stops, and the effect of signals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from typing import Any

import aiohttp
import pytest
import uvloop

from serve.config import EngineConfig
from serve.engine.node_recovery import NODES_LOST, TOO_LITTLE_LEFT
from serve.errors import GROUP_LOST
from serve.http import HttpServer, HttpSettings
from serve.http.app import ServerState
from serve.http.server import serve_until_signal
from tests.support.engine.engine_rig import Rig
from tests.support.http.fake_engine import FakeEngine
from tests.support.http.raw_requests import RAW_BODY, request
from tests.support.http.running_server import Served, run_with_server

pytestmark = pytest.mark.timing

CHAT = "/v1/chat/completions"
CHAT_BODY: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.row("A14")
def test_loading_then_ready() -> None:
    engine = FakeEngine(load_s=0.3)

    async def check() -> None:
        server = HttpServer(engine, HttpSettings(port=0))  # type: ignore[arg-type]
        await server.start()
        served = Served(server, engine, _session(server))
        loading = asyncio.create_task(server.load())
        try:
            assert await _status(served, "GET", "/health") == (200, None, None)
            for method, path in (("GET", "/ready"), ("GET", "/v1/models"), ("POST", CHAT)):
                status, code, retry = await _status(served, method, path)
                assert (status, code) == (503, "model_not_ready")
                assert retry is not None
            await loading
            assert await _status(served, "GET", "/ready") == (200, None, None)
            assert await _status(served, "POST", CHAT) == (200, None, None)
        finally:
            await served.session.close()
            await server.stop()

    asyncio.run(check())


def test_a_failed_engine_is_not_ready() -> None:
    async def check(served: Served) -> None:
        served.engine.is_ready = False
        for method, path in (("GET", "/ready"), ("POST", CHAT)):
            assert (await _status(served, method, path))[:2] == (503, "engine_failed")
        assert await _status(served, "GET", "/health") == (200, None, None)

    run_with_server(FakeEngine(), check)


def test_a_server_without_memory_is_not_ready() -> None:
    """While memory nodes or ranks are lost, /ready is 503, and requests can wait."""

    async def check(served: Served) -> None:
        served.engine.has_memory = False
        assert await _status(served, "GET", "/ready") == (503, "memory_nodes_lost", "5")
        assert await _status(served, "GET", "/health") == (200, None, None)
        assert await _status(served, "POST", CHAT) == (200, None, None)
        served.engine.config = EngineConfig(pipeline_parallel_size=2)
        assert await _status(served, "GET", "/ready") == (503, "rank_lost", "5")
        served.engine.has_memory = True
        assert await _status(served, "GET", "/ready") == (200, None, None)

    run_with_server(FakeEngine(), check)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NODES_LOST, "memory_nodes_lost"),
        (TOO_LITTLE_LEFT, "memory_nodes_lost"),
        (GROUP_LOST, "rank_lost"),
    ],
)
def test_requests_that_waited_for_memory_in_vain_are_retryable(error: str, code: str) -> None:
    async def check(served: Served) -> None:
        for body in (CHAT_BODY, {**CHAT_BODY, "stream": True}):
            assert await _status(served, "POST", CHAT, body) == (503, code, "5")
        _, answer = await served.post(CHAT, CHAT_BODY)
        assert answer["error"]["message"] == error
        assert answer["error"]["type"] == "server_error"
        served.engine.fail_at = 3  # the error comes in the middle of a stream
        async with served.session.post(CHAT, json={**CHAT_BODY, "stream": True}) as response:
            data = await response.read()
        assert f'"code":"{code}"'.encode() in data.rpartition(b"data: ")[2]
        assert b"[DONE]" not in data

    run_with_server(FakeEngine(fail_at=0, fail_error=error), check)


@pytest.mark.row("A14")
def test_draining() -> None:
    async def check(served: Served) -> None:
        running = asyncio.create_task(served.post(CHAT, CHAT_BODY))
        await served.until(lambda: len(served.engine.running) == 1)
        drained = asyncio.create_task(served.server.drain())
        await asyncio.sleep(0)
        for method, path in (("GET", "/ready"), ("GET", "/v1/models"), ("POST", CHAT)):
            status, code, retry = await _status(served, method, path)
            assert (status, code) == (503, "draining")
            assert retry is not None
        assert await _status(served, "GET", "/health") == (200, None, None)
        assert not drained.done()
        assert (await running)[0] == 200
        await drained

    run_with_server(FakeEngine(step_s=0.03), check)


def test_a_drain_that_takes_too_long_ends_streams_with_an_error() -> None:
    async def check(served: Served) -> None:
        body = {**CHAT_BODY, "stream": True}
        async with served.session.post(CHAT, json=body) as response:
            await response.content.readany()
            await served.server.drain()
            assert served.server.app.state is ServerState.DRAINING
            stopping = asyncio.create_task(served.server.stop())
            rest = await response.content.read()
            await stopping
        assert b'"code":"draining"' in rest
        assert b"[DONE]" not in rest

    run_with_server(FakeEngine(step_s=0.02, repeat=1000), check, drain_s=0.1)


def _run_with_signals(
    engine: FakeEngine, *delays_s: float, **settings: Any
) -> tuple[float, list[str]]:
    """Runs a server with one long request and sends a SIGTERM after each delay.

    Returns the seconds from the first signal until it stopped, and the last event of the answer.
    """
    last_events: list[str] = []

    async def main() -> float:
        server = HttpServer(engine, HttpSettings(port=0, **settings))  # type: ignore[arg-type]
        clients: list[asyncio.Task[None]] = []

        async def client(url: str) -> None:
            body = {**CHAT_BODY, "stream": True}
            async with (
                aiohttp.ClientSession(url) as session,
                session.post(CHAT, json=body) as response,
            ):
                last_events.append((await response.text()).rstrip().rpartition("\n\n")[2])

        def on_ready(url: str) -> None:
            clients.append(asyncio.create_task(client(url)))

        serving = asyncio.create_task(serve_until_signal(server, on_ready=on_ready))
        first_s = 0.0
        for delay_s in delays_s:
            while not engine.submitted:
                await asyncio.sleep(0.01)
            await asyncio.sleep(delay_s)
            first_s = first_s or time.monotonic()
            assert not serving.done()  # a stopped server would not catch the signal
            os.kill(os.getpid(), signal.SIGTERM)
        await serving
        await asyncio.gather(*clients)
        return time.monotonic() - first_s

    return uvloop.run(main()), last_events


def test_a_signal_lets_requests_finish() -> None:
    _, last_events = _run_with_signals(FakeEngine(step_s=0.03), 0.1)
    assert last_events == ["data: [DONE]"]


def test_a_second_signal_does_not_wait() -> None:
    seconds, last_events = _run_with_signals(FakeEngine(step_s=0.03, repeat=1000), 0.1, 0.2)
    assert seconds < 1.5
    assert '"code":"draining"' in last_events[0]


@pytest.mark.parametrize("attack", ["slow body", "slow head", "idle"])
def test_slow_clients_do_not_delay_a_stop(attack: str) -> None:
    """64 streams finish, and the server stops within a second of the last one."""
    last_events: list[str] = []
    seconds: list[float] = []

    async def client(url: str) -> None:
        async with (
            aiohttp.ClientSession(url) as session,
            session.post(CHAT, json={**CHAT_BODY, "stream": True, "max_tokens": 20}) as response,
        ):
            last_events.append((await response.text()).rstrip().rpartition("\n\n")[2])

    async def main() -> None:
        engine = FakeEngine(step_s=0.03, repeat=100_000)
        server = HttpServer(engine, HttpSettings(port=0))  # type: ignore[arg-type]
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(serve_until_signal(server, on_ready=ready.set_result))
        url = await ready
        slow_clients = [await _attack(attack, int(url.rpartition(":")[2])) for _ in range(8)]
        clients = [asyncio.create_task(client(url)) for _ in range(64)]
        while len(engine.submitted) < 64:
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.gather(*clients)
        began_s = time.monotonic()
        await serving
        seconds.append(time.monotonic() - began_s)
        for writer in slow_clients:
            writer.close()

    uvloop.run(main())
    assert last_events == ["data: [DONE]"] * 64
    assert seconds[0] < 1


def test_a_stalled_reader_does_not_delay_a_stop() -> None:
    """Unread data of a finished request does not delay the drain."""

    async def main() -> float:
        rig = Rig()
        server = HttpServer(rig.engine, HttpSettings(port=0))
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(serve_until_signal(server, on_ready=ready.set_result))
        port = int((await ready).rpartition(":")[2])
        body = {"model": rig.engine.model_name, "prompt": [5, 6, 7], "max_tokens": 200}
        body |= {"stream": True, "logprobs": 5, "n": 8, "ignore_eos": True}
        stalled = socket.socket()
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(stalled, ("127.0.0.1", port))
        data = request(json.dumps(body).encode(), first="POST /v1/completions HTTP/1.1")
        await loop.sock_sendall(stalled, data)
        while rig.engine.stats().num_finished < 8:
            await asyncio.sleep(0.01)
        (call,) = server.app.context.calls
        await asyncio.sleep(0.1)
        assert call in server.app.context.calls  # the answer is not yet read
        assert not call.is_computing
        began_s = time.monotonic()
        connections = server._listener._connections
        os.kill(os.getpid(), signal.SIGTERM)
        await serving
        assert connections is not None and not connections.closing
        stalled.close()
        return time.monotonic() - began_s

    assert uvloop.run(main()) < 1.5


async def _attack(attack: str, port: int) -> asyncio.StreamWriter:
    _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    if attack == "slow body":
        writer.write(request(RAW_BODY[:10], length=str(len(RAW_BODY))))
    elif attack == "slow head":
        writer.write(b"POST / HTTP/1.1\r\n")
    await asyncio.sleep(0.01)
    return writer


def _session(server: HttpServer) -> Any:
    return aiohttp.ClientSession(server.url)


async def _status(
    served: Served, method: str, path: str, body: dict[str, Any] = CHAT_BODY
) -> tuple[int, str | None, str | None]:
    json_body = body if method == "POST" else None
    async with served.session.request(method, path, json=json_body) as response:
        answer = await response.json()
        code = answer.get("error", {}).get("code")
        return response.status, code, response.headers.get("Retry-After")
