"""The fields for structured output: OpenAI's response_format and vLLM's two forms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import orjson

from serve.errors import RequestError
from serve.http.edge.errors import ApiError, quoted
from serve.http.edge.json_body import parse_object
from serve.http.schema.fields import (
    Boolean,
    FieldType,
    List,
    Parsed,
    Record,
    Schema,
    String,
    Unknown,
    Unsupported,
    wrong_type,
)
from serve.structured_output import JSON_KINDS, StructuredOutput

MAX_SCHEMA_BYTES = 64 << 10
MAX_GRAMMAR_CHARS = 64 << 10
MAX_REGEX_CHARS = 4096
MAX_CHOICES = 1000
MAX_CHOICE_CHARS = 1024
JSON_OBJECT = StructuredOutput("json_object")

_NAMED_SCHEMA = Record(
    {
        "name": String(64, min_chars=1, pattern="[A-Za-z0-9_-]+"),
        "description": String(4096, is_text=True),
        "schema": Parsed(
            lambda value, where, unknown: json_schema(value, where), {"type": "object"}
        ),
        "strict": Boolean(),
    },
    required=("name", "schema"),
)


def json_schema(value: Any, where: str) -> StructuredOutput:
    """Returns the structured output of a schema. value: a parsed schema or its JSON text. Raises
    RequestError invalid_schema."""
    if isinstance(value, str):
        if len(value) > MAX_SCHEMA_BYTES:
            raise _schema_too_large(where)
        try:
            value = parse_object(value.encode())
        except (ApiError, UnicodeEncodeError):
            raise _bad_schema(f"{where} is not the JSON text of an object", where) from None
    if not isinstance(value, dict):
        raise _bad_schema(f"{where} must be a JSON schema object", where)
    try:
        source = orjson.dumps(value)
    except TypeError:  # integers that need more than 64 bits
        raise _bad_schema(f"{where} has a number that is out of range", where) from None
    if len(source) > MAX_SCHEMA_BYTES:
        raise _schema_too_large(where)
    return StructuredOutput("json_schema", source.decode())


def response_format(value: Any, where: str, unknown: Unknown) -> StructuredOutput | None:
    """Parses OpenAI's response_format. Returns None for plain text."""
    if not isinstance(value, dict):
        raise wrong_type(where, "an object")
    kind = value.get("type")
    if kind is None:
        raise RequestError(
            f"{where}.type is missing", param=f"{where}.type", code="missing_required_parameter"
        )
    if kind not in ("text", "json_object", "json_schema"):
        raise RequestError(
            f"{where}.type must be text, json_object or json_schema, not {quoted(kind)}",
            param=f"{where}.type",
            code="invalid_value" if isinstance(kind, str) else "invalid_type",
        )
    names = {"type", "json_schema"} if kind == "json_schema" else {"type"}
    others = [name for name, item in value.items() if item is not None and name not in names]
    if others:
        unknown.note(where, others)
    if kind != "json_schema":
        return JSON_OBJECT if kind == "json_object" else None
    if value.get("json_schema") is None:
        raise RequestError(
            f"{where}.json_schema is missing",
            param=f"{where}.json_schema",
            code="missing_required_parameter",
        )
    named = _NAMED_SCHEMA.check(value["json_schema"], f"{where}.json_schema", unknown)
    schema: StructuredOutput = named["schema"]
    return schema


_FORMAT_SCHEMA: Schema = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"type": {"enum": ["text", "json_object"]}},
            "required": ["type"],
            "additionalProperties": {"type": "null"},
        },
        {
            "type": "object",
            "properties": {"type": {"const": "json_schema"}, "json_schema": _NAMED_SCHEMA.schema()},
            "required": ["type", "json_schema"],
            "additionalProperties": {"type": "null"},
        },
    ]
}


def _json(value: Any, where: str, unknown: Unknown) -> StructuredOutput:
    return json_schema(value, where)


def _json_object(value: Any, where: str, unknown: Unknown) -> StructuredOutput | None:
    return JSON_OBJECT if Boolean().check(value, where, unknown) else None


def _regex(value: Any, where: str, unknown: Unknown) -> StructuredOutput:
    return StructuredOutput("regex", _REGEX.check(value, where, unknown))


def _choice(value: Any, where: str, unknown: Unknown) -> StructuredOutput:
    choices = _CHOICES.check(value, where, unknown)
    return StructuredOutput("choice", orjson.dumps(choices).decode())


def _grammar(value: Any, where: str, unknown: Unknown) -> StructuredOutput:
    return StructuredOutput("grammar", _GRAMMAR.check(value, where, unknown))


_REGEX = String(MAX_REGEX_CHARS, min_chars=1)
_CHOICES = List(String(MAX_CHOICE_CHARS, min_chars=1, is_text=True), MAX_CHOICES, min_items=1)
_GRAMMAR = String(MAX_GRAMMAR_CHARS, min_chars=1)
_KINDS: dict[str, FieldType] = {
    "json": Parsed(
        _json, {"anyOf": [{"type": "object"}, {"type": "string", "maxLength": MAX_SCHEMA_BYTES}]}
    ),
    "json_object": Parsed(_json_object, Boolean().schema()),
    "regex": Parsed(_regex, _REGEX.schema()),
    "choice": Parsed(_choice, _CHOICES.schema()),
    "grammar": Parsed(_grammar, _GRAMMAR.schema()),
}
_OPTIONS: dict[str, FieldType] = {
    "structural_tag": Unsupported(),
    "disable_fallback": Boolean(),
    "disable_any_whitespace": Unsupported((False,)),
    "disable_additional_properties": Boolean(),
    "whitespace_pattern": Unsupported(),
}
_GIVEN = _KINDS | {"json_object": Parsed(_json_object, {"const": True})}
_OUTPUTS = Record({**_KINDS, **_OPTIONS})


def _outputs(value: Any, where: str, unknown: Unknown) -> StructuredOutput | None:
    given = _OUTPUTS.check(value, where, unknown)
    kinds = [name for name in _KINDS if given.get(name) is not None]
    if len(kinds) != 1:
        raise RequestError(f"{where} must hold exactly one of {', '.join(_KINDS)}", param=where)
    structured: StructuredOutput = given[kinds[0]]
    closes = given.get("disable_additional_properties") and structured.kind in JSON_KINDS
    return replace(structured, bounded=True) if closes else structured


BOUNDED: dict[str, FieldType] = {"bounded_json": Boolean()}  # of all three APIs
STRUCTURED_FIELDS: dict[str, FieldType] = {
    "response_format": Parsed(response_format, _FORMAT_SCHEMA),
    "structured_outputs": Parsed(
        _outputs,
        {"anyOf": [Record({n: k, **_OPTIONS}, (n,)).schema() for n, k in _GIVEN.items()]},
    ),
    **{f"guided_{name}": kind for name, kind in _KINDS.items()},
    **BOUNDED,
    "guided_decoding_backend": String(64),
    "guided_whitespace_pattern": Unsupported(),
}
_SOURCES = ("response_format", "structured_outputs", *(f"guided_{name}" for name in _KINDS))


def structured_output(values: Mapping[str, Any]) -> StructuredOutput | None:
    """Returns the structured output that the checked fields request. Raises RequestError if more
    than one field requests one."""
    given = [name for name in _SOURCES if values.get(name) is not None]
    if len(given) > 1:
        raise RequestError(
            f"{given[0]} and {given[1]} both set the format of the answer; use only one of them",
            param=given[1],
        )
    return bounded(values[given[0]], values) if given else None


def bounded(structured: StructuredOutput, values: Mapping[str, Any]) -> StructuredOutput:
    """Returns the structured output with what the checked fields say about its bounds."""
    says = values.get("bounded_json")
    if says is None or structured.kind not in JSON_KINDS:
        return structured
    return replace(structured, bounded=says)


def structured_name(values: Mapping[str, Any]) -> str:
    """Returns the field that requests structured output, for error messages of the engine."""
    return next((name for name in _SOURCES if values.get(name) is not None), "structured")


def _bad_schema(message: str, where: str) -> RequestError:
    return RequestError(message, param=where, code="invalid_schema")


def _schema_too_large(where: str) -> RequestError:
    return _bad_schema(f"{where} is larger than {MAX_SCHEMA_BYTES} bytes", where)
