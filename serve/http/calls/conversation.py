"""The fields of a chat request that form its prompt or say how its answer is parsed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serve.chat.request import ChatRequest, check_continued
from serve.chat.template_kwargs import check_template_kwargs
from serve.chat.tools import tool_options
from serve.http.calls.messages import MESSAGES
from serve.http.calls.reasoning_fields import REASONING_FIELDS, reasoning_options
from serve.http.calls.tools import TOOL_FIELDS
from serve.http.schema.fields import (
    Boolean,
    FieldType,
    Parsed,
    Unsupported,
)
from serve.sampling_params import SamplingParams

_KWARGS_SCHEMA = {
    "type": "object",
    "properties": {"enable_thinking": {"type": "boolean"}},
    "additionalProperties": False,
}
CONVERSATION_FIELDS: dict[str, FieldType] = {
    "messages": MESSAGES,
    **TOOL_FIELDS,
    **REASONING_FIELDS,
    "verbosity": Unsupported(),
    "chat_template_kwargs": Parsed(
        lambda value, where, unknown: check_template_kwargs(value, where), _KWARGS_SCHEMA
    ),
    "add_generation_prompt": Boolean(),
    "continue_final_message": Boolean(),
}


def conversation(
    values: Mapping[str, Any], params: SamplingParams, client: str | None
) -> ChatRequest:
    """Makes the ChatRequest. values: checked fields."""
    messages: list[dict[str, Any]] = values["messages"]
    options = tool_options(values)
    continues = values.get("continue_final_message", False)
    adds_prompt = values.get("add_generation_prompt", not continues)
    if continues:
        check_continued(messages[-1], adds_prompt=adds_prompt)
    return ChatRequest(
        messages,
        params,
        tools=options.tools,
        tool_choice=options.choice,
        parallel_tool_calls=options.parallel,
        reasoning=reasoning_options(values),
        template_kwargs=values.get("chat_template_kwargs", {}),
        add_generation_prompt=adds_prompt,
        continue_final_message=continues,
        include_reasoning=values.get("include_reasoning", True),
        client=client,
        bounded_json=values.get("bounded_json"),
    )
