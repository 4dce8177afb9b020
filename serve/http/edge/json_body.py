"""Parses strict JSON, which has one meaning for every parser.

It refuses duplicate keys, NaN and infinities, numbers out of range, byte order marks, other
encodings, lone surrogates and deep nesting.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

import orjson

from serve.http.edge.errors import ApiError, quoted
from serve.http.edge.limits import INTEGER_CHARS, JSON_CONTAINERS, JSON_DEPTH, JSON_VALUES

# the closing quote is optional, so that an unterminated string is scanned once
_STRING_OR_MARK = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[,:{\[]', re.DOTALL)
_OPENING, _BETWEEN = b"{[", b",:"
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_object(body: bytes) -> dict[str, Any]:
    """Returns the JSON object in `body`. Raises ApiError otherwise."""
    if not body:
        raise ApiError(400, "the request body is empty", code="invalid_json")
    _check_size(body)
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
    _check_depth(body, value)
    if _SURROGATE_ESCAPE.search(body):
        _check_surrogates(value)
    return value


def _check_size(body: bytes) -> None:
    """Refuses too many values before any object is made: `{}` is two bytes, and many more in
    memory."""
    num_values = body.count(b",") + body.count(b":")
    num_containers = body.count(b"{") + body.count(b"[")
    if num_values <= JSON_VALUES and num_containers <= JSON_CONTAINERS:
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


def _check_depth(body: bytes, value: dict[str, Any]) -> None:
    if body.count(b"[") + body.count(b"{") <= JSON_DEPTH:
        return
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
