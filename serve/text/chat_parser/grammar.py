"""Grammars that make a model write tool calls in its own format with valid arguments.

The notation is llguidance's Lark; the parsers of this folder read the calls back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from serve.errors import RequestError
from serve.structured_output import JSON_KINDS, JSON_OPTIONS, StructuredOutput
from serve.text.chat_parser.formats import ChatFormat, ToolFormat

MAX_CALLS = 16  # of an answer that must be calls
_REGEX_PART = re.compile(r"\\.|/|\n", re.DOTALL)
_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_NO_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


def forced_calls(
    chat: ChatFormat,
    tools: Sequence[Mapping[str, Any]],
    *,
    parallel: bool,
    is_open: bool,
    is_bounded: bool = True,
) -> StructuredOutput:
    """Requires one call of these tools, or several if parallel, after optional reasoning.

    is_open: the prompt ends inside the reasoning. is_bounded: see StructuredOutput.bounded.
    """
    assert chat.tools is not None
    rules = _call_rules(chat, chat.tools, tools, parallel=parallel, all_strict=True)
    source = _grammar(chat, "calls", rules, is_open=is_open)
    return StructuredOutput("grammar", source, bounded=is_bounded)


def calls_or_content(
    chat: ChatFormat,
    tools: Sequence[Mapping[str, Any]],
    content: StructuredOutput | None,
    *,
    parallel: bool,
    is_open: bool,
    is_bounded: bool = True,
) -> StructuredOutput:
    """Allows calls, whose arguments match the schemas of strict tools, or else content.

    The content is that of `content`, or any text, which calls may follow. A call that the model
    was free not to make is never completed for it.
    """
    start, rules = _calls_or_content(chat, tools, content, parallel=parallel)
    source = _grammar(chat, start, rules, is_open=is_open)
    is_bounded = is_bounded and (content is None or content.kind in JSON_KINDS)
    return StructuredOutput("grammar", source, bounded=is_bounded, completes=False)


def _calls_or_content(
    chat: ChatFormat,
    tools: Sequence[Mapping[str, Any]],
    content: StructuredOutput | None,
    *,
    parallel: bool,
) -> tuple[str, list[str]]:
    """Returns what the start rule has, and the other rules."""
    style = chat.tools
    assert style is not None
    rules = _call_rules(chat, style, tools, parallel=parallel, all_strict=False)
    if content is not None:
        return "calls | content", [*rules, _content_rule(content)]
    rules += ["TEXT: /(.|\\n)*/", "text: TEXT"]
    if style.is_bare:
        # any text that does not begin like a call
        rules += ["PLAIN: /([^{\\s](.|\\n)*)?/", "plain: PLAIN"]
        return "calls | plain", rules
    marker = _literal(chat, style.begin)
    if style.begin in chat.special_ids:
        rules.append(f"lead: TEXT {marker}")
    else:
        rules.append(f"lead[lazy]: TEXT {marker}")
    block = "lead list" if style.is_list else "lead rest"
    times = "*" if parallel and not style.is_list else "?"
    rules.append(f"block: {block}")
    return f"block{times} text", rules


def content_after_reasoning(
    chat: ChatFormat, content: StructuredOutput, *, is_open: bool, is_bounded: bool = True
) -> StructuredOutput:
    """Requires `content`, after optional reasoning."""
    source = _grammar(chat, "content", [_content_rule(content)], is_open=is_open)
    is_bounded = is_bounded and content.kind in JSON_KINDS
    return StructuredOutput("grammar", source, bounded=is_bounded)


def _grammar(chat: ChatFormat, start: str, rules: list[str], *, is_open: bool) -> str:
    if chat.reasoning is not None:
        begin, end = (_literal(chat, marker) for marker in chat.reasoning.markers)
        is_special = chat.reasoning.end in chat.special_ids
        rules = [*rules, f"thought{'' if is_special else '[lazy]'}: THOUGHT {end}"]
        rules += ["THOUGHT: /(.|\\n)*/", 'gap: "\\n"{0,2}']
        start = f"thought gap ({start})" if is_open else f"({begin} thought gap)? ({start})"
    return "\n".join([f"start: {start}", *rules, ""])


def _call_rules(
    chat: ChatFormat,
    style: ToolFormat,
    tools: Sequence[Mapping[str, Any]],
    *,
    parallel: bool,
    all_strict: bool,
) -> list[str]:
    """Returns the rules `calls`, and `rest` (of a call) or `list` after a begin marker."""
    more = f"{{0,{MAX_CALLS - 1}}}"
    end = f' "\\n" {_literal(chat, style.end)}' if style.end else ""
    space = '"\\n" ' if style.end else ""
    again = json.dumps(f"{style.separator} " if style.separator else "\n")
    # the chat templates of Llama refuse a later message with two calls
    following = f" ({again} call){more}" if parallel and not style.is_bare else ""
    begin = "" if style.is_bare else f"{_literal(chat, style.begin)} "
    rules = [f"rest: {space}object{end}"]
    if style.is_list:
        rules += [f'list: "[" call{following} "]"', f"calls: {begin}list", "call: object"]
    else:
        rules += [f"call: {begin}rest", f"calls: call{following}"]
    rules.append("object: " + " | ".join(f"object_{i}" for i in range(len(tools))))
    for i, tool in enumerate(tools):
        function = tool["function"]
        head = json.dumps(f'{{"name": "{function["name"]}", "{style.key}": ')
        schema = _schema(function, is_strict=all_strict or function.get("strict", False))
        rules.append(f'object_{i}: {head} arguments_{i} "}}"')
        rules.append(f"arguments_{i}: {_json(schema)}")
    return rules


def _schema(function: Mapping[str, Any], *, is_strict: bool) -> dict[str, Any]:
    if not is_strict:
        return _ANY_OBJECT
    parameters = function.get("parameters", _NO_PARAMETERS)
    return {**parameters, "type": "object"}


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS})}"


def _literal(chat: ChatFormat, marker: str) -> str:
    """Writes a marker as text, or as its id if it is a special token."""
    token_id = chat.special_ids.get(marker)
    return json.dumps(marker) if token_id is None else f"<[{token_id}]>"


def _content_rule(content: StructuredOutput) -> str:
    match content.kind:
        case "json_object":
            return f"content: {_json(_ANY_OBJECT)}"
        case "json_schema":
            return f"content: {_json(json.loads(content.source))}"
        case "regex":
            return f"content: CONTENT\nCONTENT: /{_REGEX_PART.sub(_lark_part, content.source)}/"
        case "choice":
            return "content: " + " | ".join(map(json.dumps, json.loads(content.source)))
        case _:
            raise RequestError(
                "a grammar for the answer cannot be combined with tools",
                param="tools",
                code="unsupported_parameter",
            )


def _lark_part(part: re.Match[str]) -> str:
    """Escapes a part of a regular expression, which Lark writes in slashes on one line."""
    text = part[0]
    return "\\n" if text[-1] == "\n" else "\\/" if text == "/" else text
