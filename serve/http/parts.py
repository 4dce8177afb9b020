"""The parts of a chat's answer, for the APIs (see serve.text.chat_parser.parts)."""

from __future__ import annotations

from serve.text.chat_parser.parts import Part, Reasoning, Text, ToolCallArguments, ToolCallStart

__all__ = ["Part", "Reasoning", "Text", "ToolCallArguments", "ToolCallStart"]
