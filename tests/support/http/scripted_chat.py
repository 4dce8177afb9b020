"""A ChatRun whose answer is a script of parts, for tests of the chat APIs."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Any, Self

import pytest

from serve.chat.answer_reader import ChatStep
from serve.chat.request import ChatRequest
from serve.http.calls.generation import Generation
from serve.http.calls.key_policy import KeyPolicy
from serve.http.edge.memory_budget import MemoryBudget
from serve.request import TokenDelta, TokenLogprobs
from serve.text.chat_parser.syntax.parts import (
    Part,
    Reasoning,
    Text,
    ToolCallArguments,
    ToolCallStart,
)

PROMPT_TOKENS = 20
CACHED_TOKENS = 8


class ScriptedRun:
    """A run that answers with `script`, one token per step, and raises an exception in the script.

    request: the last request of an endpoint.
    """

    script: list[list[Part] | Exception]
    finish_reason = "stop"
    stop_reason: str | int | None = None
    request: ChatRequest

    def __init__(self, call: Any, request: ChatRequest) -> None:
        type(self).request = request
        self.generation = Generation(
            [], request.params.n, MemoryBudget(1 << 30).charge(), KeyPolicy()
        )
        self.prompt_tokens = PROMPT_TOKENS
        self.cached_tokens = CACHED_TOKENS
        self.reasoning_tokens = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return None

    async def accepted(self) -> None:
        return None

    async def steps(self) -> AsyncGenerator[ChatStep, None]:
        last = len(self.script) - 1
        for position, parts in enumerate(self.script):
            if isinstance(parts, Exception):
                raise parts
            self.reasoning_tokens += any(isinstance(part, Reasoning) for part in parts)
            reason = self.finish_reason if position == last else None
            logprobs = None
            if self.request.params.logprobs is not None:
                logprobs = [TokenLogprobs(65 + position, -0.5, ((66, -1.0),))]
            delta = TokenDelta(0, "", [65 + position], logprobs, None, self.stop_reason)
            yield ChatStep(0, delta, parts, reason)


def script_answers(
    monkeypatch: pytest.MonkeyPatch,
    steps: list[list[Part] | Exception],
    finish_reason: str = "stop",
    stop_reason: str | int | None = None,
) -> type[ScriptedRun]:
    """Makes the endpoints of responses and messages answer with these steps."""
    fields = {"script": steps, "finish_reason": finish_reason, "stop_reason": stop_reason}
    run = type("Run", (ScriptedRun,), fields)
    for api in ("anthropic", "responses"):
        monkeypatch.setattr(f"serve.http.{api}.endpoint.ChatRun", run)
    return run


# Reasoning, text and two tool calls, in pieces.
SCRIPT: list[list[Part] | Exception] = [
    [Reasoning("Which ")],
    [Reasoning("city?")],
    [Text("Let me ")],
    [Text("look.")],
    [ToolCallStart(0, "call_1", "weather"), ToolCallArguments(0, '{"city":')],
    [ToolCallArguments(0, ' "Ulm"}')],
    [ToolCallStart(1, "call_2", "weather"), ToolCallArguments(1, "{}")],
]
