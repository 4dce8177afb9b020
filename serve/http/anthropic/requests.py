"""Parses bodies of Anthropic's Messages API to a ChatRequest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from serve.chat.reasoning import ReasoningOptions
from serve.chat.request import ChatRequest
from serve.errors import RequestError
from serve.http.anthropic.blocks import (
    CACHE_CONTROL,
    MESSAGES,
    TEXTS,
    chat_messages,
)
from serve.http.anthropic.errors import THREADS_UNSUPPORTED
from serve.http.anthropic.tools import TOOL_CHOICE, TOOLS, chat_tools
from serve.http.calls.sampling_fields import KV_POLICY, MAX_CLIENT_CHARS, MAX_TOKENS, MODEL
from serve.http.calls.structured_fields import BOUNDED, bounded, json_schema
from serve.http.schema.fields import (
    Boolean,
    Either,
    FieldType,
    Integer,
    List,
    Number,
    OneOfNames,
    Parsed,
    Record,
    String,
    Unknown,
    Unsupported,
)
from serve.http.schema.tagged import Tagged
from serve.sampling_params import MAX_STOP_LENGTH, MAX_STOP_STRINGS, SamplingParams

MIN_THINKING_TOKENS = 1024
_DISPLAY = OneOfNames(("summarized", "omitted"))
_THINKING = Tagged(
    {
        "enabled": Record(
            {"budget_tokens": Integer(MIN_THINKING_TOKENS, MAX_TOKENS), "display": _DISPLAY},
            required=("budget_tokens",),
        ),
        "adaptive": Record({"display": _DISPLAY}),
        "disabled": Record({}),
    },
    others=("between_tools",),
)
_KEEP = Either(
    {
        str: OneOfNames(("all",)),
        dict: Record({"type": OneOfNames(("thinking_turns",)), "value": Integer(1, MAX_TOKENS)}),
    },
    "a string or an object",
)
_FORMAT = Tagged(
    {
        "json_schema": Record(
            {
                "schema": Parsed(
                    lambda value, where, unknown: json_schema(value, where), {"type": "object"}
                )
            },
            required=("schema",),
        )
    }
)
# The chat template decides which thinking of earlier turns the model sees.
_CONTEXT_MANAGEMENT = Record(
    {
        "edits": List(
            Tagged(
                {"clear_thinking_20251015": Record({"keep": _KEEP})},
                ("clear_tool_uses_20250919", "compact_20260112"),
            ),
            16,
        )
    }
)


def _no_thread(value: Any, where: str, unknown: Unknown) -> None:
    raise RequestError(
        f"{where} is not supported: send the whole conversation",
        param=where,
        code=THREADS_UNSUPPORTED,
    )


# The fields that form the prompt, whose tokens count_tokens counts.
_PROMPT_FIELDS: dict[str, FieldType] = {
    "model": MODEL,
    "messages": MESSAGES,
    "system": TEXTS,
    "tools": TOOLS,
    "tool_choice": TOOL_CHOICE,
    "thinking": _THINKING,
    "output_config": Record(
        {"effort": OneOfNames(("low", "medium", "high", "xhigh", "max")), "format": _FORMAT}
    ),
    "cache_control": CACHE_CONTROL,
    "speed": Unsupported(("standard",)),
    "context_management": _CONTEXT_MANAGEMENT,
    "mcp_servers": Unsupported(([],)),
}
CREATE = Record(
    {
        **_PROMPT_FIELDS,
        **BOUNDED,
        "kv_policy": KV_POLICY,
        "max_tokens": Integer(0, MAX_TOKENS),
        "stop_sequences": List(String(MAX_STOP_LENGTH, min_chars=1), MAX_STOP_STRINGS),
        "temperature": Number(0, 1),
        "top_p": Number(0, 1),
        "top_k": Integer(0, MAX_TOKENS),
        "stream": Boolean(),
        "metadata": Record({"user_id": String(MAX_CLIENT_CHARS)}),
        "service_tier": OneOfNames(("auto", "standard_only")),
        "thread": Parsed(_no_thread, {"type": "null"}),
        "container": Unsupported(),
        "diagnostics": Unsupported(),
        "inference_geo": Unsupported(),
    },
    required=("model", "max_tokens", "messages"),
)
COUNT = Record(_PROMPT_FIELDS, required=("model", "messages"))


@dataclass(frozen=True, slots=True)
class MessagesCall:
    """A checked body. max_tokens: the client's limit; the context may allow fewer."""

    model: str
    chat: ChatRequest
    max_tokens: int
    stream: bool
    shows_thinking: bool = True


class CountCall(NamedTuple):
    """A checked body of POST /v1/messages/count_tokens. chat: the conversation to count."""

    model: str
    chat: ChatRequest


def parse_messages_call(
    body: Mapping[str, Any], defaults: Mapping[str, Any], unknown: Unknown | None = None
) -> MessagesCall:
    """Raises RequestError. defaults: the server's sampling settings for omitted fields."""
    values = CREATE.check(body, "", unknown or Unknown())
    max_tokens: int = values["max_tokens"]
    thinking = values.get("thinking", {})
    if thinking.get("budget_tokens", -1) >= max_tokens:
        raise RequestError(
            f"thinking.budget_tokens must be below max_tokens, which is {max_tokens}",
            param="thinking.budget_tokens",
        )
    sampling = {
        name: values.get(name, defaults.get(name))
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    }
    form = values.get("output_config", {}).get("format")
    params = SamplingParams(
        **{name: value for name, value in sampling.items() if value is not None},
        # the context may cut the answer short, without an error
        max_tokens=None if max_tokens else 0,
        default_max_tokens=max_tokens or None,
        stop=tuple(values.get("stop_sequences", ())),
        structured=None if form is None else bounded(form["schema"], values),
        kv_policy=values.get("kv_policy"),
    )
    return MessagesCall(
        values["model"],
        _chat(values, params),
        max_tokens,
        values.get("stream", False),
        shows_thinking=thinking.get("display") != "omitted",
    )


def parse_count_call(body: Mapping[str, Any], unknown: Unknown | None = None) -> CountCall:
    values = COUNT.check(body, "", unknown or Unknown())
    return CountCall(values["model"], _chat(values, SamplingParams()))


def _chat(values: Mapping[str, Any], params: SamplingParams) -> ChatRequest:
    messages = chat_messages(values.get("system"), values["messages"])
    prefills = bool(messages) and messages[-1]["role"] == "assistant"
    if prefills and "tool_calls" in messages[-1]:
        raise RequestError(
            "messages: the results of the last message's tool calls must follow it",
            param="messages",
        )
    if prefills and not messages[-1]["content"]:  # there is no text to continue
        messages.pop()
        prefills = False
    if not messages:  # all contents were empty
        raise RequestError("messages has nothing to answer", param="messages")
    tools, tool_choice = chat_tools(values.get("tools", []), values.get("tool_choice"))
    one_call: bool = (values.get("tool_choice") or {}).get("disable_parallel_tool_use", False)
    return ChatRequest(
        messages,
        params,
        tools=tools,
        tool_choice=tool_choice,
        parallel_tool_calls=not one_call,
        reasoning=_reasoning(values),
        add_generation_prompt=not prefills,
        continue_final_message=prefills,
        client=values.get("metadata", {}).get("user_id") or None,
        bounded_json=values.get("bounded_json"),
    )


def _reasoning(values: Mapping[str, Any]) -> ReasoningOptions:
    effort: str | None = values.get("output_config", {}).get("effort")
    thinking = values.get("thinking")
    if thinking is None:
        return ReasoningOptions(effort)
    is_enabled = thinking["type"] != "disabled"
    return ReasoningOptions(effort, thinking.get("budget_tokens"), is_enabled)
