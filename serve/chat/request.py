"""What a caller asks: a conversation and how to answer it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from serve.chat.reasoning import NO_OPTIONS, ReasoningOptions
from serve.errors import RequestError
from serve.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A conversation and how to answer it.

    messages: as chat templates take them (role, content, tool_calls, tool_call_id, name,
    reasoning_content). tools: OpenAI's function tools. tool_choice: "none", "auto", "required" or
    ("function", name). reasoning: how much the model may reason. template_kwargs: scalars for the
    template by name, which override those that follow from `reasoning`. include_reasoning: False
    drops the reasoning from the answer. client: as in Engine.submit. bounded_json: that of the
    arguments of calls; None takes the engine's setting.
    """

    messages: list[dict[str, Any]]
    params: SamplingParams
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: str | tuple[str, str] = "auto"
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions = NO_OPTIONS
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    include_reasoning: bool = True
    client: str | None = None
    bounded_json: bool | None = None


def check_continued(last: Mapping[str, Any], *, adds_prompt: bool) -> None:
    """Raises RequestError unless the last message can be continued."""
    if adds_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt cannot both be true",
            param="add_generation_prompt",
        )
    if last["role"] != "assistant" or "tool_calls" in last or not last["content"]:
        raise RequestError(
            "continue_final_message needs a last message of the assistant with text and no calls",
            param="continue_final_message",
        )
