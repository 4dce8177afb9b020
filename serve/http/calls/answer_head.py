"""The part of an answer that is known before any token, and the stream it is sent on."""

from __future__ import annotations

from dataclasses import dataclass

from serve.http.calls.context import ApiContext, Call
from serve.http.edge.sse import EventStream


@dataclass(frozen=True, slots=True)
class AnswerKind:
    """The names in answers that differ between chat and plain completions."""

    id_prefix: str
    object_name: str


CHAT = AnswerKind("chatcmpl-", "chat.completion")
COMPLETION = AnswerKind("cmpl-", "text_completion")


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The fields of an answer that are known before any token."""

    kind: AnswerKind
    answer_id: str
    created: int
    model: str
    fingerprint: str


def answer_head(context: ApiContext, call: Call, kind: AnswerKind) -> AnswerHead:
    return AnswerHead(
        kind=kind,
        answer_id=kind.id_prefix + call.answer_id.removeprefix("req_"),
        created=call.created,
        model=context.engine.model_name,
        fingerprint=context.fingerprint,
    )


def event_stream(context: ApiContext, call: Call) -> EventStream:
    """Returns a stream that has not started. Until it starts, an error is an answer of its own."""
    settings = context.settings
    return EventStream(
        call.request,
        call.request_id,
        write_timeout_s=settings.write_timeout_s,
        send_buffer_bytes=settings.send_buffer_bytes,
        headers=call.headers,
        journal=call.policy.journal,
    )
