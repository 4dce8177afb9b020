"""Reads an answer that arrives in pieces, for parsers that are generators.

A generator reads with `yield from`; the reader waits in it for more text, so that what is parsed
does not depend on how the text is cut. Text from a mark on is held: it is emitted as text if it
proves to be no call. White space of the content is held back, too, since it is dropped where a call
follows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar

from serve.text.chat_parser.syntax.parts import (
    Part,
    Reasoning,
    Text,
    ToolCallArguments,
    ToolCallStart,
)
from serve.text.chat_parser.syntax.scan import overlap

T = TypeVar("T")
Wait = Generator[None, None, T]

MAX_HELD_CHARS = 1 << 18  # of a call or a value that is held until it is complete
MAX_SKIPPED_CHARS = 1 << 14  # of a malformed call, up to the marker after it
_PIECE_CHARS = 2048
MAX_NAME_CHARS = 64
SPACE = " \t\r\n"
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NAME_END = re.compile(r"[^A-Za-z0-9_.-]")


class Reader:
    """The text of one answer and the parts that were parsed from it.

    tools: the schemas of the tools' parameters by name. only_tools: a call is one only if it names
    a tool. num_earlier: the calls of earlier messages, for ids that count them.
    """

    __slots__ = (
        "_at",
        "_first_of_block",
        "_has_text",
        "_is_after_call",
        "_make_id",
        "_mark",
        "_space",
        "_space_before_calls",
        "_text",
        "is_over",
        "num_calls",
        "num_earlier",
        "only_tools",
        "parts",
        "tools",
    )

    def __init__(
        self,
        make_id: Callable[[str, int], str],
        tools: Mapping[str, Mapping[str, Any]],
        *,
        only_tools: bool = False,
        num_earlier: int = 0,
    ) -> None:
        self._make_id = make_id
        self.tools = tools
        self.only_tools = only_tools
        self.num_earlier = num_earlier
        self._text = ""
        self._at = 0
        self._mark: int | None = None  # where the held text begins
        self._first_of_block = 0  # the number of the first call of the block that is read
        self._has_text = False
        self._is_after_call = False  # no text has followed the last call
        self._space: list[str] = []  # of the content, after its last text or call
        self._space_before_calls = ""
        self.is_over = False
        self.num_calls = 0
        self.parts: list[Part] = []

    # ---- text

    def push(self, text: str) -> None:
        first = self._at if self._mark is None else self._mark
        self._text = self._text[first:] + text
        self._at -= first
        self._mark = None if self._mark is None else 0

    def rest(self) -> str:
        """Returns the text that has arrived and is not read yet."""
        return self._text[self._at :]

    def advance(self, size: int) -> None:
        self._at += size

    def hold(self) -> None:
        """Holds the text from here on, until a call begins or it is rejected."""
        self._mark = self._at

    def drop(self) -> None:
        """Drops the held text, which is markup."""
        self._mark = None

    def back(self) -> None:
        """Goes back to where the held text begins, which is read again."""
        if self._mark is not None:
            self._at, self._mark = self._mark, None

    def begin_block(self) -> None:
        """Holds the text from here on, where a block of calls may begin."""
        self._first_of_block = self.num_calls
        self.hold()

    def fail(self) -> bool:
        """Ends a block at what is no call of its format. Returns True if no call has begun in it,
        since all that was read of it is text then; else what is held is read again."""
        if self.num_calls > self._first_of_block:
            self.back()
            return False
        self.content(self.held())
        return True

    def held(self) -> str:
        """Returns the text that was held up to here, which is no call."""
        held = "" if self._mark is None else self._text[self._mark : self._at]
        self._mark = None
        return held

    def more(self) -> Wait[bool]:
        """Waits for more text; False if the answer is over."""
        if self.is_over:
            return False
        yield
        return True

    def peek(self) -> Wait[str]:
        """Returns the next character, or "" at the end."""
        while self._at >= len(self._text):
            if self.is_over:
                return ""
            yield
        return self._text[self._at]

    def skip_space(self, chars: str = SPACE) -> Wait[None]:
        while (char := (yield from self.peek())) and char in chars:
            self._at += 1

    def sees(self, text: str) -> Wait[bool]:
        """Returns whether this text is next."""
        while True:
            ready = self._text[self._at : self._at + len(text)]
            if ready == text:
                return True
            if self.is_over or not text.startswith(ready):
                return False
            yield

    def take(self, text: str) -> Wait[bool]:
        """Reads this text if it is next."""
        is_next = yield from self.sees(text)
        if is_next:
            self._at += len(text)
        return is_next

    def until(self, ends: tuple[str, ...], limit: int) -> Wait[str | None]:
        """Reads up to the first of `ends`, which is read, too. Returns None at the end of the
        answer or after `limit` characters; nothing is read then."""
        found = yield from self.find(ends, limit)
        if found is None:
            return None
        at, end = found
        text = self._text[self._at : self._at + at]
        self._at += at + len(end)
        return text

    def name(self) -> Wait[str]:
        """Reads characters of a name; "" if there are none or too many."""
        while True:
            match = _NAME_END.search(self._text, self._at, self._at + MAX_NAME_CHARS + 1)
            if match is not None:
                name = self._text[self._at : match.start()]
                self._at = match.start()
                return name
            if len(self._text) - self._at > MAX_NAME_CHARS or self.is_over:
                return ""
            yield

    def find(self, ends: tuple[str, ...], limit: int) -> Wait[tuple[int, str] | None]:
        """Returns where the first of `ends` is, and which it is. Returns None at the end of the
        answer or if more than `limit` characters precede it."""
        while True:
            text = self._text[self._at : self._at + limit + max(map(len, ends))]
            found = first_of(text, ends)
            if found is not None:
                return found if found[0] <= limit else None
            if self.is_over or len(text) - longest_overlap(text, ends) > limit:
                return None
            yield

    # ---- parts

    def content(self, text: str) -> None:
        """Emits text beside calls. White space is held back until more text follows."""
        body = text.lstrip()
        self._space.append(text[: len(text) - len(body)])
        if not body:
            return
        ready = body.rstrip()
        self.emit(self._gap() + ready)
        self._space = [body[len(ready) :]]
        self._is_after_call = False
        self._has_text = True

    def read_space(self) -> Wait[None]:
        """Reads white space of the content."""
        while True:
            text = self.rest()
            size = len(text) - len(text.lstrip(SPACE))
            self.content(text[:size])
            self._at += size
            if size < len(text) or not (yield from self.more()):
                return

    def end_content(self) -> None:
        """Emits the white space that ends the answer, unless it follows a call."""
        if not self._is_after_call:
            self.emit("".join(self._space))

    def _gap(self) -> str:
        """Returns the white space before a text. Around calls, one side's is kept between two
        texts, and the indentation of a text that is the first one."""
        space = "".join(self._space)
        if not self._is_after_call:
            return space
        if self._has_text:
            return space or self._space_before_calls
        _, newline, indentation = space.rpartition("\n")
        return indentation if newline else ""

    def emit(self, text: str) -> None:
        if text:
            self.parts.append(Text(text))

    def think(self, text: str) -> None:
        if text:
            self.parts.append(Reasoning(text))

    def can_call(self, name: str) -> bool:
        if NAME.fullmatch(name) is None:
            return False
        return name in self.tools or not self.only_tools

    def begin_call(self, name: str, call_id: str = "") -> None:
        """Emits the start of a call. The held text was its markup."""
        self._mark = None
        if not self._is_after_call:
            self._space_before_calls = "".join(self._space)
        self._space = []
        self._is_after_call = True
        call_id = call_id or self._make_id(name, self.num_earlier + self.num_calls)
        self.parts.append(ToolCallStart(self.num_calls, call_id, name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Emits another piece of the last call's arguments."""
        if text:
            self.parts.append(ToolCallArguments(self.num_calls - 1, text))


def first_of(text: str, markers: tuple[str, ...]) -> tuple[int, str] | None:
    """Returns where the first of the markers is, and which it is."""
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    return min(found, key=lambda item: item[0]) if found else None


def longest_overlap(text: str, markers: tuple[str, ...]) -> int:
    """Returns the length of the longest end of text with which a marker may begin."""
    return max(overlap(text, marker) for marker in markers)


def in_json(text: str) -> str:
    """Writes text as a part of a JSON string. Pieces may be joined."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class ReadingParser:
    """A parser whose generator reads from a Reader.

    The generator refers to the reader and not to this object, which would be a cycle.
    """

    __slots__ = ("_reader", "_reading")

    def __init__(self, reader: Reader, reading: Wait[None]) -> None:
        self._reader = reader
        self._reading = reading

    @property
    def num_calls(self) -> int:
        return self._reader.num_calls

    def push(self, text: str) -> list[Part]:
        """Returns the parts that the next piece of the answer completes.

        Syntaxes search in all text that is not read yet, so a large piece is read in small ones:
        the time then grows with its length and not with the square.
        """
        for start in range(0, len(text), _PIECE_CHARS):
            self._reader.push(text[start : start + _PIECE_CHARS])
            next(self._reading, None)
        return self._taken()

    def finish(self) -> list[Part]:
        """Ends the answer and returns the parts that were held back."""
        self._reader.is_over = True
        next(self._reading, None)
        return self._taken()

    def _taken(self) -> list[Part]:
        parts, self._reader.parts = self._reader.parts, []
        return parts
