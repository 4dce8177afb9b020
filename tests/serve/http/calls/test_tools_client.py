"""Forced tool calls of the embedded model, by the official client. The grammar makes them valid."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from serve import Engine
from serve.config import default_model_path
from tests.support.http.running_server import ServerThread

USER: Any = [{"role": "user", "content": "What is the weather?"}]
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"enum": ["c", "f"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")  # ids 4092 to 4095
NO_THOUGHT = {"4094": -100}
A_CALL = {"4092": 100}
A_THOUGHT = {"4094": 100, "4095": 100}


TURNS = (
    "{% if messages[-1].role == 'assistant' or messages[1:] | selectattr('role', 'eq', 'system')"
    " | list %}{{ raise_exception('the roles must take turns') }}{% endif %}"
)


def marked_model(path: Path) -> Path:
    """Writes the embedded model with the markers as special tokens instead of its last four tokens,
    and a chat template that checks that roles alternate. Returns its path."""
    shutil.copytree(default_model_path(), path)
    file = path / "tokenizer.json"
    content = json.loads(file.read_text())
    model = content["model"]
    first = len(model["vocab"]) - len(MARKERS)
    model["vocab"] = {text: number for text, number in model["vocab"].items() if number < first}
    model["merges"] = model["merges"][: -len(MARKERS)]
    content["added_tokens"] += [
        {**content["added_tokens"][0], "id": first + number, "content": text}
        for number, text in enumerate(MARKERS)
    ]
    file.write_text(json.dumps(content))
    file = path / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config["chat_template"] = TURNS + config["chat_template"]
    file.write_text(json.dumps(config))
    return path


@contextmanager
def served(**options: Any) -> Iterator[openai.OpenAI]:
    engine = Engine(served_model_name="m", max_num_seqs=8, **options)
    with (
        ServerThread(engine) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def plain() -> Iterator[openai.OpenAI]:
    with served() as client:
        yield client


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    model = str(marked_model(tmp_path_factory.mktemp("marked") / "model"))
    with served(model=model, reasoning_parser="deepseek_r1") as client:
        yield client


@pytest.fixture(params=["plain", "marked"])
def client(request: pytest.FixtureRequest) -> openai.OpenAI:
    chosen: openai.OpenAI = request.getfixturevalue(request.param)
    return chosen


def check(calls: Any) -> None:
    assert calls
    for call in calls:
        arguments = json.loads(call.function.arguments)
        if call.function.name == "weather":
            jsonschema.validate(arguments, WEATHER)
        else:
            assert (call.function.name, arguments) == ("now", {})


@pytest.mark.covering(1)
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_forced_calls(client: openai.OpenAI, choice: Any) -> None:
    answer = client.chat.completions.create(
        model="m",
        messages=USER,
        tools=TOOLS,
        tool_choice=choice,
        n=4,
        seed=1,
        max_tokens=400,
        logit_bias=NO_THOUGHT,
    )
    for item in answer.choices:
        assert (item.finish_reason, item.message.content) == ("tool_calls", None)
        check(item.message.tool_calls)
        if choice is NAMED:
            assert [c.function.name for c in item.message.tool_calls or ()] == ["weather"]  # type: ignore[union-attr]


def test_streamed_calls_equal_whole_ones(client: openai.OpenAI) -> None:
    options: Any = {"messages": USER, "tools": TOOLS, "tool_choice": "required"}
    options |= {"temperature": 0, "max_tokens": 400, "parallel_tool_calls": False}
    options["logit_bias"] = NO_THOUGHT
    whole = client.chat.completions.create(model="m", **options).choices[0].message.tool_calls
    text = ""
    for chunk in client.chat.completions.create(model="m", stream=True, **options):
        for call in chunk.choices[0].delta.tool_calls or ():
            assert call.function is not None
            text += call.function.arguments or ""
    assert whole is not None and len(whole) == 1
    assert whole[0].function.arguments == text  # type: ignore[union-attr]


def test_a_result_is_answered(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(
        model="m",
        messages=USER,
        tools=TOOLS,
        tool_choice=NAMED,
        max_tokens=400,
        logit_bias=NO_THOUGHT,
    )
    message = first.choices[0].message
    assert message.tool_calls is not None
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "18 C, rain"}
    dialog: Any = [*USER, message, result]
    second = client.chat.completions.create(model="m", messages=dialog, tools=TOOLS, max_tokens=20)
    assert second.choices[0].finish_reason in ("stop", "length", "tool_calls")
    assert second.usage is not None and first.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


def test_strict_tools_leave_the_choice_to_the_model(client: openai.OpenAI) -> None:
    strict: Any = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    answer = client.chat.completions.create(
        model="m", messages=USER, tools=strict, n=4, max_tokens=40
    )
    assert all(item.finish_reason in ("stop", "length") for item in answer.choices)
    forced = client.chat.completions.create(
        model="m",
        messages=USER,
        tools=strict,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": WEATHER}},
        max_tokens=200,
        logit_bias=NO_THOUGHT,
    )
    content = forced.choices[0].message.content
    if content is None:
        check(forced.choices[0].message.tool_calls)
    else:
        jsonschema.validate(json.loads(content), WEATHER)


def test_arguments_of_strict_tools_fit(marked: openai.OpenAI) -> None:
    """A bias makes the model begin a call, and the grammar makes its arguments valid."""
    strict: Any = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    answer = marked.chat.completions.create(
        model="m",
        messages=USER,
        tools=strict,
        n=4,
        max_tokens=400,
        seed=1,
        logit_bias=A_CALL,
        parallel_tool_calls=False,
    )
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        check(choice.message.tool_calls)


@pytest.mark.row("G9")
def test_a_schema_that_cannot_be_compiled(client: openai.OpenAI) -> None:
    bad_schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?<=a)b"}}}
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": bad_schema}}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="m", messages=USER, tools=tools, tool_choice="required"
        )
    assert (caught.value.param, caught.value.code) == ("tools", "invalid_schema")


def test_a_thought_before_a_call(marked: openai.OpenAI) -> None:
    """The grammar allows the markers, which are special tokens, and the parser sees them."""
    answer = marked.chat.completions.create(
        model="m",
        messages=USER,
        tools=TOOLS,
        tool_choice=NAMED,
        max_tokens=400,
        logit_bias=A_THOUGHT,
    )
    message = answer.choices[0].message
    check(message.tool_calls)
    assert message.content is None
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 2


@pytest.mark.row("T10")
def test_roles_that_the_template_refuses(marked: openai.OpenAI) -> None:
    system: Any = {"role": "system", "content": "x"}
    for messages in ([system, system, *USER], [*USER, {"role": "assistant", "content": "x"}]):
        with pytest.raises(openai.BadRequestError) as caught:
            marked.chat.completions.create(model="m", messages=messages)  # type: ignore[arg-type]
        assert (caught.value.param, caught.value.code) == ("messages", "invalid_value")
        assert "the roles must take turns" in str(caught.value)
