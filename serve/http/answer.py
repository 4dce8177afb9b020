"""One completion or chat call: submit, then the whole answer or a stream of events."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiohttp import web

from serve.http import schema
from serve.http.context import ApiContext, Call
from serve.http.errors import json_response
from serve.http.generation import AnswerHead, AnswerKind, Generation, Streaming, collect
from serve.http.sse import EventStream

if TYPE_CHECKING:
    from serve.engine import RequestStream


async def answer(
    context: ApiContext,
    call: Call,
    kind: AnswerKind,
    submit: Callable[[], list[RequestStream]],
    asked: schema.CompletionCall | schema.ChatCall,
) -> web.StreamResponse:
    engine = context.engine
    head = AnswerHead(
        kind=kind,
        answer_id=kind.id_prefix + call.request_id.removeprefix("req_"),
        created=int(time.time()),
        model=engine.model_name,
        request_id=call.request_id,
    )
    with context.generating(), Generation(submit(), asked.params.n) as generation:
        generation.arrived(call.arrived_s)
        await generation.accepted()
        tokenizer = engine.tokenizer
        if not asked.stream:
            return json_response(await collect(generation, head, tokenizer), call.request_id)
        streaming = Streaming(generation, head, tokenizer, include_usage=asked.include_usage)
        return await streaming.run(event_stream(context, call))


def event_stream(context: ApiContext, call: Call) -> EventStream:
    """Not begun yet: until its start an error can be an answer of its own."""
    settings = context.settings
    return EventStream(
        call.request,
        call.request_id,
        write_timeout_s=settings.write_timeout_s,
        send_buffer_bytes=settings.send_buffer_bytes,
        headers=call.headers,
    )
