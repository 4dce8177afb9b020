"""Sockets: slow and leaving clients, stalled readers, damaged requests."""

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
def test_deadlines_are_short_without_any_setting() -> None:
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


@pytest.mark.parametrize("after_one", [False, True])
@pytest.mark.row("C2")
def test_a_slow_head_is_408(after_one: bool) -> None:
    """A line now and then does not help, be it of the first request or of a later one."""

    async def check(served: Served) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        if after_one:
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
    """A trickle is refused long before the body's deadline; one that is fast enough is not."""
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
def test_half_a_body_and_goodbye() -> None:
    """No answer, nothing submitted."""

    async def check(served: Served) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(request(RAW_BODY[:10], length=str(len(RAW_BODY))))
        await asyncio.sleep(0.05)
        writer.close()
        await asyncio.sleep(0.1)
        assert not served.engine.submitted

    run_with_server(FakeEngine(), check)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
@pytest.mark.row("C5", "C6")
def test_leaving_while_generating_aborts(stream: bool, how: str) -> None:
    async def check(served: Served) -> None:
        writer = await _start(served, stream)
        await served.until(lambda: len(served.engine.running) == 1)
        await asyncio.sleep(0.05)
        _leave(writer, how)
        assert await served.until(lambda: not served.engine.running) < 0.2
        assert len(served.engine.aborted) == 1
        await served.until(lambda: served.server.app.num_calls == 0)
        writer.close()

    run_with_server(FakeEngine(step_s=0.01, repeat=1000), check)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.row("C7")
def test_leaving_while_queued_is_seen_at_once(stream: bool) -> None:
    async def check(served: Served) -> None:
        first = await _start(served, True)
        await served.until(lambda: len(served.engine.running) == 1)
        second = await _start(served, stream)
        await served.until(lambda: len(served.engine.waiting) == 1)
        _leave(second, "close")
        assert await served.until(lambda: not served.engine.waiting) < 0.2
        assert len(served.engine.running) == 1
        _leave(first, "close")
        await served.until(lambda: not served.engine.running)

    run_with_server(FakeEngine(slots=1, step_s=0.01, repeat=1000), check)


def test_leaving_ends_all_prompts_of_a_call() -> None:
    async def check(served: Served) -> None:
        body = {"model": "fake", "prompt": ["a", "b", "c"], "max_tokens": 1000, "stream": True}
        data = request(json.dumps(body).encode(), first="POST /v1/completions HTTP/1.1")
        _, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(data)
        await served.until(lambda: len(served.engine.running) == 3)
        _leave(writer, "close")
        await served.until(lambda: not served.engine.running)
        assert len(served.engine.aborted) == 3

    run_with_server(FakeEngine(step_s=0.01, repeat=1000), check)


@pytest.fixture
def no_help_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel, too, ends connections of stalled readers; in this test only the server does."""
    monkeypatch.setattr("serve.http.server.notice_dead_peers", lambda *_: None)


@pytest.mark.row("C8")
@pytest.mark.usefixtures("no_help_of_the_kernel")
def test_a_stalled_reader_is_aborted_and_disturbs_nobody() -> None:
    async def check(served: Served) -> None:
        stalled = socket.socket()
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.setblocking(False)
        await asyncio.get_running_loop().sock_connect(stalled, ("127.0.0.1", served.port))
        body = json.dumps({**BODY, "stream": True}).encode()
        await asyncio.get_running_loop().sock_sendall(stalled, request(body))
        await served.until(lambda: len(served.engine.running) == 1)
        other = await served.events(CHAT, {**BODY, "max_tokens": 50})
        assert other[-1] == "[DONE]"
        await served.until(lambda: not served.engine.running, timeout_s=10)
        assert len(served.engine.aborted) == 1
        stalled.close()

    run_with_server(FakeEngine(repeat=100_000), check, write_timeout_s=0.3)


@pytest.mark.usefixtures("no_help_of_the_kernel")
def test_a_reader_that_takes_a_few_bytes_now_and_then_is_aborted() -> None:
    """Taking something is not enough: what is buffered must go."""

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
    """Bytes flipped, cut, doubled and inserted: a 4xx, a 200 or a closed connection."""

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
    at = rng.randrange(len(data))
    kind = rng.randrange(4)
    if kind == 0:
        data[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del data[at : at + rng.randint(1, 20)]
        data += b"\r\n" if not data else b""
    elif kind == 2:
        data[at:at] = data[at : at + rng.randint(1, 40)]
    else:
        data[at:at] = rng.choice([b"\r\n", b"\0", b"\xff", b'"', b"{", b":", b" ", b"9" * 20])


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
@pytest.mark.usefixtures("no_help_of_the_kernel")
def test_a_large_answer_to_a_stalled_reader_is_given_up() -> None:
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
    """It takes longer than a reader may make no progress, but it does make some."""
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
        got = b""
        while b"\r\n\r\n" not in got:
            got += await loop.sock_recv(slow, 1 << 16)
        head, _, rest = got.partition(b"\r\n\r\n")
        found = re.search(rb"(?i)content-length: (\d+)", head)
        assert found is not None
        size = int(found[1])
        num_left, began_s = size - len(rest), loop.time()
        while num_left:
            if size - num_left > (loop.time() - began_s) * bytes_per_s:
                await asyncio.sleep(0.005)
                continue
            piece = await loop.sock_recv(slow, 1 << 16)
            assert piece, "the answer was cut"
            num_left -= len(piece)
        assert loop.time() - began_s > 1.5
        slow.close()

    reply = "x" * 16_000
    run_with_server(_WholeReply(reply=reply, max_model_len=20_000), check, write_timeout_s=0.7)


class _WholeReply(FakeEngine):
    """Says everything in one delta per sequence."""

    def _submit(self, *arguments: Any) -> Any:
        stream = super()._submit(*arguments)
        stream.deltas_at_once = True
        return stream


async def _start(served: Served, stream: bool) -> asyncio.StreamWriter:
    _, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(request(json.dumps({**BODY, "stream": stream}).encode()))
    return writer


def _leave(writer: asyncio.StreamWriter, how: str) -> None:
    if how == "half-close":
        writer.write_eof()
    elif how == "reset":
        writer.transport.abort()
    else:
        writer.close()
