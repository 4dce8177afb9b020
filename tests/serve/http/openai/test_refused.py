"""Errors of refused bodies name the parameter and OpenAI's code."""

from __future__ import annotations

from typing import Any

import pytest

from serve.errors import RequestError
from serve.http.openai.requests import parse_chat, parse_completion
from tests.support.http.http_bodies import CHAT, COMPLETION, USER

SPACES = ("spaces_between_special_tokens", "unsupported_parameter")
DEEP: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"x": 2**70}}}

# Each row is a change to a valid body, and the param and code of the error.
BOTH_REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"model": None}, "model", "missing_required_parameter"),
    ({"model": ""}, "model", "missing_required_parameter"),
    ({"model": 5}, "model", "invalid_type"),
    ({"model": "x" * 10_000}, "model", "string_above_max_length"),
    ({"model": "a\0b"}, "model", "invalid_value"),
    *(
        ({"temperature": value}, "temperature", code)
        for value, code in (
            (-0.1, "invalid_value"),
            (2.0001, "invalid_value"),
            ("hot", "invalid_type"),
            ("0.7", "invalid_type"),
            (True, "invalid_type"),
            ([], "invalid_type"),
            (2**63, "invalid_value"),
        )
    ),
    ({"top_p": -1}, "top_p", "invalid_value"),
    ({"top_p": 1.1}, "top_p", "invalid_value"),
    ({"min_p": -0.1}, "min_p", "invalid_value"),
    ({"min_p": 2}, "min_p", "invalid_value"),
    ({"top_k": -5}, "top_k", "invalid_value"),
    ({"top_k": 1e9}, "top_k", "invalid_type"),
    ({"top_k": 1.5}, "top_k", "invalid_type"),
    ({"presence_penalty": 2.1}, "presence_penalty", "invalid_value"),
    ({"presence_penalty": -2.1}, "presence_penalty", "invalid_value"),
    ({"frequency_penalty": 2.1}, "frequency_penalty", "invalid_value"),
    ({"frequency_penalty": False}, "frequency_penalty", "invalid_type"),
    ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
    ({"repetition_penalty": -1}, "repetition_penalty", "invalid_value"),
    ({"repetition_penalty": 1e308}, "repetition_penalty", "invalid_value"),
    ({"max_tokens": -1}, "max_tokens", "invalid_value"),
    ({"max_tokens": 1.5}, "max_tokens", "invalid_type"),
    ({"max_tokens": 1.0}, "max_tokens", "invalid_type"),
    ({"max_tokens": True}, "max_tokens", "invalid_type"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 129}, "n", "invalid_value"),
    ({"n": 10**18}, "n", "invalid_value"),
    ({"n": "2"}, "n", "invalid_type"),
    ({"seed": 2**63}, "seed", "invalid_value"),
    ({"seed": -(2**63) - 1}, "seed", "invalid_value"),
    ({"seed": 1.5}, "seed", "invalid_type"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "invalid_value"),
    ({"min_tokens": -1}, "min_tokens", "invalid_value"),
    ({"stop": ["a"] * 17}, "stop", "array_above_max_length"),
    ({"stop": ""}, "stop", "invalid_value"),
    ({"stop": ["a", ""]}, "stop", "invalid_value"),
    ({"stop": "x" * 10_000}, "stop", "string_above_max_length"),
    ({"stop": 5}, "stop", "invalid_type"),
    ({"stop": [["a"]]}, "stop", "invalid_type"),
    ({"stop": {"a": 1}}, "stop", "invalid_type"),
    ({"stop": "a\0"}, "stop", "invalid_value"),
    ({"stop_token_ids": 5}, "stop_token_ids", "invalid_type"),
    ({"stop_token_ids": ["5"]}, "stop_token_ids", "invalid_type"),
    ({"stop_token_ids": [True]}, "stop_token_ids", "invalid_type"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "invalid_value"),
    ({"stop_token_ids": [2**40]}, "stop_token_ids", "invalid_value"),
    ({"stop_token_ids": [1] * 2000}, "stop_token_ids", "array_above_max_length"),
    ({"logit_bias": {"abc": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"1.0": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"٣": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"1": 1, "01": 2}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"9999999999": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"1": 101}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"1": None}}, "logit_bias", "invalid_type"),
    ({"logit_bias": {"1": "x"}}, "logit_bias", "invalid_type"),
    ({"logit_bias": [1]}, "logit_bias", "invalid_type"),
    (
        {"logit_bias": {str(i): 1 for i in range(100_000)}},
        "logit_bias",
        "array_above_max_length",
    ),
    ({"stream": "yes"}, "stream", "invalid_type"),
    ({"stream": 1}, "stream", "invalid_type"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"stream": True, "stream_options": []}, "stream_options", "invalid_type"),
    (
        {"stream": True, "stream_options": {"include_usage": 5}},
        "stream_options.include_usage",
        "invalid_type",
    ),
    (
        {"stream": True, "stream_options": {"x": 1}},
        "stream_options.x",
        "unknown_parameter",
    ),
    ({"ignore_eos": 1}, "ignore_eos", "invalid_type"),
    ({"skip_special_tokens": "no"}, "skip_special_tokens", "invalid_type"),
    ({"include_stop_str_in_output": 0}, "include_stop_str_in_output", "invalid_type"),
    ({"foo": 1}, "foo", "unknown_parameter"),
    ({"__proto__": {}}, "__proto__", "unknown_parameter"),
    ({"__class__": 1}, "__class__", "unknown_parameter"),
    ({"constructor": 1}, "constructor", "unknown_parameter"),
    ({"k" * 1_000_000: 1}, "k" * 512, "unknown_parameter"),
    ({"user": 5}, "user", "invalid_type"),
    ({"user": "u" * 10_000}, "user", "string_above_max_length"),
    ({"user": "a\0"}, "user", "invalid_value"),
    ({"metadata": {str(i): "v" for i in range(17)}}, "metadata", "array_above_max_length"),
    ({"metadata": {"k" * 65: "v"}}, "metadata", "invalid_value"),
    ({"metadata": {"k": "v" * 513}}, "metadata", "string_above_max_length"),
    ({"metadata": {"k": 5}}, "metadata", "invalid_type"),
    ({"metadata": []}, "metadata", "invalid_type"),
    ({"store": "yes"}, "store", "invalid_type"),
    ({"suffix": "x"}, "suffix", "unsupported_parameter"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "invalid_value"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "invalid_value"),
    ({"prompt_logprobs": True}, "prompt_logprobs", "invalid_type"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "invalid_value"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "invalid_value"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids", "invalid_value"),
    ({"allowed_token_ids": [2**31]}, "allowed_token_ids", "invalid_value"),
    ({"allowed_token_ids": ["1"]}, "allowed_token_ids", "invalid_type"),
    ({"allowed_token_ids": 5}, "allowed_token_ids", "invalid_type"),
    ({"allowed_token_ids": [1] * 1_000_000}, "allowed_token_ids", "array_above_max_length"),
    ({"bad_words": "x"}, "bad_words", "invalid_type"),
    ({"bad_words": [""]}, "bad_words", "invalid_value"),
    ({"bad_words": [5]}, "bad_words", "invalid_type"),
    ({"bad_words": ["x"] * 1_000_000}, "bad_words", "array_above_max_length"),
    ({"bad_words": ["x" * 10_000]}, "bad_words", "string_above_max_length"),
    ({"spaces_between_special_tokens": False}, *SPACES),
    ({"use_beam_search": True}, "use_beam_search", "unsupported_parameter"),
    ({"return_token_ids": 1}, "return_token_ids", "invalid_type"),
    ({"chat_template": "{{7*7}}"}, "chat_template", "unsupported_parameter"),
    ({"modalities": ["audio"]}, "modalities", "unsupported_parameter"),
    ({"priority": 1.5}, "priority", "invalid_type"),
    ({"priority": 2**31}, "priority", "invalid_value"),
    ({"priority": -(2**31) - 1}, "priority", "invalid_value"),
    ({"priority": -(10**18)}, "priority", "invalid_value"),
    ({"cache_salt": "a b"}, "cache_salt", "invalid_value"),
    ({"kv_policy": "quest:budget=101%"}, "kv_policy", "invalid_value"),
    ({"kv_policy": "quest:budget=25"}, "kv_policy", "invalid_value"),
    ({"kv_policy": "none"}, "kv_policy", "invalid_value"),
    ({"kv_policy": "quest:budget=" + "1" * 99}, "kv_policy", "string_above_max_length"),
    ({"kv_policy": 1}, "kv_policy", "invalid_type"),
    ({"cache_salt": ""}, "cache_salt", "invalid_value"),
    ({"cache_salt": "a\x01"}, "cache_salt", "invalid_value"),
    ({"cache_salt": "a\n"}, "cache_salt", "invalid_value"),
    ({"cache_salt": "x" * 1_000_000}, "cache_salt", "string_above_max_length"),
    ({"cache_salt": 5}, "cache_salt", "invalid_type"),
    ({"cache_salt": ["a"]}, "cache_salt", "invalid_type"),
    (
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        "stream_options.continuous_usage_stats",
        "invalid_value",
    ),
    ({"min_tokens": 2**31}, "min_tokens", "invalid_value"),
    ({"max_tokens": 2**63}, "max_tokens", "invalid_value"),
]

FORMAT_REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": "json"}, "response_format", "invalid_type"),
    ({"response_format": {}}, "response_format.type", "missing_required_parameter"),
    ({"response_format": {"type": "strnig"}}, "response_format.type", "invalid_value"),
    ({"response_format": {"type": ["text"]}}, "response_format.type", "invalid_type"),
    ({"response_format": {"type": "text", "x": 1}}, "response_format.x", "unknown_parameter"),
    (
        {"response_format": {"type": "json_schema"}},
        "response_format.json_schema",
        "missing_required_parameter",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format.json_schema.schema",
        "missing_required_parameter",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format.json_schema.name",
        "missing_required_parameter",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
        "response_format.json_schema.name",
        "invalid_value",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": 5}}},
        "response_format.json_schema.schema",
        "invalid_schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": ""}}},
        "response_format.json_schema.schema",
        "invalid_schema",
    ),
    ({"response_format": DEEP}, "response_format.json_schema.schema", "invalid_schema"),
    ({"guided_json": "{"}, "guided_json", "invalid_schema"),
    ({"guided_json": "[]"}, "guided_json", "invalid_schema"),
    ({"guided_json": {"enum": ["x" * 1_000_000]}}, "guided_json", "invalid_schema"),
    ({"guided_json": "x" * 1_000_000}, "guided_json", "invalid_schema"),
    ({"guided_regex": ""}, "guided_regex", "invalid_value"),
    ({"guided_regex": 5}, "guided_regex", "invalid_type"),
    ({"guided_regex": "x" * 1_000_000}, "guided_regex", "string_above_max_length"),
    ({"guided_choice": []}, "guided_choice", "invalid_value"),
    ({"guided_choice": [1]}, "guided_choice", "invalid_type"),
    ({"guided_choice": ["a"] * 100_000}, "guided_choice", "array_above_max_length"),
    ({"guided_grammar": "x" * 1_000_000}, "guided_grammar", "string_above_max_length"),
    ({"guided_json_object": 1}, "guided_json_object", "invalid_type"),
    ({"structured_outputs": {}}, "structured_outputs", "invalid_value"),
    (
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        "structured_outputs",
        "invalid_value",
    ),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", "unknown_parameter"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs.json", "invalid_schema"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "invalid_value"),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
        "invalid_value",
    ),
]

COMPLETION_REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", "missing_required_parameter"),
    ({"prompt": 5}, "prompt", "invalid_type"),
    ({"prompt": {}}, "prompt", "invalid_type"),
    ({"prompt": []}, "prompt", "invalid_prompt"),
    ({"prompt": [[]]}, "prompt", "invalid_prompt"),
    ({"prompt": [[1], []]}, "prompt", "invalid_prompt"),
    ({"prompt": [-1]}, "prompt", "invalid_value"),
    ({"prompt": [2**31]}, "prompt", "invalid_value"),
    ({"prompt": [2**63]}, "prompt", "invalid_value"),
    ({"prompt": [1, 1.5]}, "prompt", "invalid_type"),
    ({"prompt": [1, True]}, "prompt", "invalid_type"),
    ({"prompt": [True]}, "prompt", "invalid_type"),
    ({"prompt": [1, "a"]}, "prompt", "invalid_type"),
    ({"prompt": ["a", 1]}, "prompt", "invalid_type"),
    ({"prompt": ["a", [1]]}, "prompt", "invalid_type"),
    ({"prompt": [None]}, "prompt", "invalid_type"),
    ({"prompt": ["a"] * 10_000}, "prompt", "array_above_max_length"),
    ({"prompt": ["a"] * 100, "n": 100}, "n", "array_above_max_length"),
    ({"logprobs": 6}, "logprobs", "invalid_value"),
    ({"logprobs": -1}, "logprobs", "invalid_value"),
    ({"logprobs": True}, "logprobs", "invalid_type"),
    ({"best_of": 21}, "best_of", "invalid_value"),
    ({"best_of": 2, "n": 3}, "best_of", "invalid_value"),
    ({"best_of": 2, "stream": True}, "best_of", "invalid_value"),
    ({"best_of": 0}, "best_of", "invalid_value"),
    ({"best_of": 20, "prompt": ["a"] * 100}, "best_of", "array_above_max_length"),
    ({"echo": 1}, "echo", "invalid_type"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
    ({"truncation_side": "middle"}, "truncation_side", "invalid_value"),
    ({"functions": [{}]}, "functions", "unsupported_parameter"),
    ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs", "unsupported_parameter"),
    ({"tools": [{"type": "function"}]}, "tools", "unsupported_parameter"),
    ({"tool_choice": "required"}, "tool_choice", "unsupported_parameter"),
    ({"messages": [USER]}, "messages", "unknown_parameter"),
    ({"max_completion_tokens": 5}, "max_completion_tokens", "unknown_parameter"),
    ({"top_logprobs": 1}, "top_logprobs", "unknown_parameter"),
]

CHAT_REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": None}, "messages", "missing_required_parameter"),
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": "hi"}, "messages", "invalid_type"),
    ({"messages": [USER] * 100_000}, "messages", "array_above_max_length"),
    ({"messages": ["hi"]}, "messages[0]", "invalid_type"),
    ({"messages": [USER, {"content": "x"}]}, "messages[1].role", "missing_required_parameter"),
    ({"messages": [{"role": "SYSTEM", "content": "x"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"role": 1, "content": "x"}]}, "messages[0].role", "invalid_type"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role", "invalid_type"),
    (
        {"messages": [{"role": "tool", "content": "x", "tool_call_id": "a"}]},
        "messages[0].tool_call_id",
        "invalid_value",
    ),
    (
        {"messages": [{"role": "tool", "content": "x"}]},
        "messages[0].tool_call_id",
        "missing_required_parameter",
    ),
    (
        {"messages": [{"role": "function", "content": "x"}]},
        "messages[0].role",
        "unsupported_parameter",
    ),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
    (
        {"messages": [{"role": "user", "content": None}]},
        "messages[0].content",
        "missing_required_parameter",
    ),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_type"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "invalid_value"),
    ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]", "invalid_type"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
        "unsupported_parameter",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "zzz"}]}]},
        "messages[0].content[0].type",
        "invalid_value",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
        "messages[0].content[0].text",
        "invalid_type",
    ),
    (
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
        "messages[0].tool_calls[0].id",
        "missing_required_parameter",
    ),
    ({"messages": [{**USER, "weight": 1}]}, "messages[0].weight", "unknown_parameter"),
    ({"messages": [{**USER, "name": ""}]}, "messages[0].name", "invalid_value"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
    ({"max_completion_tokens": "5"}, "max_completion_tokens", "invalid_type"),
    (
        {"max_tokens": 5, "max_completion_tokens": 6},
        "max_completion_tokens",
        "invalid_value",
    ),
    ({"logprobs": 1}, "logprobs", "invalid_type"),
    ({"top_logprobs": 5}, "top_logprobs", "invalid_value"),
    ({"logprobs": False, "top_logprobs": 5}, "top_logprobs", "invalid_value"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"best_of": 2}, "best_of", "unsupported_parameter"),
    ({"echo": True}, "echo", "unsupported_parameter"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "unsupported_parameter"),
    ({"prompt": "x"}, "prompt", "unknown_parameter"),
]

BOTH_REFUSED += FORMAT_REFUSED


def _ids(rows: list[tuple[dict[str, Any], str, str]]) -> list[str]:
    return [repr(change)[:48] for change, _, _ in rows]


@pytest.mark.parametrize(
    ("change", "param", "code"),
    BOTH_REFUSED + COMPLETION_REFUSED,
    ids=_ids(BOTH_REFUSED + COMPLETION_REFUSED),
)
def test_completion_refused(change: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_completion({**COMPLETION, **change}, {})
    assert (caught.value.param, caught.value.code) == (param, code)
    assert len(str(caught.value)) < 800


def test_the_refusal_of_an_image_says_what_is_served() -> None:
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]
    with pytest.raises(RequestError, match="not supported: image_url, but only text is served"):
        parse_chat({**CHAT, "messages": messages}, {})


@pytest.mark.parametrize(
    ("change", "param", "code"), BOTH_REFUSED + CHAT_REFUSED, ids=_ids(BOTH_REFUSED + CHAT_REFUSED)
)
def test_chat_refused(change: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_chat({**CHAT, **change}, {})
    assert (caught.value.param, caught.value.code) == (param, code)
