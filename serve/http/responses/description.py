"""Descriptions of the routes of the Responses API, for /openapi.json."""

from __future__ import annotations

from serve.http.responses.listing import MAX_LIMIT
from serve.http.responses.requests import COUNT as COUNT_BODY
from serve.http.responses.requests import CREATE as CREATE_BODY
from serve.http.schema.describe import Operation
from serve.http.schema.fields import Schema

_COUNT: Schema = {"type": "integer", "minimum": 0}
_TEXT: Schema = {"type": "string"}
_OBJECT: Schema = {"type": "object"}
_OBJECTS: Schema = {"type": "array", "items": _OBJECT}
_RESPONSE: Schema = {
    "type": "object",
    "properties": {
        "id": _TEXT,
        "object": {"const": "response"},
        "created_at": _COUNT,
        "status": {"enum": ["completed", "incomplete"]},
        "model": _TEXT,
        "output": _OBJECTS,
        "usage": {
            "type": "object",
            "properties": {
                "input_tokens": _COUNT,
                "output_tokens": _COUNT,
                "total_tokens": _COUNT,
            },
            "required": ["input_tokens", "output_tokens", "total_tokens"],
        },
        "error": {"type": "null"},
        "incomplete_details": {"anyOf": [_OBJECT, {"type": "null"}]},
    },
    "required": ["id", "object", "created_at", "status", "model", "output", "usage"],
}
_NULLABLE_TEXT: Schema = {"type": ["string", "null"]}

CREATE = Operation(
    "Answers a conversation",
    answer=_RESPONSE,
    body=CREATE_BODY.schema(),
    streams=True,
)
COUNT = Operation(
    "Counts the tokens of a conversation",
    answer={
        "type": "object",
        "properties": {"object": {"const": "response.input_tokens"}, "input_tokens": _COUNT},
        "required": ["object", "input_tokens"],
    },
    body=COUNT_BODY.schema(),
)
FETCH = Operation(
    "A stored response",
    answer=_RESPONSE,
    statuses=(404,),
    query={"stream": {"enum": ["false"]}},
)
DELETE = Operation(
    "Deletes a stored response",
    answer={
        "type": "object",
        "properties": {
            "id": _TEXT,
            "object": {"const": "response"},
            "deleted": {"const": True},
        },
        "required": ["id", "object", "deleted"],
    },
    statuses=(404,),
)
INPUT_ITEMS = Operation(
    "The input items of a response",
    answer={
        "type": "object",
        "properties": {
            "object": {"const": "list"},
            "data": _OBJECTS,
            "first_id": _NULLABLE_TEXT,
            "last_id": _NULLABLE_TEXT,
            "has_more": {"type": "boolean"},
        },
        "required": ["object", "data", "first_id", "last_id", "has_more"],
    },
    statuses=(404,),
    query={
        "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT},
        "order": {"enum": ["asc", "desc"]},
        "after": {"type": "string"},
    },
)
CANCEL = Operation(
    "Refused: background responses are not supported", answer=_RESPONSE, statuses=(404,)
)
