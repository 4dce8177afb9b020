"""Bad bodies and paths of /v1/responses get the exact status, parameter and code."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.http.fake_engine import FakeEngine
from tests.support.http.running_server import Served, run_with_server

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "x"}
IMAGE = {"type": "input_image", "image_url": "http://127.0.0.1/"}
TEXT = {"type": "input_text", "text": "hi"}


def item(**fields: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": "a"}, fields]}


def part(*parts: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": list(parts)}]}


UNKNOWN, TYPE, VALUE = "unknown_parameter", "invalid_type", "invalid_value"
MISSING, UNSUPPORTED = "missing_required_parameter", "unsupported_parameter"
TOO_MANY, TOO_LONG = "array_above_max_length", "string_above_max_length"
# Each row is a change to a valid body, and the param and code of the error.
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"foo": 1}, "foo", UNKNOWN),
    ({"messages": []}, "messages", UNKNOWN),
    ({"max_tokens": 5}, "max_tokens", UNKNOWN),
    ({"model": None}, "model", MISSING),
    ({"model": 1}, "model", TYPE),
    ({"input": None}, "input", MISSING),
    ({"input": 1}, "input", TYPE),
    ({"input": {}}, "input", TYPE),
    ({"input": []}, "input", VALUE),
    ({"input": [1]}, "input[0]", TYPE),
    ({"input": [{"role": "user", "content": "a"}] * 8193}, "input", TOO_MANY),
    ({"input": [{}]}, "input[0].role", MISSING),
    ({"input": [{"type": 1}]}, "input[0].type", TYPE),
    (item(type="x"), "input[1].type", VALUE),
    (item(type="item_reference", id="a"), "input[1].id", VALUE),
    (item(type="item_reference"), "input[1].id", MISSING),
    (item(type="computer_call_output"), "input[1].type", UNSUPPORTED),
    (item(role="tool", content="a"), "input[1].role", VALUE),
    (item(role="user"), "input[1].content", MISSING),
    (item(role="user", content=1), "input[1].content", TYPE),
    (item(role="user", content=[]), "input[1].content", VALUE),
    (item(role="user", content="a", x=1), "input[1].x", UNKNOWN),
    (item(role="user", content="a", id=""), "input[1].id", VALUE),
    (item(role="user", content="a", status="done"), "input[1].status", VALUE),
    (part(1), "input[0].content[0]", TYPE),
    (part({"text": "a"}), "input[0].content[0].type", MISSING),
    (part(TEXT, IMAGE), "input[0].content[1].type", UNSUPPORTED),
    (part({"type": "input_file"}), "input[0].content[0].type", UNSUPPORTED),
    (part({"type": "text", "text": "a"}), "input[0].content[0].type", VALUE),
    (part({"type": "input_text"}), "input[0].content[0].text", MISSING),
    (part({"type": "input_text", "text": 1}), "input[0].content[0].text", TYPE),
    (part({**TEXT, "x": 1}), "input[0].content[0].x", UNKNOWN),
    (item(**{**CALL, "call_id": None}), "input[1].call_id", MISSING),
    (item(**{**CALL, "arguments": {}}), "input[1].arguments", TYPE),
    (item(**{**CALL, "arguments": "[1]"}), "input[1].arguments", VALUE),
    (item(**{**CALL, "name": "a b"}), "input[1].name", VALUE),
    (item(**{**CALL, "namespace": "n"}), "input[1].namespace", UNSUPPORTED),
    (item(**OUTPUT), "input[1].call_id", VALUE),
    (item(**{**OUTPUT, "output": None}), "input[1].output", MISSING),
    (item(**{**OUTPUT, "output": [IMAGE]}), "input[1].output[0].type", UNSUPPORTED),
    (item(type="reasoning", summary="a"), "input[1].summary", TYPE),
    (item(type="reasoning", content=[{"type": "x"}]), "input[1].content[0].type", VALUE),
    ({"instructions": 1}, "instructions", TYPE),
    ({"max_output_tokens": 0}, "max_output_tokens", VALUE),
    ({"max_output_tokens": 1.0}, "max_output_tokens", TYPE),
    ({"max_output_tokens": 2**31}, "max_output_tokens", VALUE),
    ({"max_output_tokens": 3000}, "input", "context_length_exceeded"),
    ({"max_tool_calls": 0}, "max_tool_calls", VALUE),
    ({"temperature": 2.1}, "temperature", VALUE),
    ({"temperature": True}, "temperature", TYPE),
    ({"top_p": 2}, "top_p", VALUE),
    ({"seed": 2**63}, "seed", VALUE),
    ({"stop": ["a"] * 17}, "stop", TOO_MANY),
    ({"cache_salt": "a b"}, "cache_salt", VALUE),
    ({"n": 2}, "n", UNKNOWN),
    ({"stream": "true"}, "stream", TYPE),
    ({"stream_options": {}}, "stream_options", VALUE),
    (
        {"stream": True, "stream_options": {"include_usage": True}},
        "stream_options.include_usage",
        UNKNOWN,
    ),
    ({"background": True}, "background", UNSUPPORTED),
    ({"truncation": "auto"}, "truncation", UNSUPPORTED),
    ({"conversation": "conv_1"}, "conversation", UNSUPPORTED),
    ({"prompt": {"id": "p"}}, "prompt", UNSUPPORTED),
    ({"context_management": [{}]}, "context_management", UNSUPPORTED),
    ({"previous_response_id": "resp_x"}, "previous_response_id", "previous_response_not_found"),
    ({"previous_response_id": 1}, "previous_response_id", TYPE),
    ({"previous_response_id": "a" * 129}, "previous_response_id", TOO_LONG),
    ({"include": "a"}, "include", TYPE),
    ({"include": ["x"]}, "include", VALUE),
    ({"top_logprobs": 21}, "top_logprobs", VALUE),
    ({"store": 1}, "store", TYPE),
    ({"metadata": {"a": 1}}, "metadata", TYPE),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata", TOO_MANY),
    ({"user": "a" * 513}, "user", TOO_LONG),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort", VALUE),
    ({"reasoning": {"summary": True}}, "reasoning.summary", TYPE),
    ({"reasoning": {"x": 1}}, "reasoning.x", UNKNOWN),
    ({"text": {"format": {}}}, "text.format.type", MISSING),
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type", UNSUPPORTED),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name", MISSING),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", MISSING),
    (
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": 1}}},
        "text.format.schema",
        "invalid_schema",
    ),
    ({"text": {"verbosity": "some"}}, "text.verbosity", VALUE),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", UNSUPPORTED),
    ({"tools": [{"type": "custom", "name": "f"}]}, "tools[0].type", UNSUPPORTED),
    ({"tools": [{"type": "x"}]}, "tools[0].type", VALUE),
    ({"tools": [{"name": "f"}]}, "tools[0].type", MISSING),
    ({"tools": [{"type": "function"}]}, "tools[0].name", MISSING),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].function", UNKNOWN),
    ({"tools": [{**TOOL, "parameters": "{}"}]}, "tools[0].parameters", TYPE),
    ({"tools": [{**TOOL, "parameters": {"type": 5}}]}, "tools[0].parameters", "invalid_schema"),
    (
        {"tools": [{**TOOL, "parameters": {"type": "array"}}]},
        "tools[0].parameters",
        "invalid_schema",
    ),
    ({"tools": [{**TOOL, "strict": 1}]}, "tools[0].strict", TYPE),
    ({"tools": [TOOL, TOOL]}, "tools[1].name", VALUE),
    ({"tools": [TOOL] * 129}, "tools", TOO_MANY),
    ({"tool_choice": "any"}, "tool_choice", VALUE),
    ({"tool_choice": "required"}, "tool_choice", VALUE),
    ({"tool_choice": 1}, "tool_choice", TYPE),
    ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice.type", UNSUPPORTED),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}},
        "tool_choice.name",
        VALUE,
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
        "tool_choice.tools",
        VALUE,
    ),
    (
        {
            "tools": [TOOL],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "g"}],
            },
        },
        "tool_choice.tools[0].name",
        VALUE,
    ),
    ({"input": "a" * 2001}, "input", "context_length_exceeded"),
]
PROMPT_FIELDS = {"model", "input", "instructions", "tools", "tool_choice", "reasoning", "text"}


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/input_tokens"])
def test_refused_bodies(path: str) -> None:
    counts = path.endswith("input_tokens")

    async def check(served: Served) -> None:
        num_refused = 0
        for change, param, code in REFUSED:
            if counts and set(change) - PROMPT_FIELDS:
                continue
            body = {"model": "fake", "input": "hi", **change}
            status, answer = await served.post(path, body)
            error = answer["error"]
            assert (status, error["param"], error["code"]) == (400, param, code), (change, error)
            assert error["type"] == "invalid_request_error"
            assert set(error) == {"message", "type", "param", "code"}
            assert (
                param.rpartition(".")[2].partition("[")[0] in error["message"] or param == "input"
            )
            num_refused += 1
        assert num_refused > 30
        assert not served.engine.running
        # these bodies are refused only after the conversation was rendered and measured
        assert len(served.engine.submitted) == (1 if counts else 2)

    run_with_server(FakeEngine(), check)


def test_paths_and_queries() -> None:
    async def check(served: Served) -> None:
        _, stored = await served.post("/v1/responses", {"model": "fake", "input": "hi"})
        path = f"/v1/responses/{stored['id']}"
        missing = (404, "response_id", "response_not_found")
        for method, url, expected in (
            ("GET", "/v1/responses/resp_x", missing),
            ("DELETE", "/v1/responses/resp_x", missing),
            ("GET", "/v1/responses/resp_x/input_items", missing),
            ("POST", "/v1/responses/resp_x/cancel", missing),
            ("GET", "/v1/responses/a%2Fb/c", missing),
            ("GET", f"{path}?stream=true", (400, "stream", "invalid_value")),
            ("POST", f"{path}/cancel", (400, None, "invalid_value")),
            ("GET", f"{path}/input_items?limit=0", (400, "limit", "invalid_value")),
            ("GET", f"{path}/input_items?limit=101", (400, "limit", "invalid_value")),
            ("GET", f"{path}/input_items?limit=%ff", (400, "limit", "invalid_value")),
            ("GET", f"{path}/input_items?limit=1e1", (400, "limit", "invalid_value")),
            ("GET", f"{path}/input_items?limit=٣", (400, "limit", "invalid_value")),
            ("GET", f"{path}/input_items?order=up", (400, "order", "invalid_value")),
            ("GET", f"{path}/input_items?after=msg_x", (400, "after", "invalid_value")),
            ("GET", "/v1/responses", (405, None, "method_not_allowed")),
            ("POST", path, (405, None, "method_not_allowed")),
            ("GET", f"{path}/cancel", (405, None, "method_not_allowed")),
        ):
            async with served.session.request(method, url) as answer:
                error = (await answer.json())["error"]
                assert (answer.status, error["param"], error["code"]) == expected, url
        async with served.session.get(path) as answer:
            assert await answer.json() == stored

    run_with_server(FakeEngine(), check)


def test_large_inputs_are_parsed_in_a_thread() -> None:
    """A thread parses large inputs with the same answers and refusals."""

    async def check(served: Served) -> None:
        body: dict[str, Any] = {"model": "fake", "input": "hi"}
        status, first = await served.post("/v1/responses", body)
        continuation = {**body, "previous_response_id": first["id"]}
        status, answer = await served.post("/v1/responses", continuation)
        assert status == 200
        assert answer["usage"]["input_tokens"] == len("hi" + "Hello there" + "hi")
        status, answer = await served.post("/v1/responses", {**body, "input": [OUTPUT]})
        assert (status, answer["error"]["param"]) == (400, "input[0].call_id")

    run_with_server(FakeEngine(), check, parse_inline_bytes=1)
