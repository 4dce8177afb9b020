"""Valid bodies of the API, as seeds."""

from __future__ import annotations

import json
from typing import Any

_SAMPLING: dict[str, Any] = {
    "n": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": -1,
    "stop": ["x", "y"],
    "stop_token_ids": [1],
    "logit_bias": {"5": -100, "6": 1.5},
    "presence_penalty": 1,
    "frequency_penalty": -2.0,
    "repetition_penalty": 1.1,
    "min_tokens": 1,
    "max_tokens": 3,
    "ignore_eos": True,
    "cache_salt": "a-b_c",
    "priority": -1,
    "user": "u",
    "stream": True,
    "stream_options": {"include_usage": True},
}
_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
_MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "t"}]},
    {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "5"},
]
_SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}


def _packed(*bodies: dict[str, Any]) -> tuple[bytes, ...]:
    return tuple(json.dumps(body).encode() for body in bodies)


COMPLETION_BODIES = _packed(
    {"model": "m", "prompt": "hi", "logprobs": 5, "echo": True, **_SAMPLING},
    {"model": "m", "prompt": [[1, 2], [3]], "best_of": 3, "suffix": "", "n": 1},
    {"model": "m", "prompt": [1, 2, 3], "allowed_token_ids": [1, 2], "bad_words": ["w"]},
    {"model": "m", "prompt": ["a", "b"], "guided_regex": "a+", "response_format": _SCHEMA},
)
CHAT_BODIES = _packed(
    {"model": "m", "messages": _MESSAGES, "tools": [_TOOL], "tool_choice": "auto"},
    {"model": "m", "messages": _MESSAGES[:2], "logprobs": True, "top_logprobs": 3, **_SAMPLING},
    {"model": "m", "messages": _MESSAGES[:2], "response_format": _SCHEMA, "metadata": {"a": "b"}},
    {
        "model": "m",
        "messages": _MESSAGES[:2],
        "tools": [_TOOL],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "chat_template_kwargs": {"enable_thinking": False},
        "max_completion_tokens": 5,
    },
)
