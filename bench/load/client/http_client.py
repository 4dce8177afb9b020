"""An HTTP/1.1 client with persistent connections and only the features that a load generator needs.

The time of received bytes is taken when the event loop delivers them, before they are parsed. The
time of a request is taken just before its bytes are written. httptools (llhttp) parses the
responses. A body without a length ends with its connection.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

import httptools

from bench.load.client.answer import CallError
from bench.load.client.redact import printable
from serve.errors import ConfigError, reason
from serve.server_url import server_root

CONNECT_TIMEOUT_S = 10.0
RACE_S = 0.05  # a server that closes a kept connection within it may not have seen the request
MAX_HEAD = 1 << 16  # consecutive bytes of an answer outside its body
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, section 5.6.2


class Sink(Protocol):
    """Takes one response. status is 0 until head(). body(), end() and broken() may set error."""

    status: int
    error: CallError | None

    def sent(self, at_s: float) -> None:
        """Records the time of sending. It is called again if the request is sent again."""

    def head(self, status: int, content_type: bytes) -> None: ...

    def body(self, data: bytes, at_s: float) -> bool:
        """Returns False if the body is too long, and the connection closes."""

    def end(self, at_s: float) -> None: ...

    def broken(self, message: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a server. root is the URL before the API's paths, prefix its path, and head
    the header lines of every request."""

    root: str
    host: str
    port: int
    is_tls: bool
    prefix: str
    head: bytes = field(repr=False)

    @classmethod
    def of(cls, url: str, headers: Mapping[str, str]) -> Address:
        """Raises ConfigError for a wrong URL or header."""
        root = server_root(url)
        try:
            parts = urlsplit(root)
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if host and parts.username is not None:
            raise ConfigError("url holds a user or a password; give them as a header")
        if not host or parts.scheme not in ("http", "https") or parts.query:
            # no pattern finds a password that contains a slash
            shown = root.rpartition("@")[2].partition("?")[0]
            raise ConfigError(f"url {printable(shown)} is not the address of a server")
        is_tls = parts.scheme == "https"
        lines = {"Host": parts.netloc, "User-Agent": "mergestep-bench", **headers}
        text = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        if not all(map(_TOKEN.fullmatch, lines)):  # the error does not show it, as it may be secret
            raise ConfigError("header: a name has characters that HTTP does not allow there")
        for name, value in lines.items():
            if not set(value).isdisjoint("\r\n\0"):
                raise ConfigError(f"header {name!r} has a value that HTTP cannot send")
        try:
            head = text.encode("latin-1")
        except UnicodeEncodeError as exc:
            raise ConfigError("headers hold characters that HTTP cannot send") from exc
        return cls(root, host, port or (443 if is_tls else 80), is_tls, parts.path, head)


class Connection(asyncio.Protocol):
    """A connection that carries one request at a time."""

    def __init__(self, forget: Callable[[Connection], None]) -> None:
        self._forget = forget
        self._transport: Any = None
        self._parser: Any = None
        self._sink: Sink | None = None
        self._done: asyncio.Future[None] | None = None
        self._content_type = b""
        self._has_length = False
        self._has_head = False
        self._now_s = self._sent_s = 0.0
        self._num_bytes = 0  # received since the last part of a body
        self._has_answer_bytes = False
        self.num_exchanges = 0
        self.lost_race = False  # the server closed it just when the last request was sent
        self.is_open = False

    async def exchange(self, data: bytes, sink: Sink) -> None:
        """Writes a request and returns when its answer has ended. The sink has the result."""
        self._done = asyncio.get_running_loop().create_future()
        self._sink = sink
        self._has_answer_bytes = False
        self._num_bytes = 0
        self.num_exchanges += 1
        self._parser = self._parser or httptools.HttpResponseParser(self)
        self._sent_s = time.perf_counter()
        sink.sent(self._sent_s)
        self._transport.write(data)
        try:
            await self._done
        except asyncio.CancelledError:
            self._sink = None
            self.close()
            raise

    def close(self) -> None:
        """Closes at once, and drops bytes that were not sent yet."""
        self.is_open = False
        self._parser = None  # breaks a reference cycle
        if self._transport is not None:
            self._transport.abort()

    def peer(self) -> str:
        return str(self._transport.get_extra_info("peername")[0])

    # ---- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        self._now_s = time.perf_counter()
        if self._sink is None or self._parser is None:  # no request is in progress
            self.close()
            return
        self._has_answer_bytes = True
        self._num_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            self._break(f"the answer is not HTTP: {exc}")
            self.close()
        if self._sink is not None and self._num_bytes > MAX_HEAD:
            self._break(f"the answer has a head of more than {MAX_HEAD >> 10} KiB")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        is_waiting = self._sink is not None and not self._has_answer_bytes
        is_race = is_waiting and self.num_exchanges > 1
        self.lost_race = is_race and time.perf_counter() - self._sent_s <= RACE_S
        if self._sink is not None and self._has_head and not self._has_length and exc is None:
            self._now_s = time.perf_counter()
            self._end()
        elif isinstance(exc, OSError):
            self._break(f"the connection broke: {reason(exc)}")
        else:
            self._break("the server closed the connection before the answer's end")
        self._parser = self._transport = None
        self._forget(self)

    # ---- httptools

    def on_message_begin(self) -> None:
        self._content_type = b""
        self._has_length = self._has_head = False

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type":
            self._content_type = value
        elif name in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._sink is not None and status >= 200:
            self._has_head = True
            self._num_bytes = 0
            self._sink.head(status, self._content_type)

    def on_body(self, body: bytes) -> None:
        self._num_bytes = 0
        if self._sink is not None and not self._sink.body(body, self._now_s):
            self.is_open = False
            self._finish()

    def on_message_complete(self) -> None:
        if self._has_head:  # false after an interim (1xx) response
            if not self._parser.should_keep_alive():
                self.is_open = False
            self._end()

    def _end(self) -> None:
        if self._sink is not None:
            self._sink.end(self._now_s)
        self._finish()

    def _break(self, message: str) -> None:
        if self._sink is not None:
            self._sink.broken(message)
        self._finish()

    def _finish(self) -> None:
        self._sink = None
        self._has_head = False
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


class HttpClient:
    """Keeps connections to one server and reuses the last one first. Their number has no limit. A
    client belongs to one event loop, and its owner closes it."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._tls = ssl.create_default_context() if address.is_tls else None
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self._endpoint: str | None = None
        self.max_connections = 0
        self.num_resent = 0

    def close(self) -> None:
        for connection in list(self._open):
            connection.close()
        self._idle.clear()

    @property
    def num_connections(self) -> int:
        return len(self._open)

    def render(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """Returns a request's bytes. path is relative to the root."""
        line = f"{method} {self.address.prefix}{path} HTTP/1.1\r\n".encode()
        if body is None:
            return line + self.address.head + b"\r\n"
        length = b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        return b"".join((line, self.address.head, length, body))

    async def exchange(self, request: bytes, sink: Sink) -> None:
        """Sends a request. Raises CallError if there is no connection; later errors go to the sink.

        A request that met a kept connection just when the server closed it (RFC 9112, section
        9.3.1) is sent again on a new one. A later close, or one after any byte of the answer, is a
        failure."""
        connection = self._take() or await self._connect()
        await self._use(connection, request, sink)
        if connection.lost_race:
            self.num_resent += 1
            sink.error = None
            await self._use(await self._connect(), request, sink)

    async def _use(self, connection: Connection, request: bytes, sink: Sink) -> None:
        await connection.exchange(request, sink)
        if connection.is_open:
            self._idle.append(connection)
        elif connection in self._open:
            connection.close()

    def _take(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        address = self.address
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                connection = Connection(self._open.discard)
                await loop.create_connection(
                    lambda: connection,
                    self._endpoint or address.host,
                    address.port,
                    ssl=self._tls,
                    server_hostname=address.host if self._tls else None,
                )
        except TimeoutError as exc:
            message = f"cannot reach {address.root}: no connection within {CONNECT_TIMEOUT_S:g} s"
            raise CallError(0, "connection_failed", message) from exc
        except OSError as exc:
            text = str(exc) if isinstance(exc, ssl.SSLError) else reason(exc)
            message = f"cannot reach {address.root}: {text}"
            raise CallError(0, "connection_failed", message) from exc
        if self._endpoint is None:  # resolves the name only once
            self._endpoint = connection.peer()
        self._open.add(connection)
        self.max_connections = max(self.max_connections, len(self._open))
        return connection
