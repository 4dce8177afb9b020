"""Parses the reasoning at the start of an answer, such as <think> ... </think>."""

from __future__ import annotations

from typing import NamedTuple

from serve.text.chat_parser.syntax.format_types import ReasoningFormat
from serve.text.chat_parser.syntax.reader import first_of, longest_overlap
from serve.text.chat_parser.syntax.scan import overlap


class Split(NamedTuple):
    reasoning: str = ""
    content: str = ""


class ReasoningParser:
    """Splits one answer into reasoning and content. Newlines next to a marker are dropped, and so
    are the markers around the answer, if the format has some.

    is_open: the prompt ends inside the reasoning. Only the start of an answer is reasoning; a
    later marker is text.
    """

    __slots__ = ("_format", "_has_begun", "_is_first", "_is_wrapped", "_state", "_text")

    def __init__(self, style: ReasoningFormat, *, is_open: bool) -> None:
        self._format = style
        self._text = ""
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
        self._text += text
        reasoning = ""
        if self._state == "start":
            self._start()
        if self._state == "inside":
            reasoning = self._inside()
        if self._state == "after":
            self._after()
        return Split(reasoning, self._content() if self._state == "done" else "")

    def finish(self) -> Split:
        """Ends the answer and returns the text that was held back."""
        text, self._text = self._text, ""
        return Split(text, "") if self._state == "inside" else Split("", text)

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

    def _inside(self) -> str:
        text, ends = self._text, self._format.ends
        if self._is_first:
            text = text.lstrip("\n")
            self._is_first = not text
        found = first_of(text, ends)
        if found is not None:
            at, end = found
            self._text = text[at + len(end) :]
            self._state = "after"
            return text[:at].rstrip("\n")
        ready = text[: len(text) - longest_overlap(text, ends)].rstrip("\n")
        self._text = text[len(ready) :]
        return ready

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
