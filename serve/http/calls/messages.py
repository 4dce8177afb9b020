"""Checks the `messages` of a chat request and converts them for chat templates.

Text parts become one string, "developer" becomes "system", the arguments of calls become objects
(what is not the JSON of one stays text), and fields that clients echo from answers (refusal: null)
are dropped. So are all unknown fields of the assistant's messages, with a warning: libraries keep
fields of their own there.
"""

from __future__ import annotations

import json
import math
from typing import Any

from serve.errors import RequestError
from serve.http.edge.errors import quoted
from serve.http.schema.fields import (
    FieldType,
    Integer,
    List,
    OneOfNames,
    Parsed,
    Record,
    Schema,
    String,
    Unknown,
    Unsupported,
    check_length,
    unsupported,
    wrong_type,
)

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
MAX_MESSAGES = 8192
MAX_NAME_CHARS = 64
MAX_TOOL_CALLS = 128
MAX_CALL_ID_CHARS = 512
MAX_TEXT_CHARS = 8 << 20  # the default limit of a body
MAX_ARGUMENTS_DEPTH = 64
_UNSUPPORTED_PARTS = ("image_url", "input_audio", "file", "video_url")


def parse_messages(value: Any, where: str, unknown: Unknown) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise wrong_type(where, "a list")
    if not value:
        raise RequestError(f"{where} is empty", param=where)
    check_length(value, where, MAX_MESSAGES)
    call_ids: set[str] = set()
    return [
        _message(item, f"{where}[{index}]", unknown, call_ids) for index, item in enumerate(value)
    ]


def _message(value: Any, where: str, unknown: Unknown, call_ids: set[str]) -> dict[str, Any]:
    """Converts one message. call_ids: the ids of earlier calls; the message adds its own."""
    if not isinstance(value, dict):
        raise wrong_type(where, "an object")
    role, content = value.get("role"), value.get("content")
    if len(value) == 2 and isinstance(content, str) and role in ("user", "assistant", "system"):
        return {
            "role": role,
            "content": content,
        }  # the fast path for most messages, of which there may be thousands
    role = _role(role, f"{where}.role")
    if role == "assistant":  # libraries keep fields of their own in the answers that they send back
        unknown = unknown.without_refusal()
    given = _RECORDS[role].check(value, where, unknown)
    message: dict[str, Any] = {"role": role, "content": given.get("content")}
    calls = given.get("tool_calls")
    reasoning = given.get("reasoning_content", given.get("reasoning"))
    if message["content"] is None:
        message["content"] = given.get("refusal")
    if message["content"] is None:
        if not calls and reasoning is None:
            raise _missing(f"{where}.content")
        message["content"] = ""
    if "name" in given:
        message["name"] = given["name"]
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": call["function"]} for call in calls
        ]
        call_ids.update(call["id"] for call in calls)
    if role == "tool":
        call_id = given["tool_call_id"]
        if call_id not in call_ids:
            raise RequestError(
                f"{where}.tool_call_id does not match a tool call of an earlier message",
                param=f"{where}.tool_call_id",
            )
        message["tool_call_id"] = call_id
    return message


def _missing(where: str) -> RequestError:
    return RequestError(f"{where} is missing", param=where, code="missing_required_parameter")


def _role(value: Any, where: str) -> str:
    if value is None:
        raise _missing(where)
    if not isinstance(value, str):
        raise wrong_type(where, "a string")
    if value == "function":
        raise RequestError(
            f'{where} "function" is not supported; use "tool"',
            param=where,
            code="unsupported_parameter",
        )
    if value not in ROLES:
        raise RequestError(
            f"{where} must be one of {', '.join(ROLES)}, not {quoted(value)}", param=where
        )
    return ROLES[value]


def _content(value: Any, where: str, unknown: Unknown) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong_type(where, "a string or a list of text parts")
    if not value:
        raise RequestError(f"{where} is an empty list", param=where)
    return "\n".join(_part(part, f"{where}[{index}]", unknown) for index, part in enumerate(value))


def _part(value: Any, where: str, unknown: Unknown) -> str:
    """Returns the text of a content part. A refusal counts as text of the assistant."""
    if not isinstance(value, dict):
        raise wrong_type(where, "an object")
    kind = value.get("type")
    if kind not in ("text", "refusal"):
        if kind in _UNSUPPORTED_PARTS:
            raise unsupported(f"{where}.type", f": {kind}, but only text is served")
        raise RequestError(
            f"{where} has the type {quoted(kind)}; only text is supported", param=f"{where}.type"
        )
    unexpected = [name for name, item in value.items() if item is not None]
    unexpected = [name for name in unexpected if name not in ("type", kind)]
    if unexpected:
        unknown.note(where, unexpected)
    text = value.get(kind)
    if not isinstance(text, str):
        raise wrong_type(f"{where}.{kind}", "a string")
    return text


def parse_arguments(value: Any, where: str, unknown: Unknown) -> dict[str, Any] | str:
    """Parses the JSON text of a call's arguments. An empty text means no arguments. An object that
    was cut off or that the model got wrong stays text, since clients send back what they got."""
    if not isinstance(value, str):
        raise wrong_type(where, "a string")
    if not value:
        return {}
    if not value.lstrip(" \t\r\n").startswith("{"):
        raise RequestError(f"{where} must be the JSON text of an object", param=where)
    try:
        arguments: dict[str, Any] = _DECODER.decode(value)
    except (ValueError, RecursionError):
        return _text(value, where, unknown)
    return value if is_deeper(arguments, MAX_ARGUMENTS_DEPTH) else arguments


def _text(value: str, where: str, unknown: Unknown) -> str:
    text: str = _TEXT.check(value, where, unknown)
    return text


def _no_number(text: str) -> float:
    raise ValueError(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


_DECODER = json.JSONDecoder(parse_constant=_no_number, parse_float=_finite)


def is_deeper(value: Any, levels: int) -> bool:
    level = [value]
    while level and levels >= 0:
        levels -= 1
        items = [item for item in level if isinstance(item, dict | list)]
        level = [
            child for item in items for child in (item.values() if isinstance(item, dict) else item)
        ]
    return any(isinstance(item, dict | list) for item in level)


_TEXT = String(MAX_TEXT_CHARS, is_text=True)
_PART_SCHEMA: Schema = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_CONTENT = Parsed(
    _content,
    {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART_SCHEMA, "minItems": 1}]},
)
# A model may have called a name that no tool can have; clients may send it back.
_CALLED_NAME = String(MAX_NAME_CHARS, min_chars=1, pattern="[A-Za-z0-9_.-]+")
_TOOL_CALL = Record(
    {
        "id": String(MAX_CALL_ID_CHARS, min_chars=1),
        "type": OneOfNames(("function",)),
        "function": Record(
            {
                "name": _CALLED_NAME,
                "arguments": Parsed(
                    parse_arguments, {"type": "string", "pattern": "^$|^\\{[ -~]*$"}
                ),
            },
            required=("name", "arguments"),
        ),
        "index": Integer(0, MAX_TOOL_CALLS),  # from a chunk; some clients keep it
    },
    required=("id", "function"),
)
_ANY: dict[str, FieldType] = {
    "role": String(16),
    "content": _CONTENT,
    "name": String(MAX_NAME_CHARS, min_chars=1),
}
_NO_CALLS: dict[str, FieldType] = {
    "tool_calls": Unsupported(([],)),
    "function_call": Unsupported(),
    "refusal": Unsupported(),
    "annotations": Unsupported(([],)),
    "audio": Unsupported(),
}
_RECORDS = {
    "system": Record({**_ANY, **_NO_CALLS}),
    "user": Record({**_ANY, **_NO_CALLS}),
    "assistant": Record(
        {
            **_ANY,
            **_NO_CALLS,
            "refusal": _TEXT,
            "tool_calls": List(_TOOL_CALL, MAX_TOOL_CALLS),
            "reasoning_content": _TEXT,
            "reasoning": _TEXT,
        }
    ),
    "tool": Record(
        {**_ANY, **_NO_CALLS, "tool_call_id": String(MAX_CALL_ID_CHARS, min_chars=1)},
        required=("tool_call_id",),
    ),
}


def _described(role: str, names: list[str]) -> Schema:
    record = _RECORDS[role]
    needed = (*record.required, *(("content",) if role != "assistant" else ()))
    schema = Record(record.fields, needed).schema()
    schema["properties"]["role"] = {"enum": names}
    schema["required"] = ["role", *needed]
    return _with_any_fields(schema) if role == "assistant" else schema


def _with_any_fields(schema: Any) -> Any:
    """Returns a schema whose objects may have other fields, too."""
    if isinstance(schema, list):
        return [_with_any_fields(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: _with_any_fields(item)
        for name, item in schema.items()
        if name != "additionalProperties"
    }


MESSAGES = Parsed(
    parse_messages,
    {
        "type": "array",
        "items": {
            "anyOf": [
                _described("system", ["system", "developer"]),
                *(_described(role, [role]) for role in ("user", "assistant", "tool")),
            ]
        },
        "minItems": 1,
        "maxItems": MAX_MESSAGES,
    },
)
