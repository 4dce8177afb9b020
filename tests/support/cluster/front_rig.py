"""A front of several models over one scripted server that stands for all their processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from serve.cluster.front.proxy import Proxy
from serve.cluster.models.front import FrontApp
from serve.cluster.models.pool import ModelPool
from serve.http.edge.connection import Connection, ConnectionServer
from serve.http.edge.keys import KeyRing, load_keys
from serve.http.edge.settings import HttpSettings
from tests.support.cluster.fake_switches import FakeSwitches, make_model

KEY = "the-key-of-the-front"
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@dataclass
class Front:
    """A running front. seen: (method, path, headers, body) of what arrived behind it."""

    url: str
    app: FrontApp
    pool: ModelPool
    switches: FakeSwitches
    session: aiohttp.ClientSession
    seen: list[tuple[str, str, Mapping[str, str], bytes]] = field(default_factory=list)

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body, headers=headers) as answer:
            text = await answer.read()
            is_json = answer.content_type == "application/json"
            return answer.status, await answer.json() if is_json else text

    async def get(self, path: str, **headers: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path, headers=headers) as answer:
            text = await answer.read()
            is_json = answer.content_type == "application/json"
            return answer.status, await answer.json() if is_json else text


@asynccontextmanager
async def running_front(handler: Handler, *names: str, **given: Any) -> AsyncIterator[Front]:
    """given: fields of HttpSettings."""
    settings = HttpSettings(port=0, access_log=False, **given)
    seen: list[tuple[str, str, Mapping[str, str], bytes]] = []

    async def behind(request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        seen.append((request.method, request.raw_path, request.headers, body))
        return await handler(request)

    loop = asyncio.get_running_loop()
    upstream = web.Server(behind, handler_cancellation=True)
    listener = await loop.create_server(upstream, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    switches: Any = FakeSwitches(url=f"http://127.0.0.1:{port}")
    pool = ModelPool([make_model(name) for name in names], switches, budget_bytes=200)
    proxy = Proxy(settings)
    keys = KeyRing(load_keys(settings.api_key_file, settings.api_keys))
    app = FrontApp(pool, switches, proxy, settings, keys, key=KEY, wait_s=2.0)

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        assert isinstance(request.protocol, Connection)
        return await app.handle(request, request.protocol.refusal)

    server = ConnectionServer(handle, settings)
    front = await loop.create_server(server, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{front.sockets[0].getsockname()[1]}"
    try:
        async with aiohttp.ClientSession() as session:
            yield Front(url, app, pool, switches, session, seen)
    finally:
        await pool.close()
        front.close()
        server.pre_shutdown()
        await server.shutdown(0.2)
        app.close()
        await proxy.close()
        listener.close()
        await upstream.shutdown(0.2)
