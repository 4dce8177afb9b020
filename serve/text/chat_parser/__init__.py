"""How models write reasoning and calls of tools, and how to read it as it comes.

Text in, parts out: no engine, no tokenizer, no HTTP.
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
