"""Limits on connections, calls, bodies and time, and the errors beyond these limits."""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

import pytest

from serve.http.edge.connection import _foreign_address
from tests.support.http.fake_engine import FakeEngine
from tests.support.http.raw_requests import BODY, CHAT, RAW_BODY, request
from tests.support.http.running_server import Served, run_with_server

GET_HEALTH = request(b"", first="GET /health HTTP/1.1", kind=None, length=None)
GET_MODELS = request(b"", first="GET /v1/models HTTP/1.1", kind=None, length=None)


# ---- overload


@pytest.mark.timing
@pytest.mark.row("A13")
def test_refusals_are_quick_and_queue_no_request() -> None:
    """Calls beyond a full queue are refused within 50 ms."""

    async def check(served: Served) -> None:
        writers = [await start(served) for _ in range(2)]
        await served.until(lambda: len(served.engine.waiting) == 1)

        async def ask() -> float:
            start_s = time.monotonic()
            answer = await served.raw(request())
            assert answer.status == 429
            assert answer.error()["code"] == "queue_full"
            assert int(answer.headers["retry-after"]) >= 1
            return time.monotonic() - start_s

        for _ in range(5):
            await asyncio.gather(*(ask() for _ in range(4)))
        seconds = [await ask() for _ in range(40)]
        assert statistics.quantiles(seconds, n=10)[7] < 0.05  # slower ones are noise of the machine
        assert len(served.engine.submitted) == 2
        for writer in writers:
            writer.close()

    run_with_server(FakeEngine(slots=1, max_waiting=1, step_s=0.02, repeat=1000), check)


def test_calls_in_flight_are_bounded() -> None:
    async def check(served: Served) -> None:
        writer = await start(served)
        await served.until(lambda: len(served.engine.running) == 1)
        status, answer = await served.post(CHAT, BODY)
        assert (status, answer["error"]["code"]) == (429, "overloaded")
        assert (await served.raw(GET_HEALTH)).status == 200
        writer.close()
        await served.until(lambda: not served.server.app.context.calls)
        assert (await served.post(CHAT, {**BODY, "max_tokens": 1}))[0] == 200

    run_with_server(FakeEngine(step_s=0.02, repeat=1000), check, max_calls=1)


def test_bodies_in_memory_are_bounded() -> None:
    async def check(served: Served) -> None:
        half = request(RAW_BODY[:-1] + b" " * 2000, length="3000")
        _, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(half)
        bodies = served.server.app.context.bodies
        await served.until(lambda: bodies.num_bytes > 2000)
        answer = await served.raw(half)
        assert (answer.status, answer.error()["code"]) == (429, "overloaded")
        assert answer.is_closed
        writer.close()
        await served.until(lambda: bodies.num_bytes == 0)
        assert (await served.post(CHAT, BODY))[0] == 200
        assert bodies.num_bytes == 0

    run_with_server(FakeEngine(), check, max_bodies_bytes=4000)


async def start(served: Served) -> asyncio.StreamWriter:
    _, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(request())
    return writer


# ---- connections


@pytest.mark.row("C13")
def test_one_connection_too_many() -> None:
    """A connection above the limit gets health or an error and is closed, and connections above the
    spare ones get no answer."""

    async def check(served: Served) -> None:
        idle = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(3)]
        connections = served.server.app.context.counters.num_connections
        await served.until(lambda: connections() == 3)
        answer = await served.raw(GET_MODELS)
        assert (answer.status, answer.error()["code"]) == (429, "too_many_connections")
        assert answer.is_closed
        assert answer.headers["retry-after"]
        assert (await served.raw(GET_HEALTH)).status == 200
        flood = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(60)]
        await asyncio.sleep(0.05)
        assert connections() <= 3 + 16 + 1
        for _, writer in flood + idle:
            writer.close()
        await served.until(lambda: connections() <= 1)
        assert (await served.post(CHAT, BODY))[0] == 200

    run_with_server(FakeEngine(), check, max_connections=3)


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        (("127.0.0.1", 5), None),
        (("::1", 5, 0, 0), None),
        (("127.3.2.1", 5), None),
        ("", None),
        (None, None),
        (("192.0.2.7", 5), "192.0.2.7"),
        (("fe80::1%eth0", 5, 0, 0), "fe80::1%eth0"),
    ],
)
@pytest.mark.row("A8")
def test_only_addresses_of_other_machines_are_counted(peer: Any, address: str | None) -> None:
    assert _foreign_address(peer) == address


@pytest.mark.row("C14", "A8")
def test_connections_of_one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers of proxies do not change the address of a connection."""
    monkeypatch.setattr("serve.http.edge.connection._foreign_address", lambda peer: "192.0.2.7")

    async def check(served: Served) -> None:
        idle = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(2)]
        await asyncio.sleep(0.02)
        for lines in ([], ["X-Forwarded-For: 192.0.2.9", "Forwarded: for=192.0.2.9"]):
            answer = await served.raw(request(RAW_BODY, *lines))
            assert (answer.status, answer.error()["code"]) == (429, "too_many_connections")
        for _, writer in idle:
            writer.close()
        await asyncio.sleep(0.02)
        assert (await served.raw(request())).status == 200

    run_with_server(FakeEngine(), check, max_connections_per_address=2)


FEW_FILES = """
import asyncio, resource, sys
sys.path[:0] = [".", "tests"]
from tests.support.http.fake_engine import FakeEngine
from serve.http import HttpServer, HttpSettings
import uvloop

async def main():
    async with HttpServer(FakeEngine(), HttpSettings(port=0)) as server:
        print(server.url, flush=True)
        await asyncio.to_thread(sys.stdin.read)

resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96))
uvloop.run(main())
"""


@pytest.mark.process
def test_health_without_free_files_and_recovery() -> None:
    """A process that may open 96 files gets 200 connections."""
    command = [sys.executable, "-c", FEW_FILES]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    port = int(process.stdout.readline().strip().rpartition(":")[2])
    flood = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
    time.sleep(1.3)
    assert process.poll() is None
    for connection in flood[100:]:  # the server has accepted none of these
        connection.close()
    time.sleep(0.1)
    assert answer_of(port, GET_HEALTH).startswith(b"HTTP/1.1 200 ")
    for connection in flood[:100]:
        connection.close()
    time.sleep(0.1)
    assert answer_of(port, request()).startswith(b"HTTP/1.1 200 ")
    process.communicate("", timeout=10)
    assert process.returncode == 0


def answer_of(port: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(data)
        return connection.recv(4096)


# ---- time


@pytest.mark.timing
@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_before_the_first_token_is_504(stream: bool) -> None:
    """The timeout also ends requests in the queue."""

    async def check(served: Served) -> None:
        first = await start(served)
        await served.until(lambda: len(served.engine.running) == 1)
        body = json.dumps({**BODY, "stream": stream}).encode()
        start_s = time.monotonic()
        answer = await served.raw(request(body, "X-Request-Timeout: 0.2"))
        assert 0.15 < time.monotonic() - start_s < 1
        assert answer.status == 504
        assert answer.error() == {
            "message": "the answer was not complete within 0.2 s",
            "type": "timeout_error",
            "param": None,
            "code": "generation_timeout",
        }
        assert not served.engine.waiting
        first.close()

    run_with_server(FakeEngine(slots=1, step_s=0.02, repeat=1000), check)


def test_a_deadline_in_a_stream_is_its_last_event() -> None:
    async def check(served: Served) -> None:
        body = {**BODY, "stream": True}
        async with served.session.post(
            CHAT, json=body, headers={"X-Request-Timeout": "0.3"}
        ) as response:
            assert response.status == 200
            text = await response.text()
        assert '"code":"generation_timeout"' in text.rstrip().rpartition("\n\n")[2]
        assert "[DONE]" not in text
        assert len(served.engine.aborted) == 1
        assert not served.engine.running

    run_with_server(FakeEngine(step_s=0.02, repeat=1000), check)


def test_the_deadline_of_the_setting() -> None:
    async def check(served: Served) -> None:
        for headers in ({}, {"X-Request-Timeout": "999999999"}):
            status, answer = await served.post(CHAT, BODY, headers=headers)
            assert (status, answer["error"]["code"]) == (504, "generation_timeout")
        assert len(served.engine.aborted) == 2

    run_with_server(FakeEngine(step_s=0.02, repeat=1000), check, request_timeout_s=0.2)


@pytest.mark.parametrize("text", ["0", "-1", "0.0000", "1e3", "inf", "nan", "", "x", "1" * 20])
@pytest.mark.row("P28")
def test_bad_deadlines(text: str) -> None:
    async def check(served: Served) -> None:
        answer = await served.raw(request(RAW_BODY, f"X-Request-Timeout: {text}"))
        assert answer.status == 400
        assert answer.error()["param"] == "X-Request-Timeout"
        assert not served.engine.submitted

    run_with_server(FakeEngine(), check)


def test_health_of_a_stuck_engine() -> None:
    async def check(served: Served) -> None:
        for path in ("/health", "/health/live", "/ping"):
            assert (await served.raw(get(path))).status == 200
            served.engine.stuck = "a step has taken 99 s and goes on"
            answer = await served.raw(get(path))
            assert answer.status == 503
            assert answer.error()["code"] == "engine_stuck"
            assert "99 s" in answer.error()["message"]
            served.engine.stuck = None
        for path in ("/ready", "/health/ready"):
            assert (await served.raw(get(path))).status == 200

    run_with_server(FakeEngine(), check)


def get(path: str) -> bytes:
    return request(b"", first=f"GET {path} HTTP/1.1", kind=None, length=None)


# ---- identity


@pytest.mark.parametrize(
    ("client_id", "echoed"),
    [
        ("a.B_c-9", "a.B_c-9"),
        ("x" * 64, "x" * 64),
        ("x" * 65, None),
        ("10.0.0.1:5000", None),
        ("a b", None),
        ("\xe4", None),
        ('"', None),
    ],
)
@pytest.mark.row("A7")
def test_request_ids(client_id: str, echoed: str | None) -> None:
    """A valid id of the client is echoed beside the id of the server."""

    async def check(served: Served) -> None:
        for path in (CHAT, "/nowhere"):
            answer = await served.raw(
                request(RAW_BODY, f"X-Request-Id: {client_id}", first=f"POST {path} HTTP/1.1")
            )
            assert answer.headers.get("x-client-request-id") == echoed
            assert answer.headers["x-request-id"].startswith("req_")
        assert len(served.engine.submitted) == 1

    run_with_server(FakeEngine(), check)


@pytest.mark.row("A7")
def test_the_same_client_id_twice_at_once() -> None:
    async def check(served: Served) -> None:
        answers = await asyncio.gather(
            *(served.raw(request(RAW_BODY, "X-Request-Id: same")) for _ in range(2))
        )
        assert [answer.status for answer in answers] == [200, 200]
        assert len({answer.headers["x-request-id"] for answer in answers}) == 2

    run_with_server(FakeEngine(step_s=0.01), check)


def test_every_answer_has_the_common_headers() -> None:
    async def check(served: Served) -> None:
        stream = json.dumps({**BODY, "stream": True}).encode()
        for data in (request(), request(b""), GET_HEALTH, get("/nowhere"), b"nonsense\r\n\r\n"):
            headers = (await served.raw(data)).headers
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["cache-control"] == "no-store"
            assert "access-control-allow-origin" not in headers
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(request(stream))
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert b"nosniff" in head and b"no-store" in head
        writer.close()

    run_with_server(FakeEngine(), check)
