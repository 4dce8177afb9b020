"""Calls that are a name, a marker and the JSON object of the arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve.text.chat_parser.syntax.json_calls import arguments_object, end_marker, object_rule
from serve.text.chat_parser.syntax.reader import Reader, Wait
from serve.text.chat_parser.syntax.rules import Rules

MAX_HEAD_CHARS = 300
_NUMBER = "/0|[1-9][0-9]{0,3}/"


@dataclass(frozen=True, slots=True)
class NamedCalls:
    """The syntax of named calls.

    head: the pattern of the text between a call's marker and the one before its arguments; group 1
    is the name. written_head: the same as a model writes it, with {name} and the call's {number}.
    before: the marker between the head and the arguments. call_begin: the marker before each call
    of a block, if it is another than the block's. call_end: texts after the arguments, of which all
    may be missing. between: what separates the calls of a block. list: whether they are in
    brackets. end: the marker after the block. has_short_form: the arguments may follow the name
    without the marker.
    """

    head: str
    written_head: str
    before: str
    call_begin: str = ""
    call_end: tuple[str, ...] = ()
    between: str = ""
    list: bool = False
    end: str = ""
    has_short_form: bool = False

    def block(self, reader: Reader) -> Wait[bool]:
        yield from reader.skip_space()
        if self.list and not (yield from reader.take("[")):
            return reader.fail()
        if self.call_begin and not (yield from reader.take(self.call_begin)):
            return reader.fail()
        while True:
            if not (yield from self._call(reader)):
                return reader.fail()
            if not self.call_begin:
                return True
            yield from reader.skip_space()
            reader.hold()
            if self.list and (yield from reader.take(",")):
                yield from reader.skip_space()
            if not (yield from reader.take(self.call_begin)):
                break
        reader.back()
        if self.list and not (yield from reader.take("]")):
            return False
        yield from end_marker(reader, self.end)
        return True

    def _call(self, reader: Reader) -> Wait[bool]:
        yield from reader.skip_space()
        head = yield from self._head(reader)
        found = re.fullmatch(self.head, head) if head is not None else None
        if found is None or not reader.can_call(found[1]):
            return False
        yield from reader.skip_space()
        if not (yield from reader.sees("{")):
            return False
        reader.begin_call(found[1])
        if not (yield from arguments_object(reader)):
            return False
        for text in self.call_end:
            yield from reader.skip_space()
            yield from end_marker(reader, text.strip())
        return True

    def _head(self, reader: Reader) -> Wait[str | None]:
        """Reads up to the arguments; None if their marker is missing."""
        if not self.has_short_form:
            head = yield from reader.until((self.before,), MAX_HEAD_CHARS)
            return None if head is None else head.strip()
        found = yield from reader.find((self.before, "{"), MAX_HEAD_CHARS)
        if found is None:
            return None
        at, end = found
        head = reader.rest()[:at]
        is_short = end == "{"
        reader.advance(at + (0 if is_short else len(end)))
        return head if is_short else head.strip()

    def rule(
        self,
        rules: Rules,
        tools: Sequence[Mapping[str, Any]],
        *,
        max_calls: int,
        all_strict: bool,
    ) -> str:
        calls = []
        for tool in tools:
            function = tool["function"]
            made = object_rule(rules, function, all_strict=all_strict)
            begin = self._begin_rule(rules, function["name"])
            calls.append(rules.add(f"{begin} {made} {rules.literal(''.join(self.call_end))}"))
        one = rules.add(" | ".join(calls))
        limit = max_calls if self.call_begin else 1
        between = rules.literal(self.between)
        more = f" ({between} {one}){{0,{limit - 1}}}" if limit > 1 else ""
        body = f"{one}{more}"
        if self.list:
            body = f'"[" {body} "]"'
        return rules.add(f"{body} {rules.literal(self.end)}")

    def _begin_rule(self, rules: Rules, name: str) -> str:
        """Returns what precedes the arguments. The model counts the calls; the parser makes ids
        itself."""
        written = f"{self.call_begin}{self.written_head}{self.before}".split("{number}")
        number = f" {rules.terminal(_NUMBER)} " if len(written) > 1 else ""
        return number.join(rules.literal(part.replace("{name}", name)) for part in written)
