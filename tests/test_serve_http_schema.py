"""Bodies to SamplingParams: every refusal names its parameter and OpenAI's code."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.errors import RequestError
from serve.http.schema import CHAT_FIELDS, COMPLETION_FIELDS, parse_chat, parse_completion

USER = {"role": "user", "content": "hi"}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hi"}
CHAT: dict[str, Any] = {"model": "m", "messages": [USER]}

# changes to a good body -> (param, code)
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
    ({"metadata": {"k": "v" * 513}}, "metadata", "invalid_value"),
    ({"metadata": {"k": 5}}, "metadata", "invalid_value"),
    ({"metadata": []}, "metadata", "invalid_type"),
    ({"store": "yes"}, "store", "invalid_type"),
    ({"best_of": 2}, "best_of", "unsupported_parameter"),
    ({"best_of": 21, "stream": True}, "best_of", "unsupported_parameter"),
    ({"echo": True}, "echo", "unsupported_parameter"),
    ({"suffix": "x"}, "suffix", "unsupported_parameter"),
    ({"prompt_logprobs": 1}, "prompt_logprobs", "unsupported_parameter"),
    ({"allowed_token_ids": [1]}, "allowed_token_ids", "unsupported_parameter"),
    ({"bad_words": ["x"]}, "bad_words", "unsupported_parameter"),
    ({"chat_template": "{{7*7}}"}, "chat_template", "unsupported_parameter"),
    (
        {"chat_template_kwargs": {"tokenize": False}},
        "chat_template_kwargs",
        "unsupported_parameter",
    ),
    ({"tools": [{"type": "function"}]}, "tools", "unsupported_parameter"),
    ({"tool_choice": "required"}, "tool_choice", "unsupported_parameter"),
    ({"functions": [{}]}, "functions", "unsupported_parameter"),
    ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
    ({"response_format": {"type": "strnig"}}, "response_format", "unsupported_parameter"),
    ({"modalities": ["audio"]}, "modalities", "unsupported_parameter"),
    ({"priority": 1.5}, "priority", "invalid_type"),
    ({"priority": 2**31}, "priority", "invalid_value"),
    ({"priority": -(2**31) - 1}, "priority", "invalid_value"),
    ({"cache_salt": "a b"}, "cache_salt", "invalid_value"),
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
        "unknown_parameter",
    ),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "unsupported_parameter"),
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
        "messages[0].tool_calls",
        "unsupported_parameter",
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
    ({"prompt": "x"}, "prompt", "unknown_parameter"),
]


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


@pytest.mark.parametrize(
    ("change", "param", "code"), BOTH_REFUSED + CHAT_REFUSED, ids=_ids(BOTH_REFUSED + CHAT_REFUSED)
)
def test_chat_refused(change: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_chat({**CHAT, **change}, {})
    assert (caught.value.param, caught.value.code) == (param, code)


def test_completion_defaults() -> None:
    call = parse_completion(COMPLETION, {})
    assert call.prompts == ["hi"]
    assert (call.stream, call.include_usage) == (False, False)
    params = call.params
    assert (params.max_tokens, params.n, params.temperature, params.logprobs) == (16, 1, 1.0, None)


def test_chat_defaults() -> None:
    params = parse_chat(CHAT, {}).params
    assert (params.max_tokens, params.temperature, params.top_p) == (None, 1.0, 1.0)


def test_server_defaults_fill_what_is_left_out() -> None:
    defaults = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "eos_token_ids": (2,)}
    params = parse_chat({**CHAT, "temperature": 0, "top_k": None}, defaults).params
    assert (params.temperature, params.top_p, params.top_k) == (0, 0.9, 20)


def test_every_parameter_arrives() -> None:
    values: dict[str, Any] = {
        "n": 2,
        "max_tokens": 7,
        "min_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "presence_penalty": -2.0,
        "frequency_penalty": 2,
        "seed": -5,
        "priority": -7,
        "stop_token_ids": [1, 2],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    body = {**values, "stop": "END", "logit_bias": {"5": -100, "6": 0.5}, "logprobs": 5}
    params = parse_completion({**COMPLETION, **body}, {}).params
    for name, value in values.items():
        expected = tuple(value) if isinstance(value, list) else value
        assert getattr(params, name) == expected
    assert params.stop == ("END",)
    assert params.logit_bias == {5: -100, 6: 0.5}
    assert params.logprobs == 5


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [{"prompt_token_ids": [1, 2]}]),
        ([[1], [2, 3]], [{"prompt_token_ids": [1]}, {"prompt_token_ids": [2, 3]}]),
    ],
)
def test_prompt_forms(prompt: Any, expected: list[Any]) -> None:
    assert parse_completion({**COMPLETION, "prompt": prompt}, {}).prompts == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 3}, 3),
    ],
)
def test_chat_logprobs(body: dict[str, Any], expected: int | None) -> None:
    assert parse_chat({**CHAT, **body}, {}).params.logprobs == expected


@pytest.mark.parametrize(
    "body",
    [
        {"max_completion_tokens": 9},
        {"max_tokens": 9},
        {"max_tokens": 9, "max_completion_tokens": 9},
    ],
)
def test_chat_max_tokens(body: dict[str, Any]) -> None:
    assert parse_chat({**CHAT, **body}, {}).params.max_tokens == 9


def test_messages_come_out_in_one_shape() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    echoed = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": [], "audio": None}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": parts, "name": "ann"},
        echoed,
        {"role": "user", "content": ""},
    ]
    assert parse_chat({**CHAT, "messages": messages}, {}).messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb", "name": "ann"},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": ""},
    ]


def test_harmless_fields_are_accepted() -> None:
    body = {
        "user": "ann",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "n": 1,
        "best_of": 1,
        "echo": False,
    }
    parse_chat({**CHAT, **body}, {})
    parse_completion({**COMPLETION, **body}, {})


@pytest.mark.parametrize("name", sorted((COMPLETION_FIELDS | CHAT_FIELDS) - {"model"}))
def test_null_means_absent(name: str) -> None:
    if name != "prompt":
        assert parse_completion({**COMPLETION, name: None}, {}) == parse_completion(COMPLETION, {})
    if name != "messages":
        assert parse_chat({**CHAT, name: None}, {}) == parse_chat(CHAT, {})


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**64), 2**64)
    | st.floats(allow_nan=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=120, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(COMPLETION_FIELDS | CHAT_FIELDS)), JSON, max_size=6))
def test_any_json_is_parsed_or_refused(change: dict[str, Any]) -> None:
    for parse, good in ((parse_completion, COMPLETION), (parse_chat, CHAT)):
        with contextlib.suppress(RequestError):
            parse({**good, **change}, {})


@pytest.mark.parametrize(
    ("names", "client"),
    [
        ({}, None),
        ({"user": "u"}, "u"),
        ({"user": "u", "safety_identifier": "s"}, "s"),
        ({"user": "u", "prompt_cache_key": "k", "safety_identifier": ""}, "k"),
    ],
)
def test_who_the_client_is(names, client):
    assert parse_chat(CHAT | names, {}).client == client
    assert parse_completion(COMPLETION | names, {}).client == client


def test_every_name_of_the_client_is_checked():
    with pytest.raises(RequestError) as error:
        parse_chat(CHAT | {"prompt_cache_key": "k", "user": 5}, {})
    assert error.value.param == "user"
