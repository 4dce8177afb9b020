"""Makes a ChatRequest from what a Python caller passes to LLM.chat."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serve.chat.reasoning import ReasoningOptions, check_effort
from serve.chat.request import ChatRequest, check_continued
from serve.chat.template_kwargs import check_template_kwargs
from serve.chat.tools import checked_choice, checked_tools, tool_options
from serve.errors import RequestError
from serve.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """The arguments of LLM.chat that all its conversations share; see there."""

    tools: Any = None
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    chat_template_kwargs: Any = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    def request(self, messages: Any, params: SamplingParams) -> ChatRequest:
        """Returns the request of one conversation. Raises RequestError that names the argument."""
        for name in ("parallel_tool_calls", "include_reasoning", "continue_final_message"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be a bool", param=name, code="invalid_type")
        check_effort(self.reasoning_effort, "reasoning_effort")
        tools = tool_options(
            {
                "tools": checked_tools(self.tools),
                "tool_choice": checked_choice(self.tool_choice),
                "parallel_tool_calls": self.parallel_tool_calls,
            }
        )
        conversation = [_message(item, f"messages[{i}]") for i, item in enumerate(messages)]
        if not conversation:
            raise RequestError("messages is empty", param="messages")
        adds_prompt = self.add_generation_prompt
        if adds_prompt is None:
            adds_prompt = not self.continue_final_message
        if self.continue_final_message:
            check_continued(conversation[-1], adds_prompt=adds_prompt)
        kwargs = self.chat_template_kwargs
        return ChatRequest(
            conversation,
            params,
            tools=tools.tools,
            tool_choice=tools.choice,
            parallel_tool_calls=tools.parallel,
            reasoning=ReasoningOptions(self.reasoning_effort),
            template_kwargs=check_template_kwargs({} if kwargs is None else kwargs, _KWARGS),
            add_generation_prompt=adds_prompt,
            continue_final_message=self.continue_final_message,
            include_reasoning=self.include_reasoning,
        )


_KWARGS = "chat_template_kwargs"


def _message(message: Any, where: str) -> dict[str, Any]:
    """Returns a message as templates take it: arguments of calls that are JSON text, as they are in
    answers, become objects, and content that is None becomes empty."""
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be a dict", param=where, code="invalid_type")
    if not isinstance(message.get("role"), str):
        raise RequestError(f"{where}.role must be a string", param=f"{where}.role")
    made = dict(message)
    if made.get("content") is None:
        made["content"] = ""
    calls = made.pop("tool_calls", None)
    if not calls:
        return made
    if not isinstance(calls, (list, tuple)):
        raise _wrong_call(f"{where}.tool_calls")
    made["tool_calls"] = [
        _call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)
    ]
    return made


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _wrong_call(where)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            parsed = None  # it was cut off: it stays text
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {**call, "function": {**function, "arguments": arguments}}


def _wrong_call(where: str) -> RequestError:
    return RequestError(
        f"{where} must hold calls with a function that has a name", param=where, code="invalid_type"
    )
