"""The error of a structured output that cannot be used."""

from __future__ import annotations

from serve.errors import RequestError

PARAM = "structured"
INVALID_SCHEMA = "invalid_schema"


def invalid(problem: str) -> RequestError:
    """Returns the error with code "invalid_schema"; its message begins with the parameter."""
    return RequestError(f"{PARAM} {problem}", param=PARAM, code=INVALID_SCHEMA)
