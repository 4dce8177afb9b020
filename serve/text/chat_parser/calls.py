"""Parses the tool calls in the text of an answer: markers, and the calls of a format behind them.

Text that proves to be no call before one has begun is text, including its markup; only the white
space around calls is dropped. Once a call has begun, its arguments are what the model writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serve.text.chat_parser.syntax.format_types import ToolFormat
from serve.text.chat_parser.syntax.reader import (
    Reader,
    ReadingParser,
    Wait,
    first_of,
    longest_overlap,
)


class ToolCallParser(ReadingParser):
    """Parses one answer. tools: the schemas of the tools' parameters by name; a bare call is one
    only if it names a tool. num_earlier: the calls of the conversation so far."""

    __slots__ = ()

    def __init__(
        self, style: ToolFormat, tools: Mapping[str, Mapping[str, Any]], num_earlier: int = 0
    ) -> None:
        reader = Reader(style.make_id, tools, only_tools=style.is_bare, num_earlier=num_earlier)
        super().__init__(reader, _answer(reader, style))


def _answer(reader: Reader, style: ToolFormat) -> Wait[None]:
    is_after_call = False
    if style.bare:
        reader.hold()
        yield from reader.skip_space()
        if (yield from reader.sees(style.bare)):
            is_after_call = yield from style.syntax.block(reader)
        else:
            reader.reject()
    while (yield from _content(reader, style, is_after_call=is_after_call)):
        is_after_call = yield from style.syntax.block(reader)


def _content(reader: Reader, style: ToolFormat, *, is_after_call: bool) -> Wait[bool]:
    """Emits text up to a marker, which is held; False at the end of the answer. White space is held
    back, since a call may follow."""
    if is_after_call:
        yield from reader.skip_space()
    begins = (style.begin, *style.also_begin, *style.inner_begin)
    while True:
        text = reader.rest()
        found = first_of(text, begins)
        end = found[0] if found else len(text) - longest_overlap(text, begins)
        ready = text[:end].rstrip()
        reader.emit(ready)
        reader.advance(len(ready))
        if found:
            reader.hold()
            size = 0 if found[1] in style.inner_begin else len(found[1])
            reader.advance(found[0] - len(ready) + size)
            return True
        if not (yield from reader.more()):
            reader.emit(reader.rest())
            reader.advance(len(reader.rest()))
            return False
