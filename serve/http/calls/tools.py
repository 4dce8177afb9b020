"""The tools of a chat request, and which of them the answer may or must call."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from serve.errors import RequestError
from serve.http.calls.messages import MAX_NAME_CHARS
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
_SCHEMAS = ("additionalProperties", "not", "if", "then", "else", "contains")
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
    """The tools that an answer may call. tools: in OpenAI's shape. choice: see ChatRequest."""

    tools: list[dict[str, Any]]
    choice: str | tuple[str, str]
    parallel: bool


def parse_parameters(value: Any, where: str, unknown: Unknown) -> dict[str, Any]:
    """Checks the JSON schema of a tool's parameters. Raises RequestError invalid_schema."""
    schema = _JSON.check(value, where, unknown)
    _check_schema(schema, where)
    if schema.get("type", "object") != "object":
        raise _bad(f"{where} must be the schema of an object", where)
    return schema


def _check_schema(schema: dict[str, Any], where: str) -> None:
    """Checks what all dialects of JSON Schema require; the grammar compiler checks the rest."""
    left: list[tuple[Any, int]] = [(schema, 1)]
    while left:
        node, depth = left.pop()
        if isinstance(node, bool):
            continue
        if not isinstance(node, dict):
            raise _bad(f"{where} has a schema that is not an object", where)
        if depth > MAX_SCHEMA_DEPTH:
            raise _bad(f"{where} nests deeper than {MAX_SCHEMA_DEPTH} schemas", where)
        for name, value in node.items():
            inner = _KEYWORDS.get(name)
            if inner is not None:
                try:
                    left += [(item, depth + 1) for item in inner(value)]
                except ValueError as error:
                    raise _bad(f"{where}: {name} must be {error}", where) from None


# Each function takes a keyword's value and returns the schemas in it. Its ValueError says what the
# value must be.


def _named(value: Any) -> Iterable[Any]:
    if not isinstance(value, dict):
        raise ValueError("an object")
    return value.values()


def _listed(value: Any) -> Iterable[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError("a list of schemas that is not empty")
    return value


def _items(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list) else (value,)


def _one(value: Any) -> Iterable[Any]:
    return (value,)


def _type(value: Any) -> Iterable[Any]:
    for kind in value if isinstance(value, list) else [value]:
        if kind not in _TYPES:
            raise ValueError(f"one of {', '.join(_TYPES)}, not {quoted(kind)}")
    return ()


def _names(value: Any) -> Iterable[Any]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError("a list of names")
    return ()


def _values(value: Any) -> Iterable[Any]:
    if not isinstance(value, list):
        raise ValueError("a list")
    return ()


def _reference(value: Any) -> Iterable[Any]:
    if not isinstance(value, str) or not value.startswith("#"):
        raise ValueError("a reference within the schema, such as #/$defs/name")
    return ()


def _number(value: Any) -> Iterable[Any]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("a number")
    return ()


def _count(value: Any) -> Iterable[Any]:
    _number(value)
    if value < 0:
        raise ValueError("a number from 0 on")
    return ()


def _pattern(value: Any) -> Iterable[Any]:
    if not isinstance(value, str) or len(value) > MAX_PATTERN_CHARS:
        raise ValueError(f"a string of at most {MAX_PATTERN_CHARS} characters")
    if _is_malformed(value):
        raise ValueError("a valid regular expression")
    return ()


_KEYWORDS: dict[str, Callable[[Any], Iterable[Any]]] = {
    **dict.fromkeys(_MAPS, _named),
    **dict.fromkeys(_LISTS, _listed),
    **dict.fromkeys(_SCHEMAS, _one),
    **dict.fromkeys(_COUNTS, _count),
    **dict.fromkeys(_BOUNDS, _number),
    "items": _items,
    "type": _type,
    "required": _names,
    "enum": _values,
    "$ref": _reference,
    "pattern": _pattern,
}


def _is_malformed(pattern: str) -> bool:
    """Returns whether the pattern is malformed in every dialect. It is not compiled here, since
    that can take seconds."""
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
                f"tool_choice names {quoted(name)}, which is not in tools", param="tool_choice"
            )
