"""One completion or chat call: submit, then the whole answer or a stream of events."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from aiohttp import web

from serve.http.calls.context import ApiContext, Call
from serve.http.calls.generation import COMPLETION, AnswerHead, AnswerKind, Generation
from serve.http.calls.renamed import parameters_named
from serve.http.edge.sse import EventStream
from serve.http.openai import requests as schema
from serve.http.openai.completion_answer import CompletionStream, Wording, check_size, whole_answer

if TYPE_CHECKING:
    from serve.engine.engine import RequestStream


async def answer_completion(
    context: ApiContext,
    call: Call,
    submit: Callable[[], Awaitable[list[RequestStream]]],
    asked: schema.CompletionCall,
) -> web.StreamResponse:
    head = answer_head(context, call, COMPLETION)
    with (
        parameters_named({"structured": asked.structured_name}),
        Generation(await submit(), asked.params.n) as generation,
    ):
        await generation.accepted()
        check_size(asked, generation)
        wording = Wording(asked, generation, context.engine.tokenizer)
        if asked.stream:
            return await CompletionStream(generation, head, wording).run(
                event_stream(context, call)
            )
        return await whole_answer(generation, head, wording, call.request_id)


def answer_head(context: ApiContext, call: Call, kind: AnswerKind) -> AnswerHead:
    return AnswerHead(
        kind=kind,
        answer_id=kind.id_prefix + call.request_id.removeprefix("req_"),
        created=int(time.time()),
        model=context.engine.model_name,
        fingerprint=context.fingerprint,
    )


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
