"""Descriptions of Anthropic's routes, for /openapi.json."""

from __future__ import annotations

from serve.http.anthropic.requests import COUNT as COUNT_BODY
from serve.http.anthropic.requests import CREATE as CREATE_BODY
from serve.http.schema.describe import Operation
from serve.http.schema.fields import Schema

_ERROR: Schema = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            "required": ["type", "message"],
        },
        "request_id": {"type": "string"},
    },
    "required": ["type", "error", "request_id"],
}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_TEXT: Schema = {"type": "string"}
_BLOCKS: list[Schema] = [
    {"type": {"const": "text"}, "text": _TEXT},
    {"type": {"const": "thinking"}, "thinking": _TEXT, "signature": _TEXT},
    {"type": {"const": "tool_use"}, "id": _TEXT, "name": _TEXT, "input": {"type": "object"}},
]
_STOP_REASONS = [
    "end_turn",
    "max_tokens",
    "model_context_window_exceeded",
    "stop_sequence",
    "tool_use",
]
_MESSAGE_FIELDS: Schema = {
    "id": _TEXT,
    "type": {"const": "message"},
    "role": {"const": "assistant"},
    "model": _TEXT,
    "content": {
        "type": "array",
        "items": {
            "anyOf": [
                {"type": "object", "properties": block, "required": list(block)}
                for block in _BLOCKS
            ]
        },
    },
    "stop_reason": {"enum": _STOP_REASONS},
    "stop_sequence": {"type": ["string", "null"]},
    "usage": {
        "type": "object",
        "properties": {
            "input_tokens": _COUNT,
            "cache_creation_input_tokens": _COUNT,
            "cache_read_input_tokens": _COUNT,
            "output_tokens": _COUNT,
        },
        "required": ["input_tokens", "output_tokens"],
    },
}

CREATE = Operation(
    "Anthropic's messages: answers a conversation",
    answer={
        "type": "object",
        "properties": _MESSAGE_FIELDS,
        "required": list(_MESSAGE_FIELDS),
    },
    body=CREATE_BODY.schema(),
    streams=True,
    error=_ERROR,
    statuses=(529,),
)
COUNT = Operation(
    "Anthropic's messages: counts the tokens of a conversation",
    answer={
        "type": "object",
        "properties": {"input_tokens": _COUNT},
        "required": ["input_tokens"],
    },
    body=COUNT_BODY.schema(),
    error=_ERROR,
    statuses=(529,),
)
