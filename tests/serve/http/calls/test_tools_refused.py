"""Bad tools, calls, results and template variables are refused with a status, param and code."""

from __future__ import annotations

import copy
import random
import re
import warnings
from typing import Any

import pytest

from serve.http.calls.tools import MAX_SCHEMA_BYTES, parse_parameters
from serve.http.schema.fields import Unknown
from tests.support.http.fake_engine import FakeEngine
from tests.support.http.running_server import Served, run_with_server

USER = {"role": "user", "content": "hi"}
F = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "f"}}
REFUSAL = {"type": "refusal", "refusal": "no"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def tool(**changes: Any) -> dict[str, Any]:
    changed = copy.deepcopy(F)
    changed["function"].update(changes)  # type: ignore[attr-defined]
    return changed


def schema(value: Any) -> dict[str, Any]:
    return {"tools": [tool(parameters={"type": "object", "properties": {"a": value}})]}


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        value = {"type": "array", "items": value}
    return value


def call(**changes: Any) -> dict[str, Any]:
    return {**CALL, "function": {**CALL["function"], **changes}}  # type: ignore[dict-item]


def with_calls(*calls: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": list(calls)}]}


def with_result(**changes: Any) -> dict[str, Any]:
    result = {"role": "tool", "tool_call_id": "c1", "content": "x", **changes}
    return {"messages": [*with_calls(CALL)["messages"], result]}


PARAMETERS = "tools[0].function.parameters"
ARGUMENTS = "messages[1].tool_calls[0].function.arguments"
KWARGS = "chat_template_kwargs"

Refusals = list[tuple[dict[str, Any], str, str]]
TOOLS: Refusals = [
    ({"tools": [tool(name=f"f{i}") for i in range(129)]}, "tools", "array_above_max_length"),
    ({"tools": [tool(name="a b")]}, "tools[0].function.name", "invalid_value"),
    ({"tools": [tool(name="a" * 65)]}, "tools[0].function.name", "string_above_max_length"),
    ({"tools": [tool(name="")]}, "tools[0].function.name", "invalid_value"),
    ({"tools": [F, F]}, "tools[1].function.name", "invalid_value"),
    ({"tools": [tool(parameters=[])]}, PARAMETERS, "invalid_type"),
    ({"tools": [tool(parameters="{}")]}, PARAMETERS, "invalid_type"),
    (
        {"tools": [tool(name=f"f{i}", description="x" * 9000) for i in range(60)]},
        "tools",
        "invalid",
    ),
    ({"tools": {}}, "tools", "invalid_type"),
    ({"tools": ["f"]}, "tools[0]", "invalid_type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
    ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type", "invalid_value"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "invalid_value"),
    ({"tools": [{"type": "web", "function": F["function"]}]}, "tools[0].type", "invalid_value"),
    ({"tools": [tool(strict="yes")]}, "tools[0].function.strict", "invalid_type"),
    ({"tools": [tool(extra=1)]}, "tools[0].function.extra", "unknown_parameter"),
]
# with the errors of G1 to G6 that show without compiling
SCHEMAS: Refusals = [
    (schema({"type": "strnig"}), PARAMETERS, "invalid_schema"),
    (schema({"type": ["object", 5]}), PARAMETERS, "invalid_schema"),
    (schema({"type": "string", "pattern": "(a"}), PARAMETERS, "invalid_schema"),
    (schema({"type": "string", "pattern": "*a"}), PARAMETERS, "invalid_schema"),
    (schema({"type": "string", "pattern": 5}), PARAMETERS, "invalid_schema"),
    *[
        (schema({"type": "string", "pattern": pattern}), PARAMETERS, "invalid_schema")
        for pattern in ("a)", "[a", "a|+b", "(?:a", "a\\", "(?<n>a", "[" * 4096, "x" * 4097)
    ],
    (schema(5), PARAMETERS, "invalid_schema"),
    (schema(nested(32)), PARAMETERS, "invalid_schema"),
    (schema({"anyOf": []}), PARAMETERS, "invalid_schema"),
    (schema({"anyOf": {"type": "string"}}), PARAMETERS, "invalid_schema"),
    (schema({"enum": "abc"}), PARAMETERS, "invalid_schema"),
    (schema({"minLength": -1}), PARAMETERS, "invalid_schema"),
    (schema({"minimum": "1"}), PARAMETERS, "invalid_schema"),
    (schema({"required": "a"}), PARAMETERS, "invalid_schema"),
    (schema({"$ref": "http://169.254.169.254/"}), PARAMETERS, "invalid_schema"),
    (schema({"description": "x" * MAX_SCHEMA_BYTES}), PARAMETERS, "invalid_value"),
    ({"tools": [tool(parameters={"type": "string"})]}, PARAMETERS, "invalid_schema"),
]
CHOICES: Refusals = [
    ({"tools": [F], "tool_choice": {**NAMED, "function": {"name": "g"}}}, "tool_choice", ""),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tool_choice": NAMED}, "tool_choice", "invalid_value"),
    ({"tools": [F], "tool_choice": "any"}, "tool_choice", "invalid_value"),
    ({"tools": [F], "tool_choice": 1}, "tool_choice", "invalid_type"),
    ({"tools": [F], "tool_choice": {"type": "function"}}, "tool_choice.function", "missing"),
    (
        {
            "tools": [F],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [{"type": "function", "function": {"name": "g"}}],
                },
            },
        },
        "tool_choice",
        "invalid_value",
    ),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls", "invalid_type"),
]
DEPRECATED: Refusals = [
    ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
    ({"function_call": {"name": "f"}}, "function_call", "unsupported_parameter"),
]
CALLS: Refusals = [
    (with_result(tool_call_id="c2"), "messages[2].tool_call_id", "invalid_value"),
    (with_result(tool_call_id=None), "messages[2].tool_call_id", "missing_required_parameter"),
    (with_result(tool_call_id=5), "messages[2].tool_call_id", "invalid_type"),
    (with_result(content=None), "messages[2].content", "missing_required_parameter"),
    (with_calls(call(arguments="[1]")), ARGUMENTS, "invalid_value"),
    (with_calls(call(arguments="[" * 100_000)), ARGUMENTS, "invalid_value"),
    (with_calls(call(arguments={})), ARGUMENTS, "invalid_type"),
    (with_calls(call(name="a b")), "messages[1].tool_calls[0].function.name", "invalid_value"),
    (with_calls({**CALL, "id": ""}), "messages[1].tool_calls[0].id", "invalid_value"),
    (with_calls({**CALL, "type": "x"}), "messages[1].tool_calls[0].type", "invalid_value"),
    (with_calls(*[CALL] * 129), "messages[1].tool_calls", "array_above_max_length"),
    (with_calls(), "messages[1].content", "missing_required_parameter"),
    ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages[0].tool_calls", "unsupported"),
    (
        {"messages": [USER, {"role": "assistant", "content": "x", "function_call": {}}]},
        "messages[1].function_call",
        "unsupported_parameter",
    ),
]
TEMPLATES: Refusals = [
    ({"chat_template": "{{ 1 }}"}, "chat_template", "unsupported_parameter"),
]
KWARGS_REFUSED: Refusals = [
    ({KWARGS: {"tokenize": False}}, KWARGS, "unsupported_parameter"),
    ({KWARGS: {"chat_template": "x"}}, KWARGS, "unsupported_parameter"),
    ({KWARGS: {"messages": []}}, KWARGS, "unsupported_parameter"),
    ({KWARGS: {"bos_token": "x"}}, KWARGS, "unsupported_parameter"),
    ({KWARGS: {"raise_exception": "x"}}, KWARGS, "unsupported_parameter"),
    ({KWARGS: {"__class__": "x"}}, KWARGS, "unsupported_parameter"),
    ({KWARGS: {"Name": "x"}}, KWARGS, "unsupported_parameter"),
    ({KWARGS: {"a": {"b": 1}}}, f"{KWARGS}.a", "invalid_type"),
    ({KWARGS: {"a": [1]}}, f"{KWARGS}.a", "invalid_type"),
    ({KWARGS: {"a": "x" * 2000}}, f"{KWARGS}.a", "string_above_max_length"),
    ({KWARGS: {"a": 1 << 60}}, f"{KWARGS}.a", "invalid_value"),
    ({KWARGS: {"a" * (i + 1): 1 for i in range(17)}}, KWARGS, "array_above_max_length"),
    ({KWARGS: "x"}, KWARGS, "invalid_type"),
]
OTHERS: Refusals = [
    ({"reasoning_effort": "most"}, "reasoning_effort", "invalid_value"),
    ({"include_reasoning": "no"}, "include_reasoning", "invalid_type"),
    ({"continue_final_message": True}, "continue_final_message", "invalid_value"),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "add_generation_prompt",
        "invalid_value",
    ),
]
IMAGE = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
ROLES: Refusals = [
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [USER, {"content": "x"}]}, "messages[1].role", "missing_required_parameter"),
    ({"messages": [{"role": "SYSTEM", "content": "x"}]}, "messages[0].role", "invalid_value"),
    (
        {"messages": [USER, {"role": "assistant"}]},
        "messages[1].content",
        "missing_required_parameter",
    ),
    ({"messages": [{**USER, "content": 5}]}, "messages[0].content", "invalid_type"),
    (
        {"messages": [{**USER, "content": [{"type": "x"}]}]},
        "messages[0].content[0].type",
        "invalid_value",
    ),
]
MEDIA: Refusals = [
    ({"messages": [{**USER, "content": [part]}]}, "messages[0].content[0].type", "unsupported")
    for part in (IMAGE, AUDIO)
]
TURNS: Refusals = [({"messages": [USER] * 20_000}, "messages", "array_above_max_length")]


@pytest.mark.parametrize(
    "refusals",
    [
        pytest.param(ROLES, marks=pytest.mark.row("P4")),
        pytest.param(MEDIA, marks=pytest.mark.row("P5")),
        pytest.param(TOOLS, marks=pytest.mark.row("P19")),
        pytest.param(CHOICES, marks=pytest.mark.row("P20")),
        pytest.param(DEPRECATED, marks=pytest.mark.row("P27")),
        pytest.param(SCHEMAS, marks=pytest.mark.row("G9")),
        pytest.param(TEMPLATES, marks=pytest.mark.row("T8")),
        pytest.param(KWARGS_REFUSED, marks=pytest.mark.row("T9")),
        pytest.param(CALLS, marks=pytest.mark.row("T11")),
        pytest.param(TURNS, marks=pytest.mark.row("T17")),
        OTHERS,
    ],
)
def test_refused(refusals: Refusals) -> None:
    async def check(served: Served) -> None:
        for change, param, code in refusals:
            body = {"model": "fake", "messages": [USER], **change}
            status, answer = await served.post("/v1/chat/completions", body)
            assert status == 400, (change, answer)
            error = answer["error"]
            assert error["type"] == "invalid_request_error"
            assert error["param"] == param, (error, str(change)[:300])
            assert error["code"].startswith(code), (error, str(change)[:300])
            assert len(error["message"]) < 300
        assert served.engine.submitted == []

    run_with_server(FakeEngine(), check)


@pytest.mark.parametrize(
    "change",
    [
        {"tools": []},
        {"tools": None, "tool_choice": "auto"},
        {"tools": [F], "tool_choice": "none"},
        {"functions": [], "function_call": "none"},
        *[
            schema({"type": "string", "pattern": pattern})
            for pattern in (
                r"^\p{L}+$",
                "(?<n>a)*",
                "[]a]",
                r"[\]]+",
                "a{2,3}?",
                "a|(|b)",
                "(?i)[^[]",
            )
        ],
        schema({"$ref": "#/$defs/x"}),
        schema(True),
        schema(nested(20)),
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        with_calls(call(arguments="")),
        with_calls(call(arguments='{"city": "Ro')),  # and others that a model may have written
        with_calls(call(arguments="{oops")),
        with_calls(call(arguments='{"a": NaN}')),
        with_calls(call(arguments='{"a": 1e999}')),
        with_calls(call(arguments='{"a": ' + "[" * 80 + "]" * 80 + "}")),
        with_calls({**CALL, "index": 0}),
        with_result(),
        with_result(content=""),
        {"messages": [USER, {"role": "assistant", "content": None, "refusal": "no"}]},
        {
            "messages": [
                USER,
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "n"}]},
            ]
        },
        {"chat_template_kwargs": {}},
    ],
)
def test_accepted(change: dict[str, Any]) -> None:
    async def check(served: Served) -> None:
        body = {"model": "fake", "messages": [USER], **change}
        status, answer = await served.post("/v1/chat/completions", body)
        assert status == 200, answer

    run_with_server(FakeEngine(), check)


def test_patterns_that_python_compiles_are_accepted() -> None:
    """The check reads a pattern without compiling it."""
    rng = random.Random(1)
    parts = ["a", "(", ")", "[", "]", "*", "+", "?", "|", "\\", "^", "(?:", "-", "{1,2}", "(?<=a)"]
    num_valid = 0
    with warnings.catch_warnings(action="ignore"):
        for _ in range(5000):
            pattern = "".join(rng.choices(parts, k=rng.randint(1, 8)))
            try:
                re.compile(pattern)
            except re.error:
                continue
            num_valid += 1
            schema = {"type": "object", "properties": {"a": {"pattern": pattern}}}
            assert parse_parameters(schema, "parameters", Unknown()) == schema
    assert num_valid > 500
