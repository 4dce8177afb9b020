"""Listens for HTTP at one address, with the limits of the settings on all connections."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from serve.errors import reason
from serve.http.edge import limits
from serve.http.edge.connection import Connection, ConnectionServer, notice_dead_peers
from serve.http.edge.errors import ApiError
from serve.http.edge.settings import HttpSettings
from serve.http.edge.tls import tls_context

logger = logging.getLogger(__name__)

Handle = Callable[[web.BaseRequest, ApiError | None], Awaitable[web.StreamResponse]]
"""Answers a request. The error is set on connections above a limit, which get it as the answer of
all routes that are not public."""


class HttpListener:
    """Call start, then close."""

    def __init__(self, handle: Handle, settings: HttpSettings) -> None:
        self._handle = handle
        self._settings = settings
        self._port = settings.port
        self._server: asyncio.Server | None = None
        self._connections: ConnectionServer | None = None

    @property
    def port(self) -> int:
        """The port; where the settings ask for any, the one that was found."""
        return self._port

    @property
    def url(self) -> str:
        host = self._settings.host
        scheme = "http" if self._settings.tls_cert is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self._port}"

    @property
    def num_connections(self) -> int:
        return 0 if self._connections is None else self._connections.num_connections

    async def start(self) -> None:
        """Raises OSError, which names host and port, and ConfigError for certificates that cannot
        be read."""
        settings = self._settings
        context = tls_context(settings)
        if context is None and not settings.is_loopback:
            logger.warning(
                "%s can be reached from other machines without encryption: set --tls-cert and"
                " --tls-key, or put a proxy in front that speaks HTTPS",
                settings.host,
            )
        connections = self._connections = ConnectionServer(self._answer, settings)
        host, port = settings.host, settings.port
        try:
            self._server = await asyncio.get_running_loop().create_server(
                connections,
                host,
                port,
                ssl=context,
                ssl_handshake_timeout=None if context is None else limits.TLS_HANDSHAKE_S,
                backlog=settings.backlog,
                reuse_address=True,
            )
        except OSError as error:
            text = f"cannot listen on host {host}, port {port}: {reason(error)}"
            raise OSError(error.errno, text) from error
        for listening in self._server.sockets:
            notice_dead_peers(listening, settings.write_timeout_s)
        self._port = self._server.sockets[0].getsockname()[1]

    async def close(self, flush_s: float) -> None:
        """Ends the connections. Handlers that still run have twice flush_s to end."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._connections is not None:
            self._connections.pre_shutdown()
            await self._connections.shutdown(flush_s)
            self._connections = None

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        assert isinstance(connection, Connection)
        return await self._handle(request, connection.refusal)
