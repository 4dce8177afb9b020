"""Calls as Python writes them: f(x=1, y="a"), in brackets or one on each line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve.text.chat_parser.syntax.json_calls import end_marker
from serve.text.chat_parser.syntax.literals import PYTHON, call
from serve.text.chat_parser.syntax.reader import Reader, Wait
from serve.text.chat_parser.syntax.rules import Rules, json_rule, tool_members
from serve.text.chat_parser.syntax.schema_types import branches, standalone

_CONSTANTS = {"boolean": '"True" | "False"', "null": '"None"'}
_PLAIN_KEYS = frozenset({"type", "title", "description", "default", "nullable", "examples"})


@dataclass(frozen=True, slots=True)
class PythonCalls:
    """The syntax of calls of Python. in_brackets: they are a list; else each has a line. end: the
    marker after them."""

    in_brackets: bool = True
    end: str = ""

    # ---- reading

    def block(self, reader: Reader) -> Wait[bool]:
        yield from reader.skip_space()
        if self.in_brackets and not (yield from reader.take("[")):
            return reader.fail()
        while True:
            if not (yield from self._call(reader)):
                return reader.fail()
            reader.hold()
            yield from reader.skip_space()
            if self.in_brackets and not (yield from reader.take(",")):
                break
            if self.end and (yield from reader.sees(self.end)):
                break
            if not (yield from reader.peek()):
                return False
        if self.in_brackets and not (yield from reader.take("]")):
            return reader.fail()
        reader.drop()
        if self.end:
            yield from reader.skip_space()
            yield from end_marker(reader, self.end)
        return True

    def _call(self, reader: Reader) -> Wait[bool]:
        """Reads one call. Returns False if there is none, or if it turns out to be malformed."""
        yield from reader.skip_space()
        name = yield from reader.name()
        if not name or not (yield from reader.take("(")) or not reader.can_call(name):
            return False
        return (yield from call(reader, PYTHON, name, assigns="=", end=")"))

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
            inside = self._arguments_rule(rules, function, all_strict=all_strict)
            head = rules.literal(f"{function['name']}(")
            calls.append(rules.add(f'{head} {inside or ""} ")"'))
        one = rules.add(" | ".join(calls))
        between = '", "' if self.in_brackets else '"\\n"'
        more = f" ({between} {one}){{0,{max_calls - 1}}}" if max_calls > 1 else ""
        end = rules.literal(self.end)
        if self.in_brackets:
            # a bare list has no markers
            return rules.add(f'"[" {one}{more} "]" {f"({end})?" if end else ""}')
        return rules.add(f'"\\n" {one}{more} "\\n" {end}')

    def _arguments_rule(
        self, rules: Rules, function: Mapping[str, Any], *, all_strict: bool
    ) -> str | None:
        found = tool_members(function, all_strict=all_strict)
        if found is None:
            one = rules.add(f'{rules.terminal("/[A-Za-z_][A-Za-z0-9_]{0,63}/")} "=" %json {{}}')
            return rules.add(f'({one} (", " {one})*)?')
        root = function.get("parameters", {})
        items = []
        for member in found:
            body = rules.add(self._value(rules, member.schema, root))
            items.append((f"{rules.literal(f'{member.name}=')} {body}", member.is_required))
        return rules.members(items, separator='", "')

    def _value(self, rules: Rules, schema: Any, root: Mapping[str, Any]) -> str:
        """Returns a value: JSON, which is Python, too, but for true, false and null."""
        parts = branches(schema, root)
        if parts is None or any(part.keys() - _PLAIN_KEYS for part in parts[:1] if "enum" in part):
            return json_rule(standalone(schema, root))
        made = []
        for part in parts:
            plain = _CONSTANTS.get(str(part.get("type")))
            is_plain = plain is not None and not part.keys() - _PLAIN_KEYS
            made.append(plain if plain and is_plain else json_rule(standalone(part, root)))
        return " | ".join(made)
