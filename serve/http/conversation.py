"""The fields of a chat request that make its prompt and that say how to read its answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serve.http.chat_run import ChatRequest
from serve.http.fields import Boolean, FieldType, Parsed, Unsupported
from serve.http.messages import MAX_MESSAGES, parse_messages
from serve.request import SamplingParams

CONVERSATION_FIELDS: dict[str, FieldType] = {
    "messages": Parsed(
        lambda value, where, unknown: parse_messages(value),
        {"type": "array", "items": {"type": "object"}, "minItems": 1, "maxItems": MAX_MESSAGES},
    ),
    "tools": Unsupported(([],)),
    "tool_choice": Unsupported(("none", "auto")),
    "parallel_tool_calls": Boolean(),
    "functions": Unsupported(([],)),
    "function_call": Unsupported(("none", "auto")),
    "reasoning_effort": Unsupported(),
    "verbosity": Unsupported(),
    "chat_template_kwargs": Unsupported(({},)),
}


def conversation(
    values: Mapping[str, Any], params: SamplingParams, client: str | None
) -> ChatRequest:
    """values: checked fields."""
    return ChatRequest(values["messages"], params, client=client)
