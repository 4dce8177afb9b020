"""Requests in the form in which Claude Code 2.1.197, Codex 0.169.0, Continue's CLI 1.5.47 and Open
WebUI 0.12.4 were seen to send them: the same fields, headers and turns, with other texts.

The programs themselves need more than tests may have (see docs/clients.md); a server with default
settings must accept what they send, and their second request has the first one's answer in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from serve import Engine
from tests.support.http.dictated_engine import dictated_engine
from tests.support.http.running_server import ServerThread

READ = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "path": {"type": "string", "description": "The file.", "minLength": 1},
        "limit": {"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991},
        "mode": {"anyOf": [{"const": "text"}, {"enum": ["raw", "lines"]}], "default": "text"},
        "marks": {
            "type": "object",
            "propertyNames": {"type": "string", "pattern": "^[a-z]+$"},
            "additionalProperties": {"type": "string", "format": "uri", "maxLength": 99},
        },
        "parts": {"type": "array", "items": {"type": "string"}, "maxItems": 9},
    },
    "required": ["path"],
    "additionalProperties": False,
}
CALLS = """SAY<<I look.
<tool_call>
{"name": "Read", "arguments": {"path": "note.txt"}}
</tool_call>
<tool_call>
{"name": "Bash", "arguments": {"command": "ls"}}
</tool_call>>> SAY<<It is 42.>>"""
BASH = {"type": "object", "required": ["command"], "properties": {"command": {"type": "string"}}}
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ServerThread(dictated_engine("m")) as server:
        yield server.url


def events(url: str, body: dict[str, Any], **headers: str) -> list[dict[str, Any]]:
    """Posts a body that asks for a stream and returns the data of its events."""
    headers = {"Accept-Encoding": "gzip, deflate, br, zstd", **headers}
    answer = requests.post(url, json=body, headers=headers, timeout=30)
    assert answer.status_code == 200, answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("is_known_model", [True, False])
def test_claude_code(url: str, is_known_model: bool) -> None:
    """Models that it does not know get adaptive thinking, and system messages between turns."""
    assert requests.head(url, timeout=30).status_code == 200
    reminder = {"type": "text", "text": "<system-reminder>\nToday.\n</system-reminder>"}
    question = {"type": "text", "text": f"Look. {CALLS}", **EPHEMERAL}
    body: dict[str, Any] = {
        "model": "m",
        "system": [
            {"type": "text", "text": "You help."},
            {"type": "text", "text": "R", **EPHEMERAL},
        ],
        "messages": [{"role": "user", "content": [reminder, question]}],
        "tools": [
            {"name": "Read", "description": "Reads.", "input_schema": READ},
            {"name": "Bash", "description": "Runs.", "input_schema": BASH},
        ],
        "metadata": {"user_id": json.dumps({"device_id": "0" * 64, "session_id": "1" * 36})},
        "max_tokens": 32000,
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "stream": True,
    }
    if is_known_model:
        body["thinking"] = {"type": "enabled", "budget_tokens": 31999}
    else:
        body |= {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}
        body["messages"].append({"role": "system", "content": "There are agents."})
    beta = "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27"
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": beta, "x-api-key": "none"}
    first = events(f"{url}/v1/messages?beta=true", body, **headers)
    blocks = [event["content_block"] for event in first if event["type"] == "content_block_start"]
    assert [block["type"] for block in blocks] == ["text", "tool_use", "tool_use"]
    inputs = [e["delta"] for e in first if e.get("delta", {}).get("type") == "input_json_delta"]
    assert "".join(delta["partial_json"] for delta in inputs) == (
        '{"path": "note.txt"}{"command": "ls"}'
    )
    uses = [
        {**blocks[1], "input": {"path": "note.txt"}},
        {**blocks[2], "input": {"command": "ls"}, **EPHEMERAL},
    ]
    results = [
        {"tool_use_id": uses[0]["id"], "type": "tool_result", "content": "1\tthe secret is 42"},
        {
            **{"tool_use_id": uses[1]["id"], "type": "tool_result", "is_error": True},
            **{"content": [{"type": "text", "text": "no such file"}], **EPHEMERAL},
        },
    ]
    body["messages"] += [
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, *uses]},
        {"role": "user", "content": results},
    ]
    second = events(f"{url}/v1/messages?beta=true", body, **headers)
    texts = [e["delta"]["text"] for e in second if e.get("delta", {}).get("type") == "text_delta"]
    assert "".join(texts) == "It is 42."


def test_codex(url: str) -> None:
    """It sends tools of OpenAI's servers beside its own, which are left out with a warning."""

    def item(role: str, text: str) -> dict[str, Any]:
        content = [{"type": "input_text", "text": text}]
        return {"type": "message", "id": f"msg_{role}", "role": role, "content": content}

    def function(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
        described = {"description": "Does.", "strict": False, "parameters": parameters}
        return {"type": "function", "name": name, **described}

    agents = {"type": "namespace", "name": "agents", "description": "Agents."}
    body: dict[str, Any] = {
        "model": "m",
        "stream": True,
        "input": [item("developer", "You are an agent."), item("user", CALLS)],
        "tools": [
            function("Read", READ),
            agents | {"tools": [function("close_agent", BASH)]},
            function("Bash", BASH),
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a20609-202d-7fb0-a60d-dda46eb3cc9b",
        "client_metadata": {"session_id": "01a20609", "turn": json.dumps({"sandbox": "none"})},
    }
    answer = requests.post(f"{url}/v1/responses", json=body, timeout=30)
    assert answer.headers["x-mergestep-warning"] == (
        "left out: tools[1] of the type namespace, tools[3] of the type web_search"
    )
    done = events(f"{url}/v1/responses", body, session_id="01a20609")[-1]
    output = done["response"]["output"]
    assert [part["type"] for part in output] == ["message", "function_call", "function_call"]
    assert [tool["name"] for tool in done["response"]["tools"]] == ["Read", "Bash"]
    results = [
        {"type": "function_call_output", "id": "fco_1", "call_id": call["call_id"], "output": "42"}
        for call in output[1:]
    ]
    body["input"] += [*output, *results]
    done = events(f"{url}/v1/responses", body)[-1]
    assert done["response"]["output"][0]["content"][0]["text"] == "It is 42."


def chat(url: str, body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the message of a streamed chat, put together as clients do, and the usage."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
    usage = {}
    for chunk in events(f"{url}/v1/chat/completions", body):
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            message["content"] += choice["delta"].get("content") or ""
            for piece in choice["delta"].get("tool_calls", []):
                if piece["index"] == len(message["tool_calls"]):
                    function = {"name": piece["function"]["name"], "arguments": ""}
                    call = {"id": piece["id"], "type": "function", "function": function}
                    message["tool_calls"].append(call)
                call = message["tool_calls"][piece["index"]]
                call["function"]["arguments"] += piece["function"].get("arguments", "")
    return message, usage


@pytest.mark.parametrize("client", ["continue", "open-webui"])
def test_continue_and_open_webui(url: str, client: str) -> None:
    """Both send chat completions; Open WebUI sends the sampling parameters of its settings, too."""
    assert requests.get(f"{url}/v1/models", timeout=30).json()["data"][0]["id"] == "m"
    body: dict[str, Any] = {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [{"role": "user", "content": CALLS}],
        "tools": [
            {"type": "function", "function": {"name": name, "description": "D", "parameters": p}}
            for name, p in (("Read", READ), ("Bash", BASH), ("Exit", {"type": "object"}))
        ],
    }
    if client == "continue":
        body["messages"].insert(0, {"role": "system", "content": "You are an agent."})
    else:
        body |= {"temperature": 0.5, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "seed": 3}
        body |= {"frequency_penalty": 0.1, "presence_penalty": 0.1, "stop": ["zzz"]}
        body |= {"reasoning_effort": "low", "logit_bias": {"5": 10}, "max_tokens": 500}
    message, usage = chat(url, body)
    assert message["content"] == "I look." and usage["total_tokens"] > 0
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["Read", "Bash"]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "42"}
        for call in message["tool_calls"]
    ]
    body["messages"] += [message, *results]
    message, _ = chat(url, body)
    assert message["content"] == "It is 42." and not message["tool_calls"]


def test_answers_that_come_back_with_fields_of_a_library(url: str) -> None:
    """LiteLLM adds provider_specific_fields, the parsing of OpenAI's client parsed values."""
    body: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "user", "content": CALLS}],
        "tools": [{"type": "function", "function": {"name": "Bash", "parameters": BASH}}],
    }
    answer = requests.post(f"{url}/v1/chat/completions", json=body, timeout=30).json()
    message = answer["choices"][0]["message"]
    message |= {"provider_specific_fields": {"refusal": None}, "parsed": {"a": 1}, "audio": None}
    for call in message["tool_calls"]:
        call["function"]["parsed_arguments"] = {"path": "note.txt"}
        body["messages"].append({"role": "tool", "tool_call_id": call["id"], "content": "42"})
    body["messages"].insert(1, message)
    again = requests.post(f"{url}/v1/chat/completions", json=body, timeout=30)
    assert again.status_code == 200, again.text
    assert again.json()["choices"][0]["message"]["content"] == "It is 42."
    warning = again.headers["x-mergestep-warning"]
    assert warning.startswith('unknown parameters: "messages[1].')
    for name in ("provider_specific_fields", "parsed", "tool_calls[1].function.parsed_arguments"):
        assert f'"messages[1].{name}"' in warning
    # the user's own messages are as strict as before
    body["messages"][0]["provider_specific_fields"] = {}
    refused = requests.post(f"{url}/v1/chat/completions", json=body, timeout=30)
    assert refused.status_code == 400


def test_words_by_which_clients_notice_a_prompt_that_is_too_long() -> None:
    """LiteLLM, LangChain, pydantic-ai and Claude Code then shorten the conversation."""
    engine = Engine(None, served_model_name="m", max_num_seqs=4)
    with ServerThread(engine) as server:
        for words in (1200, 60_000):  # the second one is refused before it is tokenized
            messages = [{"role": "user", "content": "word " * words}]
            body = {"model": "m", "messages": messages, "max_tokens": 50}
            for path in ("/v1/chat/completions", "/v1/messages"):
                answer = requests.post(server.url + path, json=body, timeout=30)
                message = answer.json()["error"]["message"]
                assert answer.status_code == 400
                assert "this model's maximum context length is" in message.lower()
                assert "prompt is too long" in message
                found = re.search(r"too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", message)
                assert found is not None
                assert int(found[1]) > int(found[2]) in (1023, 1024)
