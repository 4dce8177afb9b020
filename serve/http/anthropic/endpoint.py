"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from aiohttp import web

from serve.http.anthropic import description
from serve.http.anthropic.errors import anthropic_error
from serve.http.anthropic.message_writer import MessageWriter
from serve.http.anthropic.requests import MessagesCall, parse_count_call, parse_messages_call
from serve.http.calls.answer_head import event_stream
from serve.http.calls.answer_writer import write_stream, write_whole
from serve.http.calls.chat_run import ChatRun
from serve.http.calls.context import ApiContext, Call, Route
from serve.http.edge.errors import json_response
from serve.parameter_checks import parameters_named
from serve.sampling_params import SamplingParams

# The names of this API by those of SamplingParams and the engine.
NAMES = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "default_max_tokens": "max_tokens",
    "structured": "output_config.format.schema",
}


def messages_routes(context: ApiContext) -> list[Route]:
    async def create(call: Call) -> web.StreamResponse:
        call.headers["request-id"] = call.request_id
        parse = partial(parse_messages_call, defaults=call.engine.generation_defaults)
        asked = await context.read(call, lambda body, unknown: parse(body, unknown=unknown))
        return await _answer(context, call, asked)

    async def count_tokens(call: Call) -> web.Response:
        call.headers["request-id"] = call.request_id
        asked = await context.read(call, parse_count_call)
        chat = replace(
            asked.chat, params=SamplingParams(max_tokens=0)
        )  # rendered, but never scheduled
        with parameters_named(NAMES), ChatRun(call, chat) as run:
            await run.accepted()
            return json_response({"input_tokens": run.prompt_tokens}, call.request_id)

    return [
        Route(
            "/v1/messages",
            {"POST": create},
            error_shape=anthropic_error,
            describe={"POST": description.CREATE},
        ),
        Route(
            "/v1/messages/count_tokens",
            {"POST": count_tokens},
            error_shape=anthropic_error,
            describe={"POST": description.COUNT},
        ),
    ]


async def _answer(context: ApiContext, call: Call, asked: MessagesCall) -> web.StreamResponse:
    with (
        parameters_named(NAMES),
        ChatRun(call, asked.chat) as run,
    ):
        await run.accepted()
        writer = MessageWriter(
            run,
            call.answer_id,
            call.engine.model_name,
            streams=asked.stream,
            max_tokens=asked.max_tokens,
            stop_sequences=asked.chat.params.stop_strings,
            shows_thinking=asked.shows_thinking,
        )
        if asked.stream:
            return await write_stream(run, writer, event_stream(context, call))
        await write_whole(run, writer)
        return json_response(writer.message(), call.request_id)
