"""Turns literals of other notations than JSON into JSON while they arrive.

Python's literals and Gemma's are read by a parser of our own, bounded in depth and length: nothing
of a model's text is evaluated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from serve.text.chat_parser.syntax.reader import (
    SPACE,
    Reader,
    Wait,
    first_of,
    in_json,
    longest_overlap,
)

MAX_DEPTH = 32
MAX_WORD_CHARS = 400
MAX_KEY_CHARS = 256
_NUMBER = re.compile(r"([+-]?)([0-9][0-9_]*)?(?:(\.)([0-9_]*))?(?:[eE]([+-]?[0-9]{1,8}))?")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
_ESCAPES |= {char: char for char in "\\'\"/"} | {"\n": ""}
_HEX_SIZE = {"x": 2, "u": 4, "U": 8}
_IDENTIFIER = re.compile(r"[^\W\d][\w.-]*")
_WORD_END = re.compile(r"[^A-Za-z0-9_.+-]")
_MAX_SPACE = 256  # that is looked through after a quote
_NO_NAME = frozenset("{}[](),\"'\n")


@dataclass(frozen=True, slots=True)
class Notation:
    """A notation of values.

    quotes: the ends of strings by what they begin with. has_escapes: whether \\ escapes characters
    in them. words: the JSON of words. assigns: the character between a name and its value.
    bare_keys: names in objects have no quotes. bare_words: other words are strings.
    """

    quotes: Mapping[str, str]
    assigns: str
    has_escapes: bool = False
    bare_keys: bool = False
    bare_words: bool = False
    words: Mapping[str, str] = field(
        default_factory=lambda: {
            **{"True": "true", "true": "true", "False": "false", "false": "false"},
            **{"None": "null", "none": "null", "null": "null", "nil": "null"},
        }
    )


PYTHON = Notation({"'": "'", '"': '"'}, "=", has_escapes=True)


def call(reader: Reader, notation: Notation, name: str, *, assigns: str, end: str) -> Wait[bool]:
    """Reads the arguments of a call after their first bracket, and emits the call once the first
    name is known. Returns False if there is no call, or if it turns out to be malformed."""
    yield from reader.skip_space()
    if (yield from reader.take(end)):
        reader.begin_call(name)
        reader.arguments("{}")
        return True
    first = yield from key(reader, assigns)
    if first is None or not (notation.bare_keys or _IDENTIFIER.fullmatch(first)):
        return False
    reader.begin_call(name)
    reader.arguments(f"{{{json.dumps(first, ensure_ascii=False)}: ")
    return (yield from pairs(reader, notation, assigns, end, has_name=True))


def value(reader: Reader, notation: Notation, depth: int = 0, end: str = "") -> Wait[bool]:
    """Reads a literal and emits it as arguments in JSON. Returns False where it is malformed.
    end: the character that may follow it beside a comma."""
    yield from reader.skip_space()
    for opening, closing in notation.quotes.items():
        if (yield from reader.take(opening)):
            return (yield from _string(reader, notation, closing, f",{end}"))
    if depth >= MAX_DEPTH:
        return False
    if (yield from reader.take("[")):
        return (yield from _list(reader, notation, depth))
    if (yield from reader.take("{")):
        reader.arguments("{")
        return (yield from pairs(reader, notation, ":", "}", depth + 1))
    return (yield from _word(reader, notation))


def pairs(
    reader: Reader,
    notation: Notation,
    assigns: str,
    end: str,
    depth: int = 0,
    *,
    has_name: bool = False,
) -> Wait[bool]:
    """Reads names and values up to `end` and emits them as the members of an object, with its last
    bracket. The first bracket has been emitted already; has_name: so has the first name."""
    is_first = True
    while True:
        yield from reader.skip_space()
        if not has_name:
            if (yield from reader.take(end)):
                reader.arguments("}")
                return True
            reader.arguments("" if is_first else ", ")
            is_bare = notation.bare_keys or end == ")"
            if not (yield from _name(reader, notation, assigns, is_bare=is_bare)):
                return False
        if not (yield from value(reader, notation, depth, end)):
            return False
        yield from reader.skip_space()
        is_first = has_name = False
        if not (yield from reader.take(",")) and not (yield from reader.sees(end)):
            return False


def key(reader: Reader, assigns: str) -> Wait[str | None]:
    """Reads a name without quotes and what assigns its value; None if there is none."""
    found = yield from reader.until((assigns,), MAX_KEY_CHARS)
    name = found.strip() if found is not None else ""
    return name if name and not set(name) & _NO_NAME else None


def _name(reader: Reader, notation: Notation, assigns: str, *, is_bare: bool) -> Wait[bool]:
    """Emits the name of a member and its colon."""
    for opening, closing in notation.quotes.items():
        if (yield from reader.take(opening)):
            if not (yield from _string(reader, notation, closing, assigns)):
                return False
            yield from reader.skip_space()
            reader.arguments(": ")
            return (yield from reader.take(assigns))
    name = (yield from key(reader, assigns)) if is_bare else None
    if name is None:
        return False
    reader.arguments(f"{json.dumps(name, ensure_ascii=False)}: ")
    return True


def _list(reader: Reader, notation: Notation, depth: int) -> Wait[bool]:
    reader.arguments("[")
    is_first = True
    while True:
        yield from reader.skip_space()
        if (yield from reader.take("]")):
            reader.arguments("]")
            return True
        reader.arguments("" if is_first else ", ")
        if not (yield from value(reader, notation, depth + 1, "]")):
            return False
        is_first = False
        yield from reader.skip_space()
        if not (yield from reader.take(",")) and not (yield from reader.sees("]")):
            return False


def _word(reader: Reader, notation: Notation) -> Wait[bool]:
    """Reads a number, a word such as True, or a string without quotes."""
    text = yield from _delimited(reader, bare=notation.bare_words)
    if text is None:
        return False
    made = notation.words.get(text) or number(text)
    if made is None and notation.bare_words and text:
        made = json.dumps(text, ensure_ascii=False)
    if made is None:
        return False
    reader.arguments(made)
    return True


def _delimited(reader: Reader, *, bare: bool) -> Wait[str | None]:
    """Reads up to where a word ends, which must have arrived; None if it is too long."""
    while True:
        text = reader.rest()[: MAX_WORD_CHARS + 1]
        at = re.search(r"[,}\]]", text) if bare else _WORD_END.search(text)
        if at is not None:
            reader.advance(at.start())
            return text[: at.start()].strip()
        if len(text) > MAX_WORD_CHARS or not (yield from reader.more()):
            return None


def number(text: str) -> str | None:
    """Returns a number as JSON has it, or None."""
    match = _NUMBER.fullmatch(text)
    if match is None or not (match[2] or (match[4] or "").strip("_")):
        return None
    whole = (match[2] or "0").replace("_", "").lstrip("0") or "0"
    part = f".{(match[4] or '').replace('_', '') or '0'}" if match[3] else ""
    sign = "-" if match[1] == "-" else ""
    return f"{sign}{whole}{part}{'' if match[5] is None else f'e{match[5]}'}"


def _string(reader: Reader, notation: Notation, closing: str, after: str) -> Wait[bool]:
    """Emits a string up to its end as it arrives. after: the characters that may follow it."""
    reader.arguments('"')
    ends = (closing, "\\") if notation.has_escapes else (closing,)
    while True:
        text = reader.rest()
        found = first_of(text, ends)
        ready = text[: found[0]] if found else text[: len(text) - longest_overlap(text, ends)]
        reader.arguments(in_json(ready))
        reader.advance(len(ready))
        if found is None:
            if not (yield from reader.more()):
                reader.arguments(in_json(reader.rest()))
                reader.advance(len(reader.rest()))
                return False
        elif found[1] == "\\":
            reader.advance(1)
            if not (yield from _escape(reader)):
                return False
        elif not notation.has_escapes or (yield from _is_end(reader, closing, after)):
            reader.advance(len(closing))
            reader.arguments('"')
            return True
        else:
            reader.arguments(in_json(closing))
            reader.advance(len(closing))


def _is_end(reader: Reader, closing: str, after: str) -> Wait[bool]:
    """Returns whether a quote ends its string. Some chat templates write strings in quotes without
    escapes, so that models do, too: a quote that no character of `after` follows is text."""
    at = len(closing)
    while True:
        text = reader.rest()
        while at < len(text) and text[at] in SPACE:
            at += 1
        if at < len(text) or at > _MAX_SPACE:
            return at < len(text) and text[at] in after
        if not (yield from reader.more()):
            return True


def _escape(reader: Reader) -> Wait[bool]:
    """Reads an escape after its backslash. A surrogate stays an escape, since half a pair cannot be
    encoded; two that follow one another are a pair in JSON, too."""
    char = yield from reader.peek()
    if not char:
        return False
    reader.advance(1)
    size = _HEX_SIZE.get(char)
    if size is None:
        made = _ESCAPES.get(char)
        reader.arguments(in_json(f"\\{char}" if made is None else made))
        return True
    while len(reader.rest()) < size:
        if not (yield from reader.more()):
            return False
    digits = reader.rest()[:size]
    is_hex = re.fullmatch("[0-9a-fA-F]+", digits) is not None
    if not is_hex or int(digits, 16) > 0x10FFFF:
        reader.arguments(in_json(f"\\{char}"))
        return True
    reader.advance(size)
    code = int(digits, 16)
    reader.arguments(f"\\u{code:04x}" if 0xD800 <= code < 0xE000 else in_json(chr(code)))
    return True
