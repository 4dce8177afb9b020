"""Bytes of a request: framing that is good, bad or meant to smuggle."""

from __future__ import annotations

import asyncio

import pytest
from fakes_http import FakeEngine, Served, run_with_server

from tests.raw_requests import BODY, CHAT, JSON_TYPE, RAW_BODY, is_closed_after, request

pytestmark = pytest.mark.usefixtures("nothing_in_the_log")


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
            assert await is_closed_after(served, data)
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
        get = b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n"
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
        inner = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(request(inner, kind="Content-Type: text/plain"))
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
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
