"""The fields of tools and tool_choice in chat requests."""

from __future__ import annotations

from typing import Any

import orjson

from serve.chat.tool_schema import check_parameters
from serve.chat.tools import (
    CHOICES,
    MAX_DESCRIPTION_CHARS,
    MAX_NAME_CHARS,
    MAX_SCHEMA_BYTES,
    MAX_TOOLS,
    MAX_TOOLS_BYTES,
    NAME_PATTERN,
)
from serve.errors import RequestError
from serve.http.edge.errors import quoted
from serve.http.schema.fields import (
    Boolean,
    FieldType,
    JsonObject,
    List,
    OneOfNames,
    Parsed,
    Record,
    Schema,
    String,
    Unknown,
    Unsupported,
    wrong_type,
)

_NAME = String(MAX_NAME_CHARS, min_chars=1, pattern=NAME_PATTERN)


def parse_parameters(value: Any, where: str, unknown: Unknown) -> dict[str, Any]:
    """Checks the JSON schema of a tool's parameters. Raises RequestError invalid_schema."""
    schema = _JSON.check(value, where, unknown)
    check_parameters(schema, where)
    return schema


_JSON = JsonObject(MAX_SCHEMA_BYTES)
PARAMETERS = Parsed(
    parse_parameters,
    {
        "type": "object",
        "properties": {"type": {"const": "object"}},
        "additionalProperties": False,
    },
)
_TOOL = Record(
    {
        "type": OneOfNames(("function",)),
        "function": Record(
            {
                "name": _NAME,
                "description": String(MAX_DESCRIPTION_CHARS, is_text=True),
                "parameters": PARAMETERS,
                "strict": Boolean(),
            },
            required=("name",),
        ),
    },
    required=("type", "function"),
)


def _tools(value: Any, where: str, unknown: Unknown) -> list[dict[str, Any]]:
    tools: list[dict[str, Any]] = List(_TOOL, MAX_TOOLS).check(value, where, unknown)
    names: set[str] = set()
    size = 0
    for index, tool in enumerate(tools):
        name = tool["function"]["name"]
        if name in names:
            raise RequestError(
                f"{where} has two functions with the name {quoted(name)}",
                param=f"{where}[{index}].function.name",
            )
        names.add(name)
        size += len(orjson.dumps(tool))
    if size > MAX_TOOLS_BYTES:
        raise RequestError(f"{where} is larger than {MAX_TOOLS_BYTES} bytes of JSON", param=where)
    return tools


_NAMED = Record({"name": _NAME}, required=("name",))
_FUNCTION = Record(
    {"type": OneOfNames(("function",)), "function": _NAMED}, required=("type", "function")
)
_ALLOWED = Record(
    {
        "type": OneOfNames(("allowed_tools",)),
        "allowed_tools": Record(
            {"mode": OneOfNames(("auto", "required")), "tools": List(_FUNCTION, MAX_TOOLS, 1)},
            required=("mode", "tools"),
        ),
    },
    required=("type", "allowed_tools"),
)
_MODES = OneOfNames(CHOICES)


def _choice(value: Any, where: str, unknown: Unknown) -> Any:
    if isinstance(value, str):
        return _MODES.check(value, where, unknown)
    if not isinstance(value, dict):
        raise wrong_type(where, "a string or an object")
    record = _ALLOWED if value.get("type") == "allowed_tools" else _FUNCTION
    return record.check(value, where, unknown)


_CHOICE_SCHEMA: Schema = {"anyOf": [_MODES.schema(), _FUNCTION.schema(), _ALLOWED.schema()]}
TOOL_FIELDS: dict[str, FieldType] = {
    "tools": Parsed(_tools, List(_TOOL, MAX_TOOLS).schema()),
    "tool_choice": Parsed(_choice, _CHOICE_SCHEMA),
    "parallel_tool_calls": Boolean(),
    "functions": Unsupported(([],)),
    "function_call": Unsupported(("none", "auto")),
}
