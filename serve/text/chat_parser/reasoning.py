"""Parses the reasoning at the start of an answer, such as <think> ... </think>."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from serve.text.chat_parser.calls import ToolCallParser
from serve.text.chat_parser.syntax.format_types import ReasoningFormat
from serve.text.chat_parser.syntax.parts import ToolCallStart
from serve.text.chat_parser.syntax.reader import longest_overlap
from serve.text.chat_parser.syntax.scan import overlap

MAX_TRIAL_CHARS = 256  # of the text that shows whether a marker begins a call


class Split(NamedTuple):
    reasoning: str = ""
    content: str = ""


class ReasoningParser:
    """Splits one answer into reasoning and content. Newlines next to a marker are dropped, and so
    are the markers around the answer, if the format has some.

    is_open: the prompt ends inside the reasoning. Only the start of an answer is reasoning; a
    later marker is text. call_begins: the markers before a call, which ends the reasoning too,
    since models call without ending it first. new_calls: makes a parser of calls, which tells
    whether one follows a marker.
    """

    __slots__ = (
        "_call_begins",
        "_ends",
        "_format",
        "_has_begun",
        "_is_blank",
        "_is_first",
        "_is_wrapped",
        "_new_calls",
        "_state",
        "_text",
        "_waiting",
    )

    def __init__(
        self,
        style: ReasoningFormat,
        *,
        is_open: bool,
        call_begins: tuple[str, ...] = (),
        new_calls: Callable[[], ToolCallParser] | None = None,
    ) -> None:
        self._format = style
        self._call_begins = call_begins
        self._new_calls = new_calls
        self._ends = re.compile("|".join(map(re.escape, (*style.ends, *call_begins))))
        self._text = ""
        self._waiting: list[str] = []  # white space that follows the one in _text
        self._is_blank = True  # _text is white space that is held back
        self._state = "inside" if is_open else "start"
        self._has_begun = is_open
        self._is_first = True
        self._is_wrapped = False

    @property
    def is_open(self) -> bool:
        return self._state == "inside"

    @property
    def is_over(self) -> bool:
        """Whether reasoning, possibly empty, has ended."""
        return self._has_begun and self._state != "inside"

    def push(self, text: str) -> Split:
        if self._state == "done" and not self._is_wrapped:
            return Split("", text)
        self._waiting.append(text)
        if self._is_blank and not text.strip(self._held_space()):
            return Split()
        return self._read()

    def finish(self) -> Split:
        """Ends the answer and returns the text that was held back."""
        reasoning, content = self._read(is_over=True)
        text, self._text = self._text, ""
        if self._state == "inside":
            return Split(reasoning + text, content)
        return Split(reasoning, content + text)

    def _held_space(self) -> str | None:
        """Returns the white space that is held back, as str.strip() takes it."""
        return None if self._state in ("start", "after") else "\n"

    def _read(self, *, is_over: bool = False) -> Split:
        self._text = "".join((self._text, *self._waiting))
        self._waiting = []
        reasoning = content = ""
        if self._state == "start":
            self._start()
        if self._state == "inside":
            reasoning = self._inside(is_over)
        if self._state == "after":
            self._after()
        if self._state == "done":
            content = self._content()
        self._is_blank = not self._text.strip(self._held_space())
        return Split(reasoning, content)

    def _start(self) -> None:
        text = self._text.lstrip()
        for begin in self._format.begins:
            if text.startswith(begin):
                self._text = text[len(begin) :]
                self._state = "inside"
                self._has_begun = True
                return
        answer = self._format.answer
        heads = (*self._format.begins, *(answer[:1] if answer else ()))
        if answer and text.startswith(answer[0]):
            self._state = "after"
        elif not any(head.startswith(text) for head in heads):
            self._state = "done"

    def _inside(self, is_over: bool) -> str:
        text = self._text
        if self._is_first:
            text = text.lstrip("\n")
            self._is_first = not text
        found = self._ends.search(text)
        while found is not None:
            is_end = found[0] not in self._call_begins
            at = found.start()
            is_call = not is_end and self._is_call(text[at : at + MAX_TRIAL_CHARS], is_over)
            if is_end or is_call:
                self._text = text[found.end() if is_end else at :]
                self._state = "after"
            if is_end or is_call or is_call is None:
                break
            found = self._ends.search(text, found.end())
        if found is None:
            size = longest_overlap(text, (*self._format.ends, *self._call_begins))
        ready = text[: len(text) - size if found is None else found.start()].rstrip("\n")
        if self._state == "inside":
            self._text = text[len(ready) :]
        return ready

    def _is_call(self, text: str, is_over: bool) -> bool | None:
        """Returns whether the marker that the text begins with begins a call; None if more of the
        answer will tell."""
        assert self._new_calls is not None
        calls = self._new_calls()
        parts = calls.push(text)
        if not parts and len(text) < MAX_TRIAL_CHARS:
            if not is_over:
                return None
            parts = calls.finish()
        return not parts or isinstance(parts[0], ToolCallStart)

    def _after(self) -> None:
        """Drops newlines after the reasoning and the marker of the answer."""
        text = self._text.lstrip("\n")
        answer = self._format.answer
        if answer is not None and not self._is_wrapped:
            bare = text.lstrip()
            if bare.startswith(answer[0]):
                self._is_wrapped = True
                text = bare[len(answer[0]) :].lstrip("\n")
            elif answer[0].startswith(bare):
                self._text = text
                return
        self._text = text
        if text:
            self._state = "done"

    def _content(self) -> str:
        """Returns content up to the marker after the answer, which is dropped."""
        if not self._is_wrapped:
            content, self._text = self._text, ""
            return content
        answer = self._format.answer
        assert answer is not None
        text, end = self._text, answer[1]
        at = text.find(end)
        if at >= 0:
            self._is_wrapped = False
            self._text = ""
            return text[:at].rstrip("\n") + text[at + len(end) :]
        ready = text[: len(text) - overlap(text, end)].rstrip("\n")
        self._text = text[len(ready) :]
        return ready
