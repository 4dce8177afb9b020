"""The `messages` of a chat request, checked and brought to one shape: {role, content, name?}.

Text parts become one string, "developer" becomes "system", and what clients echo back from
our own answers (refusal: null, tool_calls: []) is dropped.
"""

from __future__ import annotations

from typing import Any

from serve.errors import RequestError
from serve.http.errors import quoted

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
MAX_MESSAGES = 8192
MAX_NAME_CHARS = 64
_FIELDS = frozenset({"role", "content", "name"})
_ECHOED = frozenset({"refusal", "annotations", "audio", "function_call", "tool_calls"})


def parse_messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise RequestError("messages must be a list", param="messages", code="invalid_type")
    if not value:
        raise RequestError("messages is empty", param="messages")
    if len(value) > MAX_MESSAGES:
        raise RequestError(
            f"messages has more than {MAX_MESSAGES} entries",
            param="messages",
            code="array_above_max_length",
        )
    return [_message(item, f"messages[{index}]") for index, item in enumerate(value)]


def _message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"{where} must be an object", param=where, code="invalid_type")
    _check_fields(value, where)
    message = {"role": _role(value.get("role"), f"{where}.role")}
    message["content"] = _content(value.get("content"), f"{where}.content")
    name = value.get("name")
    if name is not None:
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
            raise RequestError(
                f"{where}.name must be a string of 1 to {MAX_NAME_CHARS} characters",
                param=f"{where}.name",
            )
        message["name"] = name
    return message


def _check_fields(value: dict[str, Any], where: str) -> None:
    for key, item in value.items():
        if key in _FIELDS:
            continue
        if key not in _ECHOED:
            raise RequestError(
                f"unknown parameter {quoted(key)} in {where}",
                param=f"{where}.{key[:MAX_NAME_CHARS]}",
                code="unknown_parameter",
            )
        if item is not None and item != []:
            raise RequestError(
                f"{where}.{key} is not supported",
                param=f"{where}.{key}",
                code="unsupported_parameter",
            )


def _role(value: Any, where: str) -> str:
    if value is None:
        raise RequestError(f"{where} is missing", param=where, code="missing_required_parameter")
    if not isinstance(value, str):
        raise RequestError(f"{where} must be a string", param=where, code="invalid_type")
    if value in ("tool", "function"):
        raise RequestError(
            f"{where} {quoted(value)} is not supported", param=where, code="unsupported_parameter"
        )
    if value not in ROLES:
        raise RequestError(
            f"{where} must be one of {', '.join(ROLES)}, not {quoted(value)}", param=where
        )
    return ROLES[value]


def _content(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        raise RequestError(f"{where} is missing", param=where, code="missing_required_parameter")
    if not isinstance(value, list):
        raise RequestError(
            f"{where} must be a string or a list of text parts", param=where, code="invalid_type"
        )
    if not value:
        raise RequestError(f"{where} is an empty list", param=where)
    return "\n".join(_part(part, f"{where}[{index}]") for index, part in enumerate(value))


def _part(value: Any, where: str) -> str:
    if not isinstance(value, dict):
        raise RequestError(f"{where} must be an object", param=where, code="invalid_type")
    kind = value.get("type")
    if kind != "text":
        known = kind in ("image_url", "input_audio", "file", "refusal", "video_url")
        raise RequestError(
            f"{where} has the type {quoted(kind)}; only text is supported",
            param=f"{where}.type",
            code="unsupported_parameter" if known else "invalid_value",
        )
    for key in value:
        if key not in ("type", "text"):
            raise RequestError(
                f"unknown parameter {quoted(key)} in {where}",
                param=f"{where}.{key[:MAX_NAME_CHARS]}",
                code="unknown_parameter",
            )
    text = value.get("text")
    if not isinstance(text, str):
        raise RequestError(
            f"{where}.text must be a string", param=f"{where}.text", code="invalid_type"
        )
    return text
