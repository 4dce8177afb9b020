"""Incremental detokenization: text that never ends inside a character, token by token.

Each sequence has its own detokenizer, which only the output thread uses. Byte-level and
sentencepiece vocabularies have a table of the bytes that each token adds; other decoders decode a
short tail again.
"""

from __future__ import annotations

import codecs
from typing import Protocol

from serve.text.tokenizer import Tokenizer

_new_decoder = codecs.getincrementaldecoder("utf-8")
_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    def push(self, token_id: int) -> str:
        """Returns the text that becomes final with this token, which may be empty."""

    def finish(self) -> str:
        """Returns the rest; an unfinished character becomes U+FFFD."""


class BytesDetokenizer:
    """Concatenates the bytes of tokens and decodes UTF-8 incrementally.

    texts[i] is the text of token i if its bytes are whole characters (the usual case), else None.
    """

    __slots__ = ("_decoder", "_is_whole", "_pieces", "_texts")

    def __init__(self, pieces: list[bytes], texts: list[str | None]) -> None:
        self._pieces = pieces
        self._texts = texts
        self._decoder = _new_decoder("replace")
        self._is_whole = True  # the decoder holds no bytes

    def push(self, token_id: int) -> str:
        if token_id >= len(self._texts):
            return ""
        if self._is_whole and (text := self._texts[token_id]) is not None:
            return text
        decoded = self._decoder.decode(self._pieces[token_id])
        self._is_whole = not self._decoder.getstate()[0]
        return decoded

    def finish(self) -> str:
        self._is_whole = True
        return self._decoder.decode(b"", True)


class TailDetokenizer:
    """Decodes a window of the last tokens without and with the new one, and emits the difference.

    The window begins where text was last complete, so that its cost does not grow with the output
    (the two-offset scheme of Hugging Face's text-generation-inference).
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._token_ids: list[int] = []
        self._prefix = 0  # the start of the window
        self._read = 0  # the number of tokens whose text has been emitted

    def push(self, token_id: int) -> str:
        self._token_ids.append(token_id)
        before, after = self._window()
        if len(after) <= len(before) or after.endswith(_REPLACEMENT):
            return ""
        self._prefix, self._read = self._read, len(self._token_ids)
        return after[len(before) :]

    def finish(self) -> str:
        before, after = self._window()
        self._read = len(self._token_ids)
        return after[len(before) :]

    def _window(self) -> tuple[str, str]:
        decode = self._tokenizer.decode
        before = decode(self._token_ids[self._prefix : self._read], skip_special_tokens=self._skip)
        after = decode(self._token_ids[self._prefix :], skip_special_tokens=self._skip)
        return before, after


class ShownTokens:
    """Skips special tokens except a few, which are part of the text."""

    def __init__(self, inner: Detokenizer, texts: dict[int, str]) -> None:
        self._inner = inner
        self._texts = texts

    def push(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        # a special token ends an incomplete character before it
        return self._inner.push(token_id) if text is None else self._inner.finish() + text

    def finish(self) -> str:
        return self._inner.finish()


class DetokenizerFactory:
    """Makes the detokenizers of an engine, whose tables are built once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Both tables are made at start-up, since the thread that makes detokenizers also computes.
        self._tables: dict[bool, tuple[list[bytes], list[str | None]]] = {}
        if tokenizer.pieces is not None:
            pieces = tokenizer.pieces
            texts = _whole_texts(pieces)
            self._tables[False] = (pieces, texts)
            shorter, without = pieces.copy(), texts.copy()
            for index in filter(len(pieces).__gt__, tokenizer.special_ids):
                shorter[index], without[index] = b"", ""
            self._tables[True] = (shorter, without)

    def make(self, *, skip_special_tokens: bool = True, shown: tuple[str, ...] = ()) -> Detokenizer:
        """Makes the detokenizer of a sequence. shown: special tokens that are not skipped."""
        inner: Detokenizer
        if self._tokenizer.pieces is None:
            inner = TailDetokenizer(self._tokenizer, skip_special_tokens)
        else:
            inner = BytesDetokenizer(*self._tables[skip_special_tokens])
        if not shown or not skip_special_tokens:
            return inner
        ids = self._tokenizer.special_token_ids
        return ShownTokens(inner, {ids[token]: token for token in shown if token in ids})


def _whole_texts(pieces: list[bytes]) -> list[str | None]:
    """Returns the text of each piece, None for one that is no whole text."""
    texts: list[str | None] = []
    for piece in pieces:
        try:
            texts.append(piece.decode())
        except UnicodeDecodeError:
            texts.append(None)
    return texts


class StopStrings:
    """Finds stop strings in streamed text; holds back text that may be the start of one."""

    __slots__ = ("_held", "_include", "_stops")

    def __init__(self, stops: tuple[str, ...], *, include: bool) -> None:
        self._stops = stops
        self._include = include
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Returns (text to emit, the stop string that ended it or None)."""
        text = self._held + text
        matches = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            # the match that is complete first, as if the text came character by character
            at, stop = min(matches, key=lambda item: (item[0] + len(item[1]), item[0]))
            self._held = ""
            return text[: at + len(stop)] if self._include else text[:at], stop
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def finish(self) -> str:
        """Returns the text that was held back, for a sequence that ended without a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest suffix of text that is a proper prefix of stop."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
