"""Keeps JSON within bounds while it is generated: the digits of a number, and the request's tokens.

Both only take tokens away from a mask, never all of them, so that the text still matches its
grammar. Like a mask, what they take away follows from the sequence's tokens alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from serve.structured.bits import Bits, bits_of
from serve.structured.json_ending import PLAIN, way_to_end
from serve.structured.json_tokens import JsonTokens

if TYPE_CHECKING:
    from llguidance import LLMatcher

# What a double holds: digits beyond 17 do not change it. More digits are zeros before or after.
MAX_SIGNIFICANT, MAX_DIGITS, MAX_EXPONENT = 17, 40, 308
_INT64 = 1 << 63
_NUMBER = re.compile(rb"(-?)([0-9]+)(?:(\.)([0-9]*))?(?:[eE]([+-]?)([0-9]*))?$")
_NUMERIC = frozenset(b"0123456789.eE+-")
_TAIL_BYTES = 64  # more than a number has
# What stands before a value: in JSON, or in one of the formats of tool calls.
_BEFORE_VALUE = re.compile(rb'(?:^|":|[\[,\n>=:]) ?$')
# Tokens by which one in a string can put off its end: the rest of a character or of its escape.
_TEXT_GROWTH = 12
_MAX_WAY = 2048
_SOON = 32  # tokens before the last, where a way is looked for each time


@dataclass(frozen=True, slots=True)
class JsonForm:
    """What the limits know of a grammar. growth: tokens by which a single one can put off the end
    of the text; again: the same after a complete text, which may go on. names: the tokens of
    required names, each with its quote. closers: the tokens of markers that end plain text.
    completes: whether the text is completed before the request's tokens run out."""

    tokens: JsonTokens
    growth: int
    again: int
    names: tuple[list[int], ...]
    closers: tuple[list[int], ...]
    completes: bool


JsonState = tuple[float, int, list[int] | None, int, int | None]


class JsonLimits:
    """The limits of one sequence. max_output: the most tokens that it may have. reports_cut: see
    is_cut."""

    def __init__(self, form: JsonForm, max_output: int, *, reports_cut: bool = True) -> None:
        self._reports_cut = reports_cut
        self._form = form
        self._max_output = max_output
        self._look_at = self._first_look  # the tokens left at the next look for the way to the end
        self._looked_at = 0  # the output's length at the last one
        self._way: list[int] | None = None  # found at the last one
        self._text_at = -1  # the output's length, while all since then is text of one string
        self._cut_at: int | None = None

    @property
    def is_cut(self) -> bool:
        """Whether the text was completed because the tokens run out. Without reports_cut it never
        was: a client that set no limit gets a text that is whole by its form, and the libraries of
        clients throw away one that was cut."""
        return self._reports_cut and self._cut_at is not None

    @property
    def state(self) -> JsonState:
        """What the next call depends on, besides its arguments; set it to go back."""
        return self._look_at, self._looked_at, self._way, self._text_at, self._cut_at

    @state.setter
    def state(self, state: JsonState) -> None:
        self._look_at, self._looked_at, self._way, self._text_at, self._cut_at = state

    @property
    def _first_look(self) -> float:
        return math.inf if self._form.completes else -1.0

    def limit_number(self, bits: Bits, recent: Sequence[int]) -> None:
        """Takes away digits beyond what an int64 or a double holds. recent: the output's last
        tokens, at least a number's."""
        tokens = self._form.tokens
        last = tokens.tail(recent[-1:], 1)
        if not last or last[-1] not in _NUMERIC:
            return
        tail = tokens.tail(recent, _TAIL_BYTES)
        found = _NUMBER.search(tail)
        if found is None or not self._is_number(bits, tail):
            return
        text, has_exponent = found.group(), found.group(6) is not None
        if not has_exponent and len(text) + tokens.longest_numeric <= MAX_SIGNIFICANT:
            return
        is_real = bool(found.group(3)) or has_exponent
        is_integer = not is_real and not (self._has(bits, b".") or self._has(bits, b"e"))
        beyond = [
            token
            for part, group in tokens.numeric.items()
            if not _holds(text + part, is_integer)
            for token in group
        ]
        if beyond:
            _keep(bits, ~bits_of(beyond, len(bits) * 32))
        if is_real and _is_nearly_full(text):
            numeric = bits_of(tokens.numeric_tokens, len(bits) * 32)
            goes_on = not (bits & ~numeric).any()
            if goes_on:  # more zeros might not bring its end
                _keep(bits, ~bits_of(tokens.zeros, len(bits) * 32))

    def fit(
        self, bits: Bits, ends: Bits, matcher: LLMatcher, recent: Sequence[int], size: int
    ) -> None:
        """Leaves only the way to the end of the text once the tokens just suffice for it. ends: the
        tokens that end the sequence. matcher: it has consumed the output. recent: as in
        limit_number; size: the output's length."""
        left = self._max_output - size
        if size < self._looked_at:  # tokens were removed
            self._look_at, self._way, self._text_at = self._first_look, None, -1
            if self._cut_at is not None and size <= self._cut_at:
                self._cut_at = None
        is_text = all(self._has(bits, char) for char in PLAIN)
        # A marker that ends plain text is several tokens: its first one does not end the text.
        is_whole = not self._form.closers
        is_same = is_text and is_whole and self._is_same_text(recent, size)
        if left > self._look_at:
            return
        self._looked_at = size
        may_close = is_text and self._has(bits, b'"')
        way = (
            self._way
            if is_same
            else self._find_way(matcher, recent, left, anew=may_close and is_whole)
        )
        self._text_at = size if may_close and way is not None else -1
        if way is None:
            self._look_at = left - 1 if left < _SOON else left // 2
            return
        self._look_at = left - 1
        spare = left - len(way)
        growth = max(self._form.growth, _TEXT_GROWTH * is_text, self._form.again * (not way))
        if spare > growth:
            most = 1 + max(self._form.growth, _TEXT_GROWTH, self._form.again)
            self._look_at -= max(0, (spare - most) // most)
            return
        kept = bits_of(way[:1], len(bits) * 32) if way else ends & bits
        goes_on = spare > 0 and (is_text or self._ends_in_number(bits, recent))
        if goes_on and is_text:
            _add(kept, self._form.tokens.text)
        elif goes_on:
            self._add_fitting(kept, matcher, self._form.tokens.figures, way)
        elif not is_text:
            self._add_values(kept, matcher, recent, way, left)
        if _keep(bits, kept) and not goes_on and self._cut_at is None:
            self._cut_at = size

    def _is_same_text(self, recent: Sequence[int], size: int) -> bool:
        """Returns whether all tokens since the last look are text of one string that may end, so
        that the way is the same."""
        text = self._form.tokens.text
        last = recent[-1] if recent else -1
        is_text = 0 <= last < len(text) * 32 and text[last >> 5] >> (last & 31) & 1
        if is_text and size == self._text_at + 1:
            self._text_at = size
        return size == self._text_at

    def _find_way(
        self, matcher: LLMatcher, recent: Sequence[int], left: int, *, anew: bool
    ) -> list[int] | None:
        """Returns tokens that complete the text: unless anew, the rest of the last way where it
        still does, also after a token in the place of one of it or before it."""
        form, before = self._form, None if anew else self._way
        for rest in (before[1:], before) if before else ():
            copy = matcher.deep_copy()
            if (
                copy.validate_tokens(rest) == len(rest)
                and copy.consume_tokens(rest)
                and copy.is_accepting()
            ):
                self._way = rest
                return rest
        tail = form.tokens.tail(recent, 8)
        self._way = way_to_end(
            matcher, form.tokens, form.names, form.closers, tail, min(left, _MAX_WAY)
        )
        return self._way

    def _add_values(
        self, kept: Bits, matcher: LLMatcher, recent: Sequence[int], way: list[int], left: int
    ) -> None:
        """Adds short values to `kept`, where the way has a digit or where a value may begin."""
        form, tokens = self._form, self._form.tokens
        begin = tokens.tail(way[:1], 1)[:1]
        if begin.isdigit():
            self._add_fitting(kept, matcher, tokens.figures, way[1:])
        elif _BEFORE_VALUE.search(tokens.tail(recent, _TAIL_BYTES)):
            for values in (tokens.figures, tokens.literals):
                for first in values:
                    copy = matcher.deep_copy()
                    if copy.validate_tokens([first]) != 1 or not copy.consume_token(first):
                        continue
                    rest = way_to_end(
                        copy, tokens, form.names, form.closers, tokens.pieces[first], left - 1
                    )
                    if rest is not None and len(rest) < left:
                        self._add_fitting(kept, matcher, values, rest)
                    break

    def _add_fitting(
        self, kept: Bits, matcher: LLMatcher, values: Sequence[int], rest: list[int]
    ) -> None:
        """Adds those of these tokens to `kept` after which the rest of the way completes the
        text: not each number is one that the schema allows."""
        copy = matcher.deep_copy()
        for token in values:
            if copy.validate_tokens([token]) == 1 and copy.consume_token(token):
                if copy.validate_tokens(rest) == len(rest) and (rest or copy.is_accepting()):
                    kept[token >> 5] |= kept.dtype.type(1 << (token & 31))
                copy.rollback(1)

    def _ends_in_number(self, bits: Bits, recent: Sequence[int]) -> bool:
        tail = self._form.tokens.tail(recent, _TAIL_BYTES)
        return tail[-1:].isdigit() and self._is_number(bits, tail)

    def _is_number(self, bits: Bits, tail: bytes) -> bool:
        """Returns whether the digits at the end are those of a number, and not of a string."""
        found = _NUMBER.search(tail)
        before = tail[: found.start()] if found else b"?"
        return not self._has(bits, b'"') and _BEFORE_VALUE.search(before) is not None

    def _has(self, bits: Bits, char: bytes) -> bool:
        token = self._form.tokens.single.get(char)
        return token is not None and bool(bits[token >> 5] >> (token & 31) & 1)


def _keep(bits: Bits, kept: Bits) -> bool:
    """Leaves only these bits, if any is left; returns whether it changed them."""
    left = bits & kept
    if not left.any() or (left == bits).all():
        return False
    bits[:] = left
    return True


def _add(kept: Bits, tokens: Bits) -> None:
    kept[: len(tokens)] |= tokens[: len(kept)]


def _is_nearly_full(text: bytes) -> bool:
    """Returns whether the number has nearly as many digits as a double holds."""
    digits = text.lstrip(b"-").replace(b".", b"")
    return len(digits) >= MAX_DIGITS - 2 or len(digits.lstrip(b"0")) >= MAX_SIGNIFICANT - 2


def _holds(text: bytes, is_integer: bool) -> bool:
    """Returns whether an int64 or a double holds the number, as far as it is written."""
    found = _NUMBER.fullmatch(text)
    if found is None:
        return True  # the grammar decides
    sign, whole, point, fraction, exponent_sign, exponent = found.groups()
    if is_integer and point is None and exponent is None:
        return len(whole) < 20 and int(whole) < _INT64 + bool(sign)
    digits = whole + (fraction or b"")
    if len(digits) > MAX_DIGITS or len(digits.strip(b"0")) > MAX_SIGNIFICANT:
        return False
    largest = MAX_EXPONENT - (0 if exponent_sign == b"-" else len(whole))
    return not exponent or (len(exponent) <= 3 and int(exponent) <= largest)
