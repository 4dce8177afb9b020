"""Parses strict JSON, which has one meaning for every parser.

It refuses duplicate keys, NaN and infinities, numbers out of range, byte order marks, other
encodings, lone surrogates and deep nesting.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NamedTuple

import orjson

from serve.http.edge.errors import ApiError, quoted
from serve.http.edge.limits import INTEGER_CHARS, JSON_CONTAINERS, JSON_DEPTH, JSON_VALUES

# the closing quote is optional, so that an unterminated string is scanned once
_STRING_OR_MARK = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[,:{\[]', re.DOTALL)
_OPENING, _BETWEEN = b"{[", b",:"
_COUNT_BYTES = 64 << 10  # how much is searched at once, since that holds the interpreter
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


class Marks(NamedTuple):
    """How many marks of JSON a body has, those in its texts included, and whether it has a
    backslash."""

    num_between: int  # commas and colons
    num_opening: int  # of objects and lists
    has_escape: bool


def count_marks(body: bytes) -> Marks:
    """Counts in pieces, so that other threads go on between them."""
    num_between = num_opening = 0
    has_escape = False
    for start in range(0, len(body), _COUNT_BYTES):
        end = start + _COUNT_BYTES
        num_between += body.count(b",", start, end) + body.count(b":", start, end)
        num_opening += body.count(b"{", start, end) + body.count(b"[", start, end)
        has_escape = has_escape or body.find(b"\\", start, end) >= 0
    return Marks(num_between, num_opening, has_escape)


def parse_object(body: bytes, marks: Marks | None = None) -> dict[str, Any]:
    """Returns the JSON object in `body`. marks: its marks, if they have been counted. Raises
    ApiError if it is no object."""
    if not body:
        raise ApiError(400, "the request body is empty", code="invalid_json")
    marks = marks or count_marks(body)
    _check_size(body, marks)
    try:
        value = _DECODER.decode(body.decode("utf-8"))
    except UnicodeDecodeError:
        raise _invalid("the request body is not UTF-8") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as exc:  # json.JSONDecodeError and our own
        raise _invalid(f"the request body is not valid JSON: {exc}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the request body must be a JSON object", code="invalid_type")
    if marks.num_opening > JSON_DEPTH:
        _check_depth(value)
    if marks.has_escape and _SURROGATE_ESCAPE.search(body):
        _check_surrogates(value)
    return value


def _check_size(body: bytes, marks: Marks) -> None:
    """Refuses too many values before any object is made: `{}` is two bytes, and many more in
    memory."""
    if marks.num_between <= JSON_VALUES and marks.num_opening <= JSON_CONTAINERS:
        return
    num_values = num_containers = 0
    for match in _STRING_OR_MARK.finditer(body):  # step by step, so that other threads go on
        mark = body[match.start()]
        if mark in _OPENING:
            num_containers += 1
            if num_containers > JSON_CONTAINERS:
                raise _invalid(
                    f"the request body has more than {JSON_CONTAINERS} objects and lists"
                )
        elif mark in _BETWEEN:
            num_values += 1
            if num_values > JSON_VALUES:
                raise _invalid(f"the request body has more than {JSON_VALUES} values")


def _invalid(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_json")


def _too_deep() -> ApiError:
    return _invalid(f"the request body nests deeper than {JSON_DEPTH} levels")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"duplicate key {quoted(key)}")
            seen.add(key)
    return result


def _constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _integer(text: str) -> int:
    if len(text) > INTEGER_CHARS:  # other parsers silently round beyond 64 bits
        raise ValueError("an integer is out of range")
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is out of range")
    return value


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object,
    parse_constant=_constant,
    parse_int=_integer,
    parse_float=_float,
)


def _check_depth(value: dict[str, Any]) -> None:
    level: list[Any] = [value]
    depth = 0
    while level:
        depth += 1
        if depth > JSON_DEPTH:
            raise _too_deep()
        below: list[Any] = []
        for item in level:
            children = item.values() if isinstance(item, dict) else item
            below += [child for child in children if isinstance(child, (dict, list))]
        level = below


def _check_surrogates(value: dict[str, Any]) -> None:
    try:
        orjson.dumps(value, option=orjson.OPT_PASSTHROUGH_DATACLASS)
    except (TypeError, ValueError):
        _walk_surrogates(value)


def _walk_surrogates(value: dict[str, Any]) -> None:
    """Looks for surrogates in the strings: orjson has refused the value, but it also refuses
    integers beyond 64 bits."""
    pending: list[Any] = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            pending += item.keys()
            pending += item.values()
        elif isinstance(item, list):
            pending += item
        elif isinstance(item, str) and not item.isascii():
            try:
                item.encode()
            except UnicodeEncodeError:
                raise ApiError(
                    400, "a string has half of a surrogate pair", code="invalid_value"
                ) from None
