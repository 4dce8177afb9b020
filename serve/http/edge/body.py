"""Checks the framing of a request and reads its body: type, size and deadline."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from aiohttp import hdrs, web
from aiohttp.http_writer import HttpVersion10

from serve.http.edge import limits
from serve.http.edge.access import API_KEY_HEADER
from serve.http.edge.connection import Connection
from serve.http.edge.errors import TIMEOUT_ERROR, ApiError, overloaded
from serve.http.edge.json_body import Marks, count_marks, parse_object
from serve.http.edge.memory_budget import Charge, parsed_bytes
from serve.http.edge.settings import HttpSettings

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
PACED_BYTES = 128 << 10  # bodies are read in turns beyond that
READS_PER_PASS = 4  # a read returns up to 256 KB, and takes about half a millisecond
T = TypeVar("T")
_SINGLE = (
    hdrs.CONTENT_TYPE,
    hdrs.AUTHORIZATION,
    hdrs.HOST,
    hdrs.CONTENT_ENCODING,
    API_KEY_HEADER,
)


def check_framing(request: web.BaseRequest) -> None:
    """Refuses framing that the HTTP parser accepts and this server does not, and closes then."""
    if request.version < HttpVersion10 or request.version.major != 1:
        raise _bad_framing("only HTTP/1.0 and HTTP/1.1 are supported")
    if not request.raw_path.startswith("/"):
        raise _bad_framing("the request target must be a path")
    headers = request.headers
    encoding = headers.get(hdrs.TRANSFER_ENCODING)
    if encoding is not None and encoding.strip().lower() != "chunked":
        raise _bad_framing("the only supported transfer encoding is chunked")
    for name in _SINGLE:
        if name in headers and len(headers.getall(name)) > 1:
            raise _bad_framing(f"the header {name} appears more than once")


class Bodies:
    """Counts the bytes of all bodies that are being read or parsed, and owns the thread that parses
    large ones. There is one thread, since several would compete for the interpreter. Only the event
    loop uses it."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._thread = ThreadPoolExecutor(1, "mergestep-parse")
        self._num_turns = READS_PER_PASS
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def turn(self) -> None:
        """Waits until a large body may be read on: some of them in each pass of the event loop, so
        that other connections do not wait for all. A connection receives nothing more until what
        it has received is read."""
        if self._num_turns == READS_PER_PASS:
            asyncio.get_running_loop().call_soon(self._next_pass)
        if self._num_turns:
            self._num_turns -= 1
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        await waiter

    def _next_pass(self) -> None:
        self._num_turns = READS_PER_PASS
        while self._waiting and self._num_turns:
            waiter = self._waiting.popleft()
            if not waiter.done():  # a client that left has none
                waiter.set_result(None)
                self._num_turns -= 1
        if self._num_turns < READS_PER_PASS:
            asyncio.get_running_loop().call_soon(self._next_pass)

    async def run_in_thread(self, job: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, job)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


async def read_call(
    request: web.BaseRequest,
    settings: HttpSettings,
    bodies: Bodies,
    parse: Callable[[dict[str, Any]], T],
    charge: Charge,
) -> T:
    """Returns what `parse` makes of the JSON object in a request body. Raises ApiError if there is
    none. A thread parses large bodies, so that the event loop goes on; their objects are charged,
    since the call keeps them."""
    _check_content(request, settings.max_body_bytes)
    await _answer_expect(request)
    reader = _BodyReader(request, settings, bodies)
    try:
        pieces = await reader.pieces()
        if reader.size <= settings.parse_inline_bytes:
            return parse(parse_object(b"".join(pieces)))
        body, marks = await bodies.run_in_thread(lambda: _joined(pieces))
        charge.add(parsed_bytes(len(body), marks), is_body=True)
        return await bodies.run_in_thread(lambda: parse(parse_object(body, marks)))
    finally:
        bodies.num_bytes -= reader.size


@asynccontextmanager
async def held_body(
    request: web.BaseRequest, settings: HttpSettings, bodies: Bodies
) -> AsyncIterator[bytes]:
    """Reads a body and yields its bytes, which count among all bodies until the block ends. Raises
    ApiError as read_call does, but does not parse."""
    _check_content(request, settings.max_body_bytes)
    await _answer_expect(request)
    reader = _BodyReader(request, settings, bodies)
    try:
        yield b"".join(await reader.pieces())
    finally:
        bodies.num_bytes -= reader.size


def _joined(pieces: list[bytes]) -> tuple[bytes, Marks]:
    """Returns a body and its marks. It takes the pieces away."""
    body = b"".join(pieces)
    pieces.clear()
    return body, count_marks(body)


def _bad_framing(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_request", closes=True)


def _check_content(request: web.BaseRequest, max_bytes: int) -> None:
    length = request.content_length
    if length is not None and length > max_bytes:
        raise _too_large(max_bytes)
    if request.headers.get(hdrs.CONTENT_ENCODING, "identity").lower() != "identity":
        raise _unsupported("Content-Encoding is not supported")
    kind = request.content_type if hdrs.CONTENT_TYPE in request.headers else ""
    if kind != "application/json":
        raise _unsupported("Content-Type must be application/json")
    if (request.charset or "utf-8").lower() not in ("utf-8", "utf8"):
        raise _unsupported("the charset must be utf-8")


async def _answer_expect(request: web.BaseRequest) -> None:
    expect = request.headers.get(hdrs.EXPECT)
    if expect is None:
        return
    if expect.lower() != "100-continue":
        raise ApiError(
            417,
            "the only supported Expect header is 100-continue",
            code="expectation_failed",
            closes=True,
        )
    await request.writer.write(CONTINUE)
    request.writer.output_size = 0  # the answer itself has not begun


class _BodyReader:
    """Reads one body, which must keep a minimum rate and be complete by a deadline."""

    def __init__(self, request: web.BaseRequest, settings: HttpSettings, bodies: Bodies) -> None:
        self._request = request
        self._settings = settings
        self._bodies = bodies
        self.size = 0

    async def pieces(self) -> list[bytes]:
        pieces: list[bytes] = []
        began_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(self._due_s(began_s)) as deadline:
                while piece := await self._request.content.readany():
                    self._take(len(piece))
                    deadline.reschedule(self._due_s(began_s))
                    pieces.append(piece)
                    if self.size >= PACED_BYTES:
                        await self._bodies.turn()
                self._check_padding()
        except TimeoutError:
            raise ApiError(
                408,
                "the request body did not arrive in time, or not fast enough",
                kind=TIMEOUT_ERROR,
                code="request_timeout",
                closes=True,
            ) from None
        except web.PayloadAccessError:
            raise
        except web.RequestPayloadError:
            raise _bad_framing("the request body is malformed") from None
        return pieces

    def _check_padding(self) -> None:
        connection = self._request.protocol
        if isinstance(connection, Connection):
            error = connection.padding_error()
            if error is not None:
                raise error

    def _due_s(self, began_s: float) -> float:
        """Returns when the next bytes must have arrived."""
        settings = self._settings
        due_s = began_s + settings.body_timeout_s
        if settings.body_min_rate:
            slowest_s = limits.BODY_GRACE_S + self.size / settings.body_min_rate
            due_s = min(due_s, began_s + slowest_s)
        return due_s

    def _take(self, num_bytes: int) -> None:
        self.size += num_bytes
        self._bodies.num_bytes += num_bytes
        if self.size > self._settings.max_body_bytes:
            raise _too_large(self._settings.max_body_bytes)
        if self._bodies.num_bytes > self._settings.max_bodies_bytes:
            error = overloaded("the server is reading too many requests")
            error.closes = True
            raise error


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"the request body is larger than {max_bytes} bytes",
        code="request_too_large",
        closes=True,
    )


def _unsupported(message: str) -> ApiError:
    return ApiError(415, message, code="unsupported_media_type")
