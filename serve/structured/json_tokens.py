"""What the tokens of a vocabulary are to JSON: single characters, digits, text of a string."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from serve.structured.bits import Bits, bits_of

_NUMERIC = re.compile(rb"[0-9.eE+-]+")
_LITERALS = (b"true", b"false", b"null")
_MAX_COUNTS = 500  # texts that are tokenized for one grammar
_ENDS_TEXT = re.compile(rb'["\\\x00-\x1f]')


class JsonTokens:
    """The tokens of one vocabulary, sorted at once, which takes a tenth of a second. pieces: the
    bytes of each token. encode: the model's tokenizer.

    single: the token of each byte that has one. figures: the tokens that are one digit; zeros:
    those of zeros alone. numeric: the tokens that begin like the inside of a number, by this
    beginning; longest_numeric: the most characters of one. literals: those that are true, false or
    null, with or without a space in front. text: the tokens that are whole characters of a string
    and do not end it.
    """

    def __init__(self, pieces: Sequence[bytes], encode: Callable[[str], Sequence[int]]) -> None:
        self.pieces = pieces
        self._encode = encode
        self.single = {piece: token for token, piece in enumerate(pieces) if len(piece) == 1}
        self.figures = [token for piece, token in sorted(self.single.items()) if piece.isdigit()]
        self.zeros = [
            token for token, piece in enumerate(pieces) if piece and not piece.strip(b"0")
        ]
        self.numeric: dict[bytes, list[int]] = {}
        for token, piece in enumerate(pieces):
            match = _NUMERIC.match(piece)
            if match is not None:
                self.numeric.setdefault(match.group(), []).append(token)
        self.numeric_tokens = [token for group in self.numeric.values() for token in group]
        self.longest_numeric = max(map(len, self.numeric), default=0)
        self.literals = [
            t for t, piece in enumerate(pieces) if piece.removeprefix(b" ") in _LITERALS
        ]
        self.text: Bits = bits_of(
            (token for token, piece in enumerate(pieces) if piece and _is_text(piece)), len(pieces)
        )

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


def _is_text(piece: bytes) -> bool:
    if _ENDS_TEXT.search(piece):
        return False
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True
