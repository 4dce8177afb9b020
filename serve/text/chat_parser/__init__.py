"""The formats of reasoning and tool calls, and their incremental parsers.

Parsers turn text into parts; nothing here knows the engine, the tokenizer or HTTP.
"""

from __future__ import annotations

from serve.text.chat_parser.answer import AnswerParser
from serve.text.chat_parser.formats import (
    ChatFormat,
    ReasoningFormat,
    ToolFormat,
    choose_format,
)
from serve.text.chat_parser.parts import Part, Reasoning, Text, ToolCallArguments, ToolCallStart

__all__ = [
    "AnswerParser",
    "ChatFormat",
    "Part",
    "Reasoning",
    "ReasoningFormat",
    "Text",
    "ToolCallArguments",
    "ToolCallStart",
    "ToolFormat",
    "choose_format",
]
