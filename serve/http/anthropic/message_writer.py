"""Writes a message of Anthropic's API, whole or as events, from the steps of one choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from serve.chat.answer_reader import ChatStep
from serve.http.anthropic.errors import error_object
from serve.http.calls.answer_writer import Counts
from serve.http.edge.errors import ApiError
from serve.http.edge.sse import named_event
from serve.text.chat_parser.syntax.parts import Part, Reasoning, Text, ToolCallStart

TEXT, THINKING, TOOL_USE = "text", "thinking", "tool_use"
# By kind of block: the type of its deltas, and the field that they extend.
_DELTAS = {
    TEXT: ("text_delta", "text"),
    THINKING: ("thinking_delta", "thinking"),
    TOOL_USE: ("input_json_delta", "partial_json"),
}
_PING = named_event("ping", {"type": "ping"})


class MessageWriter:
    """An AnswerWriter (calls/answer_writer.py). streams: whether events are sent.

    max_tokens, stop_sequences: the client's; the context may end an answer before max_tokens.
    shows_thinking: if False, thinking blocks stay empty.
    """

    def __init__(
        self,
        counts: Counts,
        request_id: str,
        model: str,
        *,
        streams: bool,
        max_tokens: int,
        stop_sequences: Sequence[str] = (),
        shows_thinking: bool = True,
    ) -> None:
        self._counts = counts
        self._request_id = request_id
        self._model = model
        self._streams = streams
        self._max_tokens = max_tokens
        self._stop_sequences = stop_sequences
        self._shows_thinking = shows_thinking
        self._content: list[dict[str, Any]] = []
        self._kind: str | None = None  # the kind of the open block, which is the last of _content
        self._pieces: list[str] = []  # texts of the open block
        self._before_delta = b""
        self._output_tokens = 0
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None
        self._has_begun = False
        self._events: list[bytes] = []

    def step(self, step: ChatStep) -> bytes:
        if not self._has_begun:
            self._has_begun = True
            self._emit("message_start", message=self.message())
            if self._streams:
                self._events.append(_PING)
        self._output_tokens += len(step.delta.token_ids)
        for part in step.parts:
            self._add(part)
        if step.finish_reason is not None:
            self._finish(step.finish_reason, step.delta.stop_reason)
        return self._take()

    def end(self) -> bytes:
        self._close_block()
        self._emit(
            "message_delta",
            delta={"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence},
            usage=self._usage(),
        )
        self._emit("message_stop")
        return self._take()

    def failed(self, error: ApiError) -> bytes:
        return named_event("error", error_object(error, self._request_id))

    def message(self) -> dict[str, Any]:
        return {
            "id": "msg_" + self._request_id.removeprefix("req_"),
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": self._content,
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        cached = self._counts.cached_tokens
        return {
            "input_tokens": self._counts.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._output_tokens,
            "output_tokens_details": {"thinking_tokens": self._counts.reasoning_tokens},
        }

    def _add(self, part: Part) -> None:
        if isinstance(part, Text):
            self._grow(TEXT, part.text)
        elif isinstance(part, Reasoning):
            self._grow(THINKING, part.text if self._shows_thinking else "")
        elif isinstance(part, ToolCallStart):
            self._open(TOOL_USE, {"id": part.call_id, "name": part.name, "input": {}})
        else:
            self._grow(TOOL_USE, part.text)

    def _grow(self, kind: str, text: str) -> None:
        if self._kind != kind:
            assert kind != TOOL_USE, "arguments before the start of a call"
            self._open(kind, {TEXT: ""} if kind == TEXT else {THINKING: "", "signature": ""})
        if not text:
            return
        self._pieces.append(text)
        if self._streams:
            self._events.append(self._before_delta + orjson.dumps(text) + b"}}\n\n")

    def _open(self, kind: str, fields: dict[str, Any]) -> None:
        self._close_block()
        index = len(self._content)
        block = {"type": kind, **fields}
        self._emit("content_block_start", index=index, content_block=block)
        self._content.append(block)
        self._kind = kind
        delta_type, field = _DELTAS[kind]
        self._before_delta = (
            "event: content_block_delta\n"
            f'data: {{"type":"content_block_delta","index":{index},'
            f'"delta":{{"type":"{delta_type}","{field}":'
        ).encode()

    def _close_block(self) -> None:
        if self._kind is None:
            return
        text = "".join(self._pieces)
        block = self._content[-1]
        if self._kind == TOOL_USE:
            block["input"] = _input(text)
        else:
            block[self._kind] = text
        self._emit("content_block_stop", index=len(self._content) - 1)
        self._kind = None
        self._pieces = []

    def _finish(self, reason: str, stopped_by: str | int | None) -> None:
        if reason == "tool_calls":
            self._stop_reason = "tool_use"
        elif reason == "length":
            is_full = self._output_tokens < self._max_tokens
            self._stop_reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif isinstance(stopped_by, str) and stopped_by in self._stop_sequences:
            self._stop_reason, self._stop_sequence = "stop_sequence", stopped_by
        else:
            self._stop_reason = "end_turn"

    def _emit(self, name: str, /, **fields: Any) -> None:
        if self._streams:
            self._events.append(named_event(name, {"type": name, **fields}))

    def _take(self) -> bytes:
        data = b"".join(self._events)
        self._events.clear()
        return data


def _input(text: str) -> dict[str, Any]:
    """Returns the arguments of a call, or none if they are cut off or are not an object."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
