"""Builds grammars in llguidance's dialect of Lark, rule by rule."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from serve.errors import RequestError
from serve.structured_output import JSON_OPTIONS
from serve.text.chat_parser.syntax.schema_types import Member, members

ANY_OBJECT: dict[str, Any] = {"type": "object"}
NO_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
ANY_TEXT = r"(.|\n)*"
_REGEX_PART = re.compile(r"\\.|/|\n", re.DOTALL)
# What JSON's own grammar takes for these formats; other formats say nothing in plain text.
_FORMATS = {
    "date": r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])",
    "time": r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]\d\d:\d\d)",
    "date-time": r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])T([01]\d|2[0-3]):[0-5]\d:[0-5]\d"
    r"(\.\d{1,6})?(Z|[+-]\d\d:\d\d)",
    "email": r"[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63}){1,4}",
    "uuid": r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "ipv4": r"((25[0-5]|(2[0-4]|1\d|[1-9])?\d)\.){3}(25[0-5]|(2[0-4]|1\d|[1-9])?\d)",
}


class Rules:
    """The rules of one grammar. special_ids: the ids of markers that are special tokens."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self.lines: list[str] = []
        self.special_ids = special_ids
        self.named: set[str] = set()  # rules of a fixed name that have been added
        self._count = 0
        found = sorted(special_ids, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, found))) if found else None

    def add(self, body: str, *, name: str = "", lazy: bool = False) -> str:
        """Adds a rule and returns its name. lazy: the rule ends at its first match."""
        name = name or self._fresh("r")
        self.lines.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def terminal(self, body: str) -> str:
        name = self._fresh("T")
        self.lines.append(f"{name}: {body}")
        return name

    def literal(self, text: str) -> str:
        """Writes text, in which markers that are special tokens are their ids."""
        if not text:
            return ""
        parts: list[str] = []
        done = 0
        for match in self._special.finditer(text) if self._special else ():
            if match.start() > done:
                parts.append(_quoted(text[done : match.start()]))
            parts.append(f"<[{self.special_ids[match[0]]}]>")
            done = match.end()
        if done < len(text):
            parts.append(_quoted(text[done:]))
        return " ".join(parts)

    def text_until(self, end: str, schema: Mapping[str, Any] | None = None) -> str:
        """Adds a rule for text up to the first `end`, and this; schema: that of a string."""
        body, is_any = _string_regex(schema or {})
        first, is_special = self._splits(end)
        if is_special:
            return self.add(f"{self.terminal(body)} {self.literal(end)}")
        if not is_any:
            outside = re.escape(first).replace("/", "\\/").replace("\n", "\\n")
            body = f"{body} & ~/{ANY_TEXT}{outside}{ANY_TEXT}/"
        return self.add(f"{self.terminal(body)} {self.literal(end)}", lazy=True)

    def members(
        self, items: Sequence[tuple[str, bool]], *, separator: str, name: str = ""
    ) -> str | None:
        """Adds rules for a list of items, of which the optional ones may be missing, in their
        order. items: the body of each, and whether it is required. None for an empty list."""
        more = None  # what follows the first item
        first = None
        for body, is_required in reversed(items):
            tail = f" {more}" if more else ""
            head = f" {first}" if first else ""
            rest = f"{separator} {body}{tail}"
            whole = f"{body}{tail}"
            if not is_required:
                rest += f" |{tail}" if more else ' | ""'
                whole += f" |{head}" if first else ' | ""'
            more, first = self.add(rest), self.add(whole)
        return self.add(first, name=name) if first and name else first

    def _splits(self, end: str) -> tuple[str, bool]:
        """Returns the end without a leading newline, and whether it begins with a special token."""
        first = end.lstrip("\n")
        found = self._special.match(end) if self._special else None
        return first, found is not None

    def _fresh(self, prefix: str) -> str:
        self._count += 1
        return f"{prefix}_{self._count}" if prefix == "r" else f"{prefix}_{self._count}".upper()


def tool_members(function: Mapping[str, Any], *, all_strict: bool) -> list[Member] | None:
    """Returns the parameters to which the grammar holds a call; None if any are allowed. Raises
    RequestError for a strict tool whose schema says more than which parameters there are."""
    is_strict = function.get("strict", False)
    if not (is_strict or all_strict):
        return None
    parameters = function.get("parameters", NO_PARAMETERS)
    found = members(parameters)
    if found is None and is_strict and (parameters.keys() - {"type", "title", "description"}):
        raise RequestError(
            f"the tool {function['name']} is strict, but its parameters are no plain list of "
            "properties, to which this model's format of calls could be held",
            param="tools",
            code="unsupported_parameter",
        )
    return found


def json_rule(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS})}"


def regex_source(pattern: str) -> str:
    """Writes a regular expression as Lark does: in slashes, on one line."""
    return f"/{_REGEX_PART.sub(_lark_part, pattern)}/"


def _lark_part(part: re.Match[str]) -> str:
    text = part[0]
    return "\\n" if text[-1] == "\n" else "\\/" if text == "/" else text


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _string_regex(schema: Mapping[str, Any]) -> tuple[str, bool]:
    """Returns the regular expression of a string, and whether it is any string."""
    parts: list[str] = []
    pattern = schema.get("pattern", _FORMATS.get(str(schema.get("format")), ""))
    if pattern:
        parts.append(regex_source(_anchored(pattern, is_whole="pattern" not in schema)))
    low, high = schema.get("minLength", 0), schema.get("maxLength")
    if low or high is not None:
        parts.append(f"/(.|\\n){{{int(low)},{'' if high is None else int(high)}}}/")
    return " & ".join(parts) if parts else f"/{ANY_TEXT}/", not parts


def _anchored(pattern: str, *, is_whole: bool) -> str:
    """Returns a pattern that matches a whole text where this one matches a part of it."""
    if is_whole:
        return pattern
    begin = "" if pattern.startswith("^") else ANY_TEXT
    is_ended = pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern.removeprefix("^")
    inner = inner[:-1] if is_ended else inner
    return f"{begin}({inner}){'' if is_ended else ANY_TEXT}"
