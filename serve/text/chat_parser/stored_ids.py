"""Gives the calls of a stored conversation other ids, and the results those of their calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


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
