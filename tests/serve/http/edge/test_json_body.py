"""Strict JSON refuses invalid bodies and accepts every valid one."""

from __future__ import annotations

import json
import time

import pytest

from serve.http.edge.errors import ApiError
from serve.http.edge.json_body import Marks, count_marks, parse_object
from serve.http.edge.limits import JSON_DEPTH

REFUSED = {
    "empty": (b"", "invalid_json"),
    "brace": (b"{", "invalid_json"),
    "open list": (b"[1,2", "invalid_json"),
    "no value": (b'{"a":}', "invalid_json"),
    "two documents": (b'{"n":1}{"n":2}', "invalid_json"),
    "list": (b"[]", "invalid_type"),
    "string": (b'"x"', "invalid_type"),
    "number": (b"1", "invalid_type"),
    "null": (b"null", "invalid_type"),
    "true": (b"true", "invalid_type"),
    "NaN": (b'{"a":NaN}', "invalid_json"),
    "Infinity": (b'{"a":Infinity}', "invalid_json"),
    "-Infinity": (b'{"a":-Infinity}', "invalid_json"),
    "1e999": (b'{"a":1e999}', "invalid_json"),
    "duplicate key": (b'{"n":1,"n":2}', "invalid_json"),
    "duplicate key inside": (b'{"a":[{"n":1,"n":2}]}', "invalid_json"),
    "invalid UTF-8": (b'{"a":"\xff"}', "invalid_json"),
    "surrogate bytes": (b'{"a":"\xed\xa0\x80"}', "invalid_json"),
    "UTF-16": ('{"a":1}'.encode("utf-16"), "invalid_json"),
    "UTF-32": ('{"a":1}'.encode("utf-32"), "invalid_json"),
    "BOM": (b'\xef\xbb\xbf{"a":1}', "invalid_json"),
    "lone surrogate": (b'{"a":"\\ud800"}', "invalid_value"),
    "lone surrogate key": (b'{"\\uDFFF":1}', "invalid_value"),
    "lone surrogate deep": (b'{"a":[{"b":["x","\\udc00"]}]}', "invalid_value"),
    "lone surrogate and large integer": (b'{"a":18446744073709551615,"b":"\\ud800"}', None),
    "100 000 lists": (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "invalid_json"),
    "250 000 open lists": (b"[" * 250_000, "invalid_json"),
    "one level too deep": (b'{"a":' + b"[" * JSON_DEPTH + b"]" * JSON_DEPTH + b"}", "invalid_json"),
    "5 000 digits": (b'{"a":' + b"9" * 5000 + b"}", "invalid_json"),
    "2^70": (b'{"a":1180591620717411303424}', "invalid_json"),
    "control character": (b'{"a":"\n"}', "invalid_json"),
    "comment": (b'{"a":1/*x*/}', "invalid_json"),
    "single quotes": (b"{'a':1}", "invalid_json"),
    "trailing comma": (b'{"a":1,}', "invalid_json"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.row("J1", "J2", "J3", "J4", "J5", "J6", "J7", "J8", "J9", "J10", "J11", "J12", "J13")
def test_refused(name: str) -> None:
    body, code = REFUSED[name]
    with pytest.raises(ApiError) as caught:
        parse_object(body)
    assert caught.value.status == 400
    assert code is None or caught.value.code == code
    assert len(caught.value.body()) < 400


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"a": None, "b": [1, 2.5, -3, True, "x"], "c": {"d": {}}},
        {"text": "naïve 👍🏽 \u0000 \uffff \ufffe ‮ \ue000"},
        {"seed": -(2**63), "other": 2**63 - 1},
        {"many": [{"i": i} for i in range(200)]},
    ],
)
@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.row("J15")
def test_accepted(value: dict[str, object], ascii_only: bool) -> None:
    assert parse_object(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


def test_the_maximum_depth() -> None:
    depth = JSON_DEPTH - 1
    assert parse_object(b'{"a":' + b"[" * depth + b"]" * depth + b"}")


@pytest.mark.timing
@pytest.mark.row("J14")
def test_many_small_objects_take_linear_time() -> None:
    body = b'{"a":[' + b",".join([b"{}"] * 60_000) + b"]}"
    started_s = time.perf_counter()
    assert len(parse_object(body)["a"]) == 60_000
    assert time.perf_counter() - started_s < 3.0


@pytest.mark.timing
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"a":[' + b"1," * 1_000_001 + b"1]}", "more than 1000000 values"),
        (b'{"a":[' + b"{}," * 131_072 + b"{}]}", "more than 131072 objects and lists"),
        (b"[" * 140_000, "more than 131072 objects and lists"),
        (b'{"a":"' + b'\\"' * 100_000 + b"[" * 100_000, "valid JSON"),  # the string has no end
    ],
)
def test_too_many_values_are_refused_before_parsing(body: bytes, message: str) -> None:
    began_s = time.monotonic()
    with pytest.raises(ApiError, match=message) as caught:
        parse_object(body)
    assert caught.value.code == "invalid_json"
    assert time.monotonic() - began_s < 2


def test_brackets_in_strings_do_not_count() -> None:
    text = '[{,:\\"' * 300_000
    assert len(parse_object(b'{"a":"' + text.encode() + b'"}')["a"]) == 5 * 300_000


def test_marks_are_counted_across_pieces() -> None:
    body = b",:{[\\" * 50_000
    assert count_marks(body) == Marks(100_000, 100_000, True)
    assert count_marks(body[:-1].replace(b"\\", b"]") + b"\\") == Marks(100_000, 100_000, True)
    assert count_marks(b"{}") == Marks(0, 1, False)
