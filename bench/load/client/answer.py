"""Reads an OpenAI-compatible server's answer as it arrives: times, tokens and errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import orjson

from bench.load.client.record import Record
from bench.load.client.redact import printable
from bench.load.client.sse import MAX_EVENT, EventStream, EventTooLongError
from serve.errors import MergestepError

MAX_BODY = 1 << 20
_TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls", "function_call", "refusal")


class CallError(MergestepError):
    """The failure of a request. status is that of HTTP, or 0 for a failure of the connection or
    inside a stream."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(printable(message))
        self.status = status
        self.code = printable(code)


class Answer:
    """Fills a record with an answer. on_chunk is called after each piece of text is recorded. hide
    removes secrets from an error's text."""

    __slots__ = (
        "_body",
        "_events",
        "_has_ended",
        "_hide",
        "_is_done",
        "_on_chunk",
        "_record",
        "error",
        "status",
    )

    def __init__(
        self,
        record: Record,
        on_chunk: Callable[[], None] | None = None,
        hide: Callable[[str], str] = str,
    ) -> None:
        self._record = record
        self._on_chunk = on_chunk
        self._hide = hide
        self._events: EventStream | None = None
        self._body = bytearray()
        self._has_ended = False  # a finish reason, or [DONE]
        self._is_done = False  # [DONE], after which nothing can fail
        self.status = 0
        self.error: CallError | None = None

    def sent(self, at_s: float) -> None:
        if math.isnan(self._record.sent_s):  # a resent request keeps its first time
            self._record.sent_s = at_s

    def head(self, status: int, content_type: bytes) -> None:
        self.status = status
        if status == 200 and not content_type.lower().startswith(b"application/json"):
            self._events = EventStream()

    def body(self, data: bytes, at_s: float) -> bool:
        if self._events is None:
            self._body += data
            if len(self._body) <= MAX_BODY:
                return True
            self._give_up(f"the answer is longer than {MAX_BODY >> 20} MiB")
            return False
        try:
            events = self._events.feed(data)
        except EventTooLongError:
            self._give_up(f"an event of the stream is longer than {MAX_EVENT >> 20} MiB")
            return False
        for event in events:
            self._take(event, at_s)
        return True

    def _give_up(self, message: str) -> None:
        if self.status != 200:
            self.error = call_error(self.status, self._body, self._hide)
        elif self.error is None:
            self.error = CallError(0, "bad_answer", message)

    def end(self, at_s: float) -> None:
        """Ends the answer: the body is complete."""
        if not self._is_done:
            self._record.finished_s = at_s
        if self.status != 200:
            self.error = call_error(self.status, self._body, self._hide)
        elif self._events is not None:
            for event in self._events.finish():
                self._take(event, at_s)
        else:  # the server does not stream
            self._take(bytes(self._body), at_s)
        if self.error is None and not self._has_ended:
            self.error = CallError(0, "stream_broken", "the stream ended before the answer did")

    def broken(self, message: str) -> None:
        """Fails the answer: the connection ended before the body."""
        if self.status not in (0, 200):
            self.error = call_error(self.status, self._body, self._hide)
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
                self.error = call_error(0, event, self._hide)
            else:
                self._note(chunk, at_s)
        except (ValueError, KeyError, TypeError, AttributeError):
            message = f"not a chunk of an OpenAI answer: {_short(event, self._hide)}"
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
                record.finish_reason = printable(str(finish_reason))
                self._has_ended = True
        if usage := chunk.get("usage"):
            record.prompt_tokens = count(usage.get("prompt_tokens"))
            record.output_tokens = count(usage.get("completion_tokens"))
            if details := usage.get("prompt_tokens_details"):
                record.cached_tokens = count(details.get("cached_tokens"))


class Document:
    """A whole body of at most limit bytes, for requests that generate nothing."""

    __slots__ = ("_hide", "_limit", "body_bytes", "error", "status")

    def __init__(self, hide: Callable[[str], str] = str, limit: int = MAX_BODY) -> None:
        self._hide = hide
        self._limit = limit
        self.status = 0
        self.body_bytes = bytearray()
        self.error: CallError | None = None

    def sent(self, at_s: float) -> None:
        """Does nothing; a document has no times."""

    def head(self, status: int, content_type: bytes) -> None:
        self.status = status

    def body(self, data: bytes, at_s: float) -> bool:
        self.body_bytes += data
        if len(self.body_bytes) <= self._limit:
            return True
        self.error = CallError(0, "bad_answer", f"the answer is longer than {self._limit} bytes")
        return False

    def end(self, at_s: float) -> None:
        if self.status != 200:
            self.error = call_error(self.status, self.body_bytes, self._hide)

    def broken(self, message: str) -> None:
        self.error = CallError(0, "connection_lost", message)


def call_error(status: int, body: bytes | bytearray, hide: Callable[[str], str] = str) -> CallError:
    """Returns the error in OpenAI's shape, in that of other servers, or in any other body."""
    code = f"http_{status}" if status else "server_error"
    try:
        error = orjson.loads(body)
        if isinstance(error, dict):
            error = error.get("error") or error
        if isinstance(error, dict):
            name = hide(str(error.get("code") or error.get("type") or code))
            text = error.get("message") or error.get("detail") or error.get("msg")
            if text:
                text = text if isinstance(text, str) else _json(text)
                return CallError(status, name, hide(text))
        elif isinstance(error, str):
            return CallError(status, code, hide(error))
    except ValueError:
        pass
    return CallError(status, code, _short(body, hide) or "the error has no message")


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()


def _short(data: bytes | bytearray, hide: Callable[[str], str]) -> str:
    text = hide(
        data.decode(errors="replace")
    )  # hidden before the text is cut, as half a key is secret too
    return " ".join(text[:400].split())[:160]


def count(value: Any) -> int | None:
    """Returns a count from JSON, or None if the value is no plausible count."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return value if is_whole and 0 <= value < 1 << 31 else None
