"""Rows of the catalogue about framing that is huge, slow or in unusual pieces."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time

import pytest

from tests.support.http.fake_engine import FakeEngine
from tests.support.http.raw_requests import CHUNKED, RAW_BODY, request
from tests.support.http.running_server import Served, run_with_server

pytestmark = pytest.mark.usefixtures("nothing_in_the_log")


@pytest.mark.row("F20")
def test_a_flood_of_pipelined_requests() -> None:
    """10,000 pipelined requests are answered in order."""

    async def check(served: Served) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        get = b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n"
        writer.write(b"".join(get % name for name in [b"health", b"nowhere"] * 5000))
        for expected in [200, 404] * 5000:
            head = await reader.readuntil(b"\r\n\r\n")
            assert int(head.split()[1]) == expected
            length = int(head.lower().partition(b"content-length: ")[2].split()[0])
            await reader.readexactly(length)
        writer.close()

    run_with_server(FakeEngine(), check)


@pytest.mark.timing
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.row("F27", "F28")
def test_a_body_of_100_mb_is_refused_unread(chunked: bool) -> None:
    """The connection is closed within 2.5 s, and memory does not grow."""

    async def check(served: Served) -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        began_s = time.monotonic()
        piece = b" " * 65_536
        if chunked:
            writer.write(request(b"", "Transfer-Encoding: chunked", **CHUNKED))
            piece = b"%x\r\n%s\r\n" % (len(piece), piece)
        else:
            writer.write(request(b"", length="100000000"))
        answer = asyncio.create_task(reader.read())
        num_sent = 0
        while not answer.done() and num_sent < 100_000_000:
            writer.write(piece)
            num_sent += len(piece)
            try:
                await writer.drain()
            except ConnectionError:
                break
        text = await answer
        assert text.startswith(b"HTTP/1.1 413 ")
        assert b'"code":"request_too_large"' in text
        assert time.monotonic() - began_s < 2.5
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000
        writer.close()

    run_with_server(FakeEngine(), check, max_body_bytes=1 << 20)


@pytest.mark.row("F28")
def test_a_length_that_is_too_small() -> None:
    """Bytes beyond the announced length are parsed as a second, invalid request."""

    async def check(served: Served) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(request(length="10"))
        text = await reader.read()
        writer.close()
        assert text.split()[1] == b"400"
        assert b" 200 " not in text
        assert not served.engine.submitted

    run_with_server(FakeEngine(), check)


@pytest.mark.row("F7")
def test_a_chunk_extension_without_end() -> None:
    async def check(served: Served) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(request(b"1;", "Transfer-Encoding: chunked", **CHUNKED))
        answer = asyncio.create_task(reader.read())
        num_sent = 0
        while not answer.done() and num_sent < 2 << 20:
            writer.write(b"y" * 16_384)
            num_sent += 16_384
            await asyncio.sleep(0.005)
        assert num_sent < 1 << 20
        with contextlib.suppress(ConnectionResetError):  # some bytes may have hit a closed socket
            assert (await answer).split()[1] == b"400"
        writer.close()

    run_with_server(FakeEngine(), check)


@pytest.mark.timing
@pytest.mark.row("F29")
def test_a_megabyte_in_chunks_of_one_byte() -> None:
    """The body is refused as too slow before it costs a second of CPU time."""

    async def check(served: Served) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        piece = b"1\r\n \r\n" * 4096
        writer.write(request(b"", "Transfer-Encoding: chunked", **CHUNKED))
        began_s = time.process_time()
        text = b""
        with contextlib.suppress(ConnectionResetError):
            for _ in range(250):
                writer.write(piece)
                await writer.drain()
        with contextlib.suppress(ConnectionResetError):
            text = await reader.read()
        writer.close()
        assert not text or text.split()[1] == b"408"
        assert time.process_time() - began_s < 1
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(request(piece * 25, "Transfer-Encoding: chunked", **CHUNKED))
        began_s = time.process_time()
        text = await reader.read()
        writer.close()
        assert text.split()[1] == b"408"
        assert b'"code":"request_timeout"' in text
        assert time.process_time() - began_s < 1

    run_with_server(FakeEngine(), check)


def test_a_body_in_small_chunks() -> None:
    async def check(served: Served) -> None:
        chunks = b"".join(b"4\r\n%s\r\n" % b"    " for _ in range(20_000))
        body = b"%x\r\n%s\r\n" % (len(RAW_BODY), RAW_BODY) + chunks + b"0\r\n\r\n"
        answer = await served.raw(request(body, "Transfer-Encoding: chunked", **CHUNKED))
        assert answer.status == 200

    run_with_server(FakeEngine(), check)
