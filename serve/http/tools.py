"""The tools of a chat request, and which of them the answer may or must call."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from serve.errors import RequestError
from serve.http.errors import quoted
from serve.http.fields import (
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
from serve.http.messages import MAX_NAME_CHARS

MAX_TOOLS = 128
MAX_SCHEMA_BYTES = 64 << 10
MAX_SCHEMA_DEPTH = 32
MAX_DESCRIPTION_CHARS = 64 << 10
MAX_PATTERN_CHARS = 4096
MAX_TOOLS_BYTES = 512 << 10
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_NAME = String(MAX_NAME_CHARS, min_chars=1, pattern="[A-Za-z0-9_-]+")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "not", "if", "then", "else", "contains")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_PATTERN_PART = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\\\]])*\]"  # an escape, a class
    r"|\((?:\?(?:[:=!>|]|#[^)]*)|\?<[=!]|\?P?<\w+>|\?[a-zA-Z-]+:?)?"  # the head of a group
    r"|.",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class ToolOptions:
    """tools: those that the answer may call, in OpenAI's shape. choice: as ChatRequest's."""

    tools: list[dict[str, Any]]
    choice: str | tuple[str, str]
    parallel: bool


def parse_parameters(value: Any, where: str, unknown: Unknown) -> dict[str, Any]:
    """A JSON schema of an object. RequestError invalid_schema."""
    schema = _JSON.check(value, where, unknown)
    _check_schema(schema, where, MAX_SCHEMA_DEPTH)
    if schema.get("type", "object") != "object":
        raise _bad(f"{where} must describe an object", where)
    return schema


def _check_schema(schema: Any, where: str, levels: int) -> None:
    """What is wrong in any dialect of JSON Schema; the rest is for who compiles it."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise _bad(f"{where} has a schema that is no object", where)
    if levels == 0:
        raise _bad(f"{where} nests deeper than {MAX_SCHEMA_DEPTH} schemas", where)
    _check_keywords(schema, where)
    inner: list[Any] = []
    for name in _MAPS:
        members = schema.get(name, {})
        if not isinstance(members, dict):
            raise _bad(f"{where} has a {name} that is no object", where)
        inner += members.values()
    for name in _LISTS:
        if name in schema:
            items = schema[name]
            if not isinstance(items, list) or not items:
                raise _bad(f"{where} has an {name} that is no list of schemas", where)
            inner += items
    for name in _SCHEMAS:
        value = schema.get(name, True)
        inner += value if name == "items" and isinstance(value, list) else [value]
    for item in inner:
        _check_schema(item, where, levels - 1)


def _check_keywords(schema: dict[str, Any], where: str) -> None:
    kinds = schema.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind not in _TYPES:
            raise _bad(f"{where} has the type {quoted(kind)}", where)
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(item, str) for item in required):
        raise _bad(f"{where} has a required that is no list of names", where)
    if not isinstance(schema.get("enum", []), list):
        raise _bad(f"{where} has an enum that is no list", where)
    reference = schema.get("$ref", "#")
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise _bad(f"{where} has a $ref that leads out of the schema", where)
    for name in _COUNTS:
        count = schema.get(name, 0)
        if isinstance(count, bool) or not isinstance(count, int | float) or count < 0:
            raise _bad(f"{where} has a {name} that is no count", where)
    for name in _BOUNDS:
        bound = schema.get(name, 0)
        if isinstance(bound, bool) or not isinstance(bound, int | float):
            raise _bad(f"{where} has a {name} that is no number", where)
    _check_pattern(schema.get("pattern", ""), where)


def _check_pattern(pattern: Any, where: str) -> None:
    if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN_CHARS:
        raise _bad(
            f"{where} has a pattern that is no text of at most {MAX_PATTERN_CHARS} characters",
            where,
        )
    if _is_malformed(pattern):
        raise _bad(f"{where} has a malformed pattern", where)


def _is_malformed(pattern: str) -> bool:
    """Malformed in every dialect. It is not compiled here: that can take seconds."""
    depth = 0
    can_repeat = False
    for match in _PATTERN_PART.finditer(pattern):
        part = match[0]
        if part in ("[", "\\"):  # a class without an end, or nothing behind it
            return True
        if part == ")":
            depth -= 1
        if depth < 0 or (part in "*+?" and not can_repeat):
            return True
        if part.startswith("("):
            depth += 1
        can_repeat = not part.startswith("(") and part != "|"
    return depth > 0


def _bad(message: str, where: str) -> RequestError:
    return RequestError(message, param=where, code="invalid_schema")


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
_MODES = OneOfNames(("none", "auto", "required"))


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


def tool_options(values: Mapping[str, Any]) -> ToolOptions:
    """values: checked fields. RequestError for a choice that the tools do not allow."""
    tools: list[dict[str, Any]] = values.get("tools", [])
    choice: Any = values.get("tool_choice", "auto")
    parallel: bool = values.get("parallel_tool_calls", True)
    if isinstance(choice, str):
        if choice == "required" and not tools:
            raise RequestError(
                "tool_choice is required, but there are no tools", param="tool_choice"
            )
        return ToolOptions(tools, choice, parallel)
    if "function" in choice:
        name = choice["function"]["name"]
        _check_known([name], tools)
        return ToolOptions(tools, ("function", name), parallel)
    allowed = choice["allowed_tools"]
    names = [item["function"]["name"] for item in allowed["tools"]]
    _check_known(names, tools)
    offered = [tool for tool in tools if tool["function"]["name"] in names]
    return ToolOptions(offered, allowed["mode"], parallel)


def _check_known(names: list[str], tools: list[dict[str, Any]]) -> None:
    known = {tool["function"]["name"] for tool in tools}
    for name in names:
        if name not in known:
            raise RequestError(
                f"tool_choice names {quoted(name)}, which is not in tools", param="tool_choice"
            )
