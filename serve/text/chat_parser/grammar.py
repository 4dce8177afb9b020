"""Grammars that make a model write tool calls in its own format with valid arguments.

The notation is llguidance's Lark; the parsers of this folder read the calls back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from serve.errors import RequestError
from serve.structured_output import JSON_KINDS, StructuredOutput
from serve.text.chat_parser.formats import ChatFormat, harmony
from serve.text.chat_parser.syntax.format_types import ToolFormat
from serve.text.chat_parser.syntax.rules import ANY_OBJECT, ANY_TEXT, Rules, json_rule, regex_source

MAX_CALLS = 16  # of an answer that must be calls
_TEXT = f"TEXT: /{ANY_TEXT}/"


def forced_calls(
    chat: ChatFormat,
    tools: Sequence[Mapping[str, Any]],
    *,
    parallel: bool,
    is_open: bool | None = None,
    is_bounded: bool = True,
) -> StructuredOutput:
    """Requires one call of these tools, or several if parallel, after optional reasoning.

    is_open: whether the prompt ends inside the reasoning; None makes a grammar for either case.
    is_bounded: see StructuredOutput.bounded.
    """
    assert chat.tools is not None
    rules = Rules(chat.special_ids)
    _add_calls(rules, chat.tools, tools, parallel=parallel, all_strict=True)
    made = _grammar(chat, "calls", rules, is_open=is_open)
    return replace(made, bounded=is_bounded)


def calls_or_content(
    chat: ChatFormat,
    tools: Sequence[Mapping[str, Any]],
    content: StructuredOutput | None,
    *,
    parallel: bool,
    is_open: bool | None = None,
    is_bounded: bool = True,
) -> StructuredOutput:
    """Allows calls, whose arguments match the schemas of strict tools, or else content.

    The content is that of `content`, or any text, which calls may follow. A call that the model
    was free not to make is never completed for it.
    """
    rules = Rules(chat.special_ids)
    start = _add_calls_or_content(rules, chat, tools, content, parallel=parallel)
    made = _grammar(chat, start, rules, is_open=is_open)
    is_bounded = is_bounded and (content is None or content.kind in JSON_KINDS)
    return replace(made, bounded=is_bounded, completes=False)


def _add_calls_or_content(
    rules: Rules,
    chat: ChatFormat,
    tools: Sequence[Mapping[str, Any]],
    content: StructuredOutput | None,
    *,
    parallel: bool,
) -> str:
    """Adds the rules, and returns what the start rule has."""
    style = chat.tools
    assert style is not None
    block = _add_calls(rules, style, tools, parallel=parallel, all_strict=False)
    if content is not None:
        _add_content(rules, chat, content)
        return "calls | content"
    rules.lines += [_TEXT, "text: TEXT"]
    if chat.has_channels:
        rules.add(f"{rules.literal(_content_head(chat))} TEXT", name="plain")
        return "calls | plain"
    if style.bare:
        # any text that does not begin like a call
        rules.lines.append(f"PLAIN: /([^\\{style.bare}\\s](.|\\n)*)?/")
        rules.add("PLAIN", name="plain")
        return "calls | plain"
    is_special = rules.literal(style.begin).startswith("<[")
    rules.add(f"TEXT {rules.literal(style.begin)}", name="lead", lazy=not is_special)
    rules.add(f"lead {block}", name="block")
    return f"block{'*' if parallel and not style.is_list else '?'} text"


def content_after_reasoning(
    chat: ChatFormat,
    content: StructuredOutput,
    *,
    is_open: bool | None = None,
    is_bounded: bool = True,
) -> StructuredOutput:
    """Requires `content`, after optional reasoning."""
    rules = Rules(chat.special_ids)
    _add_content(rules, chat, content)
    made = _grammar(chat, "content", rules, is_open=is_open)
    is_bounded = is_bounded and content.kind in JSON_KINDS
    return replace(made, bounded=is_bounded)


def _grammar(
    chat: ChatFormat, start: str, rules: Rules, *, is_open: bool | None
) -> StructuredOutput:
    """Returns the grammar of `start` after optional reasoning."""
    style, opened = chat.reasoning, start
    if style is not None:
        begin, end = rules.literal(style.begin), rules.literal(style.end)
        # a call in the thoughts would end them, and its arguments would be any
        begins = [text for text in chat.call_begins if text not in chat.special_ids]
        patterns = [f"{ANY_TEXT}{re.escape(text)}{ANY_TEXT}" for text in begins]
        calls = "".join(f" & ~{regex_source(pattern)}" for pattern in patterns)
        rules.lines.append(f"THOUGHT: /{ANY_TEXT}/{calls}")
        rules.add(f"THOUGHT {end}", name="thought", lazy=not end.startswith("<["))
        gap = rules.add(rules.literal(style.after) if style.after else '"\\n"{0,2}', name="gap")
        start, opened = f"({begin} thought {gap})? ({start})", f"thought {gap} ({start})"
    rest = "\n".join([*rules.lines, ""])
    source, opened = (f"start: {each}\n{rest}" for each in (start, opened))
    if is_open is not None or source == opened:
        return StructuredOutput("grammar", opened if is_open else source)
    return StructuredOutput("grammar", source, opened=opened)


def _add_calls(
    rules: Rules,
    style: ToolFormat,
    tools: Sequence[Mapping[str, Any]],
    *,
    parallel: bool,
    all_strict: bool,
) -> str:
    """Adds the rule `calls`, and returns that of what follows a begin marker."""
    limit = MAX_CALLS if parallel and not style.is_single else 1
    of_block = limit if style.is_list else 1
    block = style.syntax.rule(rules, tools, max_calls=of_block, all_strict=all_strict)
    call = block if style.bare else rules.add(f"{rules.literal(style.begin)} {block}")
    more = f" ({rules.literal(style.between)} {call}){{0,{limit - 1}}}"
    rules.add(f"{call}{more if limit > of_block else ''}", name="calls")
    return block


def _content_head(chat: ChatFormat) -> str:
    """Returns what precedes a text that is the answer."""
    return harmony.REASONING.before_content if chat.has_channels else ""


def _add_content(rules: Rules, chat: ChatFormat, content: StructuredOutput) -> None:
    match content.kind:
        case "json_object":
            body = json_rule(ANY_OBJECT)
        case "json_schema":
            body = json_rule(json.loads(content.source))
        case "regex":
            body = rules.terminal(regex_source(content.source))
        case "choice":
            body = " | ".join(map(json.dumps, json.loads(content.source)))
        case _:
            raise RequestError(
                "a grammar for the answer cannot be combined with tools",
                param="tools",
                code="unsupported_parameter",
            )
    rules.add(f"{rules.literal(_content_head(chat))} ({body})", name="content")
