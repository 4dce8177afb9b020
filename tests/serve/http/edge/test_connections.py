"""Slow clients, clients that leave, stalled readers and damaged requests, on sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import socket
import time
from typing import Any

import pytest

from serve.http import HttpSettings
from tests.support.http.fake_engine import FakeEngine
from tests.support.http.raw_requests import BODY, CHAT, RAW_BODY, request
from tests.support.http.running_server import Served, run_with_server

pytestmark = [
    pytest.mark.timing,
    pytest.mark.usefixtures("nothing_in_the_log"),
]


def test_a_large_body_is_parsed_off_the_loop() -> None:
    async def check(served: Served) -> None:
        status, _ = await served.post(CHAT, {**BODY, "user": None, "stop": ["x"] * 3})
        assert status == 200
        assert (await served.post(CHAT, {**BODY, "foo": [{}] * 50_000}))[0] == 400

    run_with_server(FakeEngine(), check, parse_inline_bytes=64)


@pytest.mark.row("C1", "C2", "C3", "C8")
def test_default_deadlines() -> None:
    settings = HttpSettings()
    assert (settings.first_request_timeout_s, settings.head_timeout_s) == (15, 10)
    assert (settings.body_timeout_s, settings.body_min_rate) == (30, 1024)
    assert (settings.write_timeout_s, settings.send_buffer_bytes) == (30, 128 << 10)


@pytest.mark.row("C3")
def test_a_slow_body_is_408() -> None:
    async def check(served: Served) -> None:
        answer = await served.raw(request(RAW_BODY[:10], length=str(len(RAW_BODY))))
        assert answer.status == 408
        assert answer.error()["type"] == "timeout_error"
        assert answer.is_closed

    run_with_server(FakeEngine(), check, body_timeout_s=0.2)


@pytest.mark.row("C1")
def test_a_silent_connection_is_closed() -> None:
    async def check(served: Served) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        async with asyncio.timeout(2):
            assert await reader.read() == b""
        writer.close()

    run_with_server(FakeEngine(), check, first_request_timeout_s=0.2)


@pytest.mark.parametrize("is_second", [False, True])
@pytest.mark.row("C2")
def test_a_slow_head_is_408(is_second: bool) -> None:
    """Header lines that arrive slowly extend no deadline, in the first request or a later one."""

    async def check(served: Served) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        if is_second:
            writer.write(request(b"", first="GET /health HTTP/1.1", kind=None, length=None))
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split()[0])
            await reader.readexactly(length)
        began_s = time.monotonic()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\n")
        answer = asyncio.create_task(reader.read())
        while not answer.done():
            writer.write(b"X-A: b\r\n")
            await asyncio.sleep(0.03)
            assert time.monotonic() - began_s < 2
        assert 0.25 < time.monotonic() - began_s < 0.6
        assert answer.result().startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        assert json.loads(answer.result().partition(b"\r\n\r\n")[2])["error"] == {
            "message": "the head of the request did not arrive in time",
            "type": "timeout_error",
            "param": None,
            "code": "request_timeout",
        }
        writer.close()

    run_with_server(FakeEngine(), check, head_timeout_s=0.3)


def test_a_head_that_is_too_long_is_refused_before_its_end() -> None:
    async def check(served: Served) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(b"GET / HTTP/1.1\r\n")
        while not reader._buffer:  # type: ignore[attr-defined]
            writer.write(b"X-A: " + b"y" * 7000 + b"\r\n")
            await asyncio.sleep(0.02)
        assert (await reader.readline()).startswith(b"HTTP/1.1 431 ")
        writer.close()

    run_with_server(FakeEngine(), check)


def test_idle_connections_are_closed_and_busy_ones_are_not() -> None:
    async def check(served: Served) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        for _ in range(4):
            await asyncio.sleep(0.15)
            writer.write(request(b"", first="HEAD /health HTTP/1.1", kind=None, length=None))
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        began_s = time.monotonic()
        assert await reader.read() == b""
        assert 0.2 < time.monotonic() - began_s < 1
        writer.close()

    run_with_server(FakeEngine(), check, keepalive_s=0.3, head_timeout_s=0.1)


@pytest.mark.row("C3")
def test_a_body_must_keep_a_minimum_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body below the minimum rate is refused long before the deadline of the body."""
    monkeypatch.setattr("serve.http.edge.limits.BODY_GRACE_S", 0.2)

    async def send(served: Served, pause_s: float) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        body = RAW_BODY + b" " * 40
        writer.write(request(b"", length=str(len(body))))
        answer = asyncio.create_task(reader.readline())
        for byte in body:
            if answer.done():
                break
            writer.write(bytes([byte]))
            await asyncio.sleep(pause_s)
        status = int((await answer).split()[1])
        writer.close()
        return status

    async def check(served: Served) -> None:
        assert await send(served, 0.05) == 408
        assert await send(served, 0.001) == 200

    run_with_server(FakeEngine(), check, body_min_rate=100)


@pytest.mark.row("C4")
def test_an_incomplete_body_submits_no_request() -> None:

    async def check(served: Served) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(request(RAW_BODY[:10], length=str(len(RAW_BODY))))
        await asyncio.sleep(0.05)
        writer.close()
        await asyncio.sleep(0.1)
        assert not served.engine.submitted

    run_with_server(FakeEngine(), check)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("action", ["close", "reset", "half-close"])
@pytest.mark.row("C5", "C6")
def test_leaving_while_generating_aborts(stream: bool, action: str) -> None:
    async def check(served: Served) -> None:
        writer = await _start(served, stream)
        await served.until(lambda: len(served.engine.running) == 1)
        await asyncio.sleep(0.05)
        _disconnect(writer, action)
        assert await served.until(lambda: not served.engine.running) < 0.2
        assert len(served.engine.aborted) == 1
        await served.until(lambda: served.server.app.num_calls == 0)
        writer.close()

    run_with_server(FakeEngine(step_s=0.01, repeat=1000), check)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.row("C7")
def test_leaving_while_queued_removes_the_request(stream: bool) -> None:
    async def check(served: Served) -> None:
        first = await _start(served, True)
        await served.until(lambda: len(served.engine.running) == 1)
        second = await _start(served, stream)
        await served.until(lambda: len(served.engine.waiting) == 1)
        _disconnect(second, "close")
        assert await served.until(lambda: not served.engine.waiting) < 0.2
        assert len(served.engine.running) == 1
        _disconnect(first, "close")
        await served.until(lambda: not served.engine.running)

    run_with_server(FakeEngine(slots=1, step_s=0.01, repeat=1000), check)


def test_leaving_ends_all_prompts_of_a_call() -> None:
    async def check(served: Served) -> None:
        body = {"model": "fake", "prompt": ["a", "b", "c"], "max_tokens": 1000, "stream": True}
        data = request(json.dumps(body).encode(), first="POST /v1/completions HTTP/1.1")
        _, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(data)
        await served.until(lambda: len(served.engine.running) == 3)
        _disconnect(writer, "close")
        await served.until(lambda: not served.engine.running)
        assert len(served.engine.aborted) == 3

    run_with_server(FakeEngine(step_s=0.01, repeat=1000), check)


@pytest.fixture
def no_kernel_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables the kernel's timeout, so that only the server ends stalled connections."""
    monkeypatch.setattr("serve.http.edge.listener.notice_dead_peers", lambda *_: None)


@pytest.mark.row("C8")
@pytest.mark.usefixtures("no_kernel_timeout")
def test_a_stalled_reader_is_aborted_without_delaying_other_requests() -> None:
    async def check(served: Served) -> None:
        stalled = socket.socket()
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.setblocking(False)
        await asyncio.get_running_loop().sock_connect(stalled, ("127.0.0.1", served.port))
        body = json.dumps({**BODY, "stream": True}).encode()
        await asyncio.get_running_loop().sock_sendall(stalled, request(body))
        await served.until(lambda: len(served.engine.running) == 1)
        other_events = await served.events(CHAT, {**BODY, "max_tokens": 50})
        assert other_events[-1] == "[DONE]"
        await served.until(lambda: not served.engine.running, timeout_s=10)
        assert len(served.engine.aborted) == 1
        stalled.close()

    run_with_server(FakeEngine(repeat=100_000), check, write_timeout_s=0.3)


@pytest.mark.usefixtures("no_kernel_timeout")
def test_a_reader_of_a_few_bytes_at_a_time_is_aborted() -> None:
    """A reader must drain the buffer within the write timeout; a few bytes do not extend it."""

    async def check(served: Served) -> None:
        loop = asyncio.get_running_loop()
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.setblocking(False)
        await loop.sock_connect(slow, ("127.0.0.1", served.port))
        await loop.sock_sendall(slow, request(json.dumps({**BODY, "stream": True}).encode()))
        began_s = time.monotonic()
        while not served.engine.aborted:
            with contextlib.suppress(ConnectionResetError, BlockingIOError):
                slow.recv(10)
            await asyncio.sleep(0.01)
            assert time.monotonic() - began_s < 5
        assert not served.engine.running
        slow.close()

    run_with_server(FakeEngine(repeat=100_000), check, write_timeout_s=0.3)


@pytest.mark.parametrize("seed", range(3))
def test_damaged_requests_never_cause_a_500(seed: int) -> None:
    """Flipped, cut, doubled and inserted bytes lead to a 4xx, a 200 or a closed connection."""

    async def check(served: Served) -> None:
        rng = random.Random(seed)
        for _ in range(60):
            data = bytearray(request())
            for _ in range(rng.randint(1, 6)):
                _damage(data, rng)
            status = await _status_of(served, bytes(data))
            assert status is None or status == 200 or 400 <= status < 500, bytes(data)
        assert (await served.post(CHAT, BODY))[0] == 200
        await served.until(lambda: served.server.app.num_calls == 0)

    run_with_server(FakeEngine(), check, body_timeout_s=0.05, first_request_timeout_s=0.05)


def _damage(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data))
    kind = rng.randrange(4)
    if kind == 0:
        data[start] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del data[start : start + rng.randint(1, 20)]
        data += b"\r\n" if not data else b""
    elif kind == 2:
        data[start:start] = data[start : start + rng.randint(1, 40)]
    else:
        data[start:start] = rng.choice([b"\r\n", b"\0", b"\xff", b'"', b"{", b":", b" ", b"9" * 20])


async def _status_of(served: Served, data: bytes) -> int | None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    try:
        writer.write(data)
        async with asyncio.timeout(3):
            head = await reader.readline()
        return int(head.split()[1]) if head else None
    except ConnectionResetError:
        return None
    finally:
        writer.close()


@pytest.mark.row("C8")
@pytest.mark.usefixtures("no_kernel_timeout")
def test_a_large_answer_to_a_stalled_reader_is_aborted() -> None:
    async def check(served: Served) -> None:
        body = {"model": "fake", "prompt": ["a"] * 64, "n": 16, "max_tokens": 4000}
        data = request(json.dumps(body).encode(), first="POST /v1/completions HTTP/1.1")
        stalled = socket.socket()
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(stalled, ("127.0.0.1", served.port))
        await loop.sock_sendall(stalled, data)
        await served.until(lambda: len(served.engine.submitted) == 64)
        await served.until(lambda: not served.engine.running, timeout_s=10)
        connections = served.server.app.context.counters.num_connections
        await served.until(lambda: not connections(), timeout_s=10)
        size = 0
        with contextlib.suppress(ConnectionResetError):
            while piece := await loop.sock_recv(stalled, 1 << 20):
                size += len(piece)
        assert size < 64 * 16 * 4000
        assert (await served.post(CHAT, BODY))[0] == 200
        stalled.close()

    reply = "x" * 4000
    run_with_server(_WholeReply(reply=reply, max_model_len=9999), check, write_timeout_s=0.2)


def test_a_large_answer_to_a_slow_reader_arrives() -> None:
    """The answer takes longer than the write timeout, but the reader always makes progress."""
    bytes_per_s = 8 << 20

    async def check(served: Served) -> None:
        body = {"model": "fake", "prompt": ["a"] * 64, "n": 16, "max_tokens": 16_000}
        data = request(json.dumps(body).encode(), first="POST /v1/completions HTTP/1.1")
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        slow.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(slow, ("127.0.0.1", served.port))
        await loop.sock_sendall(slow, data)
        received = b""
        while b"\r\n\r\n" not in received:
            received += await loop.sock_recv(slow, 1 << 16)
        head, _, rest = received.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        assert length is not None
        size = int(length[1])
        num_remaining, began_s = size - len(rest), loop.time()
        while num_remaining:
            if size - num_remaining > (loop.time() - began_s) * bytes_per_s:
                await asyncio.sleep(0.005)
                continue
            piece = await loop.sock_recv(slow, 1 << 16)
            assert piece, "the answer was cut"
            num_remaining -= len(piece)
        assert loop.time() - began_s > 1.5
        slow.close()

    reply = "x" * 16_000
    run_with_server(_WholeReply(reply=reply, max_model_len=20_000), check, write_timeout_s=0.7)


class _WholeReply(FakeEngine):
    """An engine whose sequences have one delta each, with the whole text."""

    def _submit(self, *arguments: Any) -> Any:
        stream = super()._submit(*arguments)
        stream.deltas_at_once = True
        return stream


async def _start(served: Served, stream: bool) -> asyncio.StreamWriter:
    _, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(request(json.dumps({**BODY, "stream": stream}).encode()))
    return writer


def _disconnect(writer: asyncio.StreamWriter, action: str) -> None:
    if action == "half-close":
        writer.write_eof()
    elif action == "reset":
        writer.transport.abort()
    else:
        writer.close()
