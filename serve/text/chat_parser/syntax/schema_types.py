"""What a JSON schema says about the type of a value, for formats whose values are plain text.

All walks are bounded; what they do not understand is a value of any type.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

MAX_STEPS = 8  # of references and alternatives that are followed
MAX_BRANCHES = 16
STRING = frozenset({"string"})
_TYPES: dict[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}
_WORDS = {"true": True, "false": False, "none": None, "null": None}
_SHARED = ("$defs", "definitions")


class Member(NamedTuple):
    """A parameter of a tool."""

    name: str
    schema: dict[str, Any]
    is_required: bool


def resolved(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """Follows references within the document. A schema that is true or cannot be found is {}."""
    for _ in range(MAX_STEPS):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return dict(schema)
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        target = _target(reference, root)
        schema = {**target, **rest} if isinstance(target, Mapping) else {}
    return {}


def _target(reference: str, root: Mapping[str, Any]) -> Any:
    node: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and key.isdecimal() and int(key) < len(node):
            node = node[int(key)]
        elif isinstance(node, Mapping):
            node = node.get(key)
        else:
            return None
    return node


def kinds(schema: Any, root: Mapping[str, Any], steps: int = MAX_STEPS) -> frozenset[str]:
    """Returns the types that a value may have; none if the schema does not say."""
    node = resolved(schema, root)
    if "const" in node:
        return frozenset({type_of(node["const"])})
    listed = node.get("type")
    named = frozenset([listed] if isinstance(listed, str) else listed or ())
    if isinstance(node.get("enum"), list):
        found = frozenset(map(type_of, node["enum"]))
        return found & named or found
    if named:
        return named | {"null"} if node.get("nullable") is True else named
    for key in ("anyOf", "oneOf"):
        if isinstance(node.get(key), list) and steps > 0:
            parts = [kinds(item, root, steps - 1) for item in node[key]]
            return frozenset().union(*parts) if all(parts) else frozenset()
    if isinstance(node.get("allOf"), list) and steps > 0:
        parts = [found for item in node["allOf"] if (found := kinds(item, root, steps - 1))]
        return frozenset.intersection(*parts) if parts else frozenset()
    if "properties" in node:
        return frozenset({"object"})
    return frozenset({"array"}) if "items" in node else frozenset()


def branches(
    schema: Any, root: Mapping[str, Any], steps: int = MAX_STEPS
) -> list[dict[str, Any]] | None:
    """Returns the alternatives of a value, each of one type or of enumerated values; None if the
    schema does not say so, or has too many."""
    node = resolved(schema, root)
    if "enum" in node or "const" in node:
        return [node]
    for key in ("anyOf", "oneOf"):
        if isinstance(node.get(key), list):
            others = {name: value for name, value in node.items() if name != key}
            if steps <= 0 or others.keys() - {"title", "description", "default", "$defs"}:
                return None
            parts = [branches(item, root, steps - 1) for item in node[key]]
            made = [item for part in parts for item in part or ()]
            return made if all(parts) and len(made) <= MAX_BRANCHES else None
    found = kinds(node, root)
    if not found:
        return None
    return [{**node, "type": kind, "nullable": False} for kind in sorted(found)]


def members(parameters: Mapping[str, Any]) -> list[Member] | None:
    """Returns the parameters of a tool; None if the schema does not list them by name, or says more
    of them than a list can."""
    node = resolved(parameters, parameters)
    if any(key in node for key in ("anyOf", "oneOf", "allOf", "if", "not", "dependentSchemas")):
        return None
    named = node.get("properties", {})
    required = node.get("required", [])
    if not isinstance(named, Mapping) or not isinstance(required, list):
        return None
    if not named and node.get("additionalProperties", True) is not False:
        return None
    found = [Member(name, schema, name in required) for name, schema in named.items()]
    found += [Member(str(name), {}, True) for name in required if name not in named]
    return found


def standalone(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema of a value as a document of its own."""
    if not isinstance(schema, Mapping):
        return {}
    shared = {key: root[key] for key in _SHARED if key in root}
    if not _has_other_references(schema):
        return {**schema, **shared}
    moved = _moved(schema)
    assert isinstance(moved, dict)
    return {**moved, "$defs": {"root": _moved(root)}}


def _has_other_references(node: Any) -> bool:
    """Returns whether a reference leads elsewhere than to the shared definitions."""
    if isinstance(node, list):
        return any(map(_has_other_references, node))
    if not isinstance(node, Mapping):
        return False
    reference = node.get("$ref")
    if isinstance(reference, str) and not reference.startswith(("#/$defs/", "#/definitions/")):
        return True
    return any(map(_has_other_references, node.values()))


def _moved(node: Any) -> Any:
    """Returns a copy whose references lead to a document that is one of the definitions."""
    if isinstance(node, list):
        return [_moved(item) for item in node]
    if not isinstance(node, Mapping):
        return node
    made = {key: _moved(value) for key, value in node.items()}
    reference = made.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        made["$ref"] = f"#/$defs/root{reference[1:]}"
    return made


def type_of(value: Any) -> str:
    return _TYPES.get(type(value), "object")


def typed_json(text: str, found: frozenset[str]) -> str | None:
    """Returns plain text as the JSON text of a value of one of these types other than a string, or
    of any if none is given; None if it is none of them."""
    text = text.strip()
    value = _word(text, found)
    if value is _NOTHING:
        value = strict_json(text)
    if value is _NOTHING or isinstance(value, str):
        return None
    kind = type_of(value)
    if kind == "number" and "number" not in found and "integer" in found and value == int(value):
        value, kind = int(value), "integer"
    fits = not found or kind in found or (kind == "integer" and "number" in found)
    return json.dumps(value, ensure_ascii=False) if fits and _can_encode(value) else None


_NOTHING = object()


def strict_json(text: str) -> Any:
    """Parses JSON that other parsers take, too; _NOTHING if it is none."""
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return _NOTHING
    return value


def _word(text: str, found: frozenset[str]) -> Any:
    """Reads a word as Python writes it, which chat templates do, too."""
    value = _WORDS.get(text.lower(), _NOTHING)
    return value if value is not _NOTHING and type_of(value) in found else _NOTHING


def _refuse(text: str) -> float:
    raise ValueError(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def _can_encode(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        return False
    return True
