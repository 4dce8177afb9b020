"""The tokenizer of a tokenizer.model (the sentencepiece library)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from serve.errors import ModelLoadError
from serve.text.large_texts import LargeTexts
from serve.text.tokenizer_check import CheckedFile
from serve.text.tokenizer_file import load_sentencepiece

SPACE = "\u2581"  # sentencepiece's visible space
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class SentencePieceCodec:
    """Uses tokenizer.model with Llama's conventions.

    BOS comes first unless add_bos_token is false, and only the start of a text gets the invisible
    leading space.
    """

    def __init__(self, file: CheckedFile, config: dict[str, Any], named: dict[str, str]) -> None:
        try:
            self._first, self._rest = load_sentencepiece(file.data)
            self.size = int(self._first.vocab_size())
        except (OSError, RuntimeError, ValueError, TypeError) as error:
            raise ModelLoadError(f"{file.path} cannot be used: {error}") from error
        self._limits = file.limits
        self.large = LargeTexts(file, self.growth)
        self.max_growth = file.limits.growth
        if self.size < 1:
            raise ModelLoadError(f"{file.path} has an empty vocabulary")
        names = [str(self._first.id_to_piece(index)) for index in range(self.size)]
        self._ids = {name: index for index, name in enumerate(names)}
        self.special = {
            index: name
            for index, name in enumerate(names)
            if self._first.is_control(index) or self._first.is_unknown(index)
        }
        for key, index in (
            ("bos_token", self._first.bos_id()),
            ("eos_token", self._first.eos_id()),
            ("unk_token", self._first.unk_id()),
        ):
            if index >= 0:
                named.setdefault(key, names[index])
        self.special |= {self._ids[token]: token for token in named.values() if token in self._ids}
        self._bytes = [
            piece_bytes(name, has_bytes=bool(self._first.is_byte(index)))
            for index, name in enumerate(names)
        ]
        self.pieces: list[bytes] | None = list(self._bytes)
        self.strips_leading_space = self._first.encode("a", out_type=str)[0].startswith(SPACE)
        bos, eos = (
            self._ids.get(named.get("bos_token", "")),
            self._ids.get(named.get("eos_token", "")),
        )
        self._before = [bos] if bos is not None and config.get("add_bos_token", True) else []
        self._after = [eos] if eos is not None and config.get("add_eos_token", False) else []
        longest_first = sorted(self.special.values(), key=len, reverse=True)
        self._split = re.compile("|".join(re.escape(token) for token in longest_first))

    def growth(self, text: str) -> float:
        return self._limits.measure_growth(text, self._first.normalize)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self._limits.check(text, self._first.normalize)
        ids: list[int] = []
        end = 0
        for match in self._split.finditer(text):
            ids += self._encode_part(text[end : match.start()], is_first=end == 0)
            ids.append(self._ids[match.group()])
            end = match.end()
        ids += self._encode_part(text[end:], is_first=end == 0)
        return [*self._before, *ids, *self._after] if add_special_tokens else ids

    def encode_plain(self, text: str) -> list[int]:
        self._limits.check(text, self._first.normalize)
        return self._encode_part(text, is_first=True)

    def _encode_part(self, text: str, *, is_first: bool) -> list[int]:
        if not text:
            return []
        if self.large.has(text):
            return self.large.encode(text, "first" if is_first else "rest")
        ids: list[int] = (self._first if is_first else self._rest).encode(text)
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        parts = [
            self._bytes[index]
            for index in token_ids
            if 0 <= index < self.size and not (skip_special_tokens and index in self.special)
        ]
        data = b"".join(parts)
        if self.strips_leading_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", errors="replace")

    def token_to_id(self, token: str) -> int | None:
        return self._ids.get(token)


def piece_bytes(token: str, *, has_bytes: bool) -> bytes:
    match = BYTE_PIECE.fullmatch(token) if has_bytes else None
    if match is not None:
        return bytes([int(match.group(1), 16)])
    return token.replace(SPACE, " ").encode("utf-8", errors="replace")
