"""The tools of a conversation, and which of them the answer may or must call.

HTTP checks its bodies with field tables of its own; `checked_tools` and `checked_choice` check what
Python callers pass.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve.chat.tool_schema import check_parameters
from serve.errors import RequestError
from serve.parameter_checks import check_length

MAX_TOOLS = 128
MAX_SCHEMA_BYTES = 64 << 10
MAX_DESCRIPTION_CHARS = 64 << 10
MAX_TOOLS_BYTES = 512 << 10
MAX_NAME_CHARS = 64
NAME_PATTERN = "[A-Za-z0-9_-]+"
CHOICES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class ToolOptions:
    """The tools that an answer may call. tools: in OpenAI's shape. choice: see ChatRequest."""

    tools: list[dict[str, Any]]
    choice: str | tuple[str, str]
    parallel: bool


def tool_options(values: Mapping[str, Any]) -> ToolOptions:
    """Returns the tools that the checked fields allow. Raises RequestError for a choice that names
    none of them."""
    tools: list[dict[str, Any]] = values.get("tools", [])
    choice: Any = values.get("tool_choice", "auto")
    parallel: bool = values.get("parallel_tool_calls", True)
    if isinstance(choice, str):
        if choice == "required" and not tools:
            raise RequestError('tool_choice "required" needs tools', param="tool_choice")
        return ToolOptions(tools, choice, parallel)
    if "function" in choice:
        name = choice["function"]["name"]
        _check_declared([name], tools)
        return ToolOptions(tools, ("function", name), parallel)
    allowed = choice["allowed_tools"]
    names = [item["function"]["name"] for item in allowed["tools"]]
    _check_declared(names, tools)
    offered = [tool for tool in tools if tool["function"]["name"] in names]
    return ToolOptions(offered, allowed["mode"], parallel)


def _check_declared(names: list[str], tools: list[dict[str, Any]]) -> None:
    declared = {tool["function"]["name"] for tool in tools}
    for name in names:
        if name not in declared:
            raise RequestError(
                f"tool_choice names {json.dumps(name)}, which is not in tools", param="tool_choice"
            )


def checked_tools(tools: Any) -> list[dict[str, Any]]:
    """Returns OpenAI's function tools that a Python caller passes, as a list. Raises RequestError
    that names the wrong key."""
    if tools is None:
        return []
    if not isinstance(tools, (list, tuple)):
        raise _wrong_type("tools", "a list")
    check_length("tools", tools, MAX_TOOLS)
    names: set[str] = set()
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        _check_keys(tool, where, ("type", "function"), ("type", "function"))
        if tool["type"] != "function":
            raise RequestError(f'{where}.type must be "function"', param=f"{where}.type")
        name = _check_function(tool["function"], f"{where}.function")
        if name in names:
            raise RequestError(
                f"tools has two functions with the name {json.dumps(name)}",
                param=f"{where}.function.name",
            )
        names.add(name)
    if _num_bytes(list(tools), "tools") > MAX_TOOLS_BYTES:
        raise RequestError(f"tools is larger than {MAX_TOOLS_BYTES} bytes of JSON", param="tools")
    return list(tools)


def checked_choice(choice: Any) -> str | dict[str, Any]:
    """Returns a tool_choice that a Python caller passes: a string, or OpenAI's shape of a named
    function or of allowed tools. Raises RequestError that names the wrong key."""
    if isinstance(choice, str):
        if choice not in CHOICES:
            raise RequestError(
                f"tool_choice must be one of {', '.join(CHOICES)}, or name a function",
                param="tool_choice",
            )
        return choice
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        _check_allowed(choice, "tool_choice")
    else:
        _check_named(choice, "tool_choice")
    checked: dict[str, Any] = choice
    return checked


def _check_named(choice: Any, where: str) -> None:
    _check_keys(choice, where, ("type", "function"), ("type", "function"))
    if choice["type"] != "function":
        raise RequestError(f'{where}.type must be "function"', param=f"{where}.type")
    _check_keys(choice["function"], f"{where}.function", ("name",), ("name",))
    _check_name(choice["function"]["name"], f"{where}.function.name")


def _check_allowed(choice: Any, where: str) -> None:
    _check_keys(choice, where, ("type", "allowed_tools"), ("type", "allowed_tools"))
    allowed, where = choice["allowed_tools"], f"{where}.allowed_tools"
    _check_keys(allowed, where, ("mode", "tools"), ("mode", "tools"))
    if allowed["mode"] not in ("auto", "required"):
        raise RequestError(f"{where}.mode must be auto or required", param=f"{where}.mode")
    tools, where = allowed["tools"], f"{where}.tools"
    if not isinstance(tools, (list, tuple)) or not tools:
        raise _wrong_type(where, "a list that is not empty")
    check_length(where, tools, MAX_TOOLS)
    for index, tool in enumerate(tools):
        _check_named(tool, f"{where}[{index}]")


def _check_function(function: Any, where: str) -> str:
    names = ("name", "description", "parameters", "strict")
    _check_keys(function, where, ("name",), names)
    name = _check_name(function["name"], f"{where}.name")
    description, strict = function.get("description", ""), function.get("strict", False)
    if not isinstance(description, str):
        raise _wrong_type(f"{where}.description", "a string")
    if len(description) > MAX_DESCRIPTION_CHARS:
        raise RequestError(
            f"{where}.description is longer than {MAX_DESCRIPTION_CHARS} characters",
            param=f"{where}.description",
            code="string_above_max_length",
        )
    if not isinstance(strict, bool):
        raise _wrong_type(f"{where}.strict", "true or false")
    if "parameters" in function:
        schema = function["parameters"]
        where = f"{where}.parameters"
        if not isinstance(schema, dict):
            raise _wrong_type(where, "an object")
        if _num_bytes(schema, where) > MAX_SCHEMA_BYTES:
            raise RequestError(f"{where} is larger than {MAX_SCHEMA_BYTES} bytes", param=where)
        check_parameters(schema, where)
    return name


def _check_name(name: Any, where: str) -> str:
    if not isinstance(name, str):
        raise _wrong_type(where, "a string")
    if len(name) > MAX_NAME_CHARS or not re.fullmatch(NAME_PATTERN, name):
        raise RequestError(
            f"{where} must be 1 to {MAX_NAME_CHARS} letters, digits, - or _", param=where
        )
    return name


def _check_keys(value: Any, where: str, required: Sequence[str], known: Sequence[str]) -> None:
    if not isinstance(value, dict):
        raise _wrong_type(where, "an object")
    for name in required:
        if name not in value:
            raise RequestError(
                f"{where}.{name} is missing",
                param=f"{where}.{name}",
                code="missing_required_parameter",
            )
    for name in value:
        if name not in known:
            raise RequestError(
                f"{where} has the unknown key {json.dumps(str(name)[:MAX_NAME_CHARS])}",
                param=where,
                code="unknown_parameter",
            )


def _num_bytes(value: Any, where: str) -> int:
    try:
        return len(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        raise RequestError(f"{where} is not JSON", param=where) from None


def _wrong_type(where: str, kind: str) -> RequestError:
    return RequestError(f"{where} must be {kind}", param=where, code="invalid_type")
