"""What the tokens of a vocabulary are to JSON: single characters, digits, text of a string."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cached_property

from serve.structured.bits import Bits, bits_of

_NUMERIC = re.compile(rb"[0-9.eE+-]+")
_MAX_COUNTS = 500  # texts that are tokenized for one grammar
_ENDS_TEXT = re.compile(rb'["\\\x00-\x1f]')


class JsonTokens:
    """The tokens of one vocabulary, sorted when a request first needs it. pieces: the bytes of each
    token. encode: the model's tokenizer."""

    def __init__(self, pieces: Sequence[bytes], encode: Callable[[str], Sequence[int]]) -> None:
        self.pieces = pieces
        self._encode = encode

    @cached_property
    def single(self) -> dict[bytes, int]:
        """The token of each byte that has one."""
        return {piece: token for token, piece in enumerate(self.pieces) if len(piece) == 1}

    @cached_property
    def numeric(self) -> dict[bytes, list[int]]:
        """The tokens that begin like the inside of a number, by this beginning."""
        groups: dict[bytes, list[int]] = {}
        for token, piece in enumerate(self.pieces):
            match = _NUMERIC.match(piece)
            if match is not None:
                groups.setdefault(match.group(), []).append(token)
        return groups

    @cached_property
    def numeric_tokens(self) -> list[int]:
        return [token for group in self.numeric.values() for token in group]

    @cached_property
    def zeros(self) -> list[int]:
        return [token for token, piece in enumerate(self.pieces) if piece and not piece.strip(b"0")]

    @cached_property
    def longest_numeric(self) -> int:
        """The most characters of a number in one token."""
        return max(map(len, self.numeric), default=0)

    @cached_property
    def text(self) -> Bits:
        """The tokens that are whole characters of a string and do not end it."""
        return self._bits(lambda piece: not _ENDS_TEXT.search(piece) and _is_whole(piece))

    @cached_property
    def figures(self) -> list[int]:
        """The tokens that are one digit."""
        return [self.single[char] for char in map(b"%d".__mod__, range(10)) if char in self.single]

    @cached_property
    def literals(self) -> list[int]:
        """The tokens that are true, false or null, with or without a space in front."""
        known = (b"true", b"false", b"null")
        return [
            token for token, piece in enumerate(self.pieces) if piece.removeprefix(b" ") in known
        ]

    def _bits(self, belongs: Callable[[bytes], bool]) -> Bits:
        tokens = (token for token, piece in enumerate(self.pieces) if piece and belongs(piece))
        return bits_of(tokens, len(self.pieces))

    def spelled(self, text: str) -> list[int]:
        """Returns the tokens of this text, or none where the tokenizer changes it."""
        token_ids = list(self._encode(text))
        pieces = [self.pieces[token] for token in token_ids if token < len(self.pieces)]
        return token_ids if b"".join(pieces) == text.encode() else []

    def counter(self) -> Callable[[str], int]:
        """Returns a function that says how many tokens a text has; those of texts after the first
        few hundred are not more than it says."""
        counts: dict[str, int] = {}

        def count(text: str) -> int:
            if text not in counts:
                spelled = self.spelled(text) if len(counts) < _MAX_COUNTS else ()
                counts[text] = len(spelled or text)
            return counts[text]

        return count

    def tail(self, token_ids: Sequence[int], size: int) -> bytes:
        """Returns the last bytes of these tokens, `size` or somewhat more."""
        pieces: list[bytes] = []
        for token in reversed(token_ids):
            if size <= 0:
                break
            pieces.append(self.pieces[token] if token < len(self.pieces) else b"")
            size -= len(pieces[-1]) or 1
        return b"".join(reversed(pieces))


def _is_whole(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True
