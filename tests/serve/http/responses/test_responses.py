"""/v1/responses by OpenAI's official client, over the scripted engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from serve.chat.reasoning import ReasoningOptions
from serve.errors import GenerationError
from serve.text.chat_parser import choose_format
from serve.text.chat_parser.syntax.parts import Part, Reasoning, Text
from tests.support.http.fake_engine import FakeEngine
from tests.support.http.official_clients import openai_client
from tests.support.http.running_server import ServerThread
from tests.support.http.scripted_chat import CACHED_TOKENS, PROMPT_TOKENS, SCRIPT, script_answers

TEXT = "naïve\n\nevent: 👍🏽 done"
TOOLS: Any = [
    {
        "type": "function",
        "name": "weather",
        "description": "of a place",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": False,
    }
]


@pytest.fixture(scope="module")
def fake_engine() -> FakeEngine:
    return FakeEngine(reply=TEXT, model_name="m")


@pytest.fixture(scope="module")
def fake(fake_engine: FakeEngine) -> Iterator[openai.OpenAI]:
    with ServerThread(fake_engine) as server, openai_client(server) as client:
        yield client


def without_names(response: Response) -> dict[str, Any]:
    """Returns the fields that are equal in two responses to the same request."""
    fields = response.to_dict(mode="json")
    output: Any = fields["output"]
    for item in output:
        del item["id"]
        for part in item.get("content") or []:
            part.pop("parsed", None)
        item.pop("parsed_arguments", None)
    times = {"id", "created_at", "completed_at"}
    return {name: value for name, value in fields.items() if name not in times}


def test_a_response(fake: openai.OpenAI, fake_engine: FakeEngine) -> None:
    response = fake.responses.create(
        model="m",
        instructions="Be kind.",
        input="hello",
        temperature=0.25,
        top_p=0.5,
        max_output_tokens=99,
        metadata={"a": "b"},
        user="u",
        extra_body={"seed": 3, "top_k": 4},
    )
    assert response.output_text == TEXT
    assert (response.status, response.incomplete_details) == ("completed", None)
    assert (response.object, response.model, response.error) == ("response", "m", None)
    assert (response.temperature, response.top_p, response.max_output_tokens) == (0.25, 0.5, 99)
    assert (response.instructions, response.metadata) == ("Be kind.", {"a": "b"})
    assert response.usage is not None
    counts = response.usage
    assert (counts.input_tokens, counts.output_tokens) == (len("Be kind.hello"), len(TEXT))
    assert counts.total_tokens == counts.input_tokens + counts.output_tokens
    messages, params = fake_engine.submitted[-1]
    assert messages == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hello"},
    ]
    assert (params.seed, params.top_k, params.max_tokens) == (3, 4, 99)


def test_a_stream_equals_the_whole_response(fake: openai.OpenAI) -> None:
    whole = fake.responses.create(model="m", input="hello")
    with fake.responses.stream(model="m", input="hello") as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == TEXT
    assert without_names(final) == without_names(whole)


def test_an_answer_that_is_cut_off(fake: openai.OpenAI) -> None:
    whole = fake.responses.create(model="m", input="hello", max_output_tokens=3)
    stream = fake.responses.create(model="m", input="hello", max_output_tokens=3, stream=True)
    last = list(stream)[-1]
    assert last.type == "response.incomplete"
    for response in (whole, last.response):
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.output_text == TEXT[:3]
        assert response.output[0].to_dict()["status"] == "incomplete"


def test_reasoning_text_and_calls(fake: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    run = script_answers(monkeypatch, SCRIPT, "tool_calls")
    options: Any = {
        "model": "m",
        "input": "hello",
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
    }
    whole = fake.responses.create(**options)
    with fake.responses.stream(**options) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    assert without_names(streamed) == without_names(whole)
    thoughts = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert thoughts == ["Which ", "city?"]
    arguments = [
        event.delta for event in events if event.type == "response.function_call_arguments.delta"
    ]
    assert arguments == ['{"city":', ' "Ulm"}', "{}"]
    reasoning, message, first, second = whole.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert reasoning.content[0].text == "Which city?"
    assert message.type == "message"
    assert whole.output_text == "Let me look."
    assert first.type == second.type == "function_call"
    assert (first.call_id, first.name, first.arguments) == ("call_1", "weather", '{"city": "Ulm"}')
    assert (second.call_id, second.arguments, second.status) == ("call_2", "{}", "completed")
    assert whole.usage is not None
    assert whole.usage.input_tokens == PROMPT_TOKENS
    assert whole.usage.input_tokens_details.cached_tokens == CACHED_TOKENS
    assert whole.usage.output_tokens_details.reasoning_tokens == 2
    request = run.request
    function = {name: TOOLS[0][name] for name in ("name", "description", "parameters", "strict")}
    assert request.tools == [{"type": "function", "function": function}]
    assert (request.tool_choice, request.parallel_tool_calls) == ("required", False)
    assert request.reasoning == ReasoningOptions("low")


def test_markup_of_the_model_is_parsed() -> None:
    """The server parses reasoning and calls in the model's text in the format of its template."""
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>'
    chat_format = choose_format("tools <tool_call> </think>", "auto", "auto")
    engine = FakeEngine(
        reply=f"<think>Which city?</think>Let me look.{call}",
        model_name="m",
        chat_format=chat_format,
    )
    options: Any = {"model": "m", "input": "hello", "tools": TOOLS}
    with ServerThread(engine) as server, openai_client(server) as client:
        whole = client.responses.create(**options)
        with client.responses.stream(**options) as stream:
            streamed = stream.get_final_response()
    for response in (whole, streamed):
        reasoning, _, tool_call = response.output
        assert reasoning.type == "reasoning"
        assert reasoning.content is not None
        assert reasoning.content[0].text == "Which city?"
        assert response.output_text == "Let me look."
        assert tool_call.type == "function_call"
        assert (tool_call.name, tool_call.arguments) == ("weather", '{"city": "Ulm"}')
        assert response.usage is not None
        assert response.usage.output_tokens_details.reasoning_tokens > len("Which city?")
    assert engine.chats[-1]["tools"][0]["function"]["name"] == "weather"


def test_conversations_are_continued(fake: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """A previous id, all items and item references give the model the same messages."""
    script_answers(monkeypatch, SCRIPT, "tool_calls")
    first = fake.responses.create(model="m", input="hello", instructions="Hm.", tools=TOOLS)
    run = script_answers(monkeypatch, [[Text("ok")]])
    outputs: Any = [
        {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
        {
            "type": "function_call_output",
            "call_id": "call_2",
            "output": [{"type": "input_text", "text": "no city"}],
        },
        {"role": "user", "content": [{"type": "input_text", "text": "Well?"}]},
    ]
    options: Any = {"model": "m", "tools": TOOLS}
    second = fake.responses.create(input=outputs, previous_response_id=first.id, **options)
    by_id = run.request.messages
    assert second.previous_response_id == first.id
    echoed = [item.to_dict() for item in first.output]
    fake.responses.create(
        input=[{"role": "user", "content": "hello"}, *echoed, *outputs], **options
    )
    assert run.request.messages == by_id
    roles = [message["role"] for message in by_id]
    assert roles == ["user", "assistant", "tool", "tool", "user"]
    _, assistant, rain, failed, _ = by_id
    assert (assistant["content"], assistant["reasoning_content"]) == ("Let me look.", "Which city?")
    assert [call["id"] for call in assistant["tool_calls"]] == ["call_1", "call_2"]
    assert (rain["tool_call_id"], rain["name"], rain["content"]) == ("call_1", "weather", "rain")
    assert failed["content"] == "no city"
    references: Any = [{"type": "item_reference", "id": item.id} for item in first.output]
    hello: Any = {"role": "user", "content": "hello"}
    fake.responses.create(input=[hello, *references, *outputs], **options)
    assert run.request.messages == by_id
    third = fake.responses.create(input="more", previous_response_id=second.id, **options)
    assert len(run.request.messages) == 7
    items = fake.responses.input_items.list(third.id, order="asc").data
    assert [item.type for item in items][:3] == ["message", "reasoning", "message"]
    assert len(items) == 1 + 4 + 3 + 1 + 1


@pytest.mark.parametrize(
    ("choice", "expected", "names"),
    [
        ("auto", "auto", ["weather", "time"]),
        ("none", "none", ["weather", "time"]),
        ({"type": "function", "name": "time"}, ("function", "time"), ["weather", "time"]),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "time"}],
            },
            "required",
            ["time"],
        ),
    ],
)
def test_tool_choices(
    fake: openai.OpenAI,
    monkeypatch: pytest.MonkeyPatch,
    choice: Any,
    expected: Any,
    names: list[str],
) -> None:
    run = script_answers(monkeypatch, [[Text("ok")]])
    tools: Any = [*TOOLS, {"type": "function", "name": "time", "parameters": {}, "strict": None}]
    response = fake.responses.create(model="m", input="hello", tools=tools, tool_choice=choice)
    assert run.request.tool_choice == expected
    assert [tool["function"]["name"] for tool in run.request.tools] == names
    assert response.to_dict()["tool_choice"] == choice


@pytest.mark.parametrize(
    ("text_format", "kind", "source"),
    [
        ({"type": "text"}, None, None),
        ({"type": "json_object"}, "json_object", ""),
        (
            {"type": "json_schema", "name": "n", "schema": {"type": "object"}},
            "json_schema",
            '{"type":"object"}',
        ),
    ],
)
def test_text_formats(
    fake: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, text_format: Any, kind: str, source: str
) -> None:
    run = script_answers(monkeypatch, [[Text("{}")]])
    response = fake.responses.create(model="m", input="hello", text={"format": text_format})
    structured = run.request.params.structured
    assert (structured.kind if structured else None) == kind
    assert (structured.source if structured else None) == source
    assert response.text is not None
    assert response.text.format is not None
    assert response.text.format.to_dict().items() >= text_format.items()


def test_log_probabilities(fake: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the log-probabilities of its text, and none of the reasoning."""
    script_answers(monkeypatch, [[Reasoning("hm")], [Text("a")], [], [Text("b")], []])
    options: Any = {"model": "m", "input": "hello", "include": ["message.output_text.logprobs"]}
    whole = fake.responses.create(**options, top_logprobs=1)
    with fake.responses.stream(**options, top_logprobs=1) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    assert without_names(whole) == without_names(streamed)
    message = whole.output[1]
    assert message.type == "message"
    part = message.content[0]
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert [item.token for item in part.logprobs] == ["B", "C", "D", "E"]
    assert part.logprobs[0].top_logprobs[0].token == "B"
    deltas = [event.logprobs for event in events if event.type == "response.output_text.delta"]
    assert [[item.token for item in logprobs] for logprobs in deltas] == [["B"], ["C", "D"]]


def test_an_empty_answer_has_an_empty_message(
    fake: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    script_answers(monkeypatch, [[]])
    with fake.responses.stream(model="m", input="hello") as stream:
        response = stream.get_final_response()
    assert response.output_text == ""
    assert [item.type for item in response.output] == ["message"]


def test_stored_responses(fake: openai.OpenAI) -> None:
    response = fake.responses.create(model="m", input="hello")
    assert fake.responses.retrieve(response.id) == response
    items = fake.responses.input_items.list(response.id)
    assert [item.to_dict()["content"] for item in items.data] == [
        [{"type": "input_text", "text": "hello"}]
    ]
    with pytest.raises(openai.BadRequestError):
        fake.responses.cancel(response.id)
    fake.responses.delete(response.id)
    for method in (fake.responses.retrieve, fake.responses.delete, fake.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            method(response.id)
    with pytest.raises(openai.NotFoundError):
        fake.responses.input_items.list(response.id)
    with pytest.raises(openai.BadRequestError) as caught:
        fake.responses.create(model="m", input="more", previous_response_id=response.id)
    assert (caught.value.param, caught.value.code) == (
        "previous_response_id",
        "previous_response_not_found",
    )


def test_a_streamed_response_is_stored_unless_store_is_false(fake: openai.OpenAI) -> None:
    with fake.responses.stream(model="m", input="hello") as stream:
        response = stream.get_final_response()
    assert fake.responses.retrieve(response.id).output_text == TEXT
    response = fake.responses.create(model="m", input="hello", store=False)
    with pytest.raises(openai.NotFoundError):
        fake.responses.retrieve(response.id)


def test_pages_of_input_items(fake: openai.OpenAI) -> None:
    texts = [str(number) for number in range(5)]
    items: Any = [{"role": "user", "content": text, "id": f"msg_{text}"} for text in texts]
    response = fake.responses.create(model="m", input=items)
    page = fake.responses.input_items.list(response.id, limit=2, order="asc")
    assert [item.id for item in page.data] == ["msg_0", "msg_1"]
    assert page.has_more
    # the client fetches the other pages
    assert [item.id for item in page] == [f"msg_{text}" for text in texts]
    newest = fake.responses.input_items.list(response.id, limit=1)
    assert [item.id for item in newest.data] == ["msg_4"]


def test_tokens_are_counted(fake: openai.OpenAI, fake_engine: FakeEngine) -> None:
    count = fake.responses.input_tokens.count(model="m", instructions="abc", input="hello")
    assert count.input_tokens == len("abc" + "hello")
    assert fake_engine.submitted[-1][1].max_tokens == 0


@pytest.mark.parametrize("is_early", [True, False])
def test_an_error_of_the_engine(
    fake: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, is_early: bool
) -> None:
    """The error is the whole answer before the first token; after it, the response fails and the
    client raises."""
    parts: list[list[Part] | Exception] = [] if is_early else [[Text("o")]]
    script_answers(monkeypatch, [*parts, GenerationError("a bad step")])
    events: list[Any] = []
    with pytest.raises(openai.APIError) as caught:
        events.extend(fake.responses.create(model="m", input="hello", stream=True))
    assert "bad step" not in str(caught.value)
    if is_early:
        assert isinstance(caught.value, openai.InternalServerError)
        assert not events
        return
    assert events[-1].type == "response.failed"
    assert events[-1].response.status == "failed"
    assert events[-1].response.error.code == "server_error"
    assert [event.sequence_number for event in events[:5]] == list(range(5))
    assert caught.value.code == "internal_error"
    with pytest.raises(openai.NotFoundError):
        fake.responses.retrieve(events[-1].response.id)
