"""Converts the tools of Anthropic's API to OpenAI's function tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serve.chat.tools import MAX_DESCRIPTION_CHARS, MAX_SCHEMA_BYTES, MAX_TOOLS
from serve.errors import RequestError
from serve.http.anthropic.blocks import CACHE_CONTROL, NAME
from serve.http.calls.tools import PARAMETERS
from serve.http.edge.errors import quoted
from serve.http.schema.fields import (
    Boolean,
    JsonObject,
    List,
    Record,
    String,
    Unsupported,
)
from serve.http.schema.tagged import Tagged

_SERVER_TOOLS = (
    "bash_20250124",
    "code_execution_20250522",
    "code_execution_20250825",
    "code_execution_20260120",
    "memory_20250818",
    "text_editor_20250124",
    "text_editor_20250429",
    "text_editor_20250728",
    "web_fetch_20250910",
    "web_search_20250305",
)
_CUSTOM = Record(
    {
        "name": NAME,
        "description": String(MAX_DESCRIPTION_CHARS, is_text=True),
        "input_schema": PARAMETERS,
        "cache_control": CACHE_CONTROL,
        "strict": Boolean(),
        "eager_input_streaming": Boolean(),
        "input_examples": List(JsonObject(MAX_SCHEMA_BYTES), 64),
        "defer_loading": Unsupported((False,)),
        "allowed_callers": Unsupported((["direct"],)),
    },
    required=("name", "input_schema"),
)
TOOLS = List(Tagged({"custom": _CUSTOM}, _SERVER_TOOLS, default="custom"), MAX_TOOLS)
_ONE_CALL = {"disable_parallel_tool_use": Boolean()}
TOOL_CHOICE = Tagged(
    {
        "auto": Record(_ONE_CALL),
        "any": Record(_ONE_CALL),
        "tool": Record({"name": NAME, **_ONE_CALL}, required=("name",)),
        "none": Record({}),
    }
)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_tools(
    tools: list[dict[str, Any]], choice: Mapping[str, Any] | None
) -> tuple[list[dict[str, Any]], str | tuple[str, str]]:
    """Returns the tools and tool_choice of a ChatRequest. tools, choice: checked fields."""
    functions = [_function(tool) for tool in tools]
    names = [tool["name"] for tool in tools]
    for position, name in enumerate(names):
        if name in names[:position]:
            raise RequestError(
                f"tools[{position}].name {quoted(name)} appears twice",
                param=f"tools[{position}].name",
            )
    kind = "auto" if choice is None else choice["type"]
    if kind in ("any", "tool") and not tools:
        raise RequestError("tool_choice needs tools", param="tool_choice")
    if kind != "tool" or choice is None:
        return functions, _CHOICES[kind]
    if choice["name"] not in names:
        raise RequestError(
            f"tool_choice.name {quoted(choice['name'])} is not one of the tools",
            param="tool_choice.name",
        )
    return functions, ("function", choice["name"])


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    for name in ("description", "strict"):
        if name in tool:
            function[name] = tool[name]
    return {"type": "function", "function": function}
