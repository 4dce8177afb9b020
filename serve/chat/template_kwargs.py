"""Checks a caller's variables of the chat template."""

from __future__ import annotations

import json
import re
from typing import Any

from serve.errors import RequestError
from serve.parameter_checks import check_length

MAX_TEMPLATE_KWARGS = 16
MAX_KWARG_CHARS = 1024
MAX_KWARG_INTEGER = 1 << 53
_MAX_SHOWN = 64
_NAME = "(?:[a-z_]{1,64})"
# Names that the server passes to templates, and Jinja's own: callers cannot override them.
_RESERVED = frozenset(
    (
        *("messages", "tools", "documents", "tool_choice", "add_generation_prompt"),
        *("continue_final_message", "chat_template", "tokenize", "tokenizer", "return_dict"),
        *("return_tensors", "padding", "truncation", "max_length", "raise_exception"),
        *("strftime_now", "namespace", "range", "dict", "lipsum", "cycler", "joiner", "loop"),
        *("self", "caller", "true", "false", "none"),
    )
)


def check_template_kwargs(value: Any, where: str) -> dict[str, Any]:
    """Returns the variables. Raises RequestError for names that callers cannot set and for values
    that are no scalars."""
    if not isinstance(value, dict):
        raise RequestError(f"{where} must be an object", param=where, code="invalid_type")
    check_length(where, value, MAX_TEMPLATE_KWARGS)
    for name, item in value.items():
        if not re.fullmatch(_NAME, str(name)) or _is_reserved(str(name)):
            raise RequestError(
                f"{where} cannot set {json.dumps(str(name)[:_MAX_SHOWN])}",
                param=where,
                code="unsupported_parameter",
            )
        _check_scalar(item, f"{where}.{name}")
    return value


def _is_reserved(name: str) -> bool:
    return name in _RESERVED or name.startswith("_") or name.endswith(("_token", "_tokens"))


def _check_scalar(value: Any, where: str) -> None:
    if isinstance(value, str):
        if len(value) > MAX_KWARG_CHARS:
            raise RequestError(
                f"{where} is longer than {MAX_KWARG_CHARS} characters",
                param=where,
                code="string_above_max_length",
            )
    elif value is not None and not isinstance(value, bool | int | float):
        raise RequestError(
            f"{where} must be a string, a number, true, false or null",
            param=where,
            code="invalid_type",
        )
    elif isinstance(value, int) and abs(value) > MAX_KWARG_INTEGER:
        raise RequestError(f"{where} is out of range", param=where)
