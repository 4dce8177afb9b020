"""Writes the calls and the reasoning of a stored conversation as chat templates take them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_THINKING = re.compile(r"""[.'"]thinking\b""")


def with_ids(
    messages: Sequence[Mapping[str, Any]], fitted: Callable[[str, str, int], str]
) -> list[dict[str, Any]]:
    """Returns a copy. fitted: the new id for an old one, the name of the function and the number
    of the call in the conversation. A result has the id of the latest call of its old one."""
    made: list[dict[str, Any]] = []
    latest: dict[Any, str] = {}
    number = 0
    for message in messages:
        copy = dict(message)
        calls = []
        for call in copy.get("tool_calls") or ():
            old = call.get("id", "")
            latest[old] = fitted(str(old), str(call["function"]["name"]), number)
            number += 1
            calls.append({**call, "id": latest[old]})
        if calls:
            copy["tool_calls"] = calls
        if "tool_call_id" in copy:
            copy["tool_call_id"] = latest.get(copy["tool_call_id"], copy["tool_call_id"])
        made.append(copy)
    return made


def with_thinking(messages: Sequence[Mapping[str, Any]], template: str) -> list[dict[str, Any]]:
    """Returns a copy that names reasoning `thinking`, too, for the templates that call it so."""
    copies = [dict(message) for message in messages]
    if _THINKING.search(template):
        for copy in copies:
            if "reasoning_content" in copy:
                copy["thinking"] = copy["reasoning_content"]
    return copies


# Each of these changes the messages for a template that has refused them as they were, and returns
# whether it changed any.


def name_arguments(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Gives arguments that are text, since their call was cut off, a name. Some templates write
    each argument by itself and fail without one."""
    cut = [item for item in _functions(messages) if isinstance(item.get("arguments"), str)]
    for function in cut:
        function["arguments"] = {"arguments": function["arguments"]}
    return bool(cut)


def write_arguments(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Makes arguments the text of their JSON, which some templates join to other text."""
    found = [item for item in _functions(messages) if isinstance(item.get("arguments"), dict)]
    for function in found:
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return bool(found)


def drop_thinking(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Takes the reasoning from messages with a text, beside which some templates refuse it."""
    found = [item for item in messages if item.get("thinking") and item.get("content")]
    for message in found:
        assert isinstance(message, dict)
        del message["thinking"]
    return bool(found)


def _functions(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [call["function"] for item in messages for call in item.get("tool_calls") or ()]
