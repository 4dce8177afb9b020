"""The formats of reasoning and tool calls, and their incremental parsers.

This folder owns the formats and the parsers, which turn text into parts. It does not know the
engine, the tokenizer or HTTP. Begin with syntax/parts.py and answer.py. A format is a row in one of
the files of formats/, and the syntaxes that rows share are in syntax/.
"""

from __future__ import annotations

from serve.text.chat_parser.answer import AnswerParser, Parser, make_parser
from serve.text.chat_parser.formats import ChatFormat, choose_format
from serve.text.chat_parser.syntax.format_types import ReasoningFormat, ToolFormat
from serve.text.chat_parser.syntax.parts import (
    Part,
    Reasoning,
    Text,
    ToolCallArguments,
    ToolCallStart,
)

__all__ = [
    "AnswerParser",
    "ChatFormat",
    "Parser",
    "Part",
    "Reasoning",
    "ReasoningFormat",
    "Text",
    "ToolCallArguments",
    "ToolCallStart",
    "ToolFormat",
    "choose_format",
    "make_parser",
]
