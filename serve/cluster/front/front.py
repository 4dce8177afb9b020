"""The HTTP server in front of equal replicas.

Calls that generate are relayed (relay.py): where a replica dies, shuts down or is too busy, another
one goes on. All other requests pass to any replica.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import aiohttp
import orjson
from aiohttp import web

from serve.cluster.front.metrics import metrics_text
from serve.cluster.front.relay import NoReplicaError, Relay, RelayCounts, forwarded_headers
from serve.cluster.front.replicas import ROUTING, Replica, ReplicaSet
from serve.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """replicas: the URLs of equal servers. lost_after_s: seconds without an answer after which a
    replica is lost. wait_s: seconds that a call waits for a replica that is ready. max_body_bytes:
    of one request. routing: how the next replica is chosen, see ReplicaSet.choose."""

    replicas: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    lost_after_s: float = 3.0
    wait_s: float = 60.0
    routing: str = "prefix"
    max_body_bytes: int = 32 << 20
    max_calls: int = 4096

    def __post_init__(self) -> None:
        if self.routing not in ROUTING:
            raise ConfigError(f"routing must be one of {', '.join(ROUTING)}")
        for url in self.replicas:
            if not url.startswith(("http://", "https://")):
                raise ConfigError(f"replicas: {url!r} does not begin with http:// or https://")


class Front:
    """A listener: start it, then stop it."""

    def __init__(self, settings: FrontSettings) -> None:
        self.settings = settings
        self.replicas = ReplicaSet(
            settings.replicas, lost_after_s=settings.lost_after_s, routing=settings.routing
        )
        self.counts = RelayCounts()
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.ServerRunner | None = None
        self.num_calls = 0
        self.port = settings.port

    @property
    def url(self) -> str:
        return f"http://{self.settings.host}:{self.port}"

    async def start(self) -> None:
        """Opens the listener. Raises OSError."""
        no_limit = aiohttp.TCPConnector(limit=0)
        forever = aiohttp.ClientTimeout(total=None, sock_connect=self.settings.lost_after_s)
        self._session = aiohttp.ClientSession(
            connector=no_limit, timeout=forever, auto_decompress=False, read_bufsize=1 << 20
        )
        await self.replicas.start(self._session)
        server = web.Server(self._answer, access_log=None, handler_cancellation=True)
        self._runner = web.ServerRunner(server)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.settings.host, self.settings.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        await self.replicas.stop()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()

    async def __aenter__(self) -> Front:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        match request.method, request.path:
            case "GET", "/health":
                return web.Response()
            case "GET", "/ready":
                return web.Response(status=200 if self.replicas.num_ready else 503)
            case "GET", "/metrics":
                return web.Response(text=metrics_text(self.replicas.replicas, self.counts))
        if self.num_calls >= self.settings.max_calls:
            return _error(429, "the server has too many requests", "overloaded")
        self.num_calls += 1
        try:
            return await self._forward(request)
        except NoReplicaError:
            return _error(503, "no server is ready to answer", "no_replica")
        finally:
            self.num_calls -= 1

    async def _forward(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await self._read(request)
        if body is None:
            most = self.settings.max_body_bytes
            return _error(413, f"the request body is larger than {most} bytes", "request_too_large")
        assert self._session is not None
        if request.method == "POST":
            self.counts.num_calls += 1
            relay = Relay(
                request,
                body,
                self.replicas,
                self._session,
                self.counts,
                wait_s=self.settings.wait_s,
            )
            return await relay.run()
        return await self._pass(request, body)

    async def _pass(self, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        """Passes a request that generates nothing to a replica; one for a stored response to each,
        until one has it."""
        assert self._session is not None
        tried: list[Replica] = []
        while (replica := self.replicas.choose([], tried)) is not None:
            tried.append(replica)
            is_last = len(tried) == self.replicas.num_ready
            try:
                async with self._session.request(
                    request.method,
                    replica.url + request.raw_path,
                    data=body,
                    headers=forwarded_headers(request.headers),
                    allow_redirects=False,
                ) as response:
                    is_stored = request.path.startswith("/v1/responses/")
                    if response.status == 404 and is_stored and not is_last:
                        continue
                    return await _copy(response, request)
            except aiohttp.ClientConnectorError as error:
                self.replicas.lost(replica, type(error).__name__)
        raise NoReplicaError

    async def _read(self, request: web.BaseRequest) -> bytes | None:
        """Returns the body; None if it is too large."""
        pieces, size = [], 0
        async for piece in request.content.iter_any():
            size += len(piece)
            if size > self.settings.max_body_bytes:
                return None
            pieces.append(piece)
        return b"".join(pieces)


async def _copy(response: aiohttp.ClientResponse, request: web.BaseRequest) -> web.StreamResponse:
    answer = web.StreamResponse(status=response.status, headers=forwarded_headers(response.headers))
    await answer.prepare(request)
    async for data in response.content.iter_any():
        await answer.write(data)
    await answer.write_eof()
    return answer


def _error(status: int, message: str, code: str) -> web.Response:
    error = {"message": message, "type": "server_error", "param": None, "code": code}
    headers = {"Retry-After": "2"} if status in (429, 503) else {}
    return web.Response(
        status=status,
        body=orjson.dumps({"error": error}),
        content_type="application/json",
        headers=headers,
    )
