"""Checks the JSON schema of a tool's parameters."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from serve.errors import RequestError

MAX_SCHEMA_DEPTH = 32
MAX_PATTERN_CHARS = 4096
_MAX_SHOWN = 64
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
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


def check_parameters(schema: dict[str, Any], where: str) -> None:
    """Checks what all dialects of JSON Schema require; the grammar compiler checks the rest. Raises
    RequestError invalid_schema."""
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
    if schema.get("type", "object") != "object":
        raise _bad(f"{where} must be the schema of an object", where)


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
            raise ValueError(
                f"one of {', '.join(_TYPES)}, not {json.dumps(str(kind)[:_MAX_SHOWN])}"
            )
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
