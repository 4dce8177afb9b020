"""Parses the tool calls in the text of an answer: markers, and the calls of a format behind them.

Text that proves to be no call before one has begun is text, including its markup; only white space
around calls is dropped. Once a call has begun, its arguments are what the model writes; what is
left of a malformed call is dropped up to the marker after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serve.text.chat_parser.syntax.format_types import ToolFormat
from serve.text.chat_parser.syntax.reader import (
    MAX_SKIPPED_CHARS,
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
    if style.bare:
        yield from reader.read_space()
        reader.begin_block()
        if (yield from reader.sees(style.bare)):
            yield from _block(reader, style)
        else:
            reader.fail()
    while (yield from _content(reader, style)):
        yield from _block(reader, style)
    reader.end_content()


def _content(reader: Reader, style: ToolFormat) -> Wait[bool]:
    """Emits text up to a marker, which is held; False at the end of the answer."""
    begins = _begins(style)
    while True:
        text = reader.rest()
        found = first_of(text, begins)
        end = found[0] if found else len(text) - longest_overlap(text, begins)
        reader.content(text[:end])
        reader.advance(end)
        if found:
            reader.begin_block()
            reader.advance(0 if found[1] in style.inner_begin else len(found[1]))
            return True
        if not (yield from reader.more()):
            reader.content(reader.rest())
            reader.advance(len(reader.rest()))
            return False


def _block(reader: Reader, style: ToolFormat) -> Wait[None]:
    """Reads a block of calls. What follows a malformed call up to the marker after the block is
    dropped, and so is the rest of a call that the end of the answer cuts off. All else is text."""
    if (yield from style.syntax.block(reader)):
        return
    is_cut = reader.is_over
    found = None
    if style.end:
        found = yield from reader.find((style.end, *_begins(style)), MAX_SKIPPED_CHARS)
    if found is not None and found[1] == style.end:
        reader.advance(found[0] + len(style.end))
    elif found is None and is_cut:
        reader.advance(len(reader.rest()))


def _begins(style: ToolFormat) -> tuple[str, ...]:
    return (style.begin, *style.also_begin, *style.inner_begin)
