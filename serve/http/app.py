"""From a request to its endpoint, and from what that raised to an error answer.

The listener is in server.py, the endpoints are in endpoints/. A client that leaves cancels its
handler, which aborts its sequences.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING
from urllib.parse import unquote

from aiohttp import web

from serve.http.access import HostCheck, authenticate
from serve.http.body import check_framing
from serve.http.call_engine import CallEngine
from serve.http.context import ApiContext, Call, ErrorShape, Handler, Route, ServerState
from serve.http.endpoints import all_routes
from serve.http.errors import ApiError, error_response, new_request_id, quoted, to_api_error
from serve.http.keys import ApiKey, KeyRing
from serve.http.meter import CLIENT_LEFT
from serve.http.settings import HttpSettings

if TYPE_CHECKING:
    from serve.engine import Engine

__all__ = ["HttpApp", "ServerState"]

logger = logging.getLogger(__name__)

LARGE_ANSWER = 32 << 10


class HttpApp:
    """The routes over one engine. keys: without any, nobody is asked for one."""

    def __init__(self, engine: Engine, settings: HttpSettings, keys: KeyRing | None = None) -> None:
        self.context = ApiContext(engine, settings)
        self._keys = KeyRing() if keys is None else keys
        self._check_host = HostCheck(settings)
        self.routes = routes = all_routes(self.context)
        self._exact = {route.path: route for route in routes if "{" not in route.path}
        # "/v1/models/{id}" by what is before and behind the braces, the longest first
        patterns = [_around_argument(route) for route in routes if "{" in route.path]
        self._patterns = sorted(patterns, key=lambda item: -len(item[0] + item[1]))

    @property
    def state(self) -> ServerState:
        return self.context.state

    @state.setter
    def state(self, state: ServerState) -> None:
        self.context.state = state

    @property
    def num_running(self) -> int:
        return self.context.num_running

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        request_id, arrived_s = new_request_id(), time.monotonic()
        meter, path, status = self.context.meter, "", CLIENT_LEFT
        shape: ErrorShape = error_response
        try:
            check_framing(request)
            self._check_host(request)
            route, argument = self._find(request)
            if route is not None:
                shape, path = route.error_shape, route.path
            # who has no key learns nothing about which paths there are
            key = self._key_of(request, route)
            handler = _handler(route, request)
            call = self._call(request, request_id, argument, key, arrived_s)
            response = await handler(call)
            status = response.status
            if not response.prepared:
                response.headers.update(call.headers)
        except ConnectionError:
            raise
        except Exception as exc:
            if request.writer.output_size:  # part of an answer is out; only closing is honest
                raise ConnectionResetError("an answer broke off") from exc
            error = to_api_error(exc, request_id)
            meter.refuse(error.code)
            response = shape(error, request_id)
            status = response.status
        finally:
            meter.answered(path, request.method, status)
        await self._send_whole(request, response)
        logger.debug("%s %s %d", request_id, request.method, response.status)
        return response

    async def _send_whole(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """Large answers are sent here, where a reader that stalls is given up."""
        if not isinstance(response, web.Response) or (response.content_length or 0) < LARGE_ANSWER:
            return
        await response.prepare(request)
        try:
            async with asyncio.timeout(self.context.settings.write_timeout_s):
                await response.write_eof()
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the reader of an answer made no progress") from None

    def _key_of(self, request: web.BaseRequest, route: Route | None) -> ApiKey | None:
        """Every route asks for a key, unless it says that it is public."""
        if not self._keys.num_keys or (route is not None and route.is_public):
            return None
        return authenticate(request, self._keys)

    def _call(
        self,
        request: web.BaseRequest,
        request_id: str,
        argument: str,
        key: ApiKey | None,
        arrived_s: float,
    ) -> Call:
        context = self.context
        engine = CallEngine(
            context.engine,
            key,
            share_prefixes=context.settings.share_prefixes,
            arrived_s=arrived_s,
        )
        return Call(request, request_id, engine, argument, key)

    def _find(self, request: web.BaseRequest) -> tuple[Route | None, str]:
        """The route, and what stands for `{...}` in its path."""
        path = request.raw_path.partition("?")[0]
        route = self._exact.get(path)
        if route is not None:
            return route, ""
        for before, behind, route in self._patterns:
            end = len(path) - len(behind)
            if path.startswith(before) and path.endswith(behind) and end > len(before):
                return route, unquote(path[len(before) : end], errors="replace")
        return None, ""


def _around_argument(route: Route) -> tuple[str, str, Route]:
    before, _, rest = route.path.partition("{")
    return before, rest.partition("}")[2], route


def _handler(route: Route | None, request: web.BaseRequest) -> Handler:
    if route is None:
        path = request.raw_path.partition("?")[0]
        raise ApiError(404, f"there is no {quoted(path)} here", code="unknown_url")
    method = "GET" if request.method == "HEAD" else request.method
    handler = route.handlers.get(method)
    if handler is None:
        methods = list(route.handlers)
        raise ApiError(
            405,
            f"{quoted(request.raw_path.partition('?')[0])} does not take {quoted(request.method)}",
            code="method_not_allowed",
            headers={"Allow": ", ".join([*methods, "HEAD"] if "GET" in methods else methods)},
        )
    return handler
