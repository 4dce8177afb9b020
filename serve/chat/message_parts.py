"""Collects the parts of an answer into one message of the assistant."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from serve.text.chat_parser.syntax.parts import (
    Part,
    Reasoning,
    Text,
    ToolCallArguments,
    ToolCallStart,
)


@dataclass(slots=True)
class MessageParts:
    """The parts of one answer by kind. calls: each call's start, and the pieces of its
    arguments."""

    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[tuple[ToolCallStart, list[str]]] = field(default_factory=list)

    def extend(self, parts: Iterable[Part]) -> None:
        for part in parts:
            match part:
                case Text(text):
                    self.texts.append(text)
                case Reasoning(text):
                    self.reasoning.append(text)
                case ToolCallStart():
                    self.calls.append((part, []))
                case ToolCallArguments(number, text):
                    self.calls[number][1].append(text)

    @property
    def content(self) -> str | None:
        """The visible text; None if the answer has only reasoning or calls."""
        content = "".join(self.texts)
        return content if content or not (self.calls or self.reasoning) else None

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The calls in OpenAI's shape."""
        return [
            {
                "id": start.call_id,
                "type": "function",
                "function": {"name": start.name, "arguments": "".join(arguments)},
            }
            for start, arguments in self.calls
        ]
