"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from serve.http import schema
from serve.http.answer import answer
from serve.http.context import ApiContext, Call, Route

if TYPE_CHECKING:
    from serve.engine import RequestStream


def routes(context: ApiContext) -> list[Route]:
    async def chat(call: Call) -> web.StreamResponse:
        context.check_ready()
        defaults = context.engine.generation_defaults
        asked = await context.read(
            call, lambda body, unknown: schema.parse_chat(body, defaults, unknown)
        )
        context.check_model(asked.model)
        context.check_ready()

        def submit() -> list[RequestStream]:
            chat = asked.chat
            stream = call.engine.submit_chat(
                chat.messages, chat.params, request_id=call.request_id, client=chat.client
            )
            return [stream]

        return await answer(context, call, submit, asked)

    return [Route("/v1/chat/completions", {"POST": chat})]
