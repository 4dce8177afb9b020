"""Calls of tools, read from a model's text as it comes.

A call whose object begins with its name is passed on while its arguments are still written; any
other is held until its object is whole. What turns out to be no call is text, and so is all of
it: nothing is dropped but the markup of calls and the white space around it. Once a call has
begun its arguments are what the model writes, valid JSON or not, as OpenAI's API has it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NamedTuple

from serve.text.chat_parser.formats import ToolFormat
from serve.text.chat_parser.parts import Part, Text, ToolCallArguments, ToolCallStart
from serve.text.chat_parser.scan import JsonEnd, overlap

MAX_HELD_CHARS = 1 << 18  # of a call that cannot be passed on before it is whole
MAX_EXTRA_CHARS = 1024  # of an object after its arguments
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_HEAD = re.compile(
    r'\{\s{0,16}"name"\s{0,16}:\s{0,16}"([A-Za-z0-9_.-]{1,64})"\s{0,16},\s{0,16}'
    r'"(?:arguments|parameters)"\s{0,16}:\s{0,16}(?=\{)'
)
_MAX_HEAD_CHARS = 300  # no head is longer
_FIRST_KEY = re.compile(r'\{\s{0,16}+(?:[^"]|"([^"]{0,16}+).)', re.DOTALL)
_KEYS = frozenset({"name", "arguments", "parameters", "type", "id"})


class ToolCallParser:
    """Reads one answer. names: of the tools there are; bare objects are calls only of these."""

    def __init__(self, style: ToolFormat, names: frozenset[str]) -> None:
        self._format = style
        self._names = names
        self._text = ""  # not understood yet
        self._held = ""  # before it: text, if the call that began turns out to be none
        self._object = JsonEnd()
        self._scanned = 0
        self._is_after_call = False
        self._parts: list[Part] = []
        self._state: Callable[[], bool] = self._start if style.is_bare else self._content
        self.num_calls = 0

    def push(self, text: str) -> list[Part]:
        self._text += text
        self._parts = []
        while self._state():
            pass
        return self._parts

    def finish(self) -> list[Part]:
        """The answer is over: what was held back."""
        self._parts = []
        text, self._text = self._text, ""
        if self._state == self._content:
            self._say(text.lstrip() if self._is_after_call else text)
        elif self._state == self._rest:
            self._say(text.lstrip())
        elif self._state != self._after:  # a part of an end marker is no text
            self._say(self._held + text)
        return self._parts

    # ---- states: each takes from the text, and says whether there is more to do now

    def _start(self) -> bool:
        text = self._text.lstrip()
        if not text:
            return False
        self._state = self._before if text[0] == "{" else self._content
        return True

    def _content(self) -> bool:
        """Text up to a marker. White space is held back: it may stand before a call."""
        text, begin = self._text, self._format.begin
        if self._is_after_call:
            text = text.lstrip()
            self._is_after_call = not text
        at = text.find(begin)
        shown = text[: at if at >= 0 else len(text) - overlap(text, begin)].rstrip()
        self._say(shown)
        if at < 0:
            self._text = text[len(shown) :]
            return False
        at += len(begin)
        self._held, self._text = text[len(shown) : at], text[at:]
        self._state = self._list if self._format.is_list else self._before
        return True

    def _list(self) -> bool:
        text = self._text.lstrip()
        if not text:
            return False
        if text[0] != "[":
            return self._reject(0)
        self._take(self._text.index("[") + 1)
        self._state = self._before
        return True

    def _before(self) -> bool:
        text = self._text.lstrip()
        if not text:
            return False
        if text[0] != "{":
            return self._reject(0)
        self._take(len(self._text) - len(text))
        self._object, self._scanned = JsonEnd(), 0
        self._state = self._head
        return True

    def _head(self) -> bool:
        """An object from its first bracket on."""
        text = self._text
        first = _FIRST_KEY.match(text)
        if first is None:
            return False
        if first[1] not in _KEYS:
            return self._reject(first.end())
        head = _HEAD.match(text) if self._scanned <= _MAX_HEAD_CHARS else None
        if head is not None and self._is_name(head[1]):
            self._begin_call(head[1])
            self._text = text[head.end() :]
            self._object = JsonEnd()
            self._state = self._arguments
            return True
        end = self._object.scan(text, self._scanned)
        self._scanned = len(text)
        if max(end, 0 if end >= 0 else len(text)) > MAX_HELD_CHARS:
            return self._reject(MAX_HELD_CHARS)
        if end < 0:
            return False
        call = _whole_call(text[:end])
        if call is None or not self._is_name(call.name):
            return self._reject(end)
        self._begin_call(call.name)
        self._parts.append(ToolCallArguments(self.num_calls - 1, call.arguments))
        self._text = text[end:]
        self._state = self._after
        return True

    def _arguments(self) -> bool:
        end = self._object.scan(self._text, 0)
        shown = self._text if end < 0 else self._text[:end]
        if shown:
            self._parts.append(ToolCallArguments(self.num_calls - 1, shown))
        self._text = self._text[len(shown) :]
        if end < 0:
            return False
        self._state = self._rest
        return True

    def _rest(self) -> bool:
        """What an object holds behind its arguments, and its last bracket, if it has one."""
        text = self._text.lstrip()
        if not text:
            return False
        size = 0
        if text[0] == "}":
            size = 1
        elif text[0] == ",":
            end = JsonEnd(depth=1).scan(text, 0)
            if end < 0 and len(text) <= MAX_EXTRA_CHARS:
                return False
            size = end if 0 <= end <= MAX_EXTRA_CHARS else 0
        self._text = text[size:]
        self._state = self._after
        return True

    def _after(self) -> bool:
        """Behind a call: its end marker, another call or text."""
        style = self._format
        text = self._text.lstrip("} \t\r\n" if style.end else None)
        end = style.end or ("]" if style.is_list else "")
        if not text or (text != end and end.startswith(text)):
            return False
        if style.separator and text[0] == style.separator:
            self._held, self._text = text[0], text[1:]
            self._state = self._before
            return True
        is_ended = bool(end) and text.startswith(end)
        self._text = text[len(end) :] if is_ended else text
        self._is_after_call = True
        self._state = self._content
        return True

    # ---- steps of several states

    def _say(self, text: str) -> None:
        if text:
            self._parts.append(Text(text))

    def _take(self, size: int) -> None:
        self._held += self._text[:size]
        self._text = self._text[size:]

    def _reject(self, size: int) -> bool:
        """No call: what was held, and so much of the text, is text."""
        self._take(size)
        self._say(self._held)
        self._held = ""
        self._state = self._content
        return True

    def _begin_call(self, name: str) -> None:
        self._held = ""
        self._parts.append(ToolCallStart(self.num_calls, self._format.make_id(), name))
        self.num_calls += 1

    def _is_name(self, name: str) -> bool:
        return name in self._names or not self._format.is_bare


class _WholeCall(NamedTuple):
    name: str
    arguments: str


def _whole_call(text: str) -> _WholeCall | None:
    """An object that is complete; None if it is no call. Arguments may be JSON in a string."""
    try:
        call = json.loads(text)
        arguments = call.get("arguments", call.get("parameters"))
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if arguments is None:
            arguments = {}
        name = call.get("name")
        if not isinstance(arguments, dict) or not isinstance(name, str):
            return None
        if not _NAME.fullmatch(name):
            return None
        return _WholeCall(name, json.dumps(arguments, allow_nan=False))
    except (ValueError, RecursionError):
        return None
