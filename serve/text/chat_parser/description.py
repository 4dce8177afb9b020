"""Tools for models whose chat template does not render them: the conversation describes them.

Where the template writes stored calls and results, the description is in its format. Where it has
a text for the tools in the system message (Phi-4-mini), that has their JSON. Otherwise calls and
results are text in the Hermes format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from serve.text.chat_parser.formats import ChatFormat
from serve.text.chat_parser.formats.hermes import HERMES
from serve.text.chat_parser.formats.json_lists import TOOLS_KEY

_NO_SYSTEM_ROLE = re.compile(r"system role (?:is )?not supported", re.IGNORECASE)
_LIST = """You may use these functions, one JSON object per line:
<tools>
{tools}
</tools>
"""
_HERMES = """To call a function, write its name and arguments like this, once for each call:
<tool_call>
{"name": "the function's name", "arguments": {"parameter": "value"}}
</tool_call>
"""
_RESULTS = "The results come back in the next message."
_PROMPT = "You are a helpful assistant with some tools."  # as in Microsoft's example


def describe_tools(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    template: str,
    style: ChatFormat,
) -> list[dict[str, Any]]:
    """Returns the conversation with a description of the tools, as the template takes it.

    template: the text of the chat template; where it refuses system messages, the first user
    message has the description.
    """
    if style.has_native_calls:
        plain = [dict(message) for message in messages]
    else:
        plain = _plain(messages, style)
    if not tools:
        return plain
    functions = [tool["function"] for tool in tools]
    if style.has_tools_key:
        return _with_key(plain, json.dumps(functions, ensure_ascii=False))
    how = _HERMES
    if style.tools is not None and style.tools is not HERMES:
        how = f'To call a function "f" with "x" being 1, write:\n{style.tools.example}\n'
    listed = "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)
    text = f"{_LIST.format(tools=listed)}{how}{_RESULTS}"
    role = "user" if _NO_SYSTEM_ROLE.search(template) else "system"
    if plain and plain[0].get("role") == role:
        first = plain[0]
        order = (text, first["content"]) if role == "user" else (first["content"], text)
        return [{**first, "content": "\n\n".join(order)}, *plain[1:]]
    return [{"role": role, "content": text}, *plain]


def _with_key(plain: list[dict[str, Any]], tools: str) -> list[dict[str, Any]]:
    """Gives the system message the text of the tools."""
    if plain and plain[0].get("role") == "system":
        return [{**plain[0], TOOLS_KEY: tools}, *plain[1:]]
    return [{"role": "system", "content": _PROMPT, TOOLS_KEY: tools}, *plain]


def _plain(messages: Sequence[Mapping[str, Any]], style: ChatFormat) -> list[dict[str, Any]]:
    """Writes calls and results as text; consecutive results become one message, since templates
    require alternating roles. A template with a text for the tools has results, too."""
    plain: list[dict[str, Any]] = []
    was_result = False
    for message in messages:
        is_result = message.get("role") == "tool" and not style.has_tools_key
        if is_result:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if was_result:
                plain[-1]["content"] += f"\n{text}"
            else:
                plain.append({"role": "user", "content": text})
        else:
            plain.append(_with_calls(message, style))
        was_result = is_result
    return plain


def _with_calls(message: Mapping[str, Any], style: ChatFormat) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    texts = [message["content"]] if message["content"] else []
    written = [_call_text(call["function"]) for call in calls]
    if style.has_tools_key and style.tools is not None:
        texts.append(f"{style.tools.begin}[{', '.join(written)}]{style.tools.end}")
    else:
        texts += [f"<tool_call>\n{text}\n</tool_call>" for text in written]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(texts)}


def _call_text(function: Mapping[str, Any]) -> str:
    name, arguments = json.dumps(function["name"]), function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    end = "}" if _is_json(arguments) else ""  # a call that was cut off stays as it is
    return f'{{"name": {name}, "arguments": {arguments}{end}'


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
