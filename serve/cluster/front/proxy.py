"""Passes a request on to another server of this kind, and its answer back as it arrives."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import cast

import aiohttp
from aiohttp import hdrs, web
from aiohttp.http_writer import StreamWriter
from multidict import CIMultiDict
from yarl import URL

from serve.errors import MergestepError
from serve.http.edge.settings import HttpSettings

CONNECT_S = 5.0
READ_BYTES = 1 << 18
EVENTS = "text/event-stream"
# of one connection, not of the request or the answer
HOP_BY_HOP = frozenset(
    name.lower()
    for name in (
        *("Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "TE"),
        *("Trailer", "Transfer-Encoding", "Upgrade", "Proxy-Connection"),
    )
)
NOT_FORWARDED = HOP_BY_HOP | {"host", "content-length", "expect"}


class UpstreamLostError(MergestepError):
    """The other server did not answer, or its answer broke off. is_reached: it may have got the
    request."""

    def __init__(self, message: str, *, is_reached: bool = True) -> None:
        super().__init__(message)
        self.is_reached = is_reached


class Proxy:
    """Forwards requests over connections that it keeps. Close it at the end."""

    def __init__(self, settings: HttpSettings) -> None:
        self._settings = settings
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            auto_decompress=False,
            read_bufsize=READ_BYTES,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=(hdrs.USER_AGENT, hdrs.ACCEPT_ENCODING, hdrs.ACCEPT),
        )

    async def close(self) -> None:
        await self._session.close()

    async def call(
        self, method: str, url: str, headers: Mapping[str, str], timeout_s: float
    ) -> tuple[int, bytes]:
        """Makes a request of this process's own; returns the status and the whole answer. Raises
        UpstreamLostError."""
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(method, url, headers=headers) as answer,
            ):
                return answer.status, await answer.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise UpstreamLostError(f"{method} {url} failed: {error!r}") from error

    async def forward(
        self,
        request: web.BaseRequest,
        root: str,
        body: bytes | None,
        *,
        more: Mapping[str, str],
        answer_headers: Mapping[str, str],
        last_event: Callable[[], Awaitable[bytes]] | None = None,
        on_begin: Callable[[bytes], object] | None = None,
        left_out: frozenset[str] = frozenset(),
    ) -> web.StreamResponse:
        """Forwards the request to the server at `root` and its answer to the client.

        more: headers of the request to set. left_out: those, in lower case, to leave out.
        answer_headers: headers to add to the answer. last_event: makes the event that ends a stream
        which broke off between two events; None: there is none. on_begin: is called with the first
        bytes of the answer. Raises UpstreamLostError, and ConnectionError if the client has left or
        reads nothing.
        """
        headers = forwarded_headers(request.headers, NOT_FORWARDED | left_out)
        headers.update(more)
        try:
            answer = await self._session.request(
                request.method,
                URL(root + request.raw_path, encoded=True),
                headers=headers,
                data=body,
                allow_redirects=False,
            )
        except (aiohttp.ClientError, OSError) as error:
            is_reached = not (
                isinstance(error, aiohttp.ClientConnectorError)
                and error.os_error.errno == errno.ECONNREFUSED
            )
            raise UpstreamLostError(str(error) or repr(error), is_reached=is_reached) from error
        try:
            return await self._pass(request, answer, answer_headers, last_event, on_begin)
        finally:
            if answer.content.is_eof():
                answer.release()
            else:
                answer.close()  # aborts what the other server still computes

    async def _pass(
        self,
        request: web.BaseRequest,
        answer: aiohttp.ClientResponse,
        answer_headers: Mapping[str, str],
        last_event: Callable[[], Awaitable[bytes]] | None,
        on_begin: Callable[[bytes], object] | None,
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            status=answer.status,
            reason=answer.reason,
            headers=forwarded_headers(answer.headers, HOP_BY_HOP),
        )
        response.headers.update(answer_headers)
        is_stream = answer.content_type == EVENTS
        if is_stream:
            self._limit_send_buffer(request)
        await response.prepare(request)
        last = b"\n\n"
        while True:
            try:
                piece = await answer.content.readany()
            except (aiohttp.ClientError, OSError) as error:
                if not (is_stream and last == b"\n\n"):
                    raise UpstreamLostError(str(error) or repr(error)) from error
                piece = b""
                if last_event is not None:
                    await self._send(request, await last_event())
            if not piece:
                break
            if on_begin is not None:
                on_begin(piece)
                on_begin = None
            await self._send(request, piece)
            last = (last + piece)[-2:]
        await self._finish(request, response)
        return response

    async def _send(self, request: web.BaseRequest, data: bytes) -> None:
        writer = cast(StreamWriter, request.writer)
        await writer.write(data, drain=False)
        if request.protocol.writing_paused:
            await self._in_time(request, writer.drain())

    async def _finish(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        await self._in_time(request, response.write_eof())

    async def _in_time(self, request: web.BaseRequest, writing: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._settings.write_timeout_s):
                await writing
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()  # close() would wait for the reader again
            raise ConnectionResetError("the reader of an answer made no progress") from None

    def _limit_send_buffer(self, request: web.BaseRequest) -> None:
        transport = request.transport
        sock = transport.get_extra_info("socket") if transport is not None else None
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            size = self._settings.send_buffer_bytes
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)


def forwarded_headers(headers: Mapping[str, str], left_out: frozenset[str]) -> CIMultiDict[str]:
    """Returns the headers but those left out and those that Connection names."""
    named = {name.strip().lower() for name in headers.get(hdrs.CONNECTION, "").split(",")}
    kept: CIMultiDict[str] = CIMultiDict()
    for name, value in headers.items():
        if name.lower() not in left_out and name.lower() not in named:
            kept.add(name, value)
    return kept
