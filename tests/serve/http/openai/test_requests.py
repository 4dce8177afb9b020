"""Bodies are parsed to SamplingParams, prompts and messages, with defaults."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.errors import RequestError
from serve.http.openai.requests import CHAT as CHAT_BODY
from serve.http.openai.requests import COMPLETION as COMPLETION_BODY
from serve.http.openai.requests import parse_chat, parse_completion
from tests.support.http.http_bodies import CHAT, COMPLETION
from tests.support.profile import examples


def test_completion_defaults() -> None:
    call = parse_completion(COMPLETION, {})
    assert call.prompts == ["hi"]
    assert (call.stream, call.include_usage) == (False, False)
    params = call.params
    assert (params.max_tokens, params.n, params.temperature, params.logprobs) == (16, 1, 1.0, None)


def test_chat_defaults() -> None:
    params = parse_chat(CHAT, {}).params
    assert (params.max_tokens, params.temperature, params.top_p) == (None, 1.0, 1.0)


def test_server_defaults_replace_missing_fields() -> None:
    defaults = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "eos_token_ids": (2,)}
    params = parse_chat({**CHAT, "temperature": 0, "top_k": None}, defaults).params
    assert (params.temperature, params.top_p, params.top_k) == (0, 0.9, 20)


def test_every_parameter_is_parsed() -> None:
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


def test_messages_are_normalized() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    echoed = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": [], "audio": None}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": parts, "name": "ann"},
        echoed,
        {"role": "user", "content": ""},
    ]
    assert parse_chat({**CHAT, "messages": messages}, {}).chat.messages == [
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


@pytest.mark.parametrize("name", sorted({*COMPLETION_BODY.fields, *CHAT_BODY.fields} - {"model"}))
@pytest.mark.row("J21")
def test_null_means_absent(name: str) -> None:
    if name != "prompt":
        assert parse_completion({**COMPLETION, name: None}, {}) == parse_completion(COMPLETION, {})
    if name != "messages":
        assert parse_chat({**CHAT, name: None}, {}) == parse_chat(CHAT, {})


NAMES = sorted({*COMPLETION_BODY.fields, *CHAT_BODY.fields})
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


@examples(120)
@given(
    st.dictionaries(
        st.sampled_from(sorted({*COMPLETION_BODY.fields, *CHAT_BODY.fields})), JSON, max_size=6
    )
)
def test_any_json_is_parsed_or_refused(change: dict[str, Any]) -> None:
    for parse, body in ((parse_completion, COMPLETION), (parse_chat, CHAT)):
        with contextlib.suppress(RequestError):
            parse({**body, **change}, {})


@pytest.mark.parametrize(
    ("names", "client"),
    [
        ({}, None),
        ({"user": "u"}, "u"),
        ({"user": "u", "safety_identifier": "s"}, "s"),
        ({"user": "u", "prompt_cache_key": "k", "safety_identifier": ""}, "k"),
    ],
)
def test_the_client_of_a_request(names: dict[str, str], client: str | None) -> None:
    assert parse_chat(CHAT | names, {}).chat.client == client
    assert parse_completion(COMPLETION | names, {}).client == client


def test_every_name_of_the_client_is_checked() -> None:
    with pytest.raises(RequestError) as error:
        parse_chat(CHAT | {"prompt_cache_key": "k", "user": 5}, {})
    assert error.value.param == "user"
