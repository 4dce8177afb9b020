"""POST /v1/completions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from serve.http import schema
from serve.http.answer import answer_completion
from serve.http.answer_schemas import COMPLETION_ANSWER
from serve.http.context import ApiContext, Call, Route
from serve.http.describe import Operation

if TYPE_CHECKING:
    from serve.engine import RequestStream


def routes(context: ApiContext) -> list[Route]:
    async def completions(call: Call) -> web.StreamResponse:
        context.check_ready()
        defaults = context.engine.generation_defaults
        asked = await context.read(
            call, lambda body, unknown: schema.parse_completion(body, defaults, unknown)
        )
        context.check_model(asked.model)
        context.check_ready()
        return await answer_completion(context, call, lambda: _submit(call, asked), asked)

    described = Operation(
        "The continuation of one or many prompts",
        COMPLETION_ANSWER,
        schema.COMPLETION.schema(),
        streams=True,
    )
    return [Route("/v1/completions", {"POST": completions}, describe={"POST": described})]


def _submit(call: Call, asked: schema.CompletionCall) -> list[RequestStream]:
    """One engine request for each prompt; all or none."""
    streams: list[RequestStream] = []
    try:
        for position, prompt in enumerate(asked.prompts):
            name = call.request_id if position == 0 else f"{call.request_id}-{position}"
            streams.append(
                call.engine.submit(prompt, asked.params, request_id=name, client=asked.client)
            )
    except Exception:
        for stream in streams:
            stream.abort()
        raise
    return streams
