"""The fields of a response that are known before any token."""

from __future__ import annotations

from typing import Any

import orjson

from serve.http.responses.requests import ResponseCall

# Fields of the request that the answer repeats.
_REPEATED = (
    "max_output_tokens",
    "max_tool_calls",
    "previous_response_id",
    "prompt_cache_key",
    "safety_identifier",
    "user",
)


def response_head(
    asked: ResponseCall, response_id: str, created: int, model: str
) -> dict[str, Any]:
    """Returns the head of a response. created: in seconds of Unix time."""
    values, params = asked.values, asked.params
    reasoning = values.get("reasoning", {})
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": model,
        "output": [],
        "usage": None,
        **{name: values.get(name) for name in _REPEATED},
        "instructions": _as_json(values.get("instructions")),
        "metadata": values.get("metadata", {}),
        "parallel_tool_calls": values.get("parallel_tool_calls", True),
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "service_tier": "default",
        "store": values.get("store", True),
        "temperature": params.temperature,
        "top_p": params.top_p,
        "text": _as_json(_text(values.get("text", {}))),
        "tool_choice": values.get("tool_choice", "auto"),
        "tools": _as_json([_tool(tool) for tool in values.get("tools", [])]),
        "top_logprobs": values.get("top_logprobs", 0),
        "truncation": "disabled",
    }


def _as_json(value: object) -> orjson.Fragment:
    """Serializes a value once, since it may be megabytes and is sent up to five times."""
    return orjson.Fragment(orjson.dumps(value))


def _text(text: dict[str, Any]) -> dict[str, Any]:
    form = text.get("format", {"type": "text"})
    if form["type"] == "json_schema":
        form = {
            "description": None,
            "strict": None,
            **form,
            "schema": orjson.loads(form["schema"].source),
        }
    return {"format": form, "verbosity": text.get("verbosity", "medium")}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"description": None, "parameters": None, "strict": None, **tool}
