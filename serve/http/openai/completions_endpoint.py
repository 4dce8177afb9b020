"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING

from aiohttp import web

from serve.http.calls.context import ApiContext, Call, Route
from serve.http.calls.submitting import submit_each
from serve.http.openai import requests as schema
from serve.http.openai.answer import answer_completion
from serve.http.openai.answer_schemas import COMPLETION_ANSWER
from serve.http.schema.describe import Operation
from serve.request import Prompt

if TYPE_CHECKING:
    from serve.engine.engine import RequestStream


def routes(context: ApiContext) -> list[Route]:
    async def completions(call: Call) -> web.StreamResponse:
        defaults = context.engine.generation_defaults
        asked = await context.read(
            call, lambda body, unknown: schema.parse_completion(body, defaults, unknown)
        )

        def submit(prompt: Prompt, name: str) -> RequestStream:
            return call.engine.submit(prompt, asked.params, request_id=name, client=asked.client)

        def submit_all() -> Awaitable[list[RequestStream]]:
            return submit_each(asked.prompts, call.request_id, submit)

        return await answer_completion(context, call, submit_all, asked)

    described = Operation(
        "The continuation of one or many prompts",
        COMPLETION_ANSWER,
        schema.COMPLETION.schema(),
        streams=True,
    )
    return [Route("/v1/completions", {"POST": completions}, describe={"POST": described})]
