"""The listener: it opens before the model is loaded and drains before it closes."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

import aiohttp.http_parser

from serve.errors import ConfigError
from serve.http.app import HttpApp, ServerState
from serve.http.edge.hop import load_hop_token
from serve.http.edge.keys import KeyRing, load_keys
from serve.http.edge.listener import HttpListener
from serve.http.edge.settings import HttpSettings
from serve.http.metrics_listener import MetricsListener
from serve.signals import ended_by_signals

if TYPE_CHECKING:
    from serve.engine.engine import Engine

logger = logging.getLogger(__name__)

FLUSH_S = 0.4  # applied twice, to handlers that still run when the engine has stopped
POLL_S = 0.05
# A large body is many objects, and each collection that traverses them stops every thread: a tenth
# of a microsecond for each object that the first and the second generation have.
GC_THRESHOLDS = (50_000, 4, 250)


class HttpServer:
    """One listener over one engine: call start and load, then drain and stop.

    The server starts the engine and shuts it down.
    """

    def __init__(self, engine: Engine, settings: HttpSettings | None = None) -> None:
        self.settings = settings or HttpSettings()
        self._keys = KeyRing()
        self.app = HttpApp(engine, self.settings, self._keys)
        self._engine = engine
        self._listener = HttpListener(self.app.handle, self.settings)
        port = self.settings.metrics_port
        self.metrics = None if port is None else MetricsListener(self.app.context, port)

    @property
    def url(self) -> str:
        return self._listener.url

    @property
    def num_keys(self) -> int:
        """The number of valid API keys; with 0, requests need no key."""
        return self._keys.num_keys

    async def start(self) -> None:
        """Opens the listener. Until `load` is done, API calls get 503 model_not_ready.

        Raises OSError, which names host and port, and ConfigError for API keys or certificates
        that cannot be read.
        """
        _check_parser()
        self.load_keys()
        await self._listener.start()
        if not self.settings.is_loopback and not self._keys.num_keys:
            logger.warning(
                "every client that reaches port %d may use it: there is no API key",
                self._listener.port,
            )
        self.app.context.counters.start(lambda: self._listener.num_connections)
        if self.metrics is not None:
            await self.metrics.start()

    def load_keys(self) -> None:
        """Reads the API keys and the hop's. Raises ConfigError, and the keys from before stay
        valid."""
        settings = self.settings
        self._keys.replace(load_keys(settings.api_key_file, settings.api_keys))
        self.app.quotas.keep(self._keys.names)
        self.app.hop_token = load_hop_token(settings.hop_key_file)

    def reload_keys(self) -> None:
        try:
            self.load_keys()
        except ConfigError as exc:
            logger.error("the API keys stay as they were: %s", exc)
        else:
            logger.info("the API keys have been read again: %d keys", self._keys.num_keys)

    async def load(self) -> None:
        """Loads the model. API calls are answered from then on."""
        await self._engine.start()
        _freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        if self.app.state is ServerState.LOADING:
            self.app.state = ServerState.READY

    async def drain(self, hurry: asyncio.Event | None = None) -> None:
        """Refuses new requests, and hands over those with which another server goes on. Returns
        when no request is computed, drain_s is over or `hurry` is set. It does not wait for slow
        clients: `stop` sends what is left of their answers."""
        self.app.state = ServerState.DRAINING
        self.app.hand_over()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.settings.drain_s
        while self.app.is_computing and loop.time() < deadline:
            if hurry is not None and hurry.is_set():
                return
            await asyncio.sleep(POLL_S)

    async def stop(self) -> None:
        """Aborts running requests, sends what is left of the answers and closes the listener."""
        self.app.state = ServerState.DRAINING
        self.app.context.counters.stop()
        await self._engine.shutdown(drain_s=0.0)
        if self.metrics is not None:
            await self.metrics.stop()
        await self._listener.close(FLUSH_S)
        await self.app.close()

    async def __aenter__(self) -> HttpServer:
        await self.start()
        await self.load()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


async def serve_until_signal(server: HttpServer, *, on_ready: Callable[[str], None]) -> None:
    """Runs a server process. The first SIGTERM or SIGINT drains it, the second ends the wait. While
    the model loads, the first one ends the process."""
    stopping, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        if stopping.is_set():
            hurry.set()
        else:
            logger.info("stopping: waiting up to %g s for requests", server.settings.drain_s)
            stopping.set()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, server.reload_keys)
    try:
        with ended_by_signals():
            await server.start()
            logger.info("listening on %s, loading the model", server.url)
            await server.load()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        on_ready(server.url)
        await stopping.wait()
        await server.drain(hurry)
    finally:
        await server.stop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(number)


def _freeze() -> None:
    """Excludes all objects that exist now from garbage collection. This happens once per process:
    frozen cycles are never freed, and a stopped server would stay with them."""
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()


def _check_parser() -> None:
    if "Py" in aiohttp.http_parser.HttpRequestParser.__name__:
        logger.warning(
            "aiohttp runs without its C parser, which is slower and less strictly tested"
        )
