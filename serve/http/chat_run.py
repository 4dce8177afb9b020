"""One conversation to answer, whichever API it came by, and the answer in parts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, Self

from serve.http.call_engine import CallEngine
from serve.http.generation import Generation
from serve.http.parts import Part, Text
from serve.request import SamplingParams, TokenDelta


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """messages: as the template takes them (role, content, tool_calls, tool_call_id, name,
    reasoning_content). tools: OpenAI's function tools. tool_choice: "none", "auto", "required" or
    ("function", name). template_kwargs: scalars for the template by name. client: as
    Engine.submit's. max_reasoning_tokens: None is no bound."""

    messages: list[dict[str, Any]]
    params: SamplingParams
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: str | tuple[str, str] = "auto"
    parallel_tool_calls: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    client: str | None = None


class ChatStep(NamedTuple):
    """What one choice gained: the engine's delta, and its text as parts. With the last step of a
    choice comes finish_reason: "stop", "length" or "tool_calls"."""

    choice: int
    delta: TokenDelta
    parts: list[Part]
    finish_reason: str | None


class ChatRun:
    """The engine's work on one ChatRequest. Use it in a `with` block: leaving it aborts whatever
    still runs."""

    def __init__(self, engine: CallEngine, asked: ChatRequest, request_id: str) -> None:
        """Submits it. OverloadedError, EngineStoppedError; RequestError for tools or a template
        that the model cannot do."""
        stream = engine.submit_chat(
            asked.messages, asked.params, request_id=request_id, client=asked.client
        )
        self.generation = Generation([stream], asked.params.n)

    def __enter__(self) -> Self:
        self.generation.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.generation.__exit__(kind, error, traceback)

    async def accepted(self) -> None:
        """Until the prompt is rendered, tokenized and checked; raises what was wrong with it."""
        await self.generation.accepted()

    @property
    def prompt_tokens(self) -> int:
        return self.generation.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        return self.generation.cached_tokens

    async def steps(self) -> AsyncGenerator[ChatStep, None]:
        """In order of arrival. Raises for sequences that did not end well."""
        async with aclosing(self.generation.deltas()) as deltas:
            async for choice, delta in deltas:
                parts: list[Part] = [Text(delta.text)] if delta.text else []
                reason = delta.finish_reason
                yield ChatStep(choice, delta, parts, None if reason is None else reason.value)
