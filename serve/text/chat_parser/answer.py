"""Splits the text of an answer into parts: first the reasoning, then text and tool calls."""

from __future__ import annotations

from serve.text.chat_parser.calls import ToolCallParser
from serve.text.chat_parser.parts import Part, Reasoning, Text
from serve.text.chat_parser.reasoning import ReasoningParser, Split


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
