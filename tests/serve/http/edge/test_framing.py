"""Valid framing of requests, invalid framing, and framing that would smuggle a second request."""

from __future__ import annotations

import asyncio
import gzip
import random

import pytest

from tests.support.http.fake_engine import FakeEngine
from tests.support.http.raw_requests import (
    BODY,
    CHAT,
    CHUNKED,
    JSON_TYPE,
    RAW_BODY,
    is_closed_after,
    request,
)
from tests.support.http.running_server import Served, run_with_server

pytestmark = pytest.mark.usefixtures("nothing_in_the_log")


CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(RAW_BODY), RAW_BODY)


def chunks(data: bytes) -> bytes:
    """Returns a chunked request with this data and the final chunk."""
    return request(
        data + b"\r\n0\r\n\r\n", "Transfer-Encoding: chunked", length=None, kind=JSON_TYPE
    )


# name -> (bytes, allowed statuses, whether the connection must close)
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
    "length twice, equal": (
        request(RAW_BODY, f"Content-Length: {len(RAW_BODY)}"),
        {400},
        True,
    ),
    "empty length": (request(b"", "Content-Length:", length=None), {400}, True),
    "chunked twice": (
        request(CHUNKS, "Transfer-Encoding: chunked, chunked", **CHUNKED),
        {400},
        True,
    ),
    "two encodings": (
        request(CHUNKS, "Transfer-Encoding: chunked", "Transfer-Encoding: chunked", **CHUNKED),
        {400},
        True,
    ),
    "underscore chunk": (chunks(b"1_0\r\n" + b" " * 16), {400}, True),
    "Unicode chunk": (chunks("\u0661\r\n ".encode()), {400}, True),
    "plus chunk": (chunks(b"+1\r\n "), {400}, True),
    "2^70 chunk": (chunks(b"%x\r\n " % (1 << 70)), {400}, True),
    "20 kB chunk extension": (chunks(b"1;" + b"y" * 20_000 + b"\r\n "), {400}, True),
    "1 000 trailers": (
        chunks(b"1\r\n \r\n0\r\n" + b"X-A: y\r\n" * 1000),
        {400, 431},
        True,
    ),
    "a length as a trailer": (chunks(b"1\r\n \r\n0\r\nContent-Length: 5\r\n"), {400}, True),
    "CR in a header": (request(RAW_BODY, "X-A: a\rb"), {400}, True),
    "bare line feeds": (request().replace(b"\r\n", b"\n"), {400}, True),
    "100 000 headers": (request(RAW_BODY, *["X: y"] * 100_000), {431}, True),
    "TRACE": (request(b"", first="TRACE /health HTTP/1.1", kind=None, length=None), {405}, False),
    "PROPFIND": (request(b"", first=f"PROPFIND {CHAT} HTTP/1.1", length=None), {405}, False),
    "CONNECT": (
        request(b"", first="CONNECT a.example:443 HTTP/1.1", kind=None, length=None),
        {400, 405},
        False,
    ),
    "asterisk": (request(b"", first="OPTIONS * HTTP/1.1", kind=None, length=None), {400}, True),
    "random bytes": (random.Random(1).randbytes(1024) + b"\r\n\r\n", {400}, True),
    "zstd body": (request(RAW_BODY, "Content-Encoding: zstd"), {415}, False),
    "a gzip bomb": (
        request(gzip.compress(bytes(20 << 20)), "Content-Encoding: gzip"),
        {415},
        False,
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


CODES = {
    400: "invalid_request",
    405: "method_not_allowed",
    413: "request_too_large",
    414: "headers_too_large",
    415: "unsupported_media_type",
    417: "expectation_failed",
    431: "headers_too_large",
}


@pytest.mark.parametrize("name", FRAMING)
@pytest.mark.row(
    "F1",
    "F2",
    "F3",
    "F4",
    "F5",
    "F6",
    "F7",
    "F8",
    "F9",
    "F10",
    "F11",
    "F12",
    "F13",
    "F14",
    "F15",
    "F16",
    "F17",
    "F19",
    "F22",
    "F23",
    "F24",
    "F25",
    "F26",
    "F30",
)
def test_framing(name: str) -> None:
    """Bad framing gets an error in OpenAI's shape that quotes no input; the server goes on."""
    data, statuses, must_close = FRAMING[name]

    async def check(served: Served) -> None:
        answer = await served.raw(data)
        assert answer.status in statuses
        error = answer.error()
        assert (error["type"], error["param"]) == ("invalid_request_error", None)
        assert error["code"] == ("invalid_json" if name == "empty" else CODES[answer.status])
        assert ("allow" in answer.headers) == (answer.status == 405)
        assert "yyyy" not in error["message"]
        assert answer.headers["server"] == "mergestep"
        assert answer.headers["x-request-id"]
        if must_close:
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


@pytest.mark.row("F18")
def test_100_continue_only_before_a_body_that_is_read() -> None:
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


@pytest.mark.row("F21")
def test_a_refused_body_is_never_read_as_a_request() -> None:
    async def check(served: Served) -> None:
        smuggled = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(request(smuggled, kind="Content-Type: text/plain"))
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


@pytest.mark.parametrize("name", ["9 kB header", "9 kB target", "no host", "HTTP/3.7"])
@pytest.mark.row("F12")
def test_one_byte_at_a_time(name: str) -> None:
    data, statuses, _ = FRAMING[name]

    async def check(served: Served) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        for start in range(len(data)):
            if writer.is_closing():
                break
            writer.write(data[start : start + 1])
            if start % 64 == 0:
                await asyncio.sleep(0)
        async with asyncio.timeout(3):
            assert int((await reader.readline()).split()[1]) in statuses
        writer.close()

    run_with_server(FakeEngine(), check)


@pytest.mark.row("F16")
def test_an_upgrade_to_h2c_is_ignored() -> None:
    async def check(served: Served) -> None:
        answer = await served.raw(
            request(
                b"",
                "Connection: Upgrade, HTTP2-Settings",
                "Upgrade: h2c",
                "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA",
                first="GET /health HTTP/1.1",
                kind=None,
                length=None,
            )
        )
        assert answer.status == 200

    run_with_server(FakeEngine(), check)
