"""/v1/messages by Anthropic's official client, over the scripted engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from serve.chat.reasoning import ReasoningOptions
from serve.text.chat_parser import choose_format
from serve.text.chat_parser.syntax.parts import (
    Part,
    Reasoning,
    Text,
    ToolCallArguments,
    ToolCallStart,
)
from tests.support.http.fake_engine import FakeEngine
from tests.support.http.official_clients import anthropic_client
from tests.support.http.running_server import ServerThread
from tests.support.http.scripted_chat import CACHED_TOKENS, PROMPT_TOKENS, SCRIPT, script_answers

TEXT = "naïve\n\nevent: 👍🏽 done"
USER: Any = [{"role": "user", "content": "hello"}]
TOOLS: Any = [
    {
        "name": "weather",
        "description": "of a place",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
]
BLOCKS = [
    {"type": "thinking", "thinking": "Which city?", "signature": ""},
    {"type": "text", "text": "Let me look."},
    {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Ulm"}},
    {"type": "tool_use", "id": "call_2", "name": "weather", "input": {}},
]


@pytest.fixture(scope="module")
def fake_engine() -> FakeEngine:
    return FakeEngine(reply=TEXT, model_name="m")


@pytest.fixture(scope="module")
def fake(fake_engine: FakeEngine) -> Iterator[anthropic.Anthropic]:
    with ServerThread(fake_engine) as server, anthropic_client(server) as client:
        yield client


def test_a_message(fake: anthropic.Anthropic, fake_engine: FakeEngine) -> None:
    message = fake.messages.create(
        model="m",
        max_tokens=99,
        system=[{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "b"}]},
        ],
        stop_sequences=["zzz"],
        metadata={"user_id": "u"},
        service_tier="auto",
        extra_body={"temperature": 0.25, "top_p": 0.5, "top_k": 7},
    )
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": TEXT}]
    assert (message.role, message.type, message.model) == ("assistant", "message", "m")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    usage = message.usage
    assert (usage.input_tokens, usage.output_tokens) == (len("Be kind.a\nb"), len(TEXT))
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (0, 0)
    assert message._request_id is not None  # the request-id header
    assert message.id == message._request_id.replace("req_", "msg_")
    messages, params = fake_engine.submitted[-1]
    assert messages == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "a\nb"},
    ]
    assert (params.temperature, params.top_p, params.top_k) == (0.25, 0.5, 7)
    assert params.stop_strings == ("zzz",)


def test_a_stream_equals_the_whole_message(fake: anthropic.Anthropic) -> None:
    whole = fake.messages.create(model="m", max_tokens=7, messages=USER)
    assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 7)
    with fake.messages.stream(model="m", max_tokens=7, messages=USER) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(block.text for block in final.content if block.type == "text") == TEXT[:7]
    for name in whole.to_dict().keys() - {"id", "content"}:
        assert getattr(final, name) == getattr(whole, name), name


def test_raw_events_have_names_and_a_ping(fake: anthropic.Anthropic) -> None:
    with fake.messages.with_streaming_response.create(
        model="m", max_tokens=2, messages=USER, stream=True
    ) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["request-id"] == response.headers["x-request-id"]
        lines = [line for line in response.iter_lines() if line.startswith("event:")]
    assert [line.removeprefix("event: ") for line in lines] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_thinking_text_and_calls(
    fake: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = script_answers(monkeypatch, SCRIPT, "tool_calls")
    options: Any = {
        "model": "m",
        "max_tokens": 2000,
        "messages": USER,
        "tools": TOOLS,
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    whole = fake.messages.create(**options)
    with fake.messages.stream(**options) as stream:
        thoughts = [event.thinking for event in stream if event.type == "thinking"]
        streamed = stream.get_final_message()
    assert thoughts == ["Which ", "city?"]
    for message in (whole, streamed):
        assert [block.to_dict() for block in message.content] == BLOCKS
        assert message.stop_reason == "tool_use"
        assert message.usage.input_tokens == PROMPT_TOKENS - CACHED_TOKENS
        assert message.usage.cache_read_input_tokens == CACHED_TOKENS
        assert message.usage.output_tokens == len(SCRIPT)
        details = message.usage.output_tokens_details
        assert details is not None
        assert details.thinking_tokens == 2
    request = run.request
    assert request.tools == [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "description": "of a place",
                "parameters": TOOLS[0]["input_schema"],
            },
        }
    ]
    assert (request.tool_choice, request.parallel_tool_calls) == ("required", False)
    assert request.reasoning == ReasoningOptions(max_tokens=1024, is_enabled=True)


def test_the_answer_can_be_sent_back_with_results(
    fake: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    script_answers(monkeypatch, SCRIPT, "tool_calls")
    first = fake.messages.create(model="m", max_tokens=99, messages=USER, tools=TOOLS)
    run = script_answers(monkeypatch, [[Text("ok")]])
    results: Any = [
        {"type": "tool_result", "tool_use_id": "call_1", "content": "rain"},
        {
            "type": "tool_result",
            "tool_use_id": "call_2",
            "content": [{"type": "text", "text": "no city"}],
            "is_error": True,
        },
        {"type": "text", "text": "Well?"},
    ]
    messages: Any = [*USER, first.to_param(), {"role": "user", "content": results}]
    fake.messages.create(model="m", max_tokens=99, messages=messages, tools=TOOLS)
    roles = [message["role"] for message in run.request.messages]
    assert roles == ["user", "assistant", "tool", "tool", "user"]
    _, assistant, rain, failed, user = run.request.messages
    assert (assistant["content"], assistant["reasoning_content"]) == ("Let me look.", "Which city?")
    assert [call["id"] for call in assistant["tool_calls"]] == ["call_1", "call_2"]
    assert assistant["tool_calls"][0]["function"]["name"] == "weather"
    assert (rain["tool_call_id"], rain["name"], rain["content"]) == ("call_1", "weather", "rain")
    assert failed["content"] == "Error: no city"
    assert user["content"] == "Well?"


def test_markup_of_the_model_is_parsed() -> None:
    """The server parses thinking and calls in the model's text in the format of its template."""
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>'
    chat_format = choose_format("tools <tool_call> </think>", "auto", "auto")
    engine = FakeEngine(
        reply=f"<think>Which city?</think>Let me look.{call}",
        model_name="m",
        chat_format=chat_format,
    )
    options: Any = {"model": "m", "max_tokens": 999, "messages": USER, "tools": TOOLS}
    with ServerThread(engine) as server, anthropic_client(server) as client:
        whole = client.messages.create(**options)
        with client.messages.stream(**options) as stream:
            streamed = stream.get_final_message()
    for message in (whole, streamed):
        thought, text, tool_use = (block.to_dict() for block in message.content)
        assert [thought, text] == BLOCKS[:2]
        assert (tool_use["name"], tool_use["input"]) == ("weather", {"city": "Ulm"})
        assert message.stop_reason == "tool_use"
    assert engine.chats[-1]["tools"][0]["function"]["name"] == "weather"


@pytest.mark.parametrize("stream", [True, False])
def test_the_clients_own_loop_over_tools(stream: bool) -> None:
    """The client first tries a conversation that the server keeps, then continues without one."""
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>'
    engine = FakeEngine(reply=call, model_name="m")

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """The weather of a city."""
        engine.reply = f"It rains in {city}."
        return "rain"

    with ServerThread(engine) as server, anthropic_client(server) as client:
        runner: Any = client.beta.messages.tool_runner(
            model="m", max_tokens=200, messages=USER, tools=[weather], stream=stream
        )
        assert runner.until_done().content[0].text == "It rains in Ulm."
    messages = engine.submitted[-1][0]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[2]["content"] == "rain"


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, "auto"),
        ({"type": "auto"}, "auto"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "weather"}, ("function", "weather")),
    ],
)
def test_tool_choices(
    fake: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch, choice: Any, expected: Any
) -> None:
    run = script_answers(monkeypatch, [[Text("ok")]])
    extra: Any = {} if choice is None else {"tool_choice": choice}
    fake.messages.create(model="m", max_tokens=9, messages=USER, tools=TOOLS, **extra)
    assert run.request.tool_choice == expected
    assert run.request.parallel_tool_calls


@pytest.mark.parametrize(
    ("extra", "options"),
    [
        ({"thinking": {"type": "adaptive"}}, ReasoningOptions(is_enabled=True)),
        ({"thinking": {"type": "disabled"}}, ReasoningOptions(is_enabled=False)),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            ReasoningOptions(max_tokens=1024, is_enabled=True),
        ),
        ({"output_config": {"effort": "high"}}, ReasoningOptions("high")),
        ({}, ReasoningOptions()),
    ],
)
def test_the_thinking_options(
    fake: anthropic.Anthropic,
    monkeypatch: pytest.MonkeyPatch,
    extra: Any,
    options: ReasoningOptions,
) -> None:
    run = script_answers(monkeypatch, [[Reasoning("hm")], [Text("ok")]])
    fake.messages.create(model="m", max_tokens=2000, messages=USER, **extra)
    assert run.request.reasoning == options
    assert run.request.template_kwargs == {}


def test_omitted_thinking_is_empty(
    fake: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    script_answers(monkeypatch, [[Reasoning("hm")], [Text("ok")]])
    message = fake.messages.create(
        model="m",
        max_tokens=9,
        messages=USER,
        thinking={"type": "adaptive", "display": "omitted"},
    )
    thought, text = message.content
    assert thought.to_dict() == {"type": "thinking", "thinking": "", "signature": ""}
    assert text.to_dict() == {"type": "text", "text": "ok"}


@pytest.mark.parametrize(
    ("finish", "stopped_by", "max_tokens", "expected"),
    [
        ("stop", "END", 9, ("stop_sequence", "END")),
        ("stop", "<|im_end|>", 9, ("end_turn", None)),
        ("stop", 7, 9, ("end_turn", None)),
        ("length", None, 1, ("max_tokens", None)),
        ("length", None, 9, ("model_context_window_exceeded", None)),
    ],
)
def test_stop_reasons(
    fake: anthropic.Anthropic,
    monkeypatch: pytest.MonkeyPatch,
    finish: str,
    stopped_by: str | int | None,
    max_tokens: int,
    expected: tuple[str, str | None],
) -> None:
    script_answers(monkeypatch, [[Text("ok")]], finish, stopped_by)
    options: Any = {"model": "m", "max_tokens": max_tokens, "messages": USER}
    options["stop_sequences"] = ["END"]
    whole = fake.messages.create(**options)
    with fake.messages.stream(**options) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert (message.stop_reason, message.stop_sequence) == expected


def test_arguments_that_were_cut_off_are_empty(
    fake: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[list[Part] | Exception] = [
        [ToolCallStart(0, "call_1", "weather")],
        [ToolCallArguments(0, '{"city": "U')],
    ]
    script_answers(monkeypatch, steps, "length")
    message = fake.messages.create(model="m", max_tokens=2, messages=USER, tools=TOOLS)
    assert message.content[0].to_dict()["input"] == {}
    assert message.stop_reason == "max_tokens"


def test_a_prefilled_answer_is_continued(
    fake: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = script_answers(monkeypatch, [[Text("ok")]])
    prefilled: Any = [*USER, {"role": "assistant", "content": "The answer is"}]
    fake.messages.create(model="m", max_tokens=9, messages=prefilled)
    assert run.request.messages[-1] == {"role": "assistant", "content": "The answer is"}
    assert (run.request.continue_final_message, run.request.add_generation_prompt) == (True, False)
    prefilled[-1]["content"] = ""
    fake.messages.create(model="m", max_tokens=9, messages=prefilled)
    assert run.request.messages == USER
    assert (run.request.continue_final_message, run.request.add_generation_prompt) == (False, True)


def test_tokens_are_counted_without_a_generation(
    fake: anthropic.Anthropic, fake_engine: FakeEngine
) -> None:
    count = fake.messages.count_tokens(model="m", system="abc", messages=USER)
    assert count.input_tokens == len("abc" + "hello")
    assert fake_engine.submitted[-1][1].max_tokens == 0
