"""Parses tool calls incrementally from the text of a model.

A call whose object begins with its name is emitted while the model still writes its arguments; any
other call is held until its object is complete. An object that is not a call is text: only the
markup of calls and the white space around it are dropped. Once a call has begun, its arguments are
the model's text, valid JSON or not, as in OpenAI's API.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NamedTuple

from serve.text.chat_parser.formats import ToolFormat
from serve.text.chat_parser.parts import Part, Text, ToolCallArguments, ToolCallStart
from serve.text.chat_parser.scan import JsonEnd, overlap

MAX_HELD_CHARS = 1 << 18  # of a call that is held until it is complete
MAX_EXTRA_CHARS = 1024  # in an object after its arguments
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_HEAD = re.compile(
    r'\{\s{0,16}"name"\s{0,16}:\s{0,16}"([A-Za-z0-9_.-]{1,64})"\s{0,16},\s{0,16}'
    r'"(?:arguments|parameters)"\s{0,16}:\s{0,16}(?=\{)'
)
_MAX_HEAD_CHARS = 300  # the longest possible head
_FIRST_KEY = re.compile(r'\{\s{0,16}+(?:[^"]|"([^"]{0,16}+).)', re.DOTALL)
_KEYS = frozenset({"name", "arguments", "parameters", "type", "id"})


class ToolCallParser:
    """Parses one answer. names: the tools; a bare object is a call only if it names one."""

    def __init__(self, style: ToolFormat, names: frozenset[str]) -> None:
        self._format = style
        self._names = names
        self._text = ""  # not parsed yet
        self._held = ""  # the text before it, which is emitted if the call is rejected
        self._object = JsonEnd()
        self._scanned = 0
        self._is_after_call = False
        self._parts: list[Part] = []
        # A function and not a bound method, which would be a reference cycle.
        self._state: Callable[[ToolCallParser], bool] = (
            ToolCallParser._start if style.is_bare else ToolCallParser._content
        )
        self.num_calls = 0

    def push(self, text: str) -> list[Part]:
        self._text += text
        self._parts = []
        while self._state(self):
            pass
        return self._parts

    def finish(self) -> list[Part]:
        """Ends the answer and returns the parts that were held back."""
        self._parts = []
        text, self._text = self._text, ""
        if self._state is ToolCallParser._content:
            self._emit(text.lstrip() if self._is_after_call else text)
        elif self._state is ToolCallParser._rest:
            self._emit(text.lstrip())
        elif self._state is not ToolCallParser._after:  # a partial end marker is not text
            self._emit(self._held + text)
        return self._parts

    # ---- states: each consumes text, and returns whether the next state can run now

    def _start(self) -> bool:
        text = self._text.lstrip()
        if not text:
            return False
        self._state = ToolCallParser._before if text[0] == "{" else ToolCallParser._content
        return True

    def _content(self) -> bool:
        """Emits text up to a marker; white space is held back, since a call may follow."""
        text, begin = self._text, self._format.begin
        if self._is_after_call:
            text = text.lstrip()
            self._is_after_call = not text
        at = text.find(begin)
        ready = text[: at if at >= 0 else len(text) - overlap(text, begin)].rstrip()
        self._emit(ready)
        if at < 0:
            self._text = text[len(ready) :]
            return False
        at += len(begin)
        self._held, self._text = text[len(ready) : at], text[at:]
        self._state = ToolCallParser._list if self._format.is_list else ToolCallParser._before
        return True

    def _list(self) -> bool:
        text = self._text.lstrip()
        if not text:
            return False
        if text[0] != "[":
            return self._reject(0)
        self._hold(self._text.index("[") + 1)
        self._state = ToolCallParser._before
        return True

    def _before(self) -> bool:
        text = self._text.lstrip()
        if not text:
            return False
        if text[0] != "{":
            return self._reject(0)
        self._hold(len(self._text) - len(text))
        self._object, self._scanned = JsonEnd(), 0
        self._state = ToolCallParser._head
        return True

    def _head(self) -> bool:
        """Parses an object from its first bracket on."""
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
            self._state = ToolCallParser._arguments
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
        self._state = ToolCallParser._after
        return True

    def _arguments(self) -> bool:
        end = self._object.scan(self._text, 0)
        ready = self._text if end < 0 else self._text[:end]
        if ready:
            self._parts.append(ToolCallArguments(self.num_calls - 1, ready))
        self._text = self._text[len(ready) :]
        if end < 0:
            return False
        self._state = ToolCallParser._rest
        return True

    def _rest(self) -> bool:
        """Skips the members of an object after its arguments, and its last bracket."""
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
        self._state = ToolCallParser._after
        return True

    def _after(self) -> bool:
        """Parses the end marker, another call or text after a call."""
        style = self._format
        text = self._text.lstrip("} \t\r\n" if style.end else None)
        end = style.end or ("]" if style.is_list else "")
        if not text or (text != end and end.startswith(text)):
            return False
        if style.separator and text[0] == style.separator:
            self._held, self._text = text[0], text[1:]
            self._state = ToolCallParser._before
            return True
        is_ended = bool(end) and text.startswith(end)
        self._text = text[len(end) :] if is_ended else text
        self._is_after_call = True
        self._state = ToolCallParser._content
        return True

    # ---- helpers of the states

    def _emit(self, text: str) -> None:
        if text:
            self._parts.append(Text(text))

    def _hold(self, size: int) -> None:
        self._held += self._text[:size]
        self._text = self._text[size:]

    def _reject(self, size: int) -> bool:
        """Emits the held text and `size` characters as text, since they are not a call."""
        self._hold(size)
        self._emit(self._held)
        self._held = ""
        self._state = ToolCallParser._content
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
    """Parses a complete object, whose arguments may be a JSON string; None if it is no call."""
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
