"""Checks of the types and ranges of request parameters; RequestError names the parameter."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager

from serve.errors import RequestError


def as_tuple(name: str, values: object) -> tuple[object, ...]:
    if not isinstance(values, (list, tuple)):
        raise RequestError(
            f"{name} must be a list, not {type(values).__name__}", param=name, code="invalid_type"
        )
    return tuple(values)


def check_length(name: str, values: Sized, limit: int) -> None:
    if len(values) > limit:
        raise RequestError(
            f"{name} has more than {limit} entries", param=name, code="array_above_max_length"
        )


def check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(
            f"{name} must be an integer, not {type(value).__name__}",
            param=name,
            code="invalid_type",
        )
    if not low <= value <= high:
        raise RequestError(f"{name} must be between {low} and {high}", param=name)


def check_float(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(
            f"{name} must be a number, not {type(value).__name__}", param=name, code="invalid_type"
        )
    if not math.isfinite(value) or not low <= value <= high:
        raise RequestError(f"{name} must be between {low:g} and {high:g}", param=name)


@contextmanager
def parameters_named(names: Mapping[str, str]) -> Iterator[None]:
    """Renames parameters in the RequestErrors of the block. names: the API's name by ours."""
    try:
        yield
    except RequestError as exc:
        ours = exc.param or ""
        if ours not in names:
            raise
        theirs = names[ours]
        message = re.sub(
            rf"(?<!the )\b{ours}\b", theirs, str(exc)
        )  # "the prompt" is not the parameter
        raise RequestError(message, param=theirs, code=exc.code) from exc
