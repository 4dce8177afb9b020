"""/metrics on a port of its own on the loopback address, for a scraper without a key."""

from __future__ import annotations

from aiohttp import web

from serve.errors import drop_frames, reason
from serve.http.calls.context import ApiContext, ServerState
from serve.http.edge.access import HostCheck
from serve.http.edge.errors import (
    ApiError,
    common_headers,
    error_response,
    new_request_id,
    not_ready,
    to_api_error,
)
from serve.http.edge.settings import HttpSettings
from serve.http.monitoring.exposition import CONTENT_TYPE, Exposition

HOST = "127.0.0.1"


class MetricsListener:
    """Answers GET /metrics and nothing else."""

    def __init__(self, context: ApiContext, port: int) -> None:
        self._context = context
        self._exposition = Exposition(context)
        self._check_host = HostCheck(HttpSettings(host=HOST))
        self._runner: web.ServerRunner | None = None
        self.port = port

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}/metrics"

    async def start(self) -> None:
        """Opens the listener. Raises OSError, which names the port."""
        runner = web.ServerRunner(web.Server(self._handle, access_log=None), shutdown_timeout=0.5)
        await runner.setup()
        self._runner = runner
        try:
            await web.TCPSite(runner, HOST, self.port, reuse_address=True).start()
        except OSError as error:
            await self.stop()
            text = f"cannot listen on metrics_port {self.port}: {reason(error)}"
            raise OSError(error.errno, text) from error
        self.port = runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        request_id = new_request_id()
        try:
            self._check_host(request)
            if request.raw_path.partition("?")[0] != "/metrics":
                raise ApiError(404, "this port serves only /metrics", code="unknown_url")
            if request.method not in ("GET", "HEAD"):
                raise ApiError(405, "use GET", code="method_not_allowed", headers={"Allow": "GET"})
            if self._context.state is ServerState.LOADING:
                raise not_ready()
            body = await self._exposition.read()
        except Exception as exc:
            response = error_response(to_api_error(exc, request_id), request_id)
            drop_frames(exc)
            return response
        return web.Response(
            body=body, headers={"Content-Type": CONTENT_TYPE, **common_headers(request_id)}
        )
