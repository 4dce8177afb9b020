"""Converts a StructuredOutput to a grammar of llguidance, within limits that are cheap to check.

These checks read only the text; the compiler checks the rest in a child process
(serve/structured/compiler.py). A schema is one document: nothing is ever fetched.
"""

from __future__ import annotations

import json
import re
from typing import Any

from llguidance import LLMatcher

from serve.structured.refusal import invalid
from serve.structured.schema_choices import split_choices
from serve.structured.schema_closing import close_objects
from serve.structured.schema_ends import has_finite_text
from serve.structured.schema_numbers import fit_numbers
from serve.structured.schema_walk import Work
from serve.structured_output import JSON_OPTIONS, StructuredOutput

MAX_SOURCE_BYTES = 128 << 10
MAX_DEPTH = 64  # of JSON: an object in an object has depth two
MAX_NODES = 20_000
MAX_PROPERTIES = 256  # of one object: each optional one is another possible next key
MAX_BRANCHES = 256
MAX_CHOICES = 1000
MAX_REPEATS = 1 << 16  # repetitions of characters
MAX_ITEMS = 10_000
MAX_REGEX_SIZE = 4096  # characters with repetitions multiplied, which bounds a matcher step
MAX_GROUPS = 32

_COUNTS = {
    "minLength": MAX_REPEATS,
    "maxLength": MAX_REPEATS,
    "minItems": MAX_ITEMS,
    "maxItems": MAX_ITEMS,
    "minContains": MAX_ITEMS,
    "maxContains": MAX_ITEMS,
    "minProperties": MAX_PROPERTIES,
    "maxProperties": MAX_PROPERTIES,
}
_MEMBERS = ("properties", "patternProperties", "$defs", "definitions", "required")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_REPEAT = re.compile(r"\{([0-9]*)(?:(,)([0-9]*))?\}")
_ESCAPE = re.compile(r"\\(?:[pPxuU]\{[^}]*\}|.)", re.DOTALL)
_LARK_TOKEN = re.compile(
    r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|#[^\n]*|/((?:[^/\\\n]|\\.)+)/|%json\s*(?=\{)|[()\[\]]'
)


def grammar_of(
    structured: StructuredOutput, *, closed: bool = False, schemas: list[Any] | None = None
) -> str:
    """Returns the grammar for LLMatcher; RequestError has code "invalid_schema".

    closed: objects have no other properties than a schema names. schemas: gets the schemas that the
    grammar has.
    """
    source = structured.source
    try:
        size = len(source.encode())
    except UnicodeEncodeError:
        raise invalid("has a lone surrogate") from None
    if size > MAX_SOURCE_BYTES:
        raise invalid(f"is larger than {MAX_SOURCE_BYTES} bytes")
    if "\0" in source:
        raise invalid("has a zero character")
    found: list[Any] = [] if schemas is None else schemas
    work = Work()
    match structured.kind:
        case "json_object":
            found.append({"type": "object"})
            return _json_grammar(found[0])
        case "json_schema":
            found.append(_prepared(_schema(source, work), closed, work))
            return _json_grammar(found[0])
        case "regex":
            check_regex(source)
            return LLMatcher.grammar_from_regex(source)
        case "choice":
            return LLMatcher.grammar_from_lark("start: " + " | ".join(_choices(source)))
        case "grammar":
            return LLMatcher.grammar_from_lark(_lark(source, found, closed, work))
    raise invalid("is of an unknown kind")


def _json_grammar(schema: dict[str, Any]) -> str:
    try:
        return LLMatcher.grammar_from_json_schema(
            json.dumps({**schema, "x-guidance": JSON_OPTIONS}, allow_nan=False)
        )
    except ValueError:
        raise invalid("has a number that JSON cannot represent") from None


def _prepared(schema: dict[str, Any], closed: bool, work: Work) -> dict[str, Any]:
    """Returns the schema as the grammar library takes it. It allows what the schema allows, but for
    what the library cannot express and with `closed` for properties without a name."""
    schema = split_choices(fit_numbers(schema, bounded=closed), work)
    return close_objects(schema, work, every=closed)


def _parsed(source: str) -> Any:
    try:
        return json.loads(source)
    except RecursionError:
        raise invalid(f"is nested deeper than {MAX_DEPTH}") from None
    except ValueError:
        raise invalid("is not valid JSON") from None


def _schema(source: str, work: Work) -> dict[str, Any]:
    schema = _parsed(source)
    if not isinstance(schema, dict):
        raise invalid("must be a schema that is an object")
    _check_schema(schema, work)
    return schema


def _choices(source: str) -> list[str]:
    choices = _parsed(source)
    if not isinstance(choices, list) or not all(isinstance(c, str) and c for c in choices):
        raise invalid("must be a list of non-empty strings")
    if not 0 < len(choices) <= MAX_CHOICES:
        raise invalid(f"must have 1 to {MAX_CHOICES} choices")
    for choice in choices:
        _check_text(choice)
    return [json.dumps(choice) for choice in choices]


def _check_text(text: str) -> None:
    """Rejects lone surrogates, which JSON escapes can express."""
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        raise invalid("has a lone surrogate")


# -- JSON schemas


def _check_schema(schema: dict[str, Any], work: Work) -> None:
    """Checks every object in it as a schema, since references may point anywhere."""
    left: list[tuple[Any, int]] = [(schema, 1)]
    num_nodes = 0
    while left:
        node, depth = left.pop()
        num_nodes += 1
        if depth > MAX_DEPTH:
            raise invalid(f"is nested deeper than {MAX_DEPTH}")
        if num_nodes > MAX_NODES:
            raise invalid(f"has more than {MAX_NODES} values")
        if isinstance(node, str):
            _check_text(node)
        elif isinstance(node, dict):
            _check_node(node)
            left += [(value, depth + 1) for value in node.values()]
        elif isinstance(node, list):
            left += [(value, depth + 1) for value in node]
    if not has_finite_text(schema, work):
        raise invalid("is a schema that requires itself: no finite text matches it")


def _check_node(node: dict[str, Any]) -> None:
    for key in node:
        _check_text(key)
    for key, limit in _COUNTS.items():
        value = node.get(key)
        if isinstance(value, (int, float)) and not value <= limit:
            raise invalid(f"has a {key} above {limit}")
    for key in _MEMBERS:
        _check_size(node, key, MAX_PROPERTIES)
    for key in _LISTS:
        _check_size(node, key, MAX_BRANCHES)
    _check_size(node, "enum", MAX_CHOICES)
    for key in ("$ref", "$dynamicRef"):
        reference = node.get(key)
        if isinstance(reference, str) and not reference.startswith("#"):
            raise invalid(f"has a {key} to another document")
    patterns = [node.get("pattern"), *_keys(node.get("patternProperties"))]
    for pattern in patterns:
        if isinstance(pattern, str):
            check_regex(pattern)


def _check_size(node: dict[str, Any], key: str, limit: int) -> None:
    value = node.get(key)
    if isinstance(value, (list, dict)) and len(value) > limit:
        raise invalid(f"has more than {limit} entries in {key}")


def _keys(value: object) -> list[str]:
    return list(value) if isinstance(value, dict) else []


# -- regular expressions and Lark


def check_regex(text: str) -> None:
    """Checks the size, with repetitions multiplied, and the depth of groups."""
    sizes = [0]  # of the open groups so far, without their last atoms
    atom = 0
    at = 0
    while at < len(text):
        char, length = text[at], 1
        repeat = _REPEAT.match(text, at) if char == "{" else None
        if repeat is not None:
            length = len(repeat.group())
            atom *= _most(repeat)
        elif char == "(":
            sizes[-1] += atom
            sizes.append(0)
            atom = 0
        elif char == ")" and len(sizes) > 1:
            atom += sizes.pop()
        elif char not in "*+?|":
            sizes[-1] += atom
            atom, length = 1, _atom_length(text, at)
        if len(sizes) > MAX_GROUPS:
            raise invalid(f"has a regular expression with groups nested deeper than {MAX_GROUPS}")
        if max(sizes[-1], 0) + atom > MAX_REGEX_SIZE:
            raise invalid(
                f"has a regular expression that is too large: it may have {MAX_REGEX_SIZE} "
                "characters, repetitions written out"
            )
        at += length


def _most(repeat: re.Match[str]) -> int:
    """Returns the largest count of a repetition, or the least count if it is unbounded."""
    numbers = [group for group in (repeat.group(1), repeat.group(3)) if group]
    if any(len(number) > 9 for number in numbers):
        raise invalid("has a regular expression with a repetition that is too large")
    return max([1, *map(int, numbers)])


def _atom_length(text: str, at: int) -> int:
    """Returns the length of a class, an escaped character or a plain one."""
    if text[at] == "\\":
        escape = _ESCAPE.match(text, at)
        return len(escape.group()) if escape else 1
    if text[at] != "[":
        return 1
    depth, end = 0, at
    while end < len(text):
        if text[end] == "\\":
            end += 1
        elif text[end] == "[":
            depth += 1
        elif text[end] == "]" and end > at + 1:
            depth -= 1
            if depth <= 0:
                return end + 1 - at
        end += 1
    return len(text) - at


def _lark(source: str, schemas: list[Any], closed: bool, work: Work) -> str:
    """Checks the nesting, the regular expressions and the schemas of a Lark grammar. Returns it
    with its schemas prepared, which are added to `schemas`."""
    depth, at, done = 0, 0, 0
    parts: list[str] = []
    while (token := _LARK_TOKEN.search(source, at)) is not None:
        at = token.end()
        text = token.group()
        if token.group(1):
            check_regex(token.group(1))
        elif text.startswith("%json"):
            schema, end = _inner_schema(source, at, work)
            schemas.append(_prepared(schema, closed, work))
            parts += source[done:at], json.dumps(schemas[-1])
            at = done = end
        elif text in "([":
            depth += 1
        elif text in ")]":
            depth -= 1
        if depth > MAX_GROUPS:
            raise invalid(f"is nested deeper than {MAX_GROUPS}")
    return "".join((*parts, source[done:]))


def _inner_schema(source: str, at: int, work: Work) -> tuple[dict[str, Any], int]:
    """Returns the schema at `at`, checked, and its end."""
    try:
        schema, end = json.JSONDecoder().raw_decode(source, at)
    except (ValueError, RecursionError):
        raise invalid("has a %json that is not valid JSON") from None
    if not isinstance(schema, dict):
        raise invalid("has a %json that is not an object")
    if schema.get("x-guidance", JSON_OPTIONS) != JSON_OPTIONS:
        raise invalid("has x-guidance in %json, which is not supported")
    _check_schema(schema, work)
    return schema, end
