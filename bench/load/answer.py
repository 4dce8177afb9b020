"""What an OpenAI-compatible server answers, as it comes: times, tokens, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from bench.load.record import Record
from bench.load.sse import EventStream
from serve.errors import MergestepError

MAX_BODY = 1 << 20
_TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls", "function_call", "refusal")


class CallError(MergestepError):
    """What went wrong with one request. status: of HTTP; 0: the connection, or inside a stream."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class Answer:
    """Fills a record. on_chunk is called with each piece of text, after it was noted."""

    __slots__ = (
        "_body",
        "_events",
        "_has_ended",
        "_is_done",
        "_on_chunk",
        "_record",
        "error",
        "status",
    )

    def __init__(self, record: Record, on_chunk: Callable[[], None] | None = None) -> None:
        self._record = record
        self._on_chunk = on_chunk
        self._events: EventStream | None = None
        self._body = b""
        self._has_ended = False  # a finish reason, or [DONE]
        self._is_done = False  # [DONE]: after it nothing can go wrong any more
        self.status = 0
        self.error: CallError | None = None

    def sent(self, at_s: float) -> None:
        self._record.sent_s = at_s

    def head(self, status: int, content_type: bytes) -> None:
        self.status = status
        if status == 200 and not content_type.lower().startswith(b"application/json"):
            self._events = EventStream()

    def body(self, data: bytes, at_s: float) -> None:
        if self._events is not None:
            for event in self._events.feed(data):
                self._take(event, at_s)
        elif len(self._body) < MAX_BODY:
            self._body += data

    def end(self, at_s: float) -> None:
        """The body ended as HTTP says it should."""
        if not self._is_done:
            self._record.finished_s = at_s
        if self.status != 200:
            self.error = call_error(self.status, self._body)
        elif self._events is not None:
            for event in self._events.finish():
                self._take(event, at_s)
        else:  # a server that does not stream
            self._take(self._body, at_s)
        if self.error is None and not self._has_ended:
            self.error = CallError(0, "stream_broken", "the stream ended before the answer did")

    def broken(self, message: str) -> None:
        """The connection ended before the body did."""
        if self.status not in (0, 200):
            self.error = call_error(self.status, self._body)
        elif self.error is None and not self._is_done:
            self.error = CallError(0, "connection_lost", message)

    def _take(self, event: bytes, at_s: float) -> None:
        if self.error is not None:
            return
        if event.strip() == b"[DONE]":
            self._has_ended = self._is_done = True
            self._record.finished_s = at_s
            return
        try:
            chunk = orjson.loads(event)
            if chunk.get("error"):
                self.error = call_error(0, event)
            else:
                self._note(chunk, at_s)
        except (ValueError, KeyError, TypeError, AttributeError):
            message = f"no chunk of an OpenAI answer: {_short(event)}"
            self.error = CallError(0, "bad_answer", message)

    def _note(self, chunk: dict[str, Any], at_s: float) -> None:
        record = self._record
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or choice.get("message")
            if choice.get("text") or (delta and any(map(delta.get, _TEXTS))):
                record.chunks_s.append(at_s)
                if self._on_chunk is not None:
                    self._on_chunk()
            if finish_reason := choice.get("finish_reason"):
                record.finish_reason = str(finish_reason)
                self._has_ended = True
        if usage := chunk.get("usage"):
            record.prompt_tokens = _count(usage.get("prompt_tokens"))
            record.output_tokens = _count(usage.get("completion_tokens"))
            if details := usage.get("prompt_tokens_details"):
                record.cached_tokens = _count(details.get("cached_tokens"))


class Document:
    """A whole body, for requests that are no generation."""

    __slots__ = ("body_bytes", "error", "status")

    def __init__(self) -> None:
        self.status = 0
        self.body_bytes = b""
        self.error: CallError | None = None

    def sent(self, at_s: float) -> None:
        """Not kept."""

    def head(self, status: int, content_type: bytes) -> None:
        self.status = status

    def body(self, data: bytes, at_s: float) -> None:
        self.body_bytes += data

    def end(self, at_s: float) -> None:
        if self.status != 200:
            self.error = call_error(self.status, self.body_bytes)

    def broken(self, message: str) -> None:
        self.error = CallError(0, "connection_lost", message)


def call_error(status: int, body: bytes) -> CallError:
    """From OpenAI's shape, from what other servers send, or from anything at all."""
    code = f"http_{status}" if status else "server_error"
    try:
        error = orjson.loads(body)
        if isinstance(error, dict):
            error = error.get("error") or error
        if isinstance(error, dict):
            name = error.get("code") or error.get("type") or code
            text = error.get("message") or error.get("detail") or error.get("msg")
            if text:
                return CallError(status, str(name), text if isinstance(text, str) else _json(text))
        elif isinstance(error, str):
            return CallError(status, code, error)
    except ValueError:
        pass
    return CallError(status, code, _short(body) or "an error without words")


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()


def _short(data: bytes) -> str:
    text = " ".join(data[:400].decode(errors="replace").split())
    return text[:160]


def _count(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) else None
