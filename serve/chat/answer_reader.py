"""Reads one answer: from the engine's deltas to steps of text, reasoning and tool calls."""

from __future__ import annotations

from typing import NamedTuple

from serve.request import FinishReason, TokenDelta
from serve.text.chat_parser import (
    ChatFormat,
    Parser,
    Part,
    Reasoning,
    Text,
    ToolCallArguments,
    ToolCallStart,
)


class ChatStep(NamedTuple):
    """One step of a choice: the engine's delta and its text as parts. finish_reason is set
    in the last step of a choice: "stop", "length" or "tool_calls"."""

    choice: int
    delta: TokenDelta
    parts: list[Part]
    finish_reason: str | None


class AnswerReader:
    """Reads one of a request's n answers. reasoning_tokens: those up to now, markers included."""

    __slots__ = (
        "_counts_reasoning",
        "_drops_parts",
        "_format",
        "_includes_reasoning",
        "_is_parallel",
        "_parser",
        "reasoning_tokens",
    )

    def __init__(
        self,
        parser: Parser,
        style: ChatFormat,
        *,
        counts_reasoning: bool,
        include_reasoning: bool,
        parallel_tool_calls: bool,
    ) -> None:
        """include_reasoning, parallel_tool_calls: as in ChatRequest; what they exclude is dropped
        from the steps."""
        self._parser = parser
        self._format = style
        self._counts_reasoning = counts_reasoning
        self._includes_reasoning = include_reasoning
        self._is_parallel = parallel_tool_calls
        self._drops_parts = not (include_reasoning and parallel_tool_calls)
        self.reasoning_tokens = 0

    def read(self, choice: int, delta: TokenDelta) -> ChatStep:
        """Returns the step of the answer's next delta."""
        parser = self._parser
        # a format with channels may return to its reasoning
        was_reasoning = parser.is_reasoning or not parser.has_reasoned
        parts = parser.push(delta.text)
        reason = delta.finish_reason
        if self._counts_reasoning and (was_reasoning or parser.is_reasoning):
            self.reasoning_tokens += self._num_reasoning(delta, parts)
        if reason is not None:
            parts += parser.finish()
        if self._drops_parts:
            parts = [part for part in parts if self._is_wanted(part)]
        if reason is None:
            return ChatStep(choice, delta, parts, None)
        is_call = parser.num_calls > 0 and reason is FinishReason.STOP
        return ChatStep(choice, delta, parts, "tool_calls" if is_call else reason.value)

    def _is_wanted(self, part: Part) -> bool:
        match part:
            case Reasoning():
                return self._includes_reasoning
            case ToolCallStart(number) | ToolCallArguments(number):
                return number == 0 or self._is_parallel
        return True

    def _num_reasoning(self, delta: TokenDelta, parts: list[Part]) -> int:
        """Returns how many tokens of the delta are reasoning, markers included. The
        reasoning had not ended before the delta, or has begun again."""
        ids, parser = delta.token_ids, self._parser
        if parser.is_reasoning:
            return len(ids)
        if not parser.has_reasoned:
            return 0
        style, text = self._format, delta.text
        assert style.reasoning is not None
        if style.reasoning_end_id is not None and style.reasoning_end_id in ids:
            return ids.index(style.reasoning_end_id) + 1
        # the end marker is several tokens; its last part is somewhere in the delta
        before, end, _ = text.partition(style.reasoning.end)
        thought = sum(len(part.text) for part in parts if isinstance(part, Reasoning))
        said = sum(len(part.text) for part in parts if isinstance(part, Text))
        is_call = any(isinstance(part, ToolCallStart) for part in parts)
        rest = 0 if is_call else max(0, len(text) - said)
        size = len(before + end) if end else thought or rest
        return round(len(ids) * size / len(text))
