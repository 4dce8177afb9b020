"""Calls that are JSON objects with a name and arguments: alone, one after another or in a list.

A call whose object begins with its name is emitted while the model still writes its arguments; any
other call is held until its object is complete. An object that is not a call is text. Once a call
has begun, its arguments are the model's text, valid JSON or not, as in OpenAI's API.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from serve.text.chat_parser.syntax.reader import MAX_HELD_CHARS, NAME, Reader, Wait
from serve.text.chat_parser.syntax.rules import ANY_OBJECT, NO_PARAMETERS, Rules, json_rule
from serve.text.chat_parser.syntax.scan import JsonEnd

MAX_EXTRA_CHARS = 1024  # in an object after its arguments
_MAX_HEAD_CHARS = 400  # the longest possible head
_FIRST_KEY = re.compile(r'\{\s{0,16}+(?:[^"]|"([^"]{0,16}+).)', re.DOTALL)
_GAP = r"\s{0,16}"


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """The syntax of calls that are JSON objects.

    key: the arguments' key in the model's training; `arguments` and `parameters` are both read.
    name_key: that of the name. id_key: a member before the name, which is not read. end: the marker
    after a call or a list. separator: the text between calls without brackets. list: whether calls
    are in brackets: "always", "never", or "optional" (the grammar writes them). space: what a
    model writes around an object.
    """

    key: str = "arguments"
    name_key: str = "name"
    id_key: str = ""
    end: str = ""
    separator: str = ""
    list: str = "never"
    space: str = ""

    # ---- reading

    def block(self, reader: Reader) -> Wait[bool]:
        is_list = False
        if self.list != "never":
            yield from reader.skip_space()
            is_list = yield from reader.take("[")
            if not is_list and self.list == "always":
                return reader.fail()
        separator = "," if is_list else self.separator
        while True:
            if not (yield from self._object(reader)):
                return reader.fail()
            if self.end:
                yield from reader.skip_space("} \t\r\n")
            reader.hold()
            yield from reader.skip_space()
            # some models write two objects in one pair of markers
            if not separator and self.end and (yield from reader.sees("{")):
                continue
            if not separator or not (yield from reader.take(separator)):
                break
        if is_list and (yield from reader.take("]")):
            reader.drop()
        elif is_list:
            return reader.fail()
        if self.end:
            yield from reader.skip_space()
            reader.drop()
            yield from end_marker(reader, self.end)
        reader.back()
        return True

    def _object(self, reader: Reader) -> Wait[bool]:
        """Reads one object. Returns False if it is no call, whose text is held, or if it turns out
        to be malformed after the call has begun."""
        yield from reader.skip_space()
        if not (yield from reader.sees("{")):
            return False
        known = {self.name_key, self.id_key, "arguments", "parameters", "type", "id"}
        head_of, end, scanned = _head(self.name_key, self.id_key), JsonEnd(), 0
        while True:
            text = reader.rest()
            first = _FIRST_KEY.match(text)
            if first is not None:
                if first[1] not in known:
                    reader.advance(first.end())
                    return False
                head = head_of.match(text) if scanned <= _MAX_HEAD_CHARS else None
                if head is not None and reader.can_call(head[1]):
                    reader.begin_call(head[1])
                    reader.advance(head.end())
                    return (yield from arguments_object(reader)) and (yield from _rest(reader))
                at = end.scan(text, scanned)
                scanned = len(text)
                if max(at, 0 if at >= 0 else len(text)) > MAX_HELD_CHARS:
                    reader.advance(MAX_HELD_CHARS)
                    return False
                if at >= 0:
                    return self._whole(reader, text[:at])
            if not (yield from reader.more()):
                reader.advance(len(reader.rest()))
                return False

    def _whole(self, reader: Reader, text: str) -> bool:
        reader.advance(len(text))
        call = _whole_call(text, self.name_key)
        if call is None or not reader.can_call(call.name):
            return False
        reader.begin_call(call.name)
        reader.arguments(call.arguments)
        return True

    # ---- grammar

    def rule(
        self,
        rules: Rules,
        tools: Sequence[Mapping[str, Any]],
        *,
        max_calls: int,
        all_strict: bool,
    ) -> str:
        calls = [self._call_rule(rules, tool["function"], all_strict) for tool in tools]
        one = rules.add(" | ".join(calls))
        between = rules.literal(", " if self.list != "never" else f"{self.separator} ")
        more = f" ({between} {one}){{0,{max_calls - 1}}}" if max_calls > 1 else ""
        body = f"{one}{more}"
        if self.list != "never":
            body = f'"[" {body} "]"'
        space = rules.literal(self.space)
        # families with a list differ in a space before it, and others in one before the end
        before = space or ('" "?' if self.list != "never" else "")
        after = f"({space})?" if space and self.end else ""
        return rules.add(f"{before} {body} {after} {rules.literal(self.end)}")

    def _call_rule(self, rules: Rules, function: Mapping[str, Any], all_strict: bool) -> str:
        number = f'"{self.id_key}": "0", ' if self.id_key else ""
        head = f'{{{number}"{self.name_key}": "{function["name"]}", "{self.key}": '
        return rules.add(
            f'{rules.literal(head)} {object_rule(rules, function, all_strict=all_strict)} "}}"'
        )


def object_rule(rules: Rules, function: Mapping[str, Any], *, all_strict: bool) -> str:
    """Adds a rule for the JSON object of a tool's arguments."""
    if not (all_strict or function.get("strict", False)):
        return rules.add(json_rule(ANY_OBJECT))
    return rules.add(json_rule({**function.get("parameters", NO_PARAMETERS), "type": "object"}))


def arguments_object(reader: Reader) -> Wait[bool]:
    """Emits a JSON object as it arrives. Returns whether it is complete."""
    end = JsonEnd()
    while True:
        text = reader.rest()
        at = end.scan(text, 0)
        ready = text if at < 0 else text[:at]
        reader.arguments(ready)
        reader.advance(len(ready))
        if at >= 0:
            return end.is_complete
        if not (yield from reader.more()):
            return False


def end_marker(reader: Reader, marker: str) -> Wait[None]:
    """Reads the marker after a call, if it is there. A part of it at the end of an answer that was
    cut off is not text."""
    if not (yield from reader.take(marker)) and reader.is_over and marker.startswith(reader.rest()):
        reader.advance(len(reader.rest()))


def _rest(reader: Reader) -> Wait[bool]:
    """Skips the members of an object after its arguments, and its last bracket, which may be
    missing. Returns False if they are malformed or too long."""
    yield from reader.skip_space()
    char = yield from reader.peek()
    if char == "}":
        reader.advance(1)
    if char != ",":
        return True
    while True:
        text = reader.rest()
        scan = JsonEnd(depth=1)
        end = scan.scan(text, 0)
        if end >= 0 or len(text) > MAX_EXTRA_CHARS:
            is_read = scan.is_complete and 0 <= end <= MAX_EXTRA_CHARS
            reader.advance(end if is_read else 0)
            return is_read
        if not (yield from reader.more()):
            return False


def _head(name_key: str, id_key: str) -> re.Pattern[str]:
    """Returns the pattern of an object up to its arguments; `re` keeps the compiled ones."""
    number = f'"{id_key}"{_GAP}:{_GAP}"[^"]{{0,64}}"{_GAP},{_GAP}' if id_key else ""
    return re.compile(
        rf"\{{{_GAP}(?:{number})?"
        rf'"{name_key}"{_GAP}:{_GAP}"([A-Za-z0-9_.-]{{1,64}})"{_GAP},{_GAP}'
        rf'"(?:arguments|parameters)"{_GAP}:{_GAP}(?=\{{)'
    )


class _WholeCall(NamedTuple):
    name: str
    arguments: str


def _whole_call(text: str, name_key: str) -> _WholeCall | None:
    """Parses a complete object, whose arguments may be a JSON string; None if it is no call."""
    try:
        call = json.loads(text)
        arguments = call.get("arguments", call.get("parameters"))
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if arguments is None:
            arguments = {}
        name = call.get(name_key)
        if not isinstance(arguments, dict) or not isinstance(name, str):
            return None
        if not NAME.fullmatch(name):
            return None
        return _WholeCall(name, json.dumps(arguments, allow_nan=False))
    except (ValueError, RecursionError):
        return None
