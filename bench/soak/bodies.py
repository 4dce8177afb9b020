"""Valid bodies of the API for the model "m", as seeds of mutations."""

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

_RESPONSE_CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
_RESULT = {"type": "function_call_output", "call_id": "c", "output": "5"}
_REASONING = {"type": "reasoning", "id": "rs", "summary": [], "content": []}
RESPONSE_BODIES = _packed(
    {"model": "m", "input": "hi", "instructions": "s", "temperature": 0.5, "stream": True},
    {
        "model": "m",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "t"}]},
            _REASONING,
            _RESPONSE_CALL,
            {**_RESULT, "output": [{"type": "input_text", "text": "5"}]},
            {"type": "message", "role": "assistant", "content": "a", "status": "completed"},
        ],
        "tools": [{"type": "function", **_TOOL["function"]}],  # type: ignore[dict-item]
        "tool_choice": {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "function", "name": "f"}],
        },
        "max_output_tokens": 5,
        "store": False,
    },
    {
        "model": "m",
        "input": [{"role": "developer", "content": "s"}, _RESPONSE_CALL, _RESULT],
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 3,
        "metadata": {"a": "b"},
        "previous_response_id": None,
    },
)
_USE = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}
_USED = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "5"}]}
_THOUGHT = {"type": "thinking", "thinking": "t", "signature": ""}
_INPUT_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
MESSAGE_BODIES = _packed(
    {
        "model": "m",
        "max_tokens": 5,
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I"}],
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "stop_sequences": ["x"],
        "temperature": 0.5,
        "top_k": 5,
        "stream": True,
    },
    {
        "model": "m",
        "max_tokens": 2000,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "t"}]},
            {"role": "assistant", "content": [_THOUGHT, {"type": "text", "text": "a"}, _USE]},
            {"role": "user", "content": [{**_USED, "is_error": True}]},
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": _INPUT_SCHEMA}],
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "metadata": {"user_id": "u"},
    },
)
TOKENIZE_BODIES = _packed(
    {"model": "m", "prompt": "hi", "add_special_tokens": False, "return_token_strs": True},
    {"model": "m", "messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": True},
)
DETOKENIZE_BODIES = _packed({"model": "m", "tokens": [5, 6]})
EMBEDDING_BODIES = _packed(
    {"model": "m", "input": "hi", "encoding_format": "base64"},
    {"model": "m", "input": [[1, 2], [3]], "dimensions": 8, "user": "u"},
)

SEEDS: dict[str, tuple[bytes, ...]] = {
    "/v1/completions": COMPLETION_BODIES,
    "/v1/chat/completions": CHAT_BODIES,
    "/v1/embeddings": EMBEDDING_BODIES,
    "/tokenize": TOKENIZE_BODIES,
    "/detokenize": DETOKENIZE_BODIES,
    "/v1/responses": RESPONSE_BODIES,
    "/v1/messages": MESSAGE_BODIES,
    "/v1/messages/count_tokens": MESSAGE_BODIES,
}
"""The bodies by the path that takes them."""
