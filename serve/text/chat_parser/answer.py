"""Splits the text of an answer into parts: first the reasoning, then text and tool calls."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from serve.text.chat_parser.calls import ToolCallParser
from serve.text.chat_parser.formats import ChatFormat
from serve.text.chat_parser.formats.harmony import HarmonyParser
from serve.text.chat_parser.reasoning import ReasoningParser, Split
from serve.text.chat_parser.syntax.parts import Part, Reasoning, Text


class AnswerParser:
    """Parses an answer; the joined parts do not depend on how the text is cut."""

    __slots__ = ("_calls", "_reasoning")

    def __init__(self, reasoning: ReasoningParser | None, calls: ToolCallParser | None) -> None:
        self._reasoning = reasoning
        self._calls = calls

    @property
    def is_reasoning(self) -> bool:
        return self._reasoning is not None and self._reasoning.is_open

    @property
    def has_reasoned(self) -> bool:
        """Whether the reasoning has ended; False if there was none."""
        return self._reasoning is not None and self._reasoning.is_over

    @property
    def num_calls(self) -> int:
        return 0 if self._calls is None else self._calls.num_calls

    def push(self, text: str) -> list[Part]:
        split = Split("", text) if self._reasoning is None else self._reasoning.push(text)
        return self._parts(split)

    def finish(self) -> list[Part]:
        """Ends the answer and returns the parts that were held back."""
        parts = [] if self._reasoning is None else self._parts(self._reasoning.finish())
        return parts if self._calls is None else parts + self._calls.finish()

    def _parts(self, split: Split) -> list[Part]:
        parts: list[Part] = [Reasoning(split.reasoning)] if split.reasoning else []
        if not split.content:
            return parts
        if self._calls is None:
            parts.append(Text(split.content))
            return parts
        return parts + self._calls.push(split.content)


Parser = AnswerParser | HarmonyParser


def make_parser(
    style: ChatFormat,
    tools: Mapping[str, Mapping[str, Any]] | None,
    *,
    reasons: bool,
    is_open: bool = False,
    num_earlier: int = 0,
) -> Parser:
    """Makes the parser of one answer. tools: the schemas of the tools' parameters by name, or None
    if calls are text. reasons: the answer may begin with reasoning. is_open: the prompt ends inside
    it. num_earlier: the calls of the conversation so far."""
    if style.has_channels:
        return HarmonyParser(tools, reasons=reasons, num_earlier=num_earlier)
    reasoning = calls = new_calls = None
    if tools is not None and style.tools is not None:
        new_calls = partial(ToolCallParser, style.tools, tools, num_earlier)
        calls = new_calls()
    if reasons and style.reasoning is not None:
        begins = () if new_calls is None else style.call_begins
        reasoning = ReasoningParser(
            style.reasoning, is_open=is_open, call_begins=begins, new_calls=new_calls
        )
    return AnswerParser(reasoning, calls)
