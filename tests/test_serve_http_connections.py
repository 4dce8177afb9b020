"""Bytes and sockets: framing, slow and leaving clients, stalled readers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from fakes_http import FakeEngine, Served, run_with_server

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
RAW_BODY = json.dumps(BODY).encode()
JSON_TYPE = "Content-Type: application/json"


def request(
    body: bytes = RAW_BODY,
    *lines: str,
    kind: str | None = JSON_TYPE,
    length: str | None = "",
    first: str = f"POST {CHAT} HTTP/1.1",
    host: str | None = "Host: x",
) -> bytes:
    """length: "" is the true one, None is none."""
    head = [first]
    head += [line for line in (host, kind) if line is not None]
    if length is not None:
        head.append(f"Content-Length: {length or len(body)}")
    return "\r\n".join([*head, *lines, "", ""]).encode("latin-1") + body


@pytest.fixture(autouse=True)
def nothing_in_the_log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Whatever clients do, it is no error of ours."""
    yield
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


CHUNKED = {"length": None, "kind": JSON_TYPE}
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(RAW_BODY), RAW_BODY)

# name -> (bytes, statuses allowed, must the connection close)
FRAMING: dict[str, tuple[bytes, set[int], bool]] = {
    "length and chunked": (request(RAW_BODY, "Transfer-Encoding: chunked"), {400}, True),
    "two lengths": (request(RAW_BODY, "Content-Length: 3"), {400}, True),
    "length +2": (request(length="+2"), {400}, True),
    "length -2": (request(length="-2"), {400}, True),
    "length 0x2": (request(length="0x2"), {400}, True),
    "length 10^30": (request(length="1" + "0" * 30), {400}, True),
    "xchunked": (request(CHUNKS, "Transfer-Encoding: xchunked", **CHUNKED), {400}, True),
    "chunked, identity": (
        request(CHUNKS, "Transfer-Encoding: chunked, identity", **CHUNKED),
        {400},
        True,
    ),
    "gzip, chunked": (request(CHUNKS, "Transfer-Encoding: gzip, chunked", **CHUNKED), {400}, True),
    "bad chunk size": (
        request(b"zz\r\nabc\r\n", "Transfer-Encoding: chunked", **CHUNKED),
        {400},
        True,
    ),
    "negative chunk": (
        request(b"-1\r\nabc\r\n", "Transfer-Encoding: chunked", **CHUNKED),
        {400},
        True,
    ),
    "huge chunk": (
        request(b"F" * 20 + b"\r\nabc", "Transfer-Encoding: chunked", **CHUNKED),
        {400},
        True,
    ),
    "obsolete folding": (request(RAW_BODY, "X-A: b", "  folded"), {400}, True),
    "space before colon": (request(RAW_BODY, "X-A : b"), {400}, True),
    "NUL in a header": (request(RAW_BODY, "X-A: a\0b"), {400}, True),
    "no host": (request(host=None), {400}, True),
    "two hosts": (request(RAW_BODY, "Host: y"), {400}, True),
    "140 headers": (request(RAW_BODY, *[f"X-{i}: y" for i in range(140)]), {431}, True),
    "9 kB header": (request(RAW_BODY, "X-A: " + "y" * 9000), {431}, True),
    "9 kB target": (request(first=f"POST /{'y' * 9000} HTTP/1.1"), {414, 431}, True),
    "HTTP/0.9": (b"GET /health\r\n\r\n", {400}, True),
    "HTTP/2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400}, True),
    "HTTP/3.7": (request(first=f"POST {CHAT} HTTP/3.7"), {400}, True),
    "TLS hello": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200), {400}, True),
    "absolute target": (request(first="GET http://evil/v1/models HTTP/1.1"), {400}, True),
    "lower-case method": (request(first=f"post {CHAT} HTTP/1.1"), {400}, True),
    "1 000 letter method": (request(first=f"{'X' * 1000} {CHAT} HTTP/1.1"), {400}, True),
    "Expect: foo": (request(RAW_BODY, "Expect: foo"), {417}, True),
    "gzip body": (request(RAW_BODY, "Content-Encoding: gzip"), {415}, False),
    "br body": (request(RAW_BODY, "Content-Encoding: br"), {415}, False),
    "foo body": (request(RAW_BODY, "Content-Encoding: foo"), {415}, False),
    "text/plain": (request(kind="Content-Type: text/plain"), {415}, False),
    "form": (request(kind="Content-Type: application/x-www-form-urlencoded"), {415}, False),
    "multipart": (request(kind="Content-Type: multipart/form-data; boundary=x"), {415}, False),
    "no type": (request(kind=None), {415}, False),
    "utf-16": (request(kind="Content-Type: application/json; charset=utf-16"), {415}, False),
    "two types": (request(RAW_BODY, JSON_TYPE), {400}, True),
    "two authorizations": (
        request(RAW_BODY, "Authorization: a", "Authorization: b"),
        {400},
        True,
    ),
    "too large by length": (request(b"", length="100000000"), {413}, True),
    "too large by chunks": (
        request(b"%x\r\n%s\r\n" % (70_000, b" " * 70_000), "Transfer-Encoding: chunked", **CHUNKED),
        {413},
        True,
    ),
    "empty": (request(b"", length="0"), {400}, False),
    "websocket": (
        request(
            b"",
            "Connection: Upgrade",
            "Upgrade: websocket",
            "Sec-WebSocket-Version: 13",
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
            first=f"GET {CHAT} HTTP/1.1",
            kind=None,
            length=None,
        ),
        {405, 400},
        False,
    ),
}


@pytest.mark.parametrize("name", FRAMING)
def test_framing(name: str) -> None:
    """Each gets an error in OpenAI's shape that quotes nothing, and the server goes on."""
    data, statuses, closes = FRAMING[name]

    async def check(served: Served) -> None:
        answer = await served.raw(data)
        assert answer.status in statuses
        assert "yyyy" not in answer.error()["message"]
        assert answer.headers["server"] == "mergestep"
        assert answer.headers["x-request-id"]
        if closes:
            assert await _is_closed_after(served, data)
        assert not served.engine.submitted
        assert (await served.post(CHAT, BODY))[0] == 200

    run_with_server(FakeEngine(), check, max_body_bytes=65_536)


@pytest.mark.parametrize(
    ("name", "data"),
    {
        "chunked": request(CHUNKS, "Transfer-Encoding: chunked", **CHUNKED),
        "charset": request(kind="Content-Type: application/json; charset=UTF-8"),
        "identity": request(RAW_BODY, "Content-Encoding: identity"),
        "HTTP/1.0": request(first=f"POST {CHAT} HTTP/1.0"),
        "query": request(first=f"POST {CHAT}?a=b HTTP/1.1"),
    }.items(),
)
def test_good_framing(name: str, data: bytes) -> None:
    async def check(served: Served) -> None:
        assert (await served.raw(data)).status == 200

    run_with_server(FakeEngine(), check)


def test_expect_continue_only_for_what_will_be_read() -> None:
    async def check(served: Served) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(request(b"", "Expect: 100-continue", length=str(len(RAW_BODY))))
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(RAW_BODY)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
        answer = await served.raw(request(b"", "Expect: 100-continue", length="100000000"))
        assert answer.status == 413

    run_with_server(FakeEngine(), check)


def test_pipelined_requests_are_answered_in_order() -> None:
    async def check(served: Served) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        get = b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n"
        writer.write(b"".join(get % name for name in [b"health", b"nowhere"] * 50))
        for expected in [200, 404] * 50:
            head = await reader.readuntil(b"\r\n\r\n")
            assert int(head.split()[1]) == expected
            length = int(head.lower().partition(b"content-length: ")[2].split()[0])
            await reader.readexactly(length)
        writer.close()

    run_with_server(FakeEngine(), check)


def test_a_refused_body_is_never_read_as_a_request() -> None:
    async def check(served: Served) -> None:
        inner = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(request(inner, kind="Content-Type: text/plain"))
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answers = await reader.read()
        assert answers.count(b"HTTP/1.1 ") == 2
        assert b'"object":"list"' not in answers
        writer.close()

    run_with_server(FakeEngine(), check)


def test_a_body_in_single_bytes() -> None:
    async def check(served: Served) -> None:
        chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in RAW_BODY) + b"0\r\n\r\n"
        answer = await served.raw(request(chunks, "Transfer-Encoding: chunked", **CHUNKED))
        assert answer.status == 200

    run_with_server(FakeEngine(), check)


def test_a_large_body_is_parsed_off_the_loop() -> None:
    async def check(served: Served) -> None:
        status, _ = await served.post(CHAT, {**BODY, "user": None, "stop": ["x"] * 3})
        assert status == 200
        assert (await served.post(CHAT, {**BODY, "foo": [{}] * 50_000}))[0] == 400

    run_with_server(FakeEngine(), check, parse_inline_bytes=64)


def test_a_slow_body_is_408() -> None:
    async def check(served: Served) -> None:
        answer = await served.raw(request(RAW_BODY[:10], length=str(len(RAW_BODY))))
        assert answer.status == 408
        assert answer.error()["type"] == "timeout_error"
        assert answer.is_closed

    run_with_server(FakeEngine(), check, body_timeout_s=0.2)


def test_a_silent_connection_is_closed() -> None:
    async def check(served: Served) -> None:
        for sent in (b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(sent)
            async with asyncio.timeout(2):
                assert await reader.read() == b""
            writer.close()

    run_with_server(FakeEngine(), check, first_request_timeout_s=0.2)


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
def test_leaving_while_generating_aborts(stream: bool, how: str) -> None:
    async def check(served: Served) -> None:
        writer = await _start(served, stream)
        await served.until(lambda: len(served.engine.running) == 1)
        await asyncio.sleep(0.05)
        _leave(writer, how)
        assert await served.until(lambda: not served.engine.running) < 0.2
        assert len(served.engine.aborted) == 1
        await served.until(lambda: served.server.app.num_running == 0)
        writer.close()

    run_with_server(FakeEngine(step_s=0.01, repeat=1000), check)


@pytest.mark.parametrize("stream", [False, True])
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
        await served.until(lambda: served.server.app.num_running == 0)

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
        await asyncio.sleep(0.5)
        size = 0
        with contextlib.suppress(ConnectionResetError):
            while piece := await loop.sock_recv(stalled, 1 << 20):
                size += len(piece)
        assert size < 64 * 16 * 4000
        assert (await served.post(CHAT, BODY))[0] == 200
        stalled.close()

    reply = "x" * 4000
    run_with_server(_WholeReply(reply=reply, max_model_len=9999), check, write_timeout_s=0.2)


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


async def _is_closed_after(served: Served, data: bytes) -> bool:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(data)
    try:
        async with asyncio.timeout(2.5):
            await reader.read()
    except ConnectionResetError:
        return True
    finally:
        writer.close()
    return True
