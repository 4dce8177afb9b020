"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from serve.http import schema
from serve.http.answer import answer
from serve.http.body import read_call
from serve.http.context import ApiContext, Call, Route
from serve.http.generation import CHAT

if TYPE_CHECKING:
    from serve.engine import RequestStream


def routes(context: ApiContext) -> list[Route]:
    async def chat(call: Call) -> web.StreamResponse:
        context.check_ready()
        defaults = context.engine.generation_defaults
        asked = await read_call(
            call.request, context.settings, lambda body: schema.parse_chat(body, defaults)
        )
        context.check_model(asked.model)
        context.check_ready()

        def submit() -> list[RequestStream]:
            stream = call.engine.submit_chat(
                asked.messages, asked.params, request_id=call.request_id, client=asked.client
            )
            return [stream]

        return await answer(context, call, CHAT, submit, asked)

    return [Route("/v1/chat/completions", {"POST": chat})]
