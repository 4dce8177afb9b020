"""The process that serves several models: the listener, its signals and the log."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import web

from serve.cluster.front.proxy import Proxy
from serve.cluster.models.child import ChildSpec
from serve.cluster.models.front import FrontApp
from serve.cluster.models.memory import PROCESS_BYTES, expected_bytes
from serve.cluster.models.model import Model
from serve.cluster.models.pool import ModelPool
from serve.cluster.models.settings import ModelsSettings
from serve.cluster.models.switches import Switches
from serve.errors import ConfigError
from serve.http.edge.errors import ApiError
from serve.http.edge.keys import KeyRing, load_keys
from serve.http.edge.listener import HttpListener
from serve.http.edge.settings import HttpSettings
from serve.units import format_memory

logger = logging.getLogger(__name__)
POLL_S = 0.05
FLUSH_S = 0.4


@dataclass(frozen=True, slots=True)
class FrontModel:
    """A model to serve. file_bytes: those of its weight files."""

    spec: ChildSpec
    file_bytes: int


@dataclass(frozen=True, slots=True)
class FrontPlan:
    """What the front serves. budget_bytes: what all models may take together. kv_bytes: what each
    may take for K/V. dtype: that of all. key: what the models ask this process for."""

    models: Sequence[FrontModel]
    budget_bytes: int
    kv_bytes: int
    dtype: str
    key: str


def new_key() -> str:
    return secrets.token_hex(24)


class FrontServer:
    """Call start, then drain and stop."""

    def __init__(self, plan: FrontPlan, http: HttpSettings, settings: ModelsSettings) -> None:
        self.http = http
        self._plan = plan
        self._settings = settings
        self._keys = KeyRing()
        self._listener = HttpListener(self._handle, http)
        self._proxy: Proxy | None = None
        self._app: FrontApp | None = None

    @property
    def app(self) -> FrontApp:
        assert self._app is not None, "start() comes first"
        return self._app

    @property
    def url(self) -> str:
        return self._listener.url

    @property
    def num_keys(self) -> int:
        return len(self._keys.names)

    async def start(self) -> None:
        """Opens the listener; no model is started yet. Raises OSError, which names host and port,
        and ConfigError for API keys or certificates that cannot be read."""
        self._keys.replace(load_keys(self.http.api_key_file, self.http.api_keys))
        plan, settings = self._plan, self._settings
        self._proxy = Proxy(self.http)
        switches = Switches(self._proxy, plan.key, self._say)
        pool = ModelPool(
            [_model(each, plan) for each in plan.models],
            switches,
            budget_bytes=plan.budget_bytes,
            idle_s=settings.idle_seconds,
            max_waiting=settings.max_model_waiting,
        )
        self._app = FrontApp(
            pool,
            switches,
            self._proxy,
            self.http,
            self._keys,
            key=plan.key,
            wait_s=settings.model_wait_s,
        )
        await self._listener.start()
        self._app.counters.start(lambda: self._listener.num_connections)

    def reload_keys(self) -> None:
        """Reads the API keys again, and has the models do the same."""
        try:
            keys = load_keys(self.http.api_key_file, self.http.api_keys)
        except ConfigError as error:
            logger.error("the API keys stay as they were: %s", error)
            return
        self._keys.replace(keys)
        self.app.quotas.keep(self._keys.names)
        for model in self.app.pool.models.values():
            if model.child is not None and model.child.url:
                model.child.send_signal(signal.SIGHUP)
        logger.info("the API keys have been read again: %d keys", self._keys.num_keys)

    async def drain(self, hurry: asyncio.Event) -> None:
        """Refuses new requests. Returns when none runs or waits, drain_s is over or `hurry` is
        set."""
        self.app.is_draining = True
        loop = asyncio.get_running_loop()
        due_s, pool = loop.time() + self.http.drain_s, self.app.pool
        while (pool.num_running or pool.num_waiting) and loop.time() < due_s:
            if hurry.is_set():
                return
            await asyncio.sleep(POLL_S)

    async def stop(self) -> None:
        """Ends the models' processes and closes the listener."""
        if self._app is not None:
            self._app.is_draining = True
            self._app.counters.stop()
            await self._app.pool.close()
        await self._listener.close(FLUSH_S)
        if self._app is not None:
            self._app.close()
        if self._proxy is not None:
            await self._proxy.close()

    async def _handle(
        self, request: web.BaseRequest, refusal: ApiError | None
    ) -> web.StreamResponse:
        return await self.app.handle(request, refusal)

    def _say(self, name: str, line: str) -> None:
        """Passes a line of a model's log on; lines of JSON stay JSON."""
        text = line if self.http.log_format == "json" else f"{name} | {line}"
        print(text, file=sys.stderr, flush=True)


async def serve_models(
    plan: FrontPlan, http: HttpSettings, settings: ModelsSettings, *, is_quiet: bool
) -> None:
    """Serves the models until a signal. The first SIGTERM or SIGINT drains, the second ends the
    wait."""
    server = FrontServer(plan, http, settings)
    stopping, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stopping.is_set() else stopping).set()

    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    try:
        await server.start()
        for number in numbers:
            loop.add_signal_handler(number, on_signal)
        loop.add_signal_handler(signal.SIGHUP, server.reload_keys)
        print("\n".join(_summary(server, plan, settings, is_quiet=is_quiet)), flush=True)
        await stopping.wait()
        logger.info("stopping: waiting up to %g s for requests", http.drain_s)
        await server.drain(hurry)
    finally:
        await server.stop()
        for number in (*numbers, signal.SIGHUP):
            loop.remove_signal_handler(number)


def _summary(
    server: FrontServer, plan: FrontPlan, settings: ModelsSettings, *, is_quiet: bool
) -> list[str]:
    first = f"{len(plan.models)} models are ready at {server.url}/v1"
    if is_quiet:
        return [first]
    idle = "only when others need their memory"
    if settings.idle_seconds < math.inf:
        idle = f"after {settings.idle_seconds:g} s without requests"
    keys = f"{server.num_keys}" if server.num_keys else "none: any client may use the port"
    lines = [
        ("models", ", ".join(each.spec.name for each in plan.models)),
        ("memory", f"{format_memory(plan.budget_bytes)} for all, K/V of each up to"
                   f" {format_memory(plan.kv_bytes)}"),
        ("sleep", idle),
        ("metrics", f"{server.url}/metrics"),
        ("keys", keys),
    ]  # fmt: skip
    return [first, *(f"  {name:<11} {text}" for name, text in lines)]


def _model(each: FrontModel, plan: FrontPlan) -> Model:
    expected = expected_bytes(each.file_bytes, plan.dtype, plan.kv_bytes)
    return Model(each.spec, expected, min(expected, PROCESS_BYTES))
