"""Bounded JSON over every API and field that asks for JSON, by raw requests to the embedded
model: it parses, validates and ends with default settings; bounded_json false takes that away."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from serve import Engine
from tests.support.http.running_server import ServerThread
from tests.support.profile import every_day

USER = {"role": "user", "content": "What is the weather in Rome?"}
# As libraries make it of a class: nothing is bounded, and objects are open.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "degrees": {"anyOf": [{"type": "integer"}, {"type": "number"}]},
        "days": {"type": "array", "items": {"$ref": "#/$defs/Day"}},
        "kind": {"enum": ["now", "later"]},
    },
    "required": ["city", "degrees", "days", "kind"],
    "$defs": {
        "Day": {
            "type": "object",
            "properties": {"day": {"type": "integer"}, "rain": {"type": "boolean"}},
            "required": ["day"],
        }
    },
}
CLOSED = json.loads(json.dumps(SCHEMA))
for part in (CLOSED, CLOSED["$defs"]["Day"]):
    part["additionalProperties"] = False
FUNCTION = {"name": "weather", "parameters": SCHEMA}
CHAT: dict[str, Any] = {"messages": [USER]}
TOOLS = CHAT | {"tools": [{"type": "function", "function": FUNCTION}]}
INPUT: dict[str, Any] = {"input": "What is the weather in Rome?"}
FORMAT = {"name": "weather", "schema": SCHEMA}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "response_format": (
        "/v1/chat/completions",
        CHAT | {"response_format": {"type": "json_schema", "json_schema": FORMAT}},
    ),
    "guided_json": ("/v1/chat/completions", CHAT | {"guided_json": SCHEMA}),
    "structured_outputs": ("/v1/chat/completions", CHAT | {"structured_outputs": {"json": SCHEMA}}),
    "completions": ("/v1/completions", {"prompt": "Rome:", "max_tokens": 200}),
    "required": (
        "/v1/chat/completions",
        TOOLS | {"tool_choice": "required", "parallel_tool_calls": False},
    ),
    "named": (
        "/v1/chat/completions",
        TOOLS | {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
    ),
    "any": (
        "/v1/messages",
        CHAT
        | {"tools": [{"name": "weather", "input_schema": SCHEMA}], "max_tokens": 200}
        | {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
    ),
    "text.format": (
        "/v1/responses",
        INPUT | {"text": {"format": {"type": "json_schema", **FORMAT}}},
    ),
    "responses tools": (
        "/v1/responses",
        INPUT
        | {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"}
        | {"parallel_tool_calls": False},
    ),
}
REQUESTS["completions"][1]["response_format"] = REQUESTS["response_format"][1]["response_format"]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    engine = Engine(served_model_name="m", max_num_seqs=8, max_model_len=512)
    with ServerThread(engine) as server:
        yield server.url


def asked(url: str, name: str, **more: Any) -> tuple[Any, str]:
    """Returns the JSON of the answer, unparsed if it is text, and how the answer ended."""
    path, body = REQUESTS[name]
    sent = json.dumps({"model": "m", "temperature": 1.0, **body, **more}).encode()
    request = urllib.request.Request(url + path, sent, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        given = json.load(answer)
    if path == "/v1/messages":
        (block,) = given["content"]
        return block["input"], given["stop_reason"]
    if path == "/v1/responses":
        (item,) = given["output"]
        called = item["type"] == "function_call"
        return item["arguments"] if called else item["content"][0]["text"], given["status"]
    (choice,) = given["choices"]
    if path == "/v1/completions":
        return choice["text"], choice["finish_reason"]
    calls = choice["message"].get("tool_calls")
    text = calls[0]["function"]["arguments"] if calls else choice["message"]["content"]
    return text, choice["finish_reason"]


@pytest.mark.parametrize("name", list(REQUESTS))
@pytest.mark.parametrize("num_answers", every_day((0,), [2, 4]))
def test_default_settings(url: str, name: str, num_answers: int) -> None:
    for _ in range(num_answers):
        value, reason = asked(url, name)
        value = json.loads(value) if isinstance(value, str) else value
        jsonschema.validate(value, CLOSED)
        assert -(1 << 63) <= value["degrees"] < 1e309
        if "max_tokens" in REQUESTS[name][1]:
            assert reason in ("length", "stop", "max_tokens", "tool_use")
        else:
            assert reason in ("stop", "tool_calls", "completed")


@pytest.mark.parametrize("name", [name for name in REQUESTS if name != "any"])
def test_without_bounds_the_tokens_run_out(url: str, name: str) -> None:
    limit = {
        "max_output_tokens" if name in ("text.format", "responses tools") else "max_tokens": 16
    }
    text, reason = asked(url, name, bounded_json=False, **limit)
    assert reason in ("length", "incomplete")
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)
