"""Tools and reasoning in chat completions, by the official client, over the scripted engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from serve.text.chat_parser import ChatFormat
from serve.text.chat_parser.formats import REASONING_FORMATS, TOOL_FORMATS
from tests.support.http.fake_engine import FakeEngine, FakeStream
from tests.support.http.official_clients import openai_client
from tests.support.http.running_server import ServerThread

USER: Any = [{"role": "user", "content": "hello"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now", "description": "The time."}},
]
ARGUMENTS = '{"city": "Kölle </tool_call> \\"👍\\""}'
WEATHER = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
NOW_CHOICE = {"type": "function", "function": {"name": "now"}}
JSON_OBJECT: Any = {"type": "json_object"}
THINKS = ChatFormat(reasoning=REASONING_FORMATS["deepseek_r1"])


def assistant(text: str) -> Any:
    return {"role": "assistant", "content": text}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeEngine, openai.OpenAI]]:
    engine = FakeEngine(model_name="m")
    with ServerThread(engine) as server, openai_client(server) as client:
        yield engine, client


@pytest.fixture
def engine(served: tuple[FakeEngine, openai.OpenAI]) -> FakeEngine:
    fake = served[0]
    fake.chat_format, fake.prompt_end, fake.reply = ChatFormat(), "", "Hello"
    fake.tokenizer.chat_template = "{{ enable_thinking }}"
    return fake


@pytest.fixture
def client(served: tuple[FakeEngine, openai.OpenAI]) -> openai.OpenAI:
    return served[1]


def streamed(client: openai.OpenAI, **options: Any) -> list[dict[str, Any]]:
    """Returns the choices of a stream, with the deltas of each added up."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in client.chat.completions.create(model="m", stream=True, **options):
        for choice in chunk.choices:
            message = choices.setdefault(
                choice.index, {"content": None, "reasoning": "", "calls": [], "finish": None}
            )
            assert message["finish"] is None, "nothing follows the finish reason"
            message["finish"] = choice.finish_reason
            delta = choice.delta
            if delta.content is not None:
                message["content"] = (message["content"] or "") + delta.content
            message["reasoning"] += getattr(delta, "reasoning_content", None) or ""
            for call in delta.tool_calls or ():
                assert call.function is not None
                if call.index == len(message["calls"]):
                    assert (call.type, call.function.arguments) == ("function", "")
                    assert call.id and call.function.name
                    message["calls"].append([call.id, call.function.name, ""])
                else:
                    assert call.index == len(message["calls"]) - 1
                    assert (call.id, call.type, call.function.name) == (None, None, None)
                message["calls"][-1][2] += call.function.arguments or ""
    return [choices[index] for index in sorted(choices)]


def test_calls(engine: FakeEngine, client: openai.OpenAI) -> None:
    engine.reply = f"{WEATHER}\n{NOW}"
    answer = client.chat.completions.create(model="m", messages=USER, tools=TOOLS, n=2)
    for choice in answer.choices:
        message = choice.message
        assert (choice.finish_reason, message.content) == ("tool_calls", None)
        assert message.tool_calls is not None
        calls = [(call.type, call.function.name, call.function.arguments)  # type: ignore[union-attr]
                 for call in message.tool_calls]  # fmt: skip
        assert calls == [("function", "weather", ARGUMENTS), ("function", "now", "{}")]
    ids = {call.id for c in answer.choices for call in c.message.tool_calls or ()}
    assert len(ids) == 4
    assert engine.chats[-1]["tools"] == TOOLS
    assert engine.submitted[-1][1].structured is None


def test_streamed_calls(engine: FakeEngine, client: openai.OpenAI) -> None:
    engine.reply = f"I look.\n{WEATHER}\n{NOW}"
    for choice in streamed(client, messages=USER, tools=TOOLS, n=2):
        assert (choice["content"], choice["finish"]) == ("I look.", "tool_calls")
        assert [call[1:] for call in choice["calls"]] == [["weather", ARGUMENTS], ["now", "{}"]]
    engine.reply = NOW
    (choice,) = streamed(client, messages=USER, tools=TOOLS)
    assert choice["content"] is None


def test_arguments_come_in_pieces(engine: FakeEngine, client: openai.OpenAI) -> None:
    engine.reply = WEATHER
    chunks = client.chat.completions.create(model="m", messages=USER, tools=TOOLS, stream=True)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    pieces = [delta for delta in deltas if delta.tool_calls]
    assert len(pieces) > 10
    assert deltas[0].role == "assistant"


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_without_parallel_tool_calls(
    engine: FakeEngine, client: openai.OpenAI, stream: bool
) -> None:
    engine.reply = f"{NOW}{WEATHER}"
    options: Any = {"messages": USER, "tools": TOOLS, "parallel_tool_calls": False}
    if stream:
        (choice,) = streamed(client, **options)
        assert [call[1] for call in choice["calls"]] == ["now"]
        return
    message = client.chat.completions.create(model="m", **options).choices[0].message
    assert len(message.tool_calls or ()) == 1


def test_markup_is_text_without_tools(engine: FakeEngine, client: openai.OpenAI) -> None:
    """Without tools, or with tool_choice "none", markup is text and the prompt has no tools."""
    engine.reply = f"{NOW}\n"
    for options in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        answer = client.chat.completions.create(model="m", messages=USER, **options)  # type: ignore[call-overload]
        assert answer.choices[0].message.content == engine.reply
        assert answer.choices[0].finish_reason == "stop"
        assert engine.chats[-1]["tools"] is None


def test_a_call_that_is_cut_off(engine: FakeEngine, client: openai.OpenAI) -> None:
    engine.reply = WEATHER
    answer = client.chat.completions.create(
        model="m", messages=USER, tools=TOOLS, max_tokens=len(WEATHER) - 30
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is not None
    call: Any = choice.message.tool_calls[0]
    assert ARGUMENTS.startswith(call.function.arguments)


def test_malformed_calls_are_text(engine: FakeEngine, client: openai.OpenAI) -> None:
    engine.reply = "<tool_call>\nnow()\n</tool_call>"
    (choice,) = streamed(client, messages=USER, tools=TOOLS)
    assert (choice["content"], choice["finish"]) == (engine.reply, "stop")


def test_logprobs_come_once(engine: FakeEngine, client: openai.OpenAI) -> None:
    engine.reply = f"Oh\n{NOW}"
    options: Any = {"messages": USER, "tools": TOOLS, "logprobs": True, "n": 2}
    answer = client.chat.completions.create(model="m", **options)
    tokens: dict[int, str] = {0: "", 1: ""}
    for chunk in client.chat.completions.create(model="m", stream=True, **options):
        for choice in chunk.choices:
            for item in (choice.logprobs and choice.logprobs.content) or ():
                tokens[choice.index] += item.token
    assert tokens == {0: engine.reply, 1: engine.reply}
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert "".join(item.token for item in choice.logprobs.content or ()) == engine.reply


def test_a_second_turn(engine: FakeEngine, client: openai.OpenAI) -> None:
    """The client sends the answer back with the results of its calls."""
    engine.reply = f"{WEATHER}{NOW}"
    first = client.chat.completions.create(model="m", messages=USER, tools=TOOLS)
    message = first.choices[0].message
    calls: Any = message.tool_calls
    results: Any = [
        {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "18"}]}
        for call in calls
    ]
    engine.reply = "Warm."
    second = client.chat.completions.create(
        model="m",
        messages=[*USER, message, *results],  # type: ignore[list-item]  # as the client's docs do
        tools=TOOLS,
    )
    assert second.choices[0].message.content == "Warm."
    rendered = engine.chats[-1]["messages"]
    assert rendered[1]["content"] == ""
    assert rendered[1]["tool_calls"][0]["function"] == {
        "name": "weather",
        "arguments": json.loads(ARGUMENTS),
    }
    assert [item["tool_call_id"] for item in rendered[2:]] == [call.id for call in calls]
    assert rendered[2]["content"] == "18"


@pytest.mark.parametrize("is_open", [False, True])
def test_reasoning(engine: FakeEngine, client: openai.OpenAI, is_open: bool) -> None:
    engine.chat_format = THINKS
    engine.prompt_end = "<think>\n" if is_open else ""
    thought = "well\n</think>"
    engine.reply = f"{'' if is_open else '<think>'}{thought}\n\nYes {NOW}"
    answer = client.chat.completions.create(model="m", messages=USER, tools=TOOLS)
    message: Any = answer.choices[0].message
    assert (message.reasoning_content, message.content) == ("well", "Yes")
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    num_thought = len(thought) + (0 if is_open else len("<think>"))
    reasoning_tokens = answer.usage.completion_tokens_details.reasoning_tokens or 0
    assert num_thought - len("<think>") <= reasoning_tokens <= num_thought
    (choice,) = streamed(client, messages=USER, tools=TOOLS)
    assert (choice["reasoning"], choice["content"]) == ("well", "Yes")
    assert [call[1:] for call in choice["calls"]] == [["now", "{}"]]


def test_reasoning_in_one_delta(
    engine: FakeEngine, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delta that holds all tokens, as after a busy event loop, changes no count."""
    monkeypatch.setattr(FakeStream, "deltas_at_once", True)
    engine.chat_format = THINKS
    for thought in ("<think>\nwell\n</think>", "<think></think>", ""):
        engine.reply = f"{thought}\nYes {NOW}"
        answer = client.chat.completions.create(model="m", messages=USER, tools=TOOLS)
        assert answer.usage is not None and answer.usage.completion_tokens_details is not None
        assert answer.usage.completion_tokens_details.reasoning_tokens == len(thought)


def test_reasoning_can_be_left_out(engine: FakeEngine, client: openai.OpenAI) -> None:
    engine.chat_format = THINKS
    engine.reply = "<think>secret</think>Yes"
    options: Any = {"messages": USER, "extra_body": {"include_reasoning": False}}
    message = client.chat.completions.create(model="m", **options).choices[0].message
    assert (message.content, hasattr(message, "reasoning_content")) == ("Yes", False)
    (choice,) = streamed(client, **options)
    assert (choice["content"], choice["reasoning"]) == ("Yes", "")
    engine.reply = f"<think>secret</think>{NOW}"
    chunks = client.chat.completions.create(model="m", stream=True, tools=TOOLS, **options)
    first = next(iter(chunks)).choices[0].delta
    assert (first.role, first.content) == ("assistant", ""), "the role comes before the first call"


def test_reasoning_alone_has_no_content(engine: FakeEngine, client: openai.OpenAI) -> None:
    engine.chat_format = THINKS
    engine.reply = "<think>long"
    answer = client.chat.completions.create(model="m", messages=USER)
    message: Any = answer.choices[0].message
    assert (message.content, message.reasoning_content) == (None, "long")
    dialog: Any = [*USER, {**message.to_dict()}, *USER]
    client.chat.completions.create(model="m", messages=dialog)
    assert engine.chats[-1]["messages"][1] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "long",
    }


def test_only_special_markers_are_shown(engine: FakeEngine, client: openai.OpenAI) -> None:
    engine.chat_format = ChatFormat(
        tools=TOOL_FORMATS["hermes"],
        reasoning=REASONING_FORMATS["deepseek_r1"],
        special_ids={"</think>": 3, "<tool_call>": 5},
    )
    client.chat.completions.create(model="m", messages=USER, tools=TOOLS)
    assert engine.submitted[-1][1].shown_special_tokens == ("</think>", "<tool_call>")
    client.chat.completions.create(model="m", messages=USER)
    assert engine.submitted[-1][1].shown_special_tokens == ("</think>",)


def test_the_template_gets_its_variables(engine: FakeEngine, client: openai.OpenAI) -> None:
    client.chat.completions.create(
        model="m",
        messages=[*USER, {"role": "assistant", "content": "I say"}],
        reasoning_effort="low",
        extra_body={
            "chat_template_kwargs": {"enable_thinking": False, "style": "dry"},
            "continue_final_message": True,
        },
    )
    chat = engine.chats[-1]
    variables = {"enable_thinking": False, "style": "dry", "reasoning_effort": "low"}
    assert chat["template_kwargs"] == variables
    assert (chat["add_generation_prompt"], chat["continue_final_message"]) == (False, True)


def test_allowed_tools(engine: FakeEngine, client: openai.OpenAI) -> None:
    choice: Any = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [NOW_CHOICE]},
    }
    client.chat.completions.create(model="m", messages=USER, tools=TOOLS, tool_choice=choice)
    assert engine.chats[-1]["tools"] == TOOLS[1:]


def test_a_server_without_a_tool_parser(engine: FakeEngine, client: openai.OpenAI) -> None:
    engine.chat_format = ChatFormat(tools=None)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="m", messages=USER, tools=TOOLS)
    assert (caught.value.param, caught.value.code) == ("tools", "unsupported_parameter")
    client.chat.completions.create(model="m", messages=USER, tools=TOOLS, tool_choice="none")


def test_token_ids_and_running_usage(engine: FakeEngine, client: openai.OpenAI) -> None:
    engine.reply = f"Oh\n{NOW}"
    stream = client.chat.completions.create(
        model="m",
        messages=USER,
        tools=TOOLS,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={
            "return_token_ids": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    )
    chunks: list[Any] = list(stream)
    assert chunks[0].prompt_token_ids == [ord(char) for char in "hello"]
    ids = [getattr(choice, "token_ids", []) for chunk in chunks for choice in chunk.choices]
    assert "".join(chr(token) for item in ids for token in item) == engine.reply
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == len(engine.reply)


@pytest.mark.parametrize(
    ("options", "named", "unnamed"),
    [
        ({"tool_choice": "required"}, ["weather", "now", "){0,15}"], []),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ["weather"], ["{0,15}"]),
        ({"tool_choice": NOW_CHOICE}, ["now"], ["weather", "{0,15}"]),
        ({"tool_choice": NOW_CHOICE, "response_format": JSON_OBJECT}, ["now"], ["content"]),
        ({"response_format": JSON_OBJECT}, ["weather", "now", "content"], []),
    ],
)
def test_forced_calls_make_a_grammar(
    engine: FakeEngine,
    client: openai.OpenAI,
    options: dict[str, Any],
    named: list[str],
    unnamed: list[str],
) -> None:
    engine.reply = NOW
    client.chat.completions.create(model="m", messages=USER, tools=TOOLS, **options)
    structured = engine.submitted[-1][1].structured
    assert structured is not None and structured.kind == "grammar"
    assert all(word in structured.source for word in named)
    assert not any(word in structured.source for word in unnamed)


def test_a_response_format_without_tools(engine: FakeEngine, client: openai.OpenAI) -> None:
    """A response format applies after the reasoning; a grammar describes the whole answer."""
    options: Any = {"model": "m", "messages": USER}
    client.chat.completions.create(**options, response_format=JSON_OBJECT)
    assert engine.submitted[-1][1].structured.kind == "json_object"
    engine.chat_format = THINKS
    engine.reply = "<think>so</think>{}"
    answer = client.chat.completions.create(**options, response_format=JSON_OBJECT)
    assert "</think>" in engine.submitted[-1][1].structured.source
    assert answer.choices[0].message.content == "{}"
    answer = client.chat.completions.create(
        **options, extra_body={"guided_grammar": "start: /(.|\\n)+/"}
    )
    assert answer.choices[0].message.content == engine.reply
    assert not hasattr(answer.choices[0].message, "reasoning_content")


@pytest.mark.parametrize(
    ("change", "is_open"),
    [
        ({}, None),
        ({"add_generation_prompt": False}, None),
        ({"continue_final_message": True, "messages": [*USER, assistant("I")]}, False),
        ({"continue_final_message": True, "messages": [*USER, assistant("<think>I")]}, True),
    ],
)
def test_the_grammar_starts_where_the_prompt_ends(
    engine: FakeEngine, client: openai.OpenAI, change: dict[str, Any], is_open: bool | None
) -> None:
    """A continued message tells it; else there is a grammar for either case."""
    engine.chat_format = THINKS
    engine.reply = f"so</think>{NOW}"
    body = {"messages": USER, **change}
    client.chat.completions.create(
        model="m",
        messages=body.pop("messages"),
        tools=TOOLS,
        tool_choice="required",
        extra_body=body,
    )
    structured = engine.submitted[-1][1].structured
    inside, outside = "start: thought gap", 'start: ("<think>" thought gap)?'
    assert structured.source.startswith(inside if is_open else outside)
    assert structured.opened.startswith(inside) if is_open is None else not structured.opened
