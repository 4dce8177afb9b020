"""The routes that the front answers itself: health, models, metrics, sleep and the page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any
from urllib.parse import unquote

from aiohttp import web

from serve import __version__
from serve.cluster.models.errors import not_running
from serve.cluster.models.metrics import CONTENT_TYPE, FrontMetrics
from serve.cluster.models.model import Model, State
from serve.cluster.models.pool import ModelPool
from serve.cluster.models.routing import Router
from serve.cluster.models.switches import Switches
from serve.http.edge.counters import HttpCounters
from serve.http.edge.errors import ApiError, common_headers, draining, json_response, quoted
from serve.http.monitoring.page_files import PageFile, read_page

Answer = Callable[[str], Awaitable[web.Response]]
_HEALTH = ("/health", "/health/live", "/ping")
_READY = ("/ready", "/health/ready")
_MODELS = "/v1/models"
_LEVELS = ("1", "2")
_GET = ("GET", "HEAD")


class OwnRoutes:
    """public and private find the route of a request: (its path, what makes the answer). wait_s:
    how long a wake-up may take."""

    def __init__(
        self,
        pool: ModelPool,
        switches: Switches,
        router: Router,
        counters: HttpCounters,
        *,
        has_sleep: bool,
        wait_s: float,
        is_draining: Callable[[], bool],
    ) -> None:
        self._pool = pool
        self._wait_s = wait_s
        self._is_draining = is_draining
        self._switches = switches
        self._router = router
        self._has_sleep = has_sleep
        self._created = int(time.time())
        self._metrics = FrontMetrics(pool, counters)
        self._page = read_page()

    def public(self, request: web.BaseRequest) -> tuple[str, Answer] | None:
        """Returns the route of a request that needs no key; None if it is none of these."""
        path = request.raw_path.partition("?")[0]
        if path in _HEALTH:
            return _for(request, path, _GET, self._health)
        if path in _READY:
            return _for(request, path, _GET, self._ready)
        file = self._page.get(path)
        if file is not None:
            return _for(request, path, _GET, partial(_file, file, request))
        return None

    def private(self, request: web.BaseRequest) -> tuple[str, Answer] | None:
        """Returns the route of a request that needs a key, if it is the front's."""
        path = request.raw_path.partition("?")[0]
        if path == "/version":
            return _for(request, path, _GET, _version)
        if path == "/metrics":
            return _for(request, path, _GET, partial(self._read_metrics, request))
        if path == _MODELS:
            return _for(request, path, _GET, self._list)
        if path.startswith(f"{_MODELS}/"):
            name = unquote(path.removeprefix(f"{_MODELS}/"), errors="replace")
            return _for(request, f"{_MODELS}/{{id}}", _GET, partial(self._one, name))
        if not self._has_sleep:
            return None
        if path == "/is_sleeping":
            return _for(request, path, _GET, partial(self._is_sleeping, request))
        if path == "/sleep":
            return _for(request, path, ("POST",), partial(self._sleep, request))
        if path == "/wake_up":
            return _for(request, path, ("POST",), partial(self._wake, request))
        return None

    async def _health(self, request_id: str) -> web.Response:
        return json_response({"status": "ok"}, request_id)

    async def _ready(self, request_id: str) -> web.Response:
        """The front is ready with no model in memory: requests wait for theirs."""
        if self._is_draining():
            raise draining()
        return json_response({"status": "ready"}, request_id)

    async def _list(self, request_id: str) -> web.Response:
        models = [self._object(model) for model in self._pool.models.values()]
        return json_response({"object": "list", "data": models}, request_id)

    async def _one(self, name: str, request_id: str) -> web.Response:
        return json_response(self._object(self._router.by_name(name)), request_id)

    def _object(self, model: Model) -> dict[str, Any]:
        """Returns OpenAI's object of a model; sizes that only a loaded model tells may lack."""
        about = {"id": model.name, "object": "model", "created": self._created}
        about |= {"owned_by": "mergestep"} | model.about | {"created": self._created}
        about |= {
            "state": model.state.value,
            "memory_bytes": model.held_bytes,
            "running": model.running,
            "waiting": len(model.waiters),
        }
        if model.failure:
            about["failure"] = model.failure
        return about

    async def _read_metrics(self, request: web.BaseRequest, request_id: str) -> web.Response:
        """Returns the front's metrics, or with ?model= those of a model whose process runs."""
        if "model" in request.rel_url.query:
            model = self._router.by_query(request)
            body = await self._switches.metrics(model)
            if body is None:
                raise not_running(model.name, model.state)
        else:
            body = await asyncio.to_thread(self._metrics.text)
        headers = {"Content-Type": CONTENT_TYPE, **common_headers(request_id)}
        return web.Response(body=body, headers=headers)

    def _chosen(self, request: web.BaseRequest) -> list[Model]:
        """Returns the model of ?model=, or all."""
        if "model" in request.rel_url.query:
            return [self._router.by_query(request)]
        return list(self._pool.models.values())

    async def _is_sleeping(self, request: web.BaseRequest, request_id: str) -> web.Response:
        states = {model.state for model in self._chosen(request)}
        is_sleeping = states <= {State.ASLEEP, State.STOPPED}
        return json_response({"is_sleeping": is_sleeping}, request_id)

    async def _sleep(self, request: web.BaseRequest, request_id: str) -> web.Response:
        level = request.rel_url.query.get("level", "1")
        if level not in _LEVELS:
            raise ApiError(
                400,
                f"level must be 1 or 2, not {quoted(level)}",
                param="level",
                code="invalid_value",
            )
        pool = self._pool
        await asyncio.gather(*(pool.put_to_sleep(model) for model in self._chosen(request)))
        return web.Response(headers=common_headers(request_id))

    async def _wake(self, request: web.BaseRequest, request_id: str) -> web.Response:
        """Wakes one model; without ?model= the first, since all may not fit."""
        model, pool = self._router.by_query(request), self._pool
        await pool.acquire(model, self._wait_s)
        pool.release(model)
        return web.Response(headers=common_headers(request_id))


def _for(
    request: web.BaseRequest, route: str, methods: tuple[str, ...], answer: Answer
) -> tuple[str, Answer]:
    if request.method in methods:
        return route, answer
    path = request.raw_path.partition("?")[0]
    raise ApiError(
        405,
        f"{quoted(path)} does not take {quoted(request.method)}",
        code="method_not_allowed",
        headers={"Allow": ", ".join(methods)},
    )


async def _version(request_id: str) -> web.Response:
    return json_response({"version": __version__}, request_id)


async def _file(file: PageFile, request: web.BaseRequest, request_id: str) -> web.Response:
    return file.answer(request, request_id)
