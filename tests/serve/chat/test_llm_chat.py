"""LLM.chat with tools and reasoning: what answers hold, and which arguments are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from serve import LLM, SamplingParams
from serve.errors import RequestError
from tests.support.engine.thinking import thinking_checkpoint
from tests.support.http.dictated_engine import load_dictated

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}},
    {"type": "function", "function": {"name": "now", "description": "The time."}},
]
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
LONG = SamplingParams(max_tokens=400, temperature=0.0)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return thinking_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    """Its answers are dictated by the user's text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("serve.engine.llm.load_engine", load_dictated)
        made = LLM(str(path), max_num_seqs=4)
    with made:
        yield made


@pytest.fixture(scope="module")
def real(path: Path) -> Iterator[LLM]:
    with LLM(str(path), dtype="float32", max_num_seqs=4) as made:
        yield made


def say(*sayings: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "".join(f"SAY<<{each}>>" for each in sayings)}]


def ask(llm: LLM, messages: Any, **options: Any) -> Any:
    return llm.chat(messages, LONG, use_tqdm=False, **options)[0].outputs[0]


def test_reasoning_content_and_calls(llm: LLM) -> None:
    text = f"Which?\n</think>\n\nI look.\n{WEATHER}\n{NOW}"
    answer = ask(llm, say(text), tools=TOOLS)
    assert answer.text == text
    assert (answer.reasoning, answer.content) == ("Which?", "I look.")
    calls = [call["function"] for call in answer.tool_calls]
    assert [call["name"] for call in calls] == ["weather", "now"]
    assert [json.loads(call["arguments"]) for call in calls] == [{"city": "Ulm"}, {}]
    assert answer.finish_reason == "tool_calls"
    assert 0 < answer.reasoning_tokens < len(answer.token_ids)
    assert answer.message() == {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "Which?",
        "tool_calls": answer.tool_calls,
    }


def test_what_is_not_wanted_is_left_out(llm: LLM) -> None:
    said = say(f"so</think>{WEATHER}{NOW}")
    one = ask(llm, said, tools=TOOLS, parallel_tool_calls=False, include_reasoning=False)
    assert (one.reasoning, one.content) == (None, None)
    assert len(one.tool_calls) == 1
    assert one.reasoning_tokens > 0
    for options in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        plain = ask(llm, said, **options)
        assert plain.content == f"{WEATHER}{NOW}"
        assert (plain.tool_calls, plain.finish_reason) == ([], "stop")


def test_several_conversations_and_answers(llm: LLM) -> None:
    conversations = [say(f"{name}</think>{WEATHER}") for name in ("a", "b", "c")]
    params = SamplingParams(max_tokens=200, n=2)
    outputs = llm.chat(conversations, params, tools=TOOLS, use_tqdm=False)
    read = [[answer.reasoning for answer in output.outputs] for output in outputs]
    assert read == [["a", "a"], ["b", "b"], ["c", "c"]]
    ids = {a.tool_calls[0]["id"] for output in outputs for a in output.outputs}
    assert len(ids) == 6


def test_two_rounds_of_calls(llm: LLM) -> None:
    messages = say(f"x</think>{WEATHER}", f"y</think>{NOW}", "z</think>It is 4.")
    names = []
    for _ in range(2):
        answer = ask(llm, messages, tools=TOOLS)
        (call,) = answer.tool_calls
        names.append(call["function"]["name"])
        result = {"role": "tool", "tool_call_id": call["id"], "content": "4"}
        messages = [*messages, answer.message(), result]
    assert names == ["weather", "now"]
    assert ask(llm, messages, tools=TOOLS).content == "It is 4."


def test_forced_and_strict_calls(real: LLM) -> None:
    """A random model can only write calls whose arguments match."""
    bounded = SamplingParams(max_tokens=600, seed=3, thinking_token_budget=5)
    named = {"type": "function", "function": {"name": "weather"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    for choice in (named, "required", allowed):
        output = real.chat(say(""), bounded, tools=TOOLS[:1], tool_choice=choice, use_tqdm=False)
        answer = output[0].outputs[0]
        assert answer.tool_calls
        for call in answer.tool_calls:
            jsonschema.validate(json.loads(call["function"]["arguments"]), CITY)


def test_allowed_tools(llm: LLM) -> None:
    """The prompt shows only those that are allowed."""
    named = {"type": "function", "function": {"name": "now"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named]}}
    output = llm.chat(say("a</think>b"), LONG, tools=TOOLS, tool_choice=choice, use_tqdm=False)[0]
    prompt = llm.tokenizer.decode(output.prompt_token_ids)
    assert '"now"' in prompt and '"weather"' not in prompt
    assert output.outputs[0].content == "b"


def test_a_message_is_continued(llm: LLM) -> None:
    messages = [*say("more</think>"), {"role": "assistant", "content": "I say"}]
    output = llm.chat(messages, LONG, continue_final_message=True, use_tqdm=False)[0]
    assert llm.tokenizer.decode(output.prompt_token_ids).endswith("I say")
    with pytest.raises(RequestError) as caught:
        ask(llm, messages, continue_final_message=True, add_generation_prompt=True)
    assert caught.value.param == "add_generation_prompt"
    with pytest.raises(RequestError) as caught:
        ask(llm, say("more"), continue_final_message=True)
    assert caught.value.param == "continue_final_message"


def allowed(**changes: Any) -> dict[str, Any]:
    now = [{"type": "function", "function": {"name": "now"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": now} | changes}
    return {"tools": TOOLS, "tool_choice": choice}


def tool(**changes: Any) -> Any:
    return [{"type": "function", "function": {"name": "f", **changes}}]


MANY = [tool(name=f"f{i}")[0] for i in range(129)]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [1]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "web_search", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{**tool()[0], "more": 1}]}, "tools[0]"),
        ({"tools": tool(name="a b")}, "tools[0].function.name"),
        ({"tools": tool(name="a" * 65)}, "tools[0].function.name"),
        ({"tools": tool(name=None)}, "tools[0].function.name"),
        ({"tools": tool(description=1)}, "tools[0].function.description"),
        ({"tools": tool(description="a" * 70_000)}, "tools[0].function.description"),
        ({"tools": tool(strict="yes")}, "tools[0].function.strict"),
        ({"tools": tool(parameters=[])}, "tools[0].function.parameters"),
        ({"tools": tool(parameters={"type": "array"})}, "tools[0].function.parameters"),
        ({"tools": tool(parameters={"type": "strnig"})}, "tools[0].function.parameters"),
        ({"tools": tool(parameters={"a": object()})}, "tools[0].function.parameters"),
        ({"tools": tool(parameters={"a": "b" * 70_000})}, "tools[0].function.parameters"),
        ({"tools": tool() * 2}, "tools[1].function.name"),
        ({"tools": MANY}, "tools"),
        ({"tools": [tool(name=f"f{i}", description="a" * 60_000)[0] for i in range(9)]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": 5}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "tool", "function": {"name": "now"}}},
            "tool_choice.type",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "then"}}},
            "tool_choice",
        ),
        (allowed(mode="none"), "tool_choice.allowed_tools.mode"),
        (allowed(tools=[]), "tool_choice.allowed_tools.tools"),
        (allowed(tools=[{"name": "now"}]), "tool_choice.allowed_tools.tools[0].type"),
        (allowed(tools=tool()), "tool_choice"),
        (allowed(more=1), "tool_choice.allowed_tools"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"include_reasoning": None}, "include_reasoning"),
        ({"continue_final_message": "yes"}, "continue_final_message"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"mood": object()}}, "chat_template_kwargs.mood"),
        ({"chat_template_kwargs": {"thinking_budget": -7}}, "chat_template_kwargs.thinking_budget"),
    ],
)
def test_a_wrong_argument_is_named(llm: LLM, options: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        ask(llm, say("no"), **options)
    assert caught.value.param == param
    assert param.partition(".")[0].partition("[")[0] in str(caught.value)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (5, "messages[0]"),
        ({"content": "a"}, "messages[0].role"),
        ({"role": "assistant", "tool_calls": 5}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0]"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": 1}}]},
            "messages[0].tool_calls[0]",
        ),
    ],
)
def test_a_wrong_message_is_named(llm: LLM, message: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.chat([[message]], LONG, use_tqdm=False)
    assert caught.value.param == param


def test_a_schema_that_no_grammar_can_be_made_of_names_the_tools(real: LLM) -> None:
    bad = tool(parameters={"type": "object", "properties": {"a": {"not": {}}}}, strict=True)
    with pytest.raises(RequestError) as caught:
        ask(real, say("no"), tools=bad, tool_choice="required")
    assert caught.value.param == "tools"


def test_a_model_without_a_tool_parser(path: Path) -> None:
    with LLM(str(path), dtype="float32", tool_parser="none") as llm:
        with pytest.raises(RequestError) as caught:
            ask(llm, say("no"), tools=TOOLS)
        assert (caught.value.param, caught.value.code) == ("tools", "unsupported_parameter")
        assert ask(llm, say("no"), tools=TOOLS, tool_choice="none").tool_calls == []
