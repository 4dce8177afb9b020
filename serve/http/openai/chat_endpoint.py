"""POST /v1/chat/completions."""

from __future__ import annotations

from aiohttp import web

from serve.http.calls.answer_head import CHAT, answer_head, event_stream
from serve.http.calls.answer_writer import write_stream, write_whole
from serve.http.calls.chat_run import ChatRun
from serve.http.calls.context import ApiContext, Call, Route
from serve.http.edge.large_json import large_response
from serve.http.openai import requests as schema
from serve.http.openai.answer_schemas import CHAT_ANSWER
from serve.http.openai.chat_writer import ChatStreamWriter, WholeChatWriter, charge_size
from serve.http.openai.kv_transfer import name_peer, transfer_answer
from serve.http.schema.describe import Operation
from serve.parameter_checks import parameters_named


def chat_routes(context: ApiContext) -> list[Route]:
    async def chat(call: Call) -> web.StreamResponse:
        defaults = context.engine.generation_defaults
        asked = await context.read(
            call, lambda body, unknown: schema.parse_chat(body, defaults, unknown)
        )
        return await _answer(context, call, asked)

    described = Operation(
        "The answer to a conversation", CHAT_ANSWER, schema.CHAT.schema(), streams=True
    )
    return [Route("/v1/chat/completions", {"POST": chat}, describe={"POST": described})]


async def _answer(context: ApiContext, call: Call, asked: schema.ChatCall) -> web.StreamResponse:
    name_peer(call.engine, asked.kv_transfer)
    with (
        parameters_named({"structured": asked.structured_name, "prompt": "messages"}),
        ChatRun(call, asked.chat) as run,
    ):
        await run.accepted()
        charge_size(run, asked, call.charge)
        parts = (run, answer_head(context, call, CHAT), asked, call.engine.tokenizer)
        if asked.stream:
            events = event_stream(context, call)
            return await write_stream(run, ChatStreamWriter(*parts), events)
        whole = WholeChatWriter(*parts)
        await write_whole(run, whole)
        if asked.kv_transfer is not None and asked.kv_transfer.decodes_elsewhere:
            stats, num_tokens = call.engine.stats(), run.prompt_tokens
            whole.kv_transfer = transfer_answer(stats, call.request_id, num_tokens)
        return await large_response(whole.body, whole.num_values, call.request_id, call.charge)
