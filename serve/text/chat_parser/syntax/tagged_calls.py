"""Calls whose parameters are tags with plain text: <parameter=x>text</parameter>.

The tool's schema types the text: it is the value of a parameter that may only be a string, and
else JSON if it is of a type that the schema names. The arguments are emitted as the text of a JSON
object, parameter by parameter, strings while they arrive.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve.text.chat_parser.syntax.json_calls import end_marker
from serve.text.chat_parser.syntax.literals import PYTHON, value
from serve.text.chat_parser.syntax.parts import ToolCallArguments
from serve.text.chat_parser.syntax.reader import (
    MAX_HELD_CHARS,
    Reader,
    Wait,
    in_json,
)
from serve.text.chat_parser.syntax.rules import Rules, json_rule, tool_members
from serve.text.chat_parser.syntax.scan import overlap
from serve.text.chat_parser.syntax.schema_types import (
    STRING,
    branches,
    kinds,
    resolved,
    standalone,
    type_of,
    typed_json,
)

_MAX_KEY_CHARS = 256
_LISTED = frozenset({"array", "object"})


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    """The syntax of calls in tags.

    call_open, name_end, call_close: the texts around a call's name and after its parameters.
    key_open, key_end, value_open, value_close: the texts around a parameter's name and its text.
    lead, gap: what a model writes after the begin marker, and after a name or a parameter.
    has_gaps: the gaps are never missing. is_list: a block has several calls. wraps: a newline on
    either side of a parameter's text is no part of it. says_string: the tag says whether a text is
    a string, in an attribute. end: the marker after the block.
    """

    call_open: str
    name_end: str
    call_close: str
    key_open: str
    key_end: str
    value_close: str
    end: str
    value_open: str = ""
    value_gap: str = ""
    lead: str = "\n"
    gap: str = "\n"
    has_gaps: bool = True
    is_list: bool = False
    wraps: bool = False
    says_string: bool = False

    # ---- reading

    def block(self, reader: Reader) -> Wait[bool]:
        if not (yield from self._call(reader)):
            return reader.fail()
        while self.is_list:
            reader.hold()
            yield from reader.skip_space()
            if (yield from reader.sees(self.end)):
                break
            if not (yield from self._call(reader)):
                return reader.fail()
        reader.hold()
        yield from reader.skip_space()
        if (yield from reader.sees(self.end)) or reader.is_over:
            reader.drop()
        reader.back()
        yield from end_marker(reader, self.end)
        return True

    def _call(self, reader: Reader) -> Wait[bool]:
        """Reads one call. A name alone is none: a parameter or the end has to follow it. Returns
        False if there is none, or if it turns out to be malformed after it has begun."""
        yield from reader.skip_space()
        if self.call_open and not (yield from reader.take(self.call_open)):
            return False
        name = yield from reader.name()
        if not reader.can_call(name) or not (yield from reader.take(self.name_end)):
            return False
        yield from reader.skip_space()
        close = self.call_close or self.end
        is_known = (yield from reader.sees(self.key_open)) or (yield from reader.sees(close))
        if not is_known:
            return False
        reader.begin_call(name)
        root = reader.tools.get(name, {})
        num = 0
        while (yield from reader.take(self.key_open)):
            reader.arguments(", " if num else "{")
            num += 1
            if not (yield from self._parameter(reader, root)):
                return False
            yield from reader.skip_space()
        is_closed = yield from reader.sees(close)
        if not is_closed and reader.is_over:
            return False  # it was cut off, and its arguments are
        reader.arguments("}" if num else "{}")
        if self.call_close:
            yield from reader.take(self.call_close)
        return is_closed or (yield from reader.sees(self.end))

    def _parameter(self, reader: Reader, root: Mapping[str, Any]) -> Wait[bool]:
        """Reads a parameter after the tag's begin. Returns False if it is malformed or cut off."""
        name = yield from reader.until((self.key_end,), _MAX_KEY_CHARS)
        if name is None:
            return False
        is_string = None
        if self.says_string:
            attribute = yield from reader.until((">",), _MAX_KEY_CHARS)
            if attribute is None:
                return False
            is_string = '"false"' not in attribute
        if self.value_open:
            yield from reader.skip_space()
            if not (yield from reader.take(self.value_open)):
                return False
        reader.arguments(f"{json.dumps(name.strip(), ensure_ascii=False)}: ")
        found = STRING if is_string else _kinds(root, name.strip())
        if found == STRING:
            return (yield from self._stream(reader))
        return (yield from self._typed(reader, found, is_json=is_string is False))

    def _stream(self, reader: Reader) -> Wait[bool]:
        """Emits a string while it arrives."""
        reader.arguments('"')
        is_first, end = True, self.value_close
        while True:
            if is_first and self.wraps:
                yield from reader.take("\n")
            is_first = False
            text = reader.rest()
            at = text.find(end)
            ready = text[:at] if at >= 0 else text[: len(text) - overlap(text, end)]
            if self.wraps and ready.endswith("\n"):
                ready = ready[:-1]  # the last newline is the tag's
            reader.arguments(in_json(ready))
            reader.advance(at + len(end) if at >= 0 else len(ready))
            if at >= 0:
                reader.arguments('"')
                return True
            if not (yield from reader.more()):
                reader.arguments(in_json(reader.rest()))
                reader.advance(len(reader.rest()))
                return False

    def _typed(self, reader: Reader, found: frozenset[str], *, is_json: bool) -> Wait[bool]:
        """Emits a value that may be of other types than a string, once it is complete. One that
        is too long to be held is a string."""
        text = yield from reader.until((self.value_close,), MAX_HELD_CHARS)
        if text is None:
            return (yield from self._stream(reader))
        if self.wraps:
            text = text.removeprefix("\n").removesuffix("\n")
        made = typed_json(text, found)
        if made is None and is_json:
            made = typed_json(text, frozenset())
        if made is None and found & _LISTED:
            made = _python_json(text)
        reader.arguments(json.dumps(text, ensure_ascii=False) if made is None else made)
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
        calls = []
        for tool in tools:
            function = tool["function"]
            head = rules.literal(f"{self.call_open}{function['name']}{self.name_end}")
            inside = self._parameters_rule(rules, function, all_strict=all_strict)
            close = rules.literal(f"{self.call_close}{self.gap if self.call_close else ''}")
            calls.append(rules.add(f"{head} {self._gap(rules, self.gap)} {inside} {close}"))
        one = rules.add(" | ".join(calls))
        more = f" {one}{{0,{max_calls - 1}}}" if self.is_list and max_calls > 1 else ""
        return rules.add(f"{rules.literal(self.lead)} {one}{more} {rules.literal(self.end)}")

    def _parameters_rule(
        self, rules: Rules, function: Mapping[str, Any], *, all_strict: bool
    ) -> str:
        found = tool_members(function, all_strict=all_strict)
        gap = self._gap(rules, self.gap)
        if found is None:
            key = rules.terminal("/[A-Za-z_][A-Za-z0-9_.-]{0,63}/")
            text = self._text_rule(rules, {})
            head = f"{rules.literal(self.key_open)} {key} {self._key_end(rules, is_string=True)}"
            return rules.add(f"{head} {text} {gap}") + "*"
        root = function.get("parameters", {})
        made = []
        for member in found:
            body = " | ".join(
                f"{rules.literal(self.key_open + member.name)} "
                f"{self._key_end(rules, is_string=is_string)} {rule}"
                for is_string, rule in self._value_rules(rules, member.schema, root)
            )
            made.append(f"{rules.add(f'({body}) {gap}')}{'' if member.is_required else '?'}")
        return " ".join(made)

    def _key_end(self, rules: Rules, *, is_string: bool) -> str:
        """Returns what stands between a parameter's name and its text."""
        attribute = f' string="{str(is_string).lower()}">' if self.says_string else ""
        end = rules.literal(f"{self.key_end}{attribute}")
        return f"{end} {self._gap(rules, self.value_gap)} {rules.literal(self.value_open)}"

    def _gap(self, rules: Rules, text: str) -> str:
        return f"({rules.literal(text)})?" if text and not self.has_gaps else rules.literal(text)

    def _value_rules(
        self, rules: Rules, schema: Any, root: Mapping[str, Any]
    ) -> list[tuple[bool, str]]:
        """Returns the rules of a value with its end, and whether each is of strings."""
        parts = branches(schema, root)
        if parts is None:
            found = kinds(schema, root)
            if found and "string" not in found:
                return [(False, self._json_rule(rules, json_rule(standalone(schema, root))))]
            return [(True, self._text_rule(rules, {}))]
        made = []
        for part in parts:
            listed = part.get("enum", [part["const"]] if "const" in part else None)
            if isinstance(listed, list):
                made += [(isinstance(item, str), self._one_of(rules, item)) for item in listed]
            elif part["type"] == "string":
                made.append((True, self._text_rule(rules, part)))
            else:
                made.append((False, self._json_rule(rules, json_rule(standalone(part, root)))))
        return made

    def _one_of(self, rules: Rules, item: Any) -> str:
        text = item if isinstance(item, str) else json.dumps(item, ensure_ascii=False)
        edge = "\n" if self.wraps else ""
        return rules.add(rules.literal(f"{edge}{text}{edge}{self.value_close}"))

    def _json_rule(self, rules: Rules, made: str) -> str:
        edge = "\n" if self.wraps else ""
        return rules.add(f"{rules.literal(edge)} {made} {rules.literal(edge + self.value_close)}")

    def _text_rule(self, rules: Rules, schema: Mapping[str, Any]) -> str:
        """Adds a rule for a string. One whose length or form matters has both of its newlines."""
        if not self.wraps:
            return rules.text_until(self.value_close, schema)
        is_held = bool(schema.keys() & {"pattern", "format", "minLength", "maxLength"})
        end = f"\n{self.value_close}" if is_held else self.value_close
        return rules.add(f'"\\n" {rules.text_until(end, schema)}')


def _kinds(root: Mapping[str, Any], name: str) -> frozenset[str]:
    """Returns the types of a parameter."""
    whole = resolved(root, root)
    named = whole.get("properties")
    if isinstance(named, Mapping) and name in named:
        return kinds(named[name], root)
    return kinds(whole.get("additionalProperties"), root)


def _python_json(text: str) -> str | None:
    """Returns a list or a dictionary of Python as JSON; None if it is none."""
    reader = Reader(lambda name, number: "", {})
    reader.push(text.strip())
    reader.is_over = True
    reading = value(reader, PYTHON)
    try:
        next(reading)
    except StopIteration as end:
        is_whole = bool(end.value) and not reader.rest()
        made = "".join(part.text for part in reader.parts if isinstance(part, ToolCallArguments))
        return made if is_whole and type_of(json.loads(made)) in _LISTED else None
    return None
