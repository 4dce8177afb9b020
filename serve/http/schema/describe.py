"""Descriptions of routes for /openapi.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from serve.http.schema.fields import Schema

ERROR: Schema = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one route.

    answer: JSON Schema of the body of a 200; None for text of answer_type. body: JSON Schema of the
    request's body, if it has one. streams: the answer may be server-sent events. error: JSON Schema
    of the body of every other answer. statuses: errors beside those that every such route has.
    query: the optional parameters in the URL.
    """

    summary: str
    answer: Schema | None = None
    body: Schema | None = None
    answer_type: str = "application/json"
    streams: bool = False
    error: Schema | None = None
    statuses: tuple[int, ...] = ()
    query: Mapping[str, Schema] = field(default_factory=dict)
