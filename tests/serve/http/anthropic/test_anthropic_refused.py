"""Bad bodies for /v1/messages get the exact status and error, and no request is queued."""

from __future__ import annotations

import time
from typing import Any

import pytest

from serve.http.anthropic.blocks import chat_messages
from tests.support.http.fake_engine import FakeEngine
from tests.support.http.running_server import Served, run_with_server

TOOL = {"name": "f", "input_schema": {"type": "object"}}
CALL = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "c"}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/"}}


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": list(blocks)}]}


def thinking(**fields: Any) -> dict[str, Any]:
    return {"thinking": fields}


TEXT = {"type": "text", "text": "hi"}
# Each row is a change to a valid body and the whole error message.
REFUSED: list[tuple[dict[str, Any], str]] = [
    (user(), "messages has nothing to answer"),
    (assistant({"type": "text", "text": ""}), "messages has nothing to answer"),
    ({"foo": 1}, 'unknown parameter "foo"'),
    ({"model": None}, "model is missing"),
    ({"model": 1}, "model must be a string"),
    ({"model": ""}, "model is empty"),
    ({"max_tokens": None}, "max_tokens is missing"),
    ({"max_tokens": -1}, "max_tokens must be between 0 and 2147483647"),
    ({"max_tokens": 1.5}, "max_tokens must be an integer"),
    ({"max_tokens": True}, "max_tokens must be an integer"),
    ({"max_tokens": "5"}, "max_tokens must be an integer"),
    ({"max_tokens": 2**40}, "max_tokens must be between 0 and 2147483647"),
    ({"temperature": 1.1}, "temperature must be between 0 and 1"),
    ({"temperature": "1"}, "temperature must be a number"),
    ({"top_p": -0.1}, "top_p must be between 0 and 1"),
    ({"top_k": -1}, "top_k must be between 0 and 2147483647"),
    ({"stream": 1}, "stream must be true or false"),
    ({"stop_sequences": "a"}, "stop_sequences must be a list"),
    ({"stop_sequences": [""]}, "stop_sequences[0] is empty"),
    ({"stop_sequences": [1]}, "stop_sequences[0] must be a string"),
    ({"stop_sequences": ["a"] * 17}, "stop_sequences has more than 16 entries"),
    ({"stop_sequences": ["a" * 1025]}, "stop_sequences[0] is longer than 1024 characters"),
    ({"metadata": {"user_id": 1}}, "metadata.user_id must be a string"),
    ({"metadata": {"user_id": "a" * 513}}, "metadata.user_id is longer than 512 characters"),
    ({"metadata": {"x": 1}}, 'unknown parameter "x" in metadata'),
    ({"service_tier": "fast"}, 'service_tier must be one of auto, standard_only, not "fast"'),
    ({"container": "c"}, "container is not supported"),
    ({"thread": {}}, "thread is not supported: send the whole conversation"),
    ({"speed": "fast"}, "speed is not supported"),
    (
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        'context_management.edits[0].type "clear_tool_uses_20250919" is not supported',
    ),
    ({"mcp_servers": [{}]}, "mcp_servers is not supported"),
    (
        {"cache_control": {"type": "forever"}},
        'cache_control.type must be one of ephemeral, not "forever"',
    ),
    (
        {"cache_control": {"type": "ephemeral", "ttl": "2m"}},
        'cache_control.ttl must be one of 5m, 1h, not "2m"',
    ),
    ({"system": 1}, "system must be a string or a list of blocks"),
    ({"system": [IMAGE]}, 'system[0].type "image" is not supported'),
    ({"system": [{"type": "text"}]}, "system[0].text is missing"),
    ({"messages": None}, "messages is missing"),
    ({"messages": "hi"}, "messages must be a list"),
    ({"messages": []}, "messages is empty"),
    ({"messages": [1]}, "messages[0] must be an object"),
    ({"messages": [{}]}, "messages[0].role is missing"),
    (
        {"messages": [{"role": "tool", "content": "a"}]},
        'messages[0].role must be one of user, assistant, system, not "tool"',
    ),
    ({"messages": [{"role": "user"}]}, "messages[0].content is missing"),
    (
        {"messages": [{"role": "user", "content": 1}]},
        "messages[0].content must be a string or a list of blocks",
    ),
    (
        {"messages": [{"role": "user", "content": "a", "x": 1}]},
        'unknown parameter "x" in messages[0]',
    ),
    (
        {"messages": [{"role": "user", "content": "a"}] * 8193},
        "messages has more than 8192 entries",
    ),
    (user(1), "messages[0].content[0] must be an object"),
    (user({"text": "a"}), "messages[0].content[0].type is missing"),
    (user({"type": 1}), "messages[0].content[0].type must be a string"),
    (
        user(TEXT, {"type": "x" * 100}),
        f'messages[0].content[1].type must be one of text, tool_result, not "{"x" * 64}..."',
    ),
    (user(IMAGE), 'messages[0].content[0].type "image" is not supported'),
    (user({"type": "document"}), 'messages[0].content[0].type "document" is not supported'),
    (user({"type": "text", "text": 1}), "messages[0].content[0].text must be a string"),
    (user({**TEXT, "x": 1}), 'unknown parameter "x" in messages[0].content[0]'),
    (user({**TEXT, "cache_control": 1}), "messages[0].content[0].cache_control must be an object"),
    (
        user(CALL),
        'messages[0].content[0].type must be one of text, tool_result, not "tool_use"',
    ),
    (
        user({"type": "thinking", "thinking": "a"}),
        'messages[0].content[0].type must be one of text, tool_result, not "thinking"',
    ),
    (user(RESULT), 'messages[0].content[0].tool_use_id "c" does not match an earlier call'),
    (
        user({**RESULT, "content": [IMAGE]}),
        'messages[0].content[0].content[0].type "image" is not supported',
    ),
    (user({**RESULT, "is_error": "no"}), "messages[0].content[0].is_error must be true or false"),
    (user({"type": "tool_result"}), "messages[0].content[0].tool_use_id is missing"),
    (
        assistant(RESULT),
        "messages[0].content[0].type must be one of text, tool_use, thinking, "
        'redacted_thinking, not "tool_result"',
    ),
    (assistant(CALL), "messages: the results of the last message's tool calls must follow it"),
    (assistant({**CALL, "input": "{}"}), "messages[0].content[0].input must be an object"),
    (assistant({**CALL, "name": "a b"}), "messages[0].content[0].name must match [A-Za-z0-9_.-]+"),
    (
        {"messages": [{"role": "system", "content": [CALL]}]},
        'messages[0].content[0].type must be one of text, not "tool_use"',
    ),
    ({"tools": {}}, "tools must be a list"),
    ({"tools": [1]}, "tools[0] must be an object"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema is missing"),
    ({"tools": [{**TOOL, "name": "a.b"}]}, "tools[0].name must match [A-Za-z0-9_-]+"),
    ({"tools": [{**TOOL, "input_schema": []}]}, "tools[0].input_schema must be an object"),
    (
        {"tools": [{**TOOL, "input_schema": {"type": "array"}}]},
        "tools[0].input_schema must be the schema of an object",
    ),
    ({"tools": [{**TOOL, "x": 1}]}, 'unknown parameter "x" in tools[0]'),
    ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading is not supported"),
    ({"tools": [TOOL, TOOL]}, 'tools[1].name "f" appears twice'),
    ({"tools": [TOOL] * 129}, "tools has more than 128 entries"),
    (
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        'tools[0].type "web_search_20250305" is not supported',
    ),
    ({"tools": [{"type": "x", "name": "f"}]}, 'tools[0].type must be one of custom, not "x"'),
    ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
    ({"tool_choice": "auto"}, "tool_choice must be an object"),
    ({"tool_choice": {}}, "tool_choice.type is missing"),
    (
        {"tool_choice": {"type": "required"}},
        'tool_choice.type must be one of auto, any, tool, none, not "required"',
    ),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}},
        'tool_choice.name "g" is not one of the tools',
    ),
    (thinking(type="enabled"), "thinking.budget_tokens is missing"),
    (
        thinking(type="enabled", budget_tokens=1023),
        "thinking.budget_tokens must be between 1024 and 2147483647",
    ),
    (
        thinking(type="enabled", budget_tokens=1024),
        "thinking.budget_tokens must be below max_tokens, which is 9",
    ),
    (thinking(type="between_tools"), 'thinking.type "between_tools" is not supported'),
    (thinking(type="on"), 'thinking.type must be one of enabled, adaptive, disabled, not "on"'),
    (
        {"output_config": {"format": {"type": "json_schema"}}},
        "output_config.format.schema is missing",
    ),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": 1}}},
        "output_config.format.schema must be a JSON schema object",
    ),
    (
        {"output_config": {"effort": "none"}},
        'output_config.effort must be one of low, medium, high, xhigh, max, not "none"',
    ),
    ({"messages": [{"role": "user", "content": "a" * 2001}]}, "messages: too long for the context"),
]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_refused_bodies(path: str) -> None:
    counts = path.endswith("count_tokens")
    valid: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
    if not counts:
        valid["max_tokens"] = 9
    shared = {"model", "messages", "system", "tools", "tool_choice", "thinking", "output_config"}

    async def check(served: Served) -> None:
        for change, message in REFUSED:
            if counts and (set(change) - shared or "max_tokens" in message):
                continue
            status, body = await served.post(path, {**valid, **change})
            assert (status, body["error"]["message"]) == (400, message), change
            kind: dict[str, Any] = {"type": "invalid_request_error", "message": message}
            if "thread" in change:  # clients continue without a thread after this code
                kind["details"] = {"error_code": "thread_unsupported_request"}
            request_id = body["request_id"]
            assert body == {"type": "error", "error": kind, "request_id": request_id}
        assert not served.engine.running
        # one body is refused only after its conversation was rendered and measured
        assert len(served.engine.submitted) == 1

    run_with_server(FakeEngine(), check)


def test_errors_before_the_body_is_understood() -> None:
    async def check(served: Served) -> None:
        json_type = {"Content-Type": "application/json"}
        for data, headers, status, kind in (
            (b"{", json_type, 400, "invalid_request_error"),
            (b'{"a":1,"a":1}', json_type, 400, "invalid_request_error"),
            (b"[]", json_type, 400, "invalid_request_error"),
            (b"{}", {"Content-Type": "text/plain"}, 415, "invalid_request_error"),
            (b"x" * 2000, json_type, 413, "request_too_large"),
        ):
            async with served.session.post("/v1/messages", data=data, headers=headers) as answer:
                body = await answer.json()
                assert (answer.status, body["type"], body["error"]["type"]) == (
                    status,
                    "error",
                    kind,
                )
                assert answer.headers["request-id"] == body["request_id"]
        async with served.session.get("/v1/messages") as answer:
            assert (answer.status, answer.headers["Allow"]) == (405, "POST")
            assert (await answer.json())["error"]["type"] == "invalid_request_error"

    run_with_server(FakeEngine(), check, max_body_bytes=1500)


def test_malformed_requests_get_errors_of_the_common_shape() -> None:
    """The server knows the API only after it has parsed the path."""

    async def check(served: Served) -> None:
        answer = await served.raw(b"POST /v1/messages HTTP/1.1\r\nBad Header\r\n\r\n")
        assert answer.status == 400
        assert answer.error()["type"] == "invalid_request_error"
        answer = await served.raw(b"GET /v1/message HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (answer.status, answer.error()["code"]) == (404, "unknown_url")

    run_with_server(FakeEngine(), check)


def test_the_context_cuts_an_answer_short_without_an_error() -> None:
    """Clients do not know the context, so a larger max_tokens is no error."""

    async def check(served: Served) -> None:
        body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
        status, _ = await served.post("/v1/messages", {**body, "max_tokens": 64_000})
        assert status == 200
        params = served.engine.submitted[-1][1]
        assert (params.max_tokens, params.default_max_tokens) == (None, 64_000)

    run_with_server(FakeEngine(), check)


def test_a_server_that_warns_answers_unknown_names() -> None:
    async def check(served: Served) -> None:
        body = {
            "model": "fake",
            "max_tokens": 9,
            "messages": [{"role": "user", "content": [{**TEXT, "y": 1}]}],
            "x": 1,
        }
        async with served.session.post("/v1/messages", json=body) as answer:
            assert answer.status == 200
            warning = answer.headers["x-mergestep-warning"]
            assert '"x"' in warning
            assert '"messages[0].content[0].y"' in warning

    run_with_server(FakeEngine(), check, unknown_fields="warn")


@pytest.mark.timing
@pytest.mark.parametrize("kind", ["messages", "blocks"])
def test_thousands_of_pieces_are_joined_quickly(kind: str) -> None:
    """A body of 8 MB may hold thousands of pieces that become one message."""
    text, num_pieces = "a" * 1000, 8000
    pieces: Any = [{"type": "text", "text": text}] * num_pieces
    messages: Any = [{"role": "user", "content": pieces}]
    if kind == "messages":
        messages = [{"role": "user", "content": text}] * num_pieces
    start_s = time.process_time()
    (joined,) = chat_messages(None, messages)
    assert (
        time.process_time() - start_s < 1
    )  # copying all earlier pieces for each one takes many seconds
    assert len(joined["content"]) == num_pieces * 1001 - 1
