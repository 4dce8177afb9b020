"""The listener: open before the model is loaded, drained before it closes."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import aiohttp.http_parser
from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from serve.errors import ConfigError, reason
from serve.http.app import HttpApp, ServerState
from serve.http.errors import ApiError, error_response, internal_error, new_request_id
from serve.http.keys import KeyRing, load_keys
from serve.http.metrics_listener import MetricsListener
from serve.http.settings import HttpSettings

if TYPE_CHECKING:
    from serve.engine import Engine

logger = logging.getLogger(__name__)

LINGER_S = 1.0
FLUSH_S = 2.0
POLL_S = 0.05


class HttpServer:
    """One listener over one engine. start, load, then drain and stop.

    The server starts and shuts down the engine it is given.
    """

    def __init__(self, engine: Engine, settings: HttpSettings | None = None) -> None:
        self.settings = settings or HttpSettings()
        self._keys = KeyRing()
        self.app = HttpApp(engine, self.settings, self._keys)
        self._engine = engine
        self._runner: web.ServerRunner | None = None
        self._port = self.settings.port
        port = self.settings.metrics_port
        self.metrics = None if port is None else MetricsListener(self.app.context, port)

    @property
    def url(self) -> str:
        host = self.settings.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self._port}"

    @property
    def num_keys(self) -> int:
        """API keys that are good; with none, nobody is asked for one."""
        return self._keys.num_keys

    async def start(self) -> None:
        """Opens the listener. Until `load` is done, API calls get 503 model_not_ready.

        OSError names host and port. ConfigError: the API keys cannot be had.
        """
        _check_parser()
        self.load_keys()
        server = _Server(
            self._handle,
            handler_cancellation=True,
            keepalive_timeout=self.settings.keepalive_s,
            first_request_timeout_s=self.settings.first_request_timeout_s,
            access_log=None,
            auto_decompress=False,
            lingering_time=LINGER_S,
        )
        runner = web.ServerRunner(server, shutdown_timeout=FLUSH_S)
        await runner.setup()
        self._runner = runner
        site = web.TCPSite(
            runner,
            self.settings.host,
            self.settings.port,
            backlog=self.settings.backlog,
            reuse_address=True,
        )
        try:
            await site.start()
        except OSError as error:
            where = f"host {self.settings.host}, port {self.settings.port}"
            text = f"cannot listen on {where}: {reason(error)}"
            raise OSError(error.errno, text) from error
        self._port = runner.addresses[0][1]
        self.app.context.meter.start(lambda: len(server.connections))
        if self.metrics is not None:
            await self.metrics.start()

    def load_keys(self) -> None:
        """Reads the API keys (again). ConfigError: those that were there stay."""
        settings = self.settings
        self._keys.replace(load_keys(settings.api_key_file, settings.api_keys))

    def reload_keys(self) -> None:
        try:
            self.load_keys()
        except ConfigError as exc:
            logger.error("the API keys stay as they were: %s", exc)
        else:
            logger.info("the API keys are read again: there are %d", self._keys.num_keys)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        if isinstance(connection, _Connection):
            connection.first_request_came()
        return await self.app.handle(request)

    async def load(self) -> None:
        """Loads the model; then API calls are answered."""
        await self._engine.start()
        gc.collect()
        gc.freeze()
        if self.app.state is ServerState.LOADING:
            self.app.state = ServerState.READY

    async def drain(self, hurry: asyncio.Event | None = None) -> None:
        """Refuses new requests; returns when none runs, drain_s is over or `hurry` is set."""
        self.app.state = ServerState.DRAINING
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.settings.drain_s
        while self.app.num_running and loop.time() < deadline:
            if hurry is not None and hurry.is_set():
                return
            await asyncio.sleep(POLL_S)

    async def stop(self) -> None:
        """Aborts what still runs, lets the answers out, closes the listener."""
        self.app.state = ServerState.DRAINING
        self.app.context.meter.stop()
        await self._engine.shutdown(drain_s=0.0)
        if self.metrics is not None:
            await self.metrics.stop()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def __aenter__(self) -> HttpServer:
        await self.start()
        await self.load()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


async def serve_until_signal(server: HttpServer, *, on_ready: Callable[[str], None]) -> bool:
    """The life of a server process. First SIGTERM or SIGINT drains, the second hurries.

    False when the signal came while the model was loading: its thread may still be busy.
    """
    stopping, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        if stopping.is_set():
            hurry.set()
        else:
            logger.info("stopping: waiting up to %g s for requests", server.settings.drain_s)
            stopping.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    loop.add_signal_handler(signal.SIGHUP, server.reload_keys)
    try:
        await server.start()
        logger.info("listening on %s, loading the model", server.url)
        is_loaded = await _load_unless(server, stopping)
        if is_loaded:
            on_ready(server.url)
            await stopping.wait()
            await server.drain(hurry)
        return is_loaded
    finally:
        await server.stop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(number)


async def _load_unless(server: HttpServer, stopping: asyncio.Event) -> bool:
    """False when a signal came before the model was there."""
    loading = asyncio.create_task(server.load())
    stopped = asyncio.create_task(stopping.wait())
    await asyncio.wait((loading, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not loading.done():
        loading.cancel()
        await asyncio.wait((loading,))
        return False
    loading.result()
    return True


def _check_parser() -> None:
    if "Py" in aiohttp.http_parser.HttpRequestParser.__name__:
        logger.warning("aiohttp runs without its C parser: slower, and less strictly tested")


class _Connection(web.RequestHandler):
    """aiohttp's connection, with JSON errors and a deadline for the first request."""

    def __init__(self, manager: _Server, *, first_request_timeout_s: float, **kwargs: Any) -> None:
        super().__init__(manager, **kwargs)
        self._first_request_timeout_s = first_request_timeout_s
        self._first_request_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._first_request_timer = asyncio.get_running_loop().call_later(
            self._first_request_timeout_s, self.force_close
        )

    def connection_lost(self, exc: BaseException | None) -> None:
        self.first_request_came()
        super().connection_lost(exc)

    def first_request_came(self) -> None:
        if self._first_request_timer is not None:
            self._first_request_timer.cancel()
            self._first_request_timer = None

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Called for bytes that are no HTTP request. The message quotes none of them."""
        self.first_request_came()
        if isinstance(exc, ConnectionError):
            raise exc  # the client is gone: the caller closes, and nothing is to be said
        if status >= 500:
            logger.error("a connection failed", exc_info=exc)
            error = internal_error()
        elif isinstance(exc, LineTooLong) or "Too many headers" in str(exc):
            error = ApiError(431, "the request head is too large", code="headers_too_large")
        else:
            error = ApiError(status, "the request is not valid HTTP", code="invalid_request")
        error.closes = True
        return error_response(error, new_request_id())


class _Server(web.Server):
    def __init__(self, handler: Any, *, first_request_timeout_s: float, **kwargs: Any) -> None:
        super().__init__(handler, **kwargs)
        self._first_request_timeout_s = first_request_timeout_s

    def __call__(self) -> web.RequestHandler:
        return _Connection(
            self,
            loop=self._loop,
            first_request_timeout_s=self._first_request_timeout_s,
            **self._kwargs,
        )
