"""Takes a request to its endpoint, and turns what the endpoint raises into an error answer.

server.py has the listener, routes.py the endpoints. A client that disconnects cancels its handler,
which aborts its sequences.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import unquote

from aiohttp import web

from serve.errors import EngineStoppedError, drop_frames
from serve.http.calls.context import ApiContext, Call, ErrorShape, Handler, Route, ServerState
from serve.http.calls.continuation import JOURNAL_HEADER, HandedOverError
from serve.http.calls.key_policy import KeyPolicy
from serve.http.edge import limits
from serve.http.edge.access import HostCheck, authenticate, request_timeout_s
from serve.http.edge.body import check_framing
from serve.http.edge.cors import Cors
from serve.http.edge.counters import CLIENT_LEFT
from serve.http.edge.errors import (
    ERROR_CODE_HEADER,
    ApiError,
    common_headers,
    error_response,
    generation_timeout,
    new_request_id,
    overloaded,
    quoted,
    to_api_error,
)
from serve.http.edge.hop import is_of_hop, is_prompt_counted
from serve.http.edge.keys import KeyRing
from serve.http.edge.large_json import StreamedJson
from serve.http.edge.quota import Quotas
from serve.http.edge.settings import HttpSettings
from serve.http.monitoring.access_log import CLIENT_REQUEST_ID, AccessLog
from serve.http.monitoring.tracing import make_tracer
from serve.http.routes import all_routes
from serve.kept import size_of

if TYPE_CHECKING:
    from serve.engine.engine import Engine

__all__ = ["HttpApp", "ServerState"]

LARGE_ANSWER = 32 << 10
_PIECE_BYTES = 32 << 10
_REQUEST_ID = re.compile(rf"[A-Za-z0-9._-]{{1,{limits.CLIENT_REQUEST_ID_CHARS}}}")


class HttpApp:
    """The routes over one engine. keys: the valid API keys; where it is empty, no key is needed."""

    def __init__(self, engine: Engine, settings: HttpSettings, keys: KeyRing | None = None) -> None:
        self.context = ApiContext(engine, settings)
        self.quotas = Quotas()
        self.hop_token = ""  # of the operator's hop, if it has one
        self._keys = KeyRing() if keys is None else keys
        self._check_host = HostCheck(settings)
        self._cors = Cors(settings.cors_origins)
        self._access_log = AccessLog(is_on=settings.access_log)
        self._tracer = make_tracer(settings.otlp_endpoint)
        self.context.kept["clients"] = lambda: size_of(self.quotas.clients)
        if self._tracer is not None:
            self.context.kept["spans"] = self._tracer.kept
        self.routes = routes = all_routes(self.context)
        self._exact = {route.path: route for route in routes if "{" not in route.path}
        # "/v1/models/{id}" is matched by the text before and after the braces, the longest first
        patterns = [_around_argument(route) for route in routes if "{" in route.path]
        self._patterns = sorted(patterns, key=lambda item: -len(item[0] + item[1]))

    @property
    def state(self) -> ServerState:
        return self.context.state

    @state.setter
    def state(self, state: ServerState) -> None:
        self.context.state = state

    @property
    def num_calls(self) -> int:
        """The number of calls that are being answered."""
        return len(self.context.calls)

    @property
    def is_computing(self) -> bool:
        """Whether the engine computes something for any call."""
        return any(policy.is_computing for policy in self.context.calls)

    async def handle(
        self, request: web.BaseRequest, refusal: ApiError | None = None
    ) -> web.StreamResponse:
        """Answers a request. refusal: the answer of all routes that are not public, if set."""
        call = self._begin(request)
        status = CLIENT_LEFT
        try:
            response = await self._answer(call, refusal)
            status = response.status
            return response
        finally:
            if status == CLIENT_LEFT and call.route is not None and call.route.is_endless:
                status = 200  # an endless answer ends only so
            self._end(call, status)

    def hand_over(self) -> None:
        """Ends the calls that a hop in front of the server goes on with elsewhere."""
        for policy in list(self.context.calls):
            policy.hand_over()

    async def close(self) -> None:
        self.context.bodies.close()
        self.context.budget.close()
        if self._tracer is not None:
            await self._tracer.close()

    def _begin(self, request: web.BaseRequest) -> Call:
        headers = self._cors.headers(request)
        client_id = request.headers.get("X-Request-Id")
        if client_id is not None and _REQUEST_ID.fullmatch(client_id):
            headers[CLIENT_REQUEST_ID] = client_id
        context = self.context
        charge = context.budget.charge()
        return Call(request, new_request_id(), context.engine, KeyPolicy(), charge, headers=headers)

    def _end(self, call: Call, status: int) -> None:
        call.charge.release()
        path = "" if call.route is None else call.route.path
        self.context.counters.answered(path, call.request.method, status)
        self._access_log.answered(call, status)
        if self._tracer is not None:
            self._tracer.answered(call, status)

    async def _answer(self, call: Call, refusal: ApiError | None) -> web.StreamResponse:
        request = call.request
        shape: ErrorShape = error_response
        response: web.StreamResponse
        try:
            check_framing(request)
            self._check_host(request)
            preflight = self._cors.preflight(request)
            if preflight is not None:
                preflight.headers.update(common_headers(call.request_id) | call.headers)
                return preflight
            call.route, call.argument = self._find(request)
            if call.route is not None:
                shape = call.route.error_shape
            # without a key a client does not learn which paths exist
            response = await self._run_route(call, refusal)
        except ConnectionError:
            raise
        except Exception as exc:
            if request.writer.output_size:  # part of an answer has been sent: close
                raise ConnectionResetError("an answer broke off") from exc
            error = to_api_error(self._unready(exc) or exc, call.request_id)
            error.closes |= refusal is not None
            if isinstance(error, HandedOverError):
                shape = error_response
            call.error_code = error.code
            self.context.counters.refuse(error.code)
            response = shape(error, call.request_id)
            response.headers.update(call.headers)
            if error.code is not None and JOURNAL_HEADER in request.headers:
                response.headers[ERROR_CODE_HEADER] = error.code
            drop_frames(exc)
        call.response = response
        return response

    def _unready(self, exc: Exception) -> ApiError | None:
        """Returns why an engine does not run that neither stops nor has stopped for good."""
        if isinstance(exc, EngineStoppedError):
            try:
                self.context.check_ready()
            except ApiError as error:
                return error
        return None

    async def _run_route(self, call: Call, refusal: ApiError | None) -> web.StreamResponse:
        """Runs the handler. Routes that are not public need a key and count towards the limits."""
        request, route = call.request, call.route
        if route is not None and route.is_public:
            return await self._run(_handler(route, request), call, closes=refusal is not None)
        if refusal is not None:
            raise refusal
        key = authenticate(request, self._keys) if self._keys.num_keys else None
        handler = _handler(route, request)
        share = self.context.settings.share_prefixes
        call.policy = KeyPolicy(key, share_prefixes=share, arrived_s=call.arrived_s)
        call.policy.is_of_hop = is_of_hop(request, self.hop_token)
        call.policy.is_prompt_counted = is_prompt_counted(request, self.hop_token)
        with self._admitted(call):
            return await self._run(handler, call)

    async def _run(
        self, handler: Handler, call: Call, *, closes: bool = False
    ) -> web.StreamResponse:
        """closes: the connection is above the limit and ends with this answer."""
        response = await handler(call)
        if closes:
            response.force_close()
        if not response.prepared:
            response.headers.update(call.headers)
            await self._send_whole(call.request, response)
        return response

    @contextmanager
    def _admitted(self, call: Call) -> Iterator[None]:
        """Counts the call towards the server's and its key's limits, and ends it when its time is
        over. Raises ApiError 429."""
        context, key, policy = self.context, call.key, call.policy
        seconds = request_timeout_s(call.request, context.settings.request_timeout_s)
        if len(context.calls) >= context.settings.max_calls:
            raise overloaded("the server has too many requests")
        is_counted = key is not None and call.request.method not in ("GET", "HEAD")
        if key is not None and is_counted:
            self.quotas.enter(key, goes_on=policy.is_of_hop)
        context.calls.add(policy)
        loop = asyncio.get_running_loop()
        timer = loop.call_later(seconds, policy.expire, generation_timeout(seconds))
        try:
            yield
        finally:
            timer.cancel()
            context.calls.discard(policy)
            if key is not None and is_counted:
                self.quotas.leave(key, policy.num_charged)

    async def _send_whole(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """Sends a large answer; aborts the connection of a reader that stalls."""
        if isinstance(response, web.Response):
            if (response.content_length or 0) < LARGE_ANSWER:
                return
            body = b"" if request.method == "HEAD" else response.body
            assert isinstance(body, bytes)
            pieces = _slices(body)
        elif isinstance(response, StreamedJson):
            pieces = self._made(response.pieces)
        else:
            return
        writer = await response.prepare(request)
        assert writer is not None
        try:
            async for piece in pieces:
                async with asyncio.timeout(self.context.settings.write_timeout_s):
                    await writer.write(piece)
                    await writer.drain()
            await web.StreamResponse.write_eof(response)  # without sending the body again
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the reader of an answer made no progress") from None

    async def _made(self, pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
        """Yields pieces that a thread makes."""
        while piece := await self.context.bodies.run_in_thread(lambda: next(pieces, None)):
            yield piece

    def _find(self, request: web.BaseRequest) -> tuple[Route | None, str]:
        """Returns the route and the part of the path that stands for `{...}`."""
        path = request.raw_path.partition("?")[0]
        route = self._exact.get(path)
        if route is not None:
            return route, ""
        for before, after, route in self._patterns:
            end = len(path) - len(after)
            if path.startswith(before) and path.endswith(after) and end > len(before):
                return route, unquote(path[len(before) : end], errors="replace")
        return None, ""


async def _slices(body: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(body), _PIECE_BYTES):
        yield body[at : at + _PIECE_BYTES]


def _around_argument(route: Route) -> tuple[str, str, Route]:
    before, _, rest = route.path.partition("{")
    return before, rest.partition("}")[2], route


def _handler(route: Route | None, request: web.BaseRequest) -> Handler:
    if route is None:
        path = request.raw_path.partition("?")[0]
        raise ApiError(404, f"{quoted(path)} does not exist on this server", code="unknown_url")
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
