"""The routes: from a checked request to the engine and back. The listener is in server.py.

A handler answers or raises, and `handle` turns what was raised into an error answer. A client
that leaves cancels its handler, which aborts its sequences.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import TYPE_CHECKING
from urllib.parse import unquote

from aiohttp import web

from serve.http import metrics, schema, shapes
from serve.http.body import check_framing, read_call
from serve.http.errors import (
    ApiError,
    common_headers,
    draining,
    engine_failed,
    error_response,
    json_response,
    new_request_id,
    no_memory,
    not_ready,
    quoted,
    to_api_error,
)
from serve.http.generation import (
    CHAT,
    COMPLETION,
    AnswerHead,
    AnswerKind,
    Generation,
    Streaming,
    collect,
)
from serve.http.settings import HttpSettings
from serve.http.sse import EventStream

if TYPE_CHECKING:
    from serve.engine import Engine, RequestStream

logger = logging.getLogger(__name__)

Handler = Callable[[web.BaseRequest, str], Awaitable[web.StreamResponse]]
MODEL_PATH = "/v1/models/"
LARGE_ANSWER = 32 << 10


class ServerState(Enum):
    """What the server can answer: everything only when READY."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


class HttpApp:
    """The OpenAI routes over one engine."""

    def __init__(self, engine: Engine, settings: HttpSettings) -> None:
        self._engine = engine
        self._settings = settings
        self._created = int(time.time())
        self.state = ServerState.LOADING
        self.num_running = 0
        self._routes: dict[str, dict[str, Handler]] = {
            "/health": {"GET": self._health},
            "/ready": {"GET": self._ready},
            "/metrics": {"GET": self._metrics},
            "/v1/models": {"GET": self._models},
            "/v1/completions": {"POST": self._completions},
            "/v1/chat/completions": {"POST": self._chat},
        }

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        request_id = new_request_id()
        try:
            check_framing(request)
            response = await self._find(request)(request, request_id)
        except ConnectionError:
            raise
        except Exception as exc:
            if request.writer.output_size:  # part of an answer is out; only closing is honest
                raise ConnectionResetError("an answer broke off") from exc
            response = error_response(to_api_error(exc, request_id), request_id)
        await self._send_whole(request, response)
        logger.debug("%s %s %d", request_id, request.method, response.status)
        return response

    async def _send_whole(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """Large answers are sent here, where a reader that stalls is given up."""
        if not isinstance(response, web.Response) or (response.content_length or 0) < LARGE_ANSWER:
            return
        await response.prepare(request)
        try:
            async with asyncio.timeout(self._settings.write_timeout_s):
                await response.write_eof()
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the reader of an answer made no progress") from None

    def _find(self, request: web.BaseRequest) -> Handler:
        path = request.raw_path.partition("?")[0]
        methods = self._routes.get(path)
        if methods is None and path.startswith(MODEL_PATH) and len(path) > len(MODEL_PATH):
            methods = {"GET": self._model}
        if methods is None:
            raise ApiError(404, f"there is no {quoted(path)} here", code="unknown_url")
        method = "GET" if request.method == "HEAD" else request.method
        handler = methods.get(method)
        if handler is None:
            allowed = ", ".join([*methods, "HEAD"] if "GET" in methods else methods)
            raise ApiError(
                405,
                f"{quoted(path)} does not take {quoted(request.method)}",
                code="method_not_allowed",
                headers={"Allow": allowed},
            )
        return handler

    async def _health(self, request: web.BaseRequest, request_id: str) -> web.Response:
        return json_response({"status": "ok"}, request_id)

    async def _ready(self, request: web.BaseRequest, request_id: str) -> web.Response:
        self._check_ready()
        if not self._engine.has_memory:
            raise no_memory("memory nodes are lost, and no other memory is there")
        return json_response({"status": "ready"}, request_id)

    async def _metrics(self, request: web.BaseRequest, request_id: str) -> web.Response:
        self._check_ready()
        return web.Response(
            body=metrics.exposition(self._engine),
            headers={"Content-Type": metrics.CONTENT_TYPE, **common_headers(request_id)},
        )

    async def _models(self, request: web.BaseRequest, request_id: str) -> web.Response:
        self._check_ready()
        return json_response({"object": "list", "data": [self._model_object()]}, request_id)

    async def _model(self, request: web.BaseRequest, request_id: str) -> web.Response:
        self._check_ready()
        path = request.raw_path.partition("?")[0]
        self._check_model(unquote(path[len(MODEL_PATH) :], errors="replace"))
        return json_response(self._model_object(), request_id)

    async def _completions(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        self._check_ready()
        defaults = self._engine.generation_defaults
        call = await read_call(
            request, self._settings, lambda body: schema.parse_completion(body, defaults)
        )
        self._check_model(call.model)
        self._check_ready()

        def submit() -> list[RequestStream]:
            streams: list[RequestStream] = []
            try:
                for position, prompt in enumerate(call.prompts):
                    name = request_id if position == 0 else f"{request_id}-{position}"
                    stream = self._engine.submit(
                        prompt, call.params, request_id=name, client=call.client
                    )
                    streams.append(stream)
            except Exception:
                for stream in streams:
                    stream.abort()
                raise
            return streams

        return await self._answer(request, request_id, COMPLETION, submit, call)

    async def _chat(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        self._check_ready()
        defaults = self._engine.generation_defaults
        call = await read_call(
            request, self._settings, lambda body: schema.parse_chat(body, defaults)
        )
        self._check_model(call.model)
        self._check_ready()

        def submit() -> list[RequestStream]:
            stream = self._engine.submit_chat(
                call.messages, call.params, request_id=request_id, client=call.client
            )
            return [stream]

        return await self._answer(request, request_id, CHAT, submit, call)

    async def _answer(
        self,
        request: web.BaseRequest,
        request_id: str,
        kind: AnswerKind,
        submit: Callable[[], list[RequestStream]],
        call: schema.CompletionCall | schema.ChatCall,
    ) -> web.StreamResponse:
        head = AnswerHead(
            kind=kind,
            answer_id=kind.id_prefix + request_id.removeprefix("req_"),
            created=int(time.time()),
            model=self._engine.model_name,
            request_id=request_id,
        )
        self.num_running += 1
        try:
            with Generation(submit(), call.params.n) as generation:
                await generation.accepted()
                tokenizer = self._engine.tokenizer
                if not call.stream:
                    return json_response(await collect(generation, head, tokenizer), request_id)
                events = EventStream(
                    request,
                    request_id,
                    write_timeout_s=self._settings.write_timeout_s,
                    send_buffer_bytes=self._settings.send_buffer_bytes,
                )
                streaming = Streaming(generation, head, tokenizer, include_usage=call.include_usage)
                return await streaming.run(events)
        finally:
            self.num_running -= 1

    def _check_ready(self) -> None:
        if self.state is ServerState.LOADING:
            raise not_ready()
        if self.state is ServerState.DRAINING:
            raise draining()
        if not self._engine.is_ready:
            raise engine_failed()

    def _check_model(self, name: str) -> None:
        if name != self._engine.model_name:
            raise ApiError(
                404,
                f"the model {quoted(name)} does not exist",
                param="model",
                code="model_not_found",
            )

    def _model_object(self) -> dict[str, object]:
        engine = self._engine
        return shapes.model_object(
            engine.model_name, self._created, engine.max_model_len, engine.spec.vocab_size
        )
