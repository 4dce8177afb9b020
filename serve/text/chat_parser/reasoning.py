"""Parses the reasoning at the start of an answer, such as <think> ... </think>."""

from __future__ import annotations

from typing import NamedTuple

from serve.text.chat_parser.formats import ReasoningFormat
from serve.text.chat_parser.scan import overlap


class Split(NamedTuple):
    reasoning: str = ""
    content: str = ""


class ReasoningParser:
    """Splits one answer into reasoning and content. Newlines next to a marker are dropped.

    is_open: the prompt ends inside the reasoning. Only the start of an answer is reasoning; a
    later marker is text.
    """

    __slots__ = ("_format", "_has_begun", "_is_first", "_state", "_text")

    def __init__(self, style: ReasoningFormat, *, is_open: bool) -> None:
        self._format = style
        self._text = ""
        self._state = "inside" if is_open else "start"
        self._has_begun = is_open
        self._is_first = True

    @property
    def is_open(self) -> bool:
        return self._state == "inside"

    @property
    def is_over(self) -> bool:
        """Whether reasoning, possibly empty, has ended."""
        return self._has_begun and self._state != "inside"

    def push(self, text: str) -> Split:
        if self._state == "done":
            return Split("", text)
        self._text += text
        reasoning = ""
        if self._state == "start":
            self._start()
        if self._state == "inside":
            reasoning = self._inside()
        if self._state == "after":
            self._text = self._text.lstrip("\n")
            if self._text:
                self._state = "done"
        content = ""
        if self._state == "done":
            content, self._text = self._text, ""
        return Split(reasoning, content)

    def finish(self) -> Split:
        """Ends the answer and returns the text that was held back."""
        text, self._text = self._text, ""
        return Split(text, "") if self._state == "inside" else Split("", text)

    def _start(self) -> None:
        text, begin = self._text.lstrip(), self._format.begin
        if text.startswith(begin):
            self._text = text[len(begin) :]
            self._state = "inside"
            self._has_begun = True
        elif not begin.startswith(text):
            self._state = "done"

    def _inside(self) -> str:
        text, end = self._text, self._format.end
        if self._is_first:
            text = text.lstrip("\n")
            self._is_first = not text
        at = text.find(end)
        if at >= 0:
            self._text = text[at + len(end) :]
            self._state = "after"
            return text[:at].rstrip("\n")
        ready = text[: len(text) - overlap(text, end)].rstrip("\n")
        self._text = text[len(ready) :]
        return ready
