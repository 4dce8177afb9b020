"""The front of several models: answers what concerns all, and forwards the rest to the model."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from aiohttp import web

from serve.cluster.front.proxy import Proxy, UpstreamLostError
from serve.cluster.models import errors
from serve.cluster.models.model import Model, State
from serve.cluster.models.own_routes import OwnRoutes
from serve.cluster.models.pool import ModelPool
from serve.cluster.models.routing import Kind, Router, Target, find_target
from serve.cluster.models.switches import Switches
from serve.errors import drop_frames
from serve.http.anthropic.errors import anthropic_error, error_object
from serve.http.edge import limits
from serve.http.edge.access import (
    TIMEOUT_HEADER,
    HostCheck,
    authenticate,
    request_timeout_s,
)
from serve.http.edge.body import Bodies, check_framing, held_body
from serve.http.edge.cors import Cors
from serve.http.edge.counters import CLIENT_LEFT, HttpCounters
from serve.http.edge.errors import (
    ApiError,
    common_headers,
    draining,
    error_response,
    new_request_id,
    overloaded,
    to_api_error,
)
from serve.http.edge.json_body import parse_object
from serve.http.edge.keys import ApiKey, KeyRing
from serve.http.edge.quota import Quotas
from serve.http.edge.settings import HttpSettings
from serve.http.edge.sse import named_event

logger = logging.getLogger("serve.access")
_REQUEST_ID = re.compile(rf"[A-Za-z0-9._-]{{1,{limits.CLIENT_REQUEST_ID_CHARS}}}")
_ANTHROPIC = "/v1/messages"
_END_S = 1.0  # at most, from the end of a process's connections to its own


@dataclass(slots=True)
class _Call:
    """One request. arrived_s: in seconds of the monotonic clock. headers: of the answer."""

    request: web.BaseRequest
    request_id: str
    headers: dict[str, str]
    arrived_s: float = field(default_factory=time.monotonic)
    route: str = ""
    is_forwarded: bool = False

    @property
    def path(self) -> str:
        return self.request.raw_path.partition("?")[0]

    @property
    def is_anthropic(self) -> bool:
        return self.path.startswith(_ANTHROPIC)


class FrontApp:
    """The routes over one pool. key: what the models' processes ask for where clients need none.
    wait_s: how long a request waits for its model."""

    def __init__(
        self,
        pool: ModelPool,
        switches: Switches,
        proxy: Proxy,
        settings: HttpSettings,
        keys: KeyRing,
        *,
        key: str,
        wait_s: float,
    ) -> None:
        self.pool = pool
        self.counters = HttpCounters()
        self.quotas = Quotas()
        self.is_draining = False
        self.num_calls = 0
        self._proxy = proxy
        self._settings = settings
        self._keys = keys
        self._key = key
        self._wait_s = wait_s
        self._router = Router(pool.models)
        self._own = OwnRoutes(
            pool,
            switches,
            self._router,
            self.counters,
            has_sleep=settings.enable_sleep_mode,
            wait_s=wait_s,
            is_draining=lambda: self.is_draining,
        )
        self._bodies = Bodies()
        self._check_host = HostCheck(settings)
        self._cors = Cors(settings.cors_origins)

    async def handle(
        self, request: web.BaseRequest, refusal: ApiError | None = None
    ) -> web.StreamResponse:
        """Answers a request. refusal: the answer of all routes that are not public, if set."""
        call = _Call(request, new_request_id(), self._cors.headers(request))
        status = CLIENT_LEFT
        try:
            response = await self._answer(call, refusal)
            status = response.status
            return response
        finally:
            self.counters.answered(call.route, request.method, status)
            if self._settings.access_log and not call.is_forwarded:
                self._log(call, status)

    def close(self) -> None:
        self._bodies.close()

    def _log(self, call: _Call, status: int) -> None:
        """Logs what the front answers itself; the models log what they answer."""
        seconds = round(time.monotonic() - call.arrived_s, 4)
        route = call.route or "-"
        logger.info("id=%s route=%s status=%d seconds=%g", call.request_id, route, status, seconds)

    async def _answer(self, call: _Call, refusal: ApiError | None) -> web.StreamResponse:
        request = call.request
        try:
            check_framing(request)
            self._check_host(request)
            preflight = self._cors.preflight(request)
            if preflight is not None:
                preflight.headers.update(common_headers(call.request_id) | call.headers)
                return preflight
            return await self._run(call, refusal)
        except ConnectionError:
            raise
        except Exception as exc:
            call.is_forwarded = False
            if request.writer.output_size:  # part of an answer has been sent: close
                raise ConnectionResetError("an answer broke off") from exc
            error = to_api_error(exc, call.request_id)
            error.closes |= refusal is not None
            self.counters.refuse(error.code)
            shape = anthropic_error if call.is_anthropic else error_response
            response = shape(error, call.request_id)
            response.headers.update(call.headers)
            drop_frames(exc)
            return response

    async def _run(self, call: _Call, refusal: ApiError | None) -> web.StreamResponse:
        request = call.request
        public = self._own.public(request)
        if public is not None:
            call.route = public[0]
            return self._finished(call, await public[1](call.request_id), refusal)
        if refusal is not None:
            raise refusal
        key = authenticate(request, self._keys) if self._keys.num_keys else None
        own = self._own.private(request)
        if own is not None:
            call.route = own[0]
            with self._admitted(request, key):
                return self._finished(call, await own[1](call.request_id), None)
        target = find_target(request)
        call.route = target.route
        with self._admitted(request, key):
            if target.kind is Kind.LIVE:
                return await self._forward_live(call)
            return await self._forward(call, target)

    def _finished(
        self, call: _Call, response: web.Response, refusal: ApiError | None
    ) -> web.Response:
        if refusal is not None:
            response.force_close()
        response.headers.update(call.headers)
        return response

    @contextmanager
    def _admitted(self, request: web.BaseRequest, key: ApiKey | None) -> Iterator[None]:
        """Counts the call towards the limits of the server and of its key. Raises ApiError."""
        if self.is_draining:
            raise draining()
        if self.num_calls >= self._settings.max_calls:
            raise overloaded("the server has too many requests")
        is_counted = key is not None and request.method not in ("GET", "HEAD")
        if key is not None and is_counted:
            self.quotas.enter(key)
        self.num_calls += 1
        try:
            yield
        finally:
            self.num_calls -= 1
            if key is not None and is_counted:
                self.quotas.leave(key, 0)  # each model counts its tokens

    # ---- what models answer

    async def _forward(self, call: _Call, target: Target) -> web.StreamResponse:
        request = call.request
        if target.kind is not Kind.BODY:
            stored = target.kind is Kind.STORED
            found = self._router.by_response(target.response_id) if stored else None
            return await self._ask(call, found or self._router.by_query(request), None)
        async with held_body(request, self._settings, self._bodies) as body:
            return await self._ask(call, self._router.by_name(await self._named(body)), body)

    async def _ask(self, call: _Call, model: Model, body: bytes | None) -> web.StreamResponse:
        """Has a model answer. One whose process ended before the request reached it is started
        again for it."""
        try:
            async with self._ready(call, model):
                return await self._pass(call, model, body)
        except UpstreamLostError as lost:
            logger.warning("%s was not reached by %s: %s", model.name, call.request_id, lost)
        await self.pool.lose(model)
        try:
            async with self._ready(call, model):
                return await self._pass(call, model, body)
        except UpstreamLostError as lost:
            raise self._failed(model) from lost

    def _failed(self, model: Model) -> ApiError:
        model.refuse("model_failed")
        return errors.model_failed(model.name, "its process has ended")

    async def _named(self, body: bytes) -> object:
        """Returns the model that a body names. A thread parses large ones."""
        if len(body) <= self._settings.parse_inline_bytes:
            return parse_object(body).get("model")
        return await self._bodies.run_in_thread(lambda: parse_object(body).get("model"))

    @asynccontextmanager
    async def _ready(self, call: _Call, model: Model) -> AsyncIterator[None]:
        """Waits until the model is ready, which it stays inside."""
        limit_s = request_timeout_s(call.request, self._settings.request_timeout_s)
        await self.pool.acquire(model, min(self._wait_s, limit_s))
        try:
            yield
        finally:
            self.pool.release(model)

    async def _pass(self, call: _Call, model: Model, body: bytes | None) -> web.StreamResponse:
        """Raises UpstreamLostError if the request has not reached the model."""
        child, request = model.child, call.request
        if child is None or child.status is not None:
            raise UpstreamLostError("its process has ended", is_reached=False)
        more: dict[str, str] = {}
        if not self._keys.num_keys:
            more["Authorization"] = f"Bearer {self._key}"
        if TIMEOUT_HEADER in request.headers:
            left_s = request_timeout_s(request, self._settings.request_timeout_s)
            left_s -= time.monotonic() - call.arrived_s
            more[TIMEOUT_HEADER] = f"{max(0.001, left_s):.3f}"

        async def last_event() -> bytes:
            await child.wait(_END_S)
            error = self._failed(model)
            if call.is_anthropic:
                return named_event("error", error_object(error, call.request_id))
            return b"data: %s\n\n" % error.body()

        is_response = call.path == "/v1/responses"
        call.is_forwarded = True
        try:
            return await self._proxy.forward(
                request,
                child.url,
                body,
                more=more,
                left_out=frozenset({"origin"}),
                answer_headers=call.headers,
                last_event=last_event,
                on_begin=(lambda begin: self._router.note(model, begin)) if is_response else None,
            )
        except UpstreamLostError as lost:
            if not lost.is_reached:
                raise
            logger.warning("%s did not finish %s: %s", model.name, call.request_id, lost)
            # a client that tries again must not be sent to a process that is about to end
            await child.wait(_END_S)
            raise self._failed(model) from lost

    async def _forward_live(self, call: _Call) -> web.StreamResponse:
        """Forwards the live view of a model that is ready; it keeps no model awake."""
        model = self._router.by_query(call.request)
        if model.state is not State.READY:
            raise errors.not_running(model.name, model.state)
        try:
            return await self._pass(call, model, None)
        except UpstreamLostError as lost:
            raise self._failed(model) from lost
