"""Typed access to the fields of a body. null is absent; every mistake names its parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serve.errors import RequestError
from serve.http.errors import quoted

MAX_NAME_CHARS = 512
MAX_LISTED = 8
# Known to the API, not to us; the values listed ask for nothing and are accepted.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "use_beam_search": (False,),
    "prompt_logprobs": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
}


class Fields:
    """The fields of one object. prefix: what comes before a name in `param`, if anything."""

    def __init__(self, body: Mapping[str, Any], known: frozenset[str], prefix: str = "") -> None:
        self._values = {name: value for name, value in body.items() if value is not None}
        self._prefix = prefix
        unknown = [name for name in self._values if name not in known]
        if unknown:
            self._refuse(unknown)

    def _refuse(self, names: list[str]) -> None:
        for name in names:
            if name not in _NEUTRAL or self._prefix:
                listed = ", ".join(quoted(item) for item in sorted(names)[:MAX_LISTED])
                raise RequestError(
                    f"unknown parameter {listed}",
                    param=self._prefix + name[:MAX_NAME_CHARS],
                    code="unknown_parameter",
                )
            if not _is_neutral(self._values[name], _NEUTRAL[name]):
                raise RequestError(
                    f"{name} is not supported", param=name, code="unsupported_parameter"
                )

    def required(self, name: str) -> Any:
        if name not in self._values:
            raise RequestError(
                f"{name} is missing", param=self._prefix + name, code="missing_required_parameter"
            )
        return self._values[name]

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def integer(self, name: str) -> int | None:
        value = self._values.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise self._type_error(name, "an integer")
        return value

    def number(self, name: str) -> float | None:
        value = self._values.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise self._type_error(name, "a number")
        return value

    def boolean(self, name: str) -> bool | None:
        value = self._values.get(name)
        if value is not None and not isinstance(value, bool):
            raise self._type_error(name, "true or false")
        return value

    def string(self, name: str, max_chars: int = MAX_NAME_CHARS) -> str | None:
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self._type_error(name, "a string")
        if len(value) > max_chars:
            raise RequestError(
                f"{name} is longer than {max_chars} characters",
                param=self._prefix + name,
                code="string_above_max_length",
            )
        if "\0" in value:
            raise RequestError(f"{name} holds a NUL character", param=self._prefix + name)
        return value

    def mapping(self, name: str) -> dict[str, Any] | None:
        value = self._values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self._type_error(name, "an object")
        return value

    def _type_error(self, name: str, wanted: str) -> RequestError:
        return RequestError(
            f"{name} must be {wanted}", param=self._prefix + name, code="invalid_type"
        )


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    return any(type(value) is type(item) and value == item for item in neutral)
