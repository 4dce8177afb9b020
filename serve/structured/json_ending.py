"""Finds tokens that complete a JSON text, however far it is: a short way to its end.

The search knows the grammar only through the matcher, so that the way fits the schema whatever is
in it. It takes what closes strings, objects and arrays first and the shortest of values, and the
names of required properties before others. It is short and not always the shortest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from serve.structured.json_tokens import JsonTokens

if TYPE_CHECKING:
    from llguidance import LLMatcher

_AT_VALUE = (b"]", b"n", b"0", b"1", b'"', b"{", b"[", b"t", b"f", b"-")
_AFTER_VALUE = (b'"', b"}", b"]", b",", b":")
_AT_NAME = (b"}", b'"')
_IN_PATTERN = (b"a", b"A", b"x", b"_", b"!", b"@")  # none follows a value or a comma
_BEFORE_VALUES = b":[,"
PLAIN = (b"x", b"#", b" ", b"<")  # only the text of a free string allows them all
# What shows where in a pattern a text is: which of these may follow. They are also tried first.
_PROBES = tuple(bytes([char]) for char in b'"@.-:/ aAzT0_+}')
_LAST = tuple(bytes([char]) for char in b"09azAZ_-. ") + _PROBES
_MAX_MASKS = 64  # of one search; a mask takes much longer than trying a token
_ATTEMPTS = 2


def way_to_end(
    matcher: LLMatcher,
    tokens: JsonTokens,
    names: Sequence[list[int]],
    closers: Sequence[list[int]],
    tail: bytes,
    limit: int,
) -> list[int] | None:
    """Returns tokens that complete the text, or None if no way of at most `limit` tokens was found.
    tail: the last bytes of the text. names: the tokens of required properties' names, each with its
    quote. closers: those of the markers that end plain text. The matcher stays as it is."""
    for attempt in range(_ATTEMPTS):
        search = _Search(matcher.deep_copy(), tokens, names, closers, tail, attempt)
        if search.run(limit):
            return search.way
    return None


class _Search:
    def __init__(
        self,
        matcher: LLMatcher,
        tokens: JsonTokens,
        names: Sequence[list[int]],
        closers: Sequence[list[int]],
        tail: bytes,
        attempt: int,
    ) -> None:
        self.way: list[int] = []
        self._matcher = matcher
        self._tokens = tokens
        self._names = names
        self._closers = closers
        self._last = tail.rstrip(b" ")[-1:]
        self._attempt = attempt
        self._masks_left = _MAX_MASKS
        self._has_quoted = False
        self._known: set[tuple[bool, ...]] = set()

    def run(self, limit: int) -> bool:
        """Returns whether the way ends after at most `limit` tokens."""
        while not self._matcher.is_accepting():
            if self._matcher.is_error() or not self._step() or len(self.way) > limit:
                return False
        return True

    def _step(self) -> bool:
        """Takes the next tokens; returns whether there are any."""
        forced = self._matcher.compute_ff_tokens()
        if forced:
            self._has_quoted = False
            return self._take(forced)
        if self._closers and self._close():
            return True
        is_plain = all(map(self._allows, PLAIN))
        if is_plain and self._has_quoted:
            return False  # text that no quote ends, such as reasoning
        if is_plain:
            self._has_quoted = self._allows(b'"')
            return self._take(
                [self._tokens.single[b'"']] if self._has_quoted else self._before_quote()
            )
        self._has_quoted = False
        for char in self._order():
            if self._allows(char):
                return self._take([self._tokens.single[char]])
        for name in self._names:
            if self._matcher.validate_tokens(name) == len(name):
                return self._take(name)
        return self._take_any()

    def _close(self) -> bool:
        """Takes a marker that ends plain text here; in a string it would be a part of it."""
        for closer in self._closers:
            if self._matcher.validate_tokens(closer) != len(closer):
                continue
            if not self._matcher.consume_tokens(closer):
                return False
            is_text = not self._matcher.is_accepting() and all(map(self._allows, PLAIN))
            self._matcher.rollback(len(closer))
            if not is_text:
                return self._take(closer)
        return False

    def _before_quote(self) -> list[int]:
        """Returns tokens after which free text may end, where a pattern wants some more of it."""
        for name in self._names:
            if self._matcher.validate_tokens(name) == len(name):
                return name
        for char in _LAST:
            if self._allows(char) and self._matcher.consume_token(self._tokens.single[char]):
                ends = self._allows(b'"')
                self._matcher.rollback(1)
                if ends:
                    return [self._tokens.single[char]]
        return [self._tokens.single[b"x"]]

    def _order(self) -> tuple[bytes, ...]:
        if any(map(self._allows, _IN_PATTERN)):
            return (b'"',)
        if not self._last or self._last in _BEFORE_VALUES:
            return _AT_VALUE
        return _AT_NAME if self._last == b"{" else _AFTER_VALUE

    def _allows(self, char: bytes) -> bool:
        token = self._tokens.single.get(char)
        return token is not None and self._matcher.validate_tokens([token]) == 1

    def _take(self, token_ids: Sequence[int]) -> bool:
        self.way += token_ids
        last = self._tokens.tail(token_ids, 4).rstrip(b" ")[-1:]
        self._last = last or self._last
        return self._matcher.consume_tokens(list(token_ids))

    def _take_any(self) -> bool:
        """Takes one of the allowed tokens: one that a quote may follow, one that leads to another
        place of a pattern, as far as the tokens that may follow show it, or each time another."""
        self._masks_left -= 1
        if self._masks_left < 0:
            return False
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = dict.fromkeys(np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist())
        known = self._tokens.single
        new: list[int] = []
        for token in (known[char] for char in _PROBES if char in known and known[char] in allowed):
            if not self._matcher.consume_token(token):
                return False
            after = tuple(map(self._allows, _PROBES))
            self._matcher.rollback(1)
            if after[0]:
                return self._take([token])
            if after not in self._known:
                self._known.add(after)
                new.append(token)
        if new:
            return self._take(new[:1])
        pieces = self._tokens.pieces
        single = [token for token in allowed if token < len(pieces) and len(pieces[token]) == 1]
        some = single or list(allowed)
        return bool(some) and self._take([some[(self._masks_left + self._attempt) % len(some)]])
