"""POST /v1/completions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiohttp import web

from serve.http.calls.answer_head import COMPLETION, answer_head, event_stream
from serve.http.calls.context import ApiContext, Call, Route
from serve.http.calls.generation import Generation, submit_each
from serve.http.openai import requests as schema
from serve.http.openai.answer_schemas import COMPLETION_ANSWER
from serve.http.openai.completion_writer import (
    ChoiceWriter,
    CompletionStreamWriter,
    charge_size,
    whole_answer,
)
from serve.http.openai.kv_transfer import name_peer, transfer_answer
from serve.http.openai.prompts import cut_long_texts
from serve.http.schema.describe import Operation
from serve.parameter_checks import parameters_named
from serve.request import Prompt

if TYPE_CHECKING:
    from serve.engine.request_stream import RequestStream


def completion_routes(context: ApiContext) -> list[Route]:
    async def completions(call: Call) -> web.StreamResponse:
        defaults = context.engine.generation_defaults
        asked = await context.read(
            call, lambda body, unknown: schema.parse_completion(body, defaults, unknown)
        )
        return await _answer(context, call, asked)

    described = Operation(
        "The continuation of one or many prompts",
        COMPLETION_ANSWER,
        schema.COMPLETION.schema(),
        streams=True,
    )
    return [Route("/v1/completions", {"POST": completions}, describe={"POST": described})]


async def _answer(
    context: ApiContext, call: Call, asked: schema.CompletionCall
) -> web.StreamResponse:
    def submit(prompt: Prompt, name: str) -> RequestStream:
        return call.engine.submit(
            prompt, asked.params, request_id=name, client=asked.client, policy=call.policy
        )

    head = answer_head(context, call, COMPLETION)
    name_peer(call.engine, asked.kv_transfer)
    with parameters_named({"structured": asked.structured_name}):
        call.engine.check_grammar_queue(asked.params)
        tokenizer, charge = call.engine.tokenizer, call.charge
        prompts = await cut_long_texts(asked.prompts, tokenizer, charge, "prompt")
        streams = await submit_each(prompts, call.request_id, submit)
        with Generation(streams, asked.params.n, charge, call.policy) as generation:
            await generation.accepted()
            charge_size(asked, generation, charge)
            writer = ChoiceWriter(asked, generation, context.engine.tokenizer)
            if asked.stream:
                stream = CompletionStreamWriter(generation, head, writer)
                return await stream.run(event_stream(context, call))

            def transfer() -> dict[str, Any]:
                if asked.kv_transfer is None or not asked.kv_transfer.decodes_elsewhere:
                    return {}
                stats, num_tokens = call.engine.stats(), generation.prompt_tokens
                found = transfer_answer(stats, call.request_id, num_tokens)
                return {} if found is None else {"kv_transfer_params": found}

            return await whole_answer(generation, head, writer, call.request_id, transfer)
