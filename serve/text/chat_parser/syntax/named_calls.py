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


@dataclass(frozen=True, slots=True)
class NamedCalls:
    """The syntax of named calls.

    head: the pattern of the text between a call's marker and the one before its arguments; group 1
    is the name. written_head: the same as a model writes it, with {name} and the call's {number}.
    before: the marker between the head and the arguments. call_begin: the marker before each call
    of a block, if it is another than the block's. call_end: texts after the arguments, of which all
    may be missing. between: what separates the calls of a block. list: whether they are in
    brackets. end: the marker after the block. takes_id: whether the head is the call's id.
    """

    head: str
    written_head: str
    before: str
    call_begin: str = ""
    call_end: tuple[str, ...] = ()
    between: str = ""
    list: bool = False
    end: str = ""
    lead: str = ""
    takes_id: bool = False

    def block(self, reader: Reader) -> Wait[bool]:
        yield from reader.skip_space()
        if self.list and not (yield from reader.take("[")):
            return reader.reject()
        if self.call_begin and not (yield from reader.take(self.call_begin)):
            return reader.reject()
        while True:
            if not (yield from self._call(reader)):
                return reader.reject()
            if not self.call_begin:
                break
            yield from reader.skip_space()
            reader.hold()
            if self.list and (yield from reader.take(",")):
                yield from reader.skip_space()
            if not (yield from reader.take(self.call_begin)):
                break
        reader.reject()
        if self.list:
            yield from reader.take("]")
        if self.end:
            yield from end_marker(reader, self.end)
        return True

    def _call(self, reader: Reader) -> Wait[bool]:
        yield from reader.skip_space()
        head = yield from reader.until((self.before,), MAX_HEAD_CHARS)
        found = re.fullmatch(self.head, head.strip()) if head is not None else None
        if found is None or not reader.can_call(found[1]):
            return False
        yield from reader.skip_space()
        if not (yield from reader.sees("{")):
            return False
        is_id = self.takes_id and found[0] != found[1]
        reader.begin_call(found[1], found[0] if is_id else "")
        if not (yield from arguments_object(reader)):
            return True
        for text in self.call_end:
            yield from reader.skip_space()
            yield from end_marker(reader, text.strip())
        return True

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
            # The number is that of the first call: the parser takes ids that it makes itself.
            head = self.written_head.format(name=function["name"], number=0)
            made = object_rule(rules, function, all_strict=all_strict)
            begin = rules.literal(f"{self.call_begin}{head}{self.before}")
            calls.append(rules.add(f"{begin} {made} {rules.literal(''.join(self.call_end))}"))
        one = rules.add(" | ".join(calls))
        limit = max_calls if self.call_begin else 1
        between = rules.literal(self.between)
        more = f" ({between} {one}){{0,{limit - 1}}}" if limit > 1 else ""
        body = f"{one}{more}"
        if self.list:
            body = f'"[" {body} "]"'
        return rules.add(f"{rules.literal(self.lead)} {body} {rules.literal(self.end)}")
