"""Rewrites the bounds of numbers in a JSON schema so that the grammar library accepts them.

llguidance keeps bounds as doubles and makes expressions of them in 64-bit integers. It refuses the
range of an int64 and a maximum of 1e20, and a bound that a double does not hold moves. Here each
range becomes one that the library takes and that lies inside the schema's own.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from serve.structured.refusal import invalid
from serve.structured.schema_walk import DATA, NAMED

_EXACT = 1 << 53  # a double holds every integer up to here
_LARGEST = (1 << 63) - 1  # of an int64; the library reads 2^63 as this
_DOUBLE = (1 << 63) - 1024  # the largest double below 2^63
_LONG = 10**18  # a range from here on needs an end, since the library has no 20 digits
_ENDLESS = 10**308  # no number is generated beyond it
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")


def fit_numbers(node: Any, *, bounded: bool = False) -> Any:
    """Returns a copy of the schema with such bounds. bounded: a multiple has bounds on both sides,
    since it could not be ended after any digit. Raises RequestError with code "invalid_schema" for
    numbers that the library cannot express."""
    if isinstance(node, list):
        return [fit_numbers(item, bounded=bounded) for item in node]
    if not isinstance(node, dict):
        return node
    made: dict[str, Any] = {}
    for key, value in node.items():
        if key in DATA:
            if key in ("const", "enum"):
                _check_constants([value])
            made[key] = value
        elif key in NAMED and isinstance(value, dict):
            made[key] = {name: fit_numbers(item, bounded=bounded) for name, item in value.items()}
        else:
            made[key] = fit_numbers(value, bounded=bounded)
    if bounded and "multipleOf" in made:
        made = _bounded(made)
    return _fitted(made)


def _bounded(node: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema with a bound on each side."""
    given = [node[key] for key in _BOUNDS if _is_finite(node.get(key))]
    if not all(abs(value) < _EXACT for value in given):
        return node
    if not any(_is_finite(node.get(key)) for key in _BOUNDS[:2]):
        node = node | {"minimum": -_EXACT}
    if not any(_is_finite(node.get(key)) for key in _BOUNDS[2:]):
        node = node | {"maximum": _EXACT}
    return node


def _check_constants(values: list[Any]) -> None:
    for value in values:
        if isinstance(value, dict | list):
            _check_constants(list(value.values()) if isinstance(value, dict) else value)
        elif type(value) is int and not _is_double(value):
            raise invalid(
                f"has the constant {str(value)[:40]}, which the grammar library cannot express: it"
                " keeps numbers as doubles"
            )


def _is_double(value: int) -> bool:
    return abs(value) <= _EXACT or (abs(value) <= _DOUBLE and int(float(value)) == value)


def _fitted(node: dict[str, Any]) -> dict[str, Any]:
    given = {key: node[key] for key in _BOUNDS if _is_finite(node.get(key))}
    if all(abs(value) <= _EXACT for value in given.values()):
        return node
    kind = node.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    is_integer = "number" not in kinds and None not in kinds
    low = _tightest(given, "minimum", "exclusiveMinimum", is_integer, 1)
    high = _tightest(given, "maximum", "exclusiveMaximum", is_integer, -1)
    if low is not None and high is not None and low[0] > high[0]:
        return node  # the library says so
    rest = {key: value for key, value in node.items() if key not in given}
    fit = _fit_integers if is_integer else _fit_doubles
    bounds = fit(low and low[0], high and high[0])
    if bounds is None:
        raise invalid(
            "has a range of numbers that the grammar library cannot express: it takes those from "
            f"{-_DOUBLE} to {_LARGEST}, with bounds that a double holds"
        )
    for (value, bound), keys in zip(
        ((bounds[0], low), (bounds[1], high)), (_BOUNDS[:2], _BOUNDS[2:]), strict=True
    ):
        if value is not None:
            is_excluded = bound is not None and bound[1] and bound[0] == value
            rest[keys[is_excluded]] = int(value) if value == int(value) else value
    return rest


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < math.inf


_Limit = tuple[Fraction, bool]  # a bound, and whether the bound itself is excluded


def _tightest(
    given: dict[str, Any], key: str, exclusive: str, is_integer: bool, up: int
) -> _Limit | None:
    """Returns the tighter of the two bounds. up: 1 for lower bounds, -1 for upper ones."""
    limits = [
        (Fraction(given[name]), name == exclusive) for name in (key, exclusive) if name in given
    ]
    if not limits:
        return None
    value, is_excluded = max(limits, key=lambda limit: (up * limit[0], limit[1]))
    if not is_integer:
        return value, is_excluded
    whole = up * math.ceil(up * value)
    return Fraction(whole + up if is_excluded and whole == value else whole), False


_Pair = tuple[int | float | None, int | float | None]


def _fit_integers(low: Fraction | None, high: Fraction | None) -> _Pair | None:
    if (low is not None and low > _LARGEST) or (high is not None and high < -_DOUBLE):
        return None
    least = None if low is None else _at_least(max(int(low), -_DOUBLE))
    most = None if high is None else -_at_least(max(-int(high), -_DOUBLE))
    if high is not None and high >= _LARGEST:
        most = _LARGEST
    if least is not None and least >= _LONG and most is None:
        most = _LARGEST
    if most is not None and most <= -_LONG and least is None:
        least = -_DOUBLE
    if least is not None and most is not None and least > most:
        return None
    if least is not None and least > _LARGEST:
        return None
    return least, most


def _at_least(value: int) -> int:
    """Returns the smallest integer from `value` on that a double holds."""
    double = float(value)
    return int(double if int(double) >= value else math.nextafter(double, math.inf))


def _fit_doubles(low: Fraction | None, high: Fraction | None) -> _Pair | None:
    if (low is not None and low > _DOUBLE) or (high is not None and high < -_DOUBLE):
        return None
    least = None if low is None or low <= -_ENDLESS else max(float(low), float(-_DOUBLE))
    most = None if high is None or high >= _ENDLESS else min(float(high), float(_DOUBLE))
    if least is not None and least >= _LONG and most is None:
        most = float(_DOUBLE)
    if most is not None and most <= -_LONG and least is None:
        least = float(-_DOUBLE)
    if least is not None and most is not None and least > most:
        return None
    return least, most
