"""Every API's way to say how much a model may reason, as the engine gets it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import requests

from serve.chat.reasoning import EFFORT_TOKENS
from serve.config import EngineConfig
from serve.text.chat_parser import ChatFormat
from serve.text.chat_parser.formats import REASONING_FORMATS
from tests.support.http.fake_engine import FakeEngine
from tests.support.http.running_server import ServerThread

THINKS = ChatFormat(reasoning=REASONING_FORMATS["deepseek_r1"])
MESSAGES = [{"role": "user", "content": "hello"}]
CHAT = ("/v1/chat/completions", {"model": "m", "messages": MESSAGES})
RESPONSES = ("/v1/responses", {"model": "m", "input": "hello"})
ANTHROPIC = ("/v1/messages", {"model": "m", "messages": MESSAGES, "max_tokens": 1500})
COMPLETIONS = ("/v1/completions", {"model": "m", "prompt": "hello"})
TYPE, VALUE = "invalid_type", "invalid_value"


def thinking(budget: Any) -> dict[str, Any]:
    return {"thinking": {"type": "enabled", "budget_tokens": budget}}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeEngine, ServerThread]]:
    engine = FakeEngine(model_name="m", config=EngineConfig(reasoning_budget=77))
    engine.tokenizer.chat_template = "{{ enable_thinking }}"
    with ServerThread(engine) as server:
        yield engine, server


@pytest.fixture
def engine(served: tuple[FakeEngine, ServerThread]) -> FakeEngine:
    fake = served[0]
    fake.chat_format, fake.reply = THINKS, "<think>so</think>Yes"
    return fake


def post(served: Any, api: tuple[str, dict[str, Any]], **more: Any) -> Any:
    return requests.post(served[1].url + api[0], json={**api[1], **more}, timeout=10)


@pytest.mark.parametrize(
    ("api", "fields", "bound", "kwargs"),
    [
        (CHAT, {}, 77, {}),
        (CHAT, {"thinking_token_budget": 5}, 5, {}),
        (CHAT, {"thinking_token_budget": None}, 77, {}),
        (CHAT, {"thinking_token_budget": -1}, None, {}),
        (CHAT, {"thinking_token_budget": 0}, 0, {"enable_thinking": False}),
        (CHAT, {"reasoning_budget_tokens": 5}, 5, {}),
        (CHAT, {"thinking_budget_tokens": 5, "thinking_budget": 5}, 5, {}),
        (CHAT, {"enable_thinking": False}, 0, {"enable_thinking": False}),
        (CHAT, {"enable_thinking": True, "thinking_budget": 6}, 6, {"enable_thinking": True}),
        (CHAT, {"chat_template_kwargs": {"thinking_budget": 8}}, 8, {"thinking_budget": 8}),
        (
            CHAT,
            {"chat_template_kwargs": {"enable_thinking": False}},
            0,
            {"enable_thinking": False},
        ),
        (CHAT, {"reasoning_effort": "high"}, EFFORT_TOKENS["high"], {"reasoning_effort": "high"}),
        (CHAT, {"reasoning_effort": "max"}, None, {"reasoning_effort": "max"}),
        (
            RESPONSES,
            {"reasoning": {"effort": "minimal"}},
            EFFORT_TOKENS["minimal"],
            {"reasoning_effort": "minimal"},
        ),
        (RESPONSES, {"thinking_token_budget": 9}, 9, {}),
        (RESPONSES, {}, 77, {}),
        (ANTHROPIC, {}, 77, {}),
        (ANTHROPIC, thinking(1024), 1024, {"enable_thinking": True}),
        (ANTHROPIC, {"thinking": {"type": "disabled"}}, 0, {"enable_thinking": False}),
        (ANTHROPIC, {"thinking": {"type": "adaptive"}}, 77, {"enable_thinking": True}),
        (
            ANTHROPIC,
            {"output_config": {"effort": "low"}},
            EFFORT_TOKENS["low"],
            {"reasoning_effort": "low"},
        ),
    ],
)
def test_the_engine_gets_the_bound(
    served: Any,
    engine: FakeEngine,
    api: Any,
    fields: dict[str, Any],
    bound: int | None,
    kwargs: dict[str, Any],
) -> None:
    for more in ({}, {"stream": True}):
        answer = post(served, api, **fields, **more)
        assert answer.status_code == 200, answer.text
        assert engine.submitted[-1][1].thinking_token_budget == bound
        assert engine.chats[-1]["template_kwargs"] == kwargs


def test_completions_take_the_bound_as_it_is(served: Any, engine: FakeEngine) -> None:
    assert post(served, COMPLETIONS, thinking_token_budget=4).status_code == 200
    assert engine.submitted[-1][1].thinking_token_budget == 4
    assert post(served, COMPLETIONS).status_code == 200
    assert engine.submitted[-1][1].thinking_token_budget is None


@pytest.mark.parametrize(
    ("api", "fields", "param", "code"),
    [
        *(
            (api, {"thinking_token_budget": value}, "thinking_token_budget", code)
            for api in (CHAT, COMPLETIONS, RESPONSES)
            for value, code in (
                (-2, VALUE),
                (1 << 31, VALUE),
                ("5", TYPE),
                (True, TYPE),
                (1.5, TYPE),
            )
        ),
        (CHAT, {"reasoning_budget_tokens": -2}, "reasoning_budget_tokens", VALUE),
        (CHAT, {"thinking_budget": [1]}, "thinking_budget", TYPE),
        (CHAT, {"thinking_token_budget": 1, "thinking_budget": 2}, "thinking_budget", VALUE),
        (CHAT, {"enable_thinking": 1}, "enable_thinking", TYPE),
        (CHAT, {"reasoning_effort": "huge"}, "reasoning_effort", VALUE),
        (
            CHAT,
            {"chat_template_kwargs": {"thinking_budget": "5"}},
            "chat_template_kwargs.thinking_budget",
            TYPE,
        ),
        (RESPONSES, {"reasoning": {"effort": 3}}, "reasoning.effort", TYPE),
    ],
)
def test_bad_values_name_their_field(
    served: Any, engine: FakeEngine, api: Any, fields: dict[str, Any], param: str, code: str
) -> None:
    answer = post(served, api, **fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, code)


@pytest.mark.parametrize("budget", [1023, 1500, "2000", None])
def test_bad_thinking_of_the_messages_api(served: Any, engine: FakeEngine, budget: Any) -> None:
    answer = post(served, ANTHROPIC, **thinking(budget))
    assert answer.status_code == 400
    assert "thinking.budget_tokens" in answer.json()["error"]["message"]


def test_models_without_reasoning(served: Any, engine: FakeEngine) -> None:
    """An explicit bound is refused; what clients send to every model has no effect."""
    engine.chat_format, engine.reply = ChatFormat(), "Yes"
    for name in ("thinking_token_budget", "thinking_budget_tokens"):
        answer = post(served, CHAT, **{name: 5})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (
            400,
            name,
            "unsupported_parameter",
        )
        assert post(served, CHAT, **{name: -1}).status_code == 200
    for api, fields in (
        (ANTHROPIC, thinking(1024)),
        (CHAT, {"reasoning_effort": "low"}),
        (RESPONSES, {"reasoning": {"effort": "none"}}),
        (CHAT, {"chat_template_kwargs": {"thinking_budget": 3}}),
    ):
        assert post(served, api, **fields).status_code == 200
        assert engine.submitted[-1][1].thinking_token_budget is None


def test_a_grammar_of_the_whole_answer_has_no_bound(served: Any, engine: FakeEngine) -> None:
    fields = {"guided_grammar": "start: /(.|\\n)+/", "thinking_token_budget": 5}
    assert post(served, CHAT, **fields).status_code == 200
    assert engine.submitted[-1][1].thinking_token_budget is None


def test_a_continued_message_says_where_it_ends(served: Any, engine: FakeEngine) -> None:
    for said, is_open in (("<think>I", True), ("I", False)):
        messages = [*MESSAGES, {"role": "assistant", "content": said}]
        more = {"messages": messages, "continue_final_message": True, "thinking_token_budget": 5}
        assert post(served, CHAT, **more).status_code == 200
        assert engine.submitted[-1][1].is_reasoning_open is is_open
