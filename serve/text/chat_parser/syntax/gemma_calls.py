"""Calls as Gemma writes them: call:f{x:1,y:<|"|>text<|"|>}, in a notation of their own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve.text.chat_parser.syntax.json_calls import end_marker
from serve.text.chat_parser.syntax.literals import Notation, call
from serve.text.chat_parser.syntax.reader import Reader, Wait
from serve.text.chat_parser.syntax.rules import Rules, json_rule, tool_members
from serve.text.chat_parser.syntax.schema_types import branches, members, standalone

_MAX_DEPTH = 6  # of objects and lists whose form the grammar holds
_NUMERIC = ("number", "integer")


@dataclass(frozen=True, slots=True)
class GemmaCalls:
    """The syntax of Gemma's calls. quote: the marker on both sides of a string. end: the marker
    after a call."""

    quote: str
    end: str

    @property
    def notation(self) -> Notation:
        quotes = {self.quote: self.quote}
        return Notation(quotes, ":", bare_keys=True, bare_words=True)

    # ---- reading

    def block(self, reader: Reader) -> Wait[bool]:
        yield from reader.skip_space()
        if not (yield from reader.take("call:")):
            return reader.fail()
        name = yield from reader.name()
        if not reader.can_call(name) or not (yield from reader.take("{")):
            return reader.fail()
        if not (yield from call(reader, self.notation, name, assigns=":", end="}")):
            return reader.fail()
        yield from reader.skip_space()
        yield from end_marker(reader, self.end)
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
            head = rules.literal(f"call:{function['name']}{{")
            found = tool_members(function, all_strict=all_strict)
            if found is None:
                inside = self._any_members(rules)
            else:
                root = function.get("parameters", {})
                items = [
                    (self._member(rules, item.name, item.schema, root, 0), item.is_required)
                    for item in found
                ]
                inside = rules.members(items, separator='","') or ""
            calls.append(rules.add(f'{head} {inside} "}}" {rules.literal(self.end)}'))
        return rules.add(" | ".join(calls))

    def _member(
        self, rules: Rules, name: str, schema: Any, root: Mapping[str, Any], depth: int
    ) -> str:
        return f"{rules.literal(f'{name}:')} {self._value(rules, schema, root, depth)}"

    def _value(self, rules: Rules, schema: Any, root: Mapping[str, Any], depth: int) -> str:
        parts = branches(schema, root) if depth < _MAX_DEPTH else None
        if parts is None:
            return self._any_value(rules)
        made = []
        for part in parts:
            listed = part.get("enum", [part["const"]] if "const" in part else None)
            if isinstance(listed, list):
                made += [rules.literal(self._written(item)) for item in listed]
            else:
                made.append(self._typed(rules, part, root, depth))
        return rules.add(" | ".join(made))

    def _typed(
        self, rules: Rules, part: Mapping[str, Any], root: Mapping[str, Any], depth: int
    ) -> str:
        kind = str(part["type"])
        if kind == "string":
            return f"{rules.literal(self.quote)} {rules.text_until(self.quote, part)}"
        if kind == "array":
            return self._array(rules, part, root, depth)
        if kind == "object":
            found = members(part)
            if found is None:
                return f'"{{" {self._any_members(rules)} "}}"'
            items = [
                (self._member(rules, item.name, item.schema, root, depth + 1), item.is_required)
                for item in found
            ]
            return f'"{{" {rules.members(items, separator=_COMMA) or ""} "}}"'
        if kind in _NUMERIC:
            return json_rule(standalone(part, root))
        return '"null"' if kind == "null" else '"true" | "false"'

    def _array(
        self, rules: Rules, part: Mapping[str, Any], root: Mapping[str, Any], depth: int
    ) -> str:
        item = rules.add(self._value(rules, part.get("items", {}), root, depth + 1))
        low, high = int(part.get("minItems", 0)), part.get("maxItems")
        if high == 0:
            return '"[]"'
        most = "" if high is None else int(high) - 1
        some = f'{item} ("," {item}){{{max(low - 1, 0)},{most}}}'
        return f'"[" {some} "]"' if low else f'"[" ({some})? "]"'

    def _written(self, item: Any) -> str:
        if isinstance(item, str):
            return f"{self.quote}{item}{self.quote}"
        if isinstance(item, list):
            return f"[{','.join(map(self._written, item))}]"
        if isinstance(item, Mapping):
            return f"{{{','.join(f'{k}:{self._written(v)}' for k, v in item.items())}}}"
        return json.dumps(item)

    def _any_members(self, rules: Rules) -> str:
        name = rules.terminal("/[A-Za-z_][A-Za-z0-9_]{0,63}/")
        one = rules.add(f'{name} ":" {self._any_value(rules)}')
        return rules.add(f'({one} ("," {one})*)?')

    def _any_value(self, rules: Rules) -> str:
        """Adds the rules for any value; they are recursive."""
        if "any_value" not in rules.named:
            rules.named.add("any_value")
            text = f"{rules.literal(self.quote)} {rules.text_until(self.quote)}"
            name = rules.terminal("/[A-Za-z_][A-Za-z0-9_]{0,63}/")
            pair = rules.add(f'{name} ":" any_value')
            rules.add(
                f'{text} | %json {{"type": "number"}} | "true" | "false" | "null"'
                ' | "[" (any_value ("," any_value)*)? "]"'
                f' | "{{" ({pair} ("," {pair})*)? "}}"',
                name="any_value",
            )
        return "any_value"


_COMMA = '","'
