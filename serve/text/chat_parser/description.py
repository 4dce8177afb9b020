"""Tools for models whose chat template does not support them.

The conversation describes the tools, and calls and results are text in the Hermes format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_NO_SYSTEM_ROLE = re.compile(r"system role (?:is )?not supported", re.IGNORECASE)
_INTRODUCTION = """You may use these functions, one JSON object per line:
<tools>
{tools}
</tools>
To call a function, write its name and arguments like this, once for each call:
<tool_call>
{{"name": "the function's name", "arguments": {{"parameter": "value"}}}}
</tool_call>
The results come back in the next message."""


def describe_tools(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    template: str,
) -> list[dict[str, Any]]:
    """Returns the conversation as plain messages of system, user and assistant.

    template: the text of the chat template; where it refuses system messages, the first user
    message has the description.
    """
    plain = _plain(messages)
    if not tools:
        return plain
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = _INTRODUCTION.format(tools=listed)
    role = "user" if _NO_SYSTEM_ROLE.search(template) else "system"
    if plain and plain[0].get("role") == role:
        first = plain[0]
        order = (text, first["content"]) if role == "user" else (first["content"], text)
        return [{**first, "content": "\n\n".join(order)}, *plain[1:]]
    return [{"role": role, "content": text}, *plain]


def _plain(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Writes calls and results as text; consecutive results become one message, since templates
    require alternating roles."""
    plain: list[dict[str, Any]] = []
    was_result = False
    for message in messages:
        is_result = message.get("role") == "tool"
        if is_result:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if was_result:
                plain[-1]["content"] += f"\n{text}"
            else:
                plain.append({"role": "user", "content": text})
        else:
            plain.append(_with_calls(message))
        was_result = is_result
    return plain


def _with_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    texts = [message["content"]] if message["content"] else []
    texts += [_call_text(call["function"]) for call in calls]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(texts)}


def _call_text(function: Mapping[str, Any]) -> str:
    name, arguments = json.dumps(function["name"]), function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    end = "}" if _is_json(arguments) else ""  # a call that was cut off stays as it is
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}{end}\n</tool_call>'


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
