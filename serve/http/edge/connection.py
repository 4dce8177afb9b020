"""Connections: how many there may be, and how long the head of a request may take.

aiohttp parses and answers; this module adds the limits that it lacks. A connection above the limit
still gets an answer that says so, and its health checks are answered, for up to SPARE connections.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from serve.errors import drop_frames
from serve.http.edge import limits
from serve.http.edge.errors import (
    TIMEOUT_ERROR,
    ApiError,
    error_response,
    internal_error,
    new_request_id,
    overloaded,
)
from serve.http.edge.file_limit import SPARE, allowed_connections
from serve.http.edge.settings import HttpSettings

logger = logging.getLogger(__name__)

LINGER_S = 1.0
REST_S = 0.2  # time for unsent data when the server stops
SPARE_S = 1.0  # time for a health check to begin on a connection above the limit
PIECE_BYTES = 16 << 10  # how much is parsed at once
CHUNK_OVERHEAD, SLOW_OVERHEAD = 8, 3
CHUNK_PADDING_BYTES = 8 << 10
PROBE_AFTER_S, PROBE_EVERY_S = 10, 5  # seconds of silence before TCP probes, and between them
LOG_INTERVAL_S = 10.0
MAX_LOG_TEXTS = 64
SHORT_ANSWERS = ("GET", "HEAD")  # methods whose answers cost nearly nothing


class LimitedLog:
    """Logs each warning at most once in LOG_INTERVAL_S, since clients can cause it at any rate. The
    next one says how many were left out."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._logged: dict[str, tuple[float, int]] = {}

    def warning(self, text: str, *values: object) -> None:
        """text: a constant format string for the values."""
        now_s = self._clock()
        last = self._logged.get(text)
        if last is not None and now_s - last[0] < LOG_INTERVAL_S:
            self._logged[text] = last[0], last[1] + 1
            return
        left_out = last[1] if last is not None else 0
        if len(self._logged) >= MAX_LOG_TEXTS:
            self._logged.clear()
        self._logged[text] = now_s, 0
        if left_out:
            self._logger.warning(f"{text} (and %d more times)", *values, left_out)
        else:
            self._logger.warning(text, *values)


_warnings = LimitedLog(logger)


class ConnectionServer(web.Server):
    """Makes and counts the connections. num_refused: connections above a limit. closing:
    connections that the shutdown has closed and that still have data to send."""

    def __init__(self, handler: Any, settings: HttpSettings) -> None:
        super().__init__(
            handler,
            handler_cancellation=True,
            keepalive_timeout=settings.keepalive_s,
            access_log=None,
            auto_decompress=False,
            lingering_time=LINGER_S,
            max_line_size=limits.LINE_BYTES,
            max_field_size=limits.LINE_BYTES,
            max_headers=limits.HEADERS,
        )
        self.settings = settings
        self.max_connections = allowed_connections(settings.max_connections)
        self.num_refused = 0
        self.closing: dict[web.RequestHandler, asyncio.Transport] = {}
        self._addresses: Counter[str] = Counter()

    def __call__(self) -> web.RequestHandler:
        return Connection(self, loop=self._loop, **self._kwargs)

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    async def shutdown(self, timeout: float | None = None) -> None:
        """Closes all connections as aiohttp does, then aborts those with unsent data."""
        self.closing = dict(self._connections)
        await super().shutdown(timeout)
        loop = asyncio.get_running_loop()
        due_s = loop.time() + REST_S
        while self.closing and loop.time() < due_s:
            await asyncio.sleep(REST_S / 20)
        for transport in self.closing.values():
            transport.abort()
        while self.closing and loop.time() < due_s + REST_S:
            await asyncio.sleep(0)

    def count(self, address: str | None) -> ApiError | None:
        """Counts a new connection. Returns the error to answer if it is above a limit."""
        num_connections = len(self._connections)
        if num_connections > self.max_connections:
            self.num_refused += 1
            _warnings.warning("there are more than %d connections", self.max_connections)
            return overloaded("the server has too many connections", code="too_many_connections")
        if address is None:
            return None
        self._addresses[address] += 1
        if self._addresses[address] <= self.settings.max_connections_per_address:
            return None
        self.num_refused += 1
        return overloaded("this address has too many connections", code="too_many_connections")

    def forget(self, address: str | None) -> None:
        if address is not None:
            self._addresses[address] -= 1
            if self._addresses[address] <= 0:
                del self._addresses[address]


class Connection(web.RequestHandler):
    """aiohttp's connection, with JSON errors and deadlines for the heads of requests.

    refusal: the error that answers every request on it except health checks, if any.
    """

    __slots__ = (
        "_address",
        "_has_short_answers",
        "_head_bytes",
        "_head_timer",
        "_is_counted",
        "_num_heads",
        "_num_received",
        "_payload",
        "_server",
        "refusal",
    )

    def __init__(self, manager: ConnectionServer, **kwargs: Any) -> None:
        super().__init__(manager, **kwargs)
        self.refusal: ApiError | None = None
        self._server = manager
        self._address: str | None = None
        self._is_counted = False
        self._has_short_answers = True  # of all requests that are not answered yet
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._num_heads = 0
        self._payload: Any = None  # the body of the last request, if it is chunked
        self._num_received = 0  # bytes since the head of the last request

    async def start(self) -> None:
        """Answers the requests of the connection."""
        try:
            await super().start()
        except asyncio.CancelledError as error:
            drop_frames(error)  # aiohttp's frame refers to its own task, and so to the error
            raise

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        server = self._server
        self._address = _foreign_address(transport.get_extra_info("peername"))
        self.refusal = server.count(self._address)
        self._is_counted = True
        if self.refusal is not None:
            self.refusal.closes = True
            if server.num_connections > server.max_connections + SPARE:
                self.force_close()
                return
        patience_s = server.settings.first_request_timeout_s
        if self.refusal is not None:
            patience_s = min(SPARE_S, patience_s)
        loop = asyncio.get_running_loop()
        self._head_timer = loop.call_later(patience_s, self._head_is_late)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._end_head()
        for message, _ in self._messages:  # an error of the parser refers to the frames it passed
            error = getattr(message, "exc", None)
            if isinstance(error, BaseException):
                drop_frames(error)
        self._server.closing.pop(self, None)
        if self._is_counted:
            self._is_counted = False
            self._server.forget(self._address)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if len(data) <= PIECE_BYTES:
            self._take(data)
            return
        for start in range(0, len(data), PIECE_BYTES):
            self._take(data[start : start + PIECE_BYTES])

    def _take(self, data: bytes) -> None:
        payload = self._payload
        if data and payload is not None and not payload.is_eof():
            error = self.padding_error()
            if error is not None:
                payload.set_exception(error)
                payload.feed_eof()
                self.close()  # later bytes are not parsed
                return
        was_idle = not self._messages and (self._waiter is not None or not self._request_count)
        super().data_received(data)
        if self._request_count != self._num_heads:
            new = list(self._messages)[self._num_heads - self._request_count :]
            is_short = all(getattr(head, "method", "GET") in SHORT_ANSWERS for head, _ in new)
            self._has_short_answers = is_short and (was_idle or self._has_short_answers)
            self._num_heads = self._request_count
            self._end_head()
            self._num_received = len(data) - data.find(b"\r\n\r\n") - 4
            message, body = self._messages[-1] if self._messages else (None, None)
            self._payload = body if getattr(message, "chunked", False) else None
            return
        self._num_received += len(data)
        is_idle = self._waiter is not None or not self._request_count
        if data and is_idle and not self._messages:
            self._head_goes_on(len(data))

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio wants a bool
        """Called when a client has closed its sending half. If the answer to its request is short,
        the answer is still sent. Any other request is aborted, because most clients that close
        their half have gone, and no tokens should be computed for them."""
        is_idle = not self._messages and (self._waiter is not None or not self._request_count)
        is_tls = self.transport is not None and self.transport.get_extra_info("ssl_object")
        if is_idle or is_tls or not self._has_short_answers:
            return False  # asyncio closes the connection
        self.close()  # after the answer
        return True

    def padding_error(self) -> Exception | None:
        """Returns an error if the framing of a chunked body is much larger than the body. Chunks of
        one byte are six times the body, and slow to parse; long chunk extensions are not part of
        the body at all."""
        if self._payload is None:
            return None
        beside = self._num_received - CHUNK_PADDING_BYTES
        if beside > CHUNK_OVERHEAD * self._payload.total_bytes:
            return web.RequestPayloadError("padding")
        return TimeoutError() if beside > SLOW_OVERHEAD * self._payload.total_bytes else None

    def _head_goes_on(self, num_bytes: int) -> None:
        """Counts bytes of an incomplete head, whose deadline starts with its first byte."""
        if not self._head_bytes:
            loop = asyncio.get_running_loop()
            if self._head_timer is not None:
                self._head_timer.cancel()
            patience_s = self._server.settings.head_timeout_s
            if self.refusal is not None:
                patience_s = min(SPARE_S, patience_s)
            self._head_timer = loop.call_later(patience_s, self._head_is_late)
        self._head_bytes += num_bytes
        if self._head_bytes > limits.HEAD_BYTES:
            self._refuse_head(_head_too_large())

    def _end_head(self) -> None:
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        if not self._head_bytes:  # no byte has arrived: there is nothing to answer
            self.force_close()
            return
        self._refuse_head(
            ApiError(
                408,
                "the head of the request did not arrive in time",
                kind=TIMEOUT_ERROR,
                code="request_timeout",
            )
        )

    def _refuse_head(self, error: ApiError) -> None:
        """Answers an error for a head that is not a complete request, and closes."""
        self._end_head()
        if self.transport is not None:
            self.transport.write(_plain_answer(error))
        self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answers bytes that are not an HTTP request. The message quotes none of them."""
        self._end_head()
        if isinstance(exc, ConnectionError):  # the client is gone: the caller closes the connection
            drop_frames(exc)
            try:
                raise exc
            finally:
                del exc  # it refers to this frame
        if status >= 500:
            logger.error("a connection failed", exc_info=exc)
            error = internal_error()
        elif isinstance(exc, LineTooLong) or "Too many headers" in str(exc):
            error = _head_too_large()
        else:
            error = ApiError(status, "the request is not valid HTTP", code="invalid_request")
        error.closes = True
        if exc is not None:
            drop_frames(exc)
        return error_response(error, new_request_id())


def notice_dead_peers(listening: socket.socket, patience_s: float) -> None:
    """Has the kernel close connections whose peer acknowledges nothing for patience_s, such as one
    whose link is cut. Accepted connections inherit this from the listening socket."""
    if listening.family not in (socket.AF_INET, socket.AF_INET6):
        return
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if not hasattr(socket, "TCP_USER_TIMEOUT"):  # pragma: no cover, elsewhere than on Linux
        return
    for option, value in (
        (socket.TCP_KEEPIDLE, PROBE_AFTER_S),
        (socket.TCP_KEEPINTVL, PROBE_EVERY_S),
        (socket.TCP_USER_TIMEOUT, min(int(patience_s * 1000), (1 << 31) - 1)),
    ):
        listening.setsockopt(socket.IPPROTO_TCP, option, value)


def _head_too_large() -> ApiError:
    return ApiError(431, "the request head is too large", code="headers_too_large")


def _plain_answer(error: ApiError) -> bytes:
    response = error_response(error, new_request_id())
    body = error.body()
    headers = {**response.headers, "Content-Length": str(len(body)), "Connection": "close"}
    lines = [f"HTTP/1.1 {response.status} {response.reason}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def _foreign_address(peer: Any) -> str | None:
    """Returns the peer's address, or None for this machine's own: a local proxy serves many
    clients."""
    if not isinstance(peer, tuple) or not peer:
        return None
    address = str(peer[0])
    try:
        is_own = ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return None
    return None if is_own else address
