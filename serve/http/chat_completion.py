"""Chat completions in OpenAI's shapes, whole and as chunks, from the steps of a ChatRun."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from serve.http import shapes
from serve.http.chat_run import ChatRun, ChatStep
from serve.http.errors import to_api_error
from serve.http.generation import AnswerHead
from serve.http.parts import Part, Reasoning, Text, ToolCallArguments, ToolCallStart
from serve.http.sse import DONE, ChunkFormat, EventStream
from serve.request import TokenLogprobs


@dataclass(slots=True)
class _Choice:
    """One answer, gathered from its steps."""

    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[tuple[ToolCallStart, list[str]]] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None

    def extend(self, step: ChatStep) -> None:
        for part in step.parts:
            match part:
                case Text(text):
                    self.texts.append(text)
                case Reasoning(text):
                    self.reasoning.append(text)
                case ToolCallStart():
                    self.calls.append((part, []))
                case ToolCallArguments(number, text):
                    self.calls[number][1].append(text)
        if step.delta.logprobs is not None:
            self.logprobs = (self.logprobs or []) + step.delta.logprobs
        self.finish_reason = step.finish_reason or self.finish_reason

    def message(self) -> dict[str, Any]:
        """content is null where there is only something else."""
        content = "".join(self.texts)
        is_null = not content and (self.calls or self.reasoning)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if is_null else content,
            "refusal": None,
        }
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": start.call_id,
                    "type": "function",
                    "function": {"name": start.name, "arguments": "".join(arguments)},
                }
                for start, arguments in self.calls
            ]
        return message


async def whole_answer(
    run: ChatRun, head: AnswerHead, num_choices: int, tokenizer: shapes.TokenTexts
) -> dict[str, Any]:
    choices = [_Choice() for _ in range(num_choices)]
    num_tokens = 0
    async with aclosing(run.steps()) as steps:
        async for step in steps:
            choices[step.choice].extend(step)
            num_tokens += len(step.delta.token_ids)
    return {
        "id": head.answer_id,
        "object": head.kind.object_name,
        "created": head.created,
        "model": head.model,
        "choices": [
            {
                "index": index,
                "message": choice.message(),
                "logprobs": shapes.chat_logprobs(choice.logprobs, tokenizer),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ],
        "usage": _usage(run, num_tokens),
    }


class ChatChunks:
    """The steps of one run as chunks."""

    def __init__(
        self, run: ChatRun, head: AnswerHead, tokenizer: shapes.TokenTexts, *, include_usage: bool
    ) -> None:
        self._run = run
        self._head = head
        self._tokenizer = tokenizer
        self._include_usage = include_usage
        self._format = ChunkFormat(
            "chat", head.answer_id, head.created, head.model, usage=include_usage
        )
        self._opened: set[int] = set()
        self._num_tokens = 0

    async def send(self, events: EventStream) -> web.StreamResponse:
        """Until the head is sent an error raises; after that it is the last event."""
        try:
            async with aclosing(self._run.steps()) as steps:
                async for step in steps:
                    data = self._encode(step)
                    if data:
                        if events.response is None:
                            await events.start()
                        await events.send(data)
            if events.response is None:
                await events.start()
            await events.send(self._ending())
        except ConnectionError:
            raise
        except Exception as exc:
            if events.response is None:
                raise
            await events.send_error(to_api_error(exc, self._head.request_id))
        return await events.finish()

    def _encode(self, step: ChatStep) -> bytes:
        choice, delta, parts, reason = step
        self._num_tokens += len(delta.token_ids)
        logprobs = delta.logprobs
        if not parts and not logprobs and reason is None:
            return b""
        data = b""
        if choice not in self._opened:
            self._opened.add(choice)
            data = self._format.role(choice)
        if logprobs is not None:
            # Once for each token, though its text may be held back or be part of a call.
            text = "".join([part.text for part in parts if isinstance(part, Text)])
            if logprobs or text:
                shown = shapes.chat_logprobs(logprobs, self._tokenizer)
                data += self._format.text_with_logprobs(choice, text, shown)
            parts = [part for part in parts if not isinstance(part, Text)]
        for part in parts:
            if isinstance(part, Text):
                data += self._format.text(choice, part.text)
            else:
                data += self._format.delta(choice, _delta(part))
        if reason is not None:
            data += self._format.finish(choice, reason)
        return data

    def _ending(self) -> bytes:
        if not self._include_usage:
            return DONE
        return self._format.usage(_usage(self._run, self._num_tokens)) + DONE


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
    counts = shapes.usage(run.prompt_tokens, completion_tokens, run.cached_tokens)
    details = {"reasoning_tokens": run.reasoning_tokens}
    return {**counts, "completion_tokens_details": details}
