"""Writes a response of OpenAI's Responses API, whole or as events, from the steps of a choice."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import orjson

from serve.chat.answer_reader import ChatStep
from serve.http.calls.answer_writer import Counts
from serve.http.edge.errors import ApiError
from serve.http.edge.large_json import json_bytes
from serve.http.edge.sse import named_event
from serve.http.openai import shapes
from serve.request import TokenLogprobs
from serve.text.chat_parser.syntax.parts import Part, Reasoning, Text, ToolCallStart

MESSAGE, REASONING, CALL = "message", "reasoning", "function_call"
_NO_LOGPROBS = orjson.Fragment(b"[]")
_ID_PREFIXES = {MESSAGE: "msg", REASONING: "rs", CALL: "fc"}
# By kind of item: the prefix of its event names, and the type of its part.
_EVENTS = {
    MESSAGE: ("response.output_text", "output_text"),
    REASONING: ("response.reasoning_text", "reasoning_text"),
    CALL: ("response.function_call_arguments", ""),
}


class ResponseWriter:
    """An AnswerWriter (calls/answer_writer.py). streams: whether events are sent.

    head: see response_head; its id is "resp_" and a name. on_end: is called with the whole
    response before its end is sent. num_sent: events that another server has sent before, for the
    tokens that are replayed.
    """

    def __init__(
        self,
        counts: Counts,
        head: dict[str, Any],
        tokenizer: shapes.TokenTexts,
        *,
        streams: bool,
        on_end: Callable[[dict[str, Any]], None],
        num_sent: int = 0,
    ) -> None:
        self._counts = counts
        self._head = head
        self._name = str(head["id"]).removeprefix("resp_")
        self._tokenizer = tokenizer
        self._streams = streams
        self._on_end = on_end
        self._output: list[dict[str, Any]] = []
        self._kind: str | None = None  # the kind of the open item, which is the last of _output
        self._pieces: list[str] = []  # texts of the open item
        self._logprobs: list[bytes] = []  # of the open item, as JSON
        self._unplaced: list[TokenLogprobs] = []  # of tokens whose text is still held back
        self._before_delta = b""
        self._output_tokens = 0
        self._is_cut = False  # whether max_output_tokens ended it
        self._sequence_number = 0
        self._num_sent = num_sent
        self._events: list[bytes] = []

    def step(self, step: ChatStep) -> bytes:
        if self._sequence_number == 0:
            self._emit("response.created", response=self._response("in_progress"))
            self._emit("response.in_progress", response=self._response("in_progress"))
        self._output_tokens += len(step.delta.token_ids)
        self._note_logprobs(step)
        for part in step.parts:
            self._add(part)
        if step.finish_reason is not None:
            self._is_cut = step.finish_reason == "length"
        if step.delta.is_replayed:
            self._sequence_number = self._num_sent
        return self._take()

    def end(self) -> bytes:
        if not self._output:  # a response has at least one item
            self._open(MESSAGE, {"content": [], "role": "assistant"})
        self._close_item("incomplete" if self._is_cut else "completed")
        response = self.response()
        self._on_end(response)
        self._emit(f"response.{response['status']}", response=response)
        return self._take()

    def failed(self, error: ApiError) -> bytes:
        """Returns the failed response and the error event that clients raise."""
        failure = {"code": "server_error", "message": error.message}
        self._close_item("incomplete")
        self._events.clear()  # the item is not complete
        self._emit("response.failed", response={**self._response("failed"), "error": failure})
        fields = {"message": error.message, "param": error.param, "code": error.code}
        self._emit("error", **fields, error={"type": error.kind, **fields})
        return self._take()

    def response(self) -> dict[str, Any]:
        """Returns the whole response, after its end."""
        response = self._response("incomplete" if self._is_cut else "completed")
        if self._is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        response["usage"] = self._usage()
        return response

    def _response(self, status: str) -> dict[str, Any]:
        return {**self._head, "status": status, "output": self._output}

    def _usage(self) -> dict[str, Any]:
        counts = self._counts
        return {
            "input_tokens": counts.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": counts.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": self._output_tokens,
            "output_tokens_details": {"reasoning_tokens": counts.reasoning_tokens},
            "total_tokens": counts.prompt_tokens + self._output_tokens,
        }

    def _note_logprobs(self, step: ChatStep) -> None:
        """Keeps the log-probabilities of steps that have only text, which belong to a message."""
        if step.delta.logprobs is None:
            return
        if all(isinstance(part, Text) for part in step.parts):
            self._unplaced += step.delta.logprobs
        else:
            self._unplaced = []

    def _place_logprobs(self) -> bytes:
        """Returns the log-probabilities as a JSON list. They are serialized once, since an answer
        sends them up to five times."""
        if not self._unplaced:
            return b"[]"
        items = json_bytes(shapes.chat_tokens(self._unplaced, self._tokenizer))
        self._unplaced = []
        self._logprobs.append(items[1:-1])
        return items

    def _add(self, part: Part) -> None:
        if isinstance(part, Text):
            self._grow(MESSAGE, part.text)
        elif isinstance(part, Reasoning):
            self._grow(REASONING, part.text)
        elif isinstance(part, ToolCallStart):
            self._open(CALL, {"call_id": part.call_id, "name": part.name, "arguments": ""})
        else:
            self._grow(CALL, part.text)

    def _grow(self, kind: str, text: str) -> None:
        if self._kind != kind:
            assert kind != CALL, "arguments before the start of a call"
            head = {"content": [], "role": "assistant"} if kind == MESSAGE else {"summary": []}
            self._open(kind, {"content": [], **head})
        if not text:
            return
        self._pieces.append(text)
        logprobs = self._place_logprobs() if kind == MESSAGE else b""
        if self._streams:
            more = b',"logprobs":' + logprobs if kind == MESSAGE else b""
            number = self._next_number()
            self._events.append(
                b'%s%s%s,"sequence_number":%d}\n\n'
                % (self._before_delta, orjson.dumps(text), more, number)
            )

    def _open(self, kind: str, fields: dict[str, Any]) -> None:
        self._close_item("completed")
        index = len(self._output)
        item_id = f"{_ID_PREFIXES[kind]}_{self._name}{index:02x}"
        item = {"id": item_id, "type": kind, "status": "in_progress", **fields}
        self._output.append(item)
        self._kind = kind
        event_name, part_type = _EVENTS[kind]
        self._emit("response.output_item.added", output_index=index, item=item)
        place: dict[str, Any] = {"item_id": item_id, "output_index": index}
        if part_type:
            place["content_index"] = 0
            part = _part(part_type, "", _NO_LOGPROBS)
            self._emit("response.content_part.added", **place, part=part)
        head = {"type": f"{event_name}.delta", **place}
        self._before_delta = (
            f"event: {event_name}.delta\ndata: ".encode() + orjson.dumps(head)[:-1] + b',"delta":'
        )

    def _close_item(self, status: str) -> None:
        if self._kind is None:
            return
        kind, self._kind = self._kind, None
        index, item, text = len(self._output) - 1, self._output[-1], "".join(self._pieces)
        event_name, part_type = _EVENTS[kind]
        place: dict[str, Any] = {"item_id": item["id"], "output_index": index}
        if kind == CALL:
            item["arguments"] = text
            self._emit(f"{event_name}.done", **place, name=item["name"], arguments=text)
        else:
            more, logprobs = {}, _NO_LOGPROBS
            if kind == MESSAGE:
                self._place_logprobs()
                logprobs = orjson.Fragment(b"[" + b",".join(self._logprobs) + b"]")
                more = {"logprobs": logprobs}
            place["content_index"] = 0
            part = _part(part_type, text, logprobs)
            self._emit(f"{event_name}.done", **place, text=text, **more)
            self._emit("response.content_part.done", **place, part=part)
            item["content"] = [part]
        item["status"] = status
        self._emit("response.output_item.done", output_index=index, item=item)
        self._pieces, self._logprobs = [], []

    def _emit(self, name: str, /, **fields: Any) -> None:
        number = self._next_number()
        if self._streams:
            self._events.append(
                named_event(name, {"type": name, "sequence_number": number, **fields})
            )

    def _next_number(self) -> int:
        number = self._sequence_number
        self._sequence_number += 1
        return number

    def _take(self) -> bytes:
        data = b"".join(self._events)
        self._events.clear()
        return data


def _part(part_type: str, text: str, logprobs: orjson.Fragment) -> dict[str, Any]:
    if part_type == "reasoning_text":
        return {"type": part_type, "text": text}
    return {"type": part_type, "text": text, "annotations": [], "logprobs": logprobs}
