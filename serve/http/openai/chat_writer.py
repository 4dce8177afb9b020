"""Writes chat completions in OpenAI's shapes, whole and as chunks, from the steps of a ChatRun."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from serve.chat.answer_reader import ChatStep
from serve.chat.message_parts import MessageParts
from serve.errors import RequestError
from serve.http.calls.answer_head import AnswerHead
from serve.http.calls.chat_run import ChatRun
from serve.http.edge.errors import ApiError
from serve.http.edge.large_json import CHARS_PER_VALUE, drained, json_list
from serve.http.edge.memory_budget import LOGPROB_BYTES, Charge
from serve.http.edge.sse import DONE
from serve.http.openai import shapes
from serve.http.openai.completion_writer import FIELDS, MAX_PROMPT_LOGPROBS
from serve.http.openai.requests import ChatCall
from serve.request import TokenLogprobs
from serve.text.chat_parser.syntax.parts import (
    Part,
    Reasoning,
    Text,
    ToolCallArguments,
    ToolCallStart,
)


@dataclass(slots=True)
class _Choice:
    """One choice, collected from its steps."""

    said: MessageParts = field(default_factory=MessageParts)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def extend(self, step: ChatStep) -> None:
        delta = step.delta
        self.said.extend(step.parts)
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += delta.logprobs
        if step.finish_reason is not None:
            self.finish_reason, self.stop_reason = step.finish_reason, delta.stop_reason

    def message(self) -> dict[str, Any]:
        """Returns the message. content is null if the choice has only reasoning or calls."""
        said = self.said
        message: dict[str, Any] = {"role": "assistant", "content": said.content, "refusal": None}
        if said.reasoning:
            message["reasoning_content"] = "".join(said.reasoning)
        if said.calls:
            message["tool_calls"] = said.tool_calls
        return message


def charge_size(run: ChatRun, asked: ChatCall, charge: Charge) -> None:
    """Charges the log-probabilities of the answer. Raises RequestError if there are too many."""
    if not asked.stream:
        run.generation.charge_logprobs("top_logprobs")
    num_top = asked.params.prompt_logprobs
    if num_top is None:
        return
    size = run.prompt_tokens * (1 + num_top)
    if size > MAX_PROMPT_LOGPROBS:
        raise RequestError(
            f"the prompt's log-probabilities are more than {MAX_PROMPT_LOGPROBS} numbers",
            param="prompt_logprobs",
        )
    charge.add(LOGPROB_BYTES * size, "prompt_logprobs")


class WholeChatWriter:
    """An AnswerWriter that sends nothing: `body` returns the answer at its end."""

    def __init__(
        self, run: ChatRun, head: AnswerHead, asked: ChatCall, tokenizer: shapes.TokenTexts
    ) -> None:
        self._run = run
        self._head = head
        self._asked = asked
        self._tokenizer = tokenizer
        self._choices = [_Choice() for _ in range(asked.params.n)]
        self._prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
        self.kv_transfer: dict[str, Any] | None = None  # for the engine that goes on

    def step(self, step: ChatStep) -> bytes:
        self._choices[step.choice].extend(step)
        self._prompt_logprobs = self._prompt_logprobs or step.delta.prompt_logprobs
        return b""

    def end(self) -> bytes:
        return b""

    def failed(self, error: ApiError) -> bytes:
        raise error

    @property
    def num_values(self) -> int:
        """The approximate number of values in the body."""
        params, prompt_tokens = self._asked.params, self._run.prompt_tokens
        num_tokens = sum(len(item.token_ids) for item in self._choices)
        said = [item.said for item in self._choices]
        texts = [text for item in said for text in (*item.texts, *item.reasoning)]
        size = FIELDS * len(self._choices) + sum(map(len, texts)) // CHARS_PER_VALUE
        if params.logprobs is not None:
            size += num_tokens * (1 + params.logprobs)
        if params.prompt_logprobs is not None:
            size += prompt_tokens * (1 + params.prompt_logprobs)
        if self._asked.return_token_ids:
            size += num_tokens + prompt_tokens
        return size

    def body(self) -> dict[str, Any]:
        """Returns the answer. Any thread may call it, but only once, since it frees its parts."""
        head, asked = self._head, self._asked
        body: dict[str, Any] = {
            "id": head.answer_id,
            "object": head.kind.object_name,
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
            "choices": json_list(map(self._choice, range(len(self._choices))), 1),
            "usage": _usage(self._run, sum(len(item.token_ids) for item in self._choices)),
        }
        if asked.return_token_ids:
            body["prompt_token_ids"] = self._run.generation.requests[0].prompt_token_ids
        if self.kv_transfer is not None:
            body["kv_transfer_params"] = self.kv_transfer
        num_top, items = asked.params.prompt_logprobs, self._prompt_logprobs
        if num_top is not None and items is not None:
            body["prompt_logprobs"] = shapes.prompt_logprobs(items, self._tokenizer, num_top)
        return body

    def _choice(self, index: int) -> dict[str, Any]:
        item = self._choices[index]
        scores = None if item.logprobs is None else drained(item.logprobs)
        choice: dict[str, Any] = {
            "index": index,
            "message": item.message(),
            "logprobs": shapes.chat_logprobs(scores, self._tokenizer),
            "finish_reason": item.finish_reason,
            "stop_reason": item.stop_reason,
        }
        if self._asked.return_token_ids:
            choice["token_ids"] = item.token_ids
        return choice


class ChatStreamWriter:
    """An AnswerWriter of chunks. The constant parts of chunks are made once: a token of plain text
    costs one call of orjson and one write."""

    def __init__(
        self, run: ChatRun, head: AnswerHead, asked: ChatCall, tokenizer: shapes.TokenTexts
    ) -> None:
        self._run = run
        self._asked = asked
        self._tokenizer = tokenizer
        fields = {
            "id": head.answer_id,
            "object": "chat.completion.chunk",
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
        }
        self._fields = b"data: " + orjson.dumps(fields)[:-1]
        self._head = self._fields + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if asked.include_usage else b"]}\n\n"
        self._before_text = [
            self._head + b'{"index":%d,"delta":{"content":' % index
            for index in range(asked.params.n)
        ]
        self._after_text = b'},"logprobs":null,"finish_reason":null}' + self._tail
        self._is_plain = not (
            asked.params.logprobs is not None or asked.return_token_ids or asked.continuous_usage
        )
        # a client without the reasoning still sees that the answer has begun
        self._opens_at_once = not (self._is_plain and asked.chat.include_reasoning)
        self._opened: set[int] = set()
        self._num_tokens = 0

    def step(self, step: ChatStep) -> bytes:
        choice, delta, parts, reason = step
        self._num_tokens += len(delta.token_ids)
        data = b""
        if choice not in self._opened and (parts or reason or self._opens_at_once):
            data = self._opening(choice, parts)
        if self._is_plain:
            for part in parts:
                if type(part) is Text:
                    data += self._before_text[choice] + orjson.dumps(part.text) + self._after_text
                else:
                    data += self._chunk(choice, _delta(part))
        else:
            data += self._full(step)
        if reason is not None:
            data += self._chunk(choice, {}, finish_reason=reason, stop_reason=delta.stop_reason)
        return data

    def end(self) -> bytes:
        if not self._asked.include_usage:
            return DONE
        return self._head + b'],"usage":' + orjson.dumps(self._usage()) + b"}\n\n" + DONE

    def failed(self, error: ApiError) -> bytes:
        return b"data: " + error.body() + b"\n\n"

    def _opening(self, choice: int, parts: Sequence[Part]) -> bytes:
        """Returns the first chunk. The content is null if the answer begins with something else."""
        is_text = not parts or isinstance(parts[0], Text)
        data = self._chunk(choice, {"role": "assistant", "content": "" if is_text else None})
        if self._asked.return_token_ids and not self._opened:
            ids = self._run.generation.requests[0].prompt_token_ids
            head = b',"prompt_token_ids":' + orjson.dumps(ids) + b',"choices":['
            data = data.replace(self._head, self._fields + head, 1)
        self._opened.add(choice)
        return data

    def _full(self, step: ChatStep) -> bytes:
        """Returns chunks with log-probabilities and token ids. Each token's are sent once, even if
        its text is held back or is part of a call."""
        delta = step.delta
        deltas = [_delta(part) for part in step.parts]
        extra: dict[str, Any] = {}
        if delta.logprobs:
            extra["logprobs"] = shapes.chat_logprobs(delta.logprobs, self._tokenizer)
        if self._asked.return_token_ids and delta.token_ids:
            extra["token_ids"] = delta.token_ids
        if extra and not deltas:
            deltas = [{"content": ""}]
        data = b""
        for item in deltas:
            data += self._chunk(step.choice, item, **extra)
            extra = {}
        return data

    def _chunk(self, choice: int, delta: dict[str, Any], **more: Any) -> bytes:
        fields = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        tail = self._tail
        if self._asked.continuous_usage:
            tail = b'],"usage":' + orjson.dumps(self._usage()) + b"}\n\n"
        return self._head + orjson.dumps(fields) + tail

    def _usage(self) -> dict[str, Any]:
        return _usage(self._run, self._num_tokens)


def _delta(part: Part) -> dict[str, Any]:
    match part:
        case Text(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case ToolCallStart(number, call_id, name):
            function = {"name": name, "arguments": ""}
            call = {"index": number, "id": call_id, "type": "function", "function": function}
            return {"tool_calls": [call]}
        case ToolCallArguments(number, text):
            return {"tool_calls": [{"index": number, "function": {"arguments": text}}]}


def _usage(run: ChatRun, completion_tokens: int) -> dict[str, Any]:
    return shapes.usage(
        run.prompt_tokens,
        completion_tokens,
        run.cached_tokens,
        run.reasoning_tokens,
        run.prediction,
    )
