"""The tokenizer of a tokenizer.model (the sentencepiece library)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from serve.errors import ModelLoadError
from serve.text.large_texts import LargeTexts
from serve.text.tokenizer_check import CheckedFile
from serve.text.tokenizer_config import TextConfig, extra_tokens, token_string
from serve.text.tokenizer_file import load_sentencepiece

SPACE = "\u2581"  # sentencepiece's visible space
MAX_ADDED = 1 << 16  # ids of added tokens beyond the pieces
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class _Added(NamedTuple):
    content: str
    special: bool


class SentencePieceCodec:
    """Uses tokenizer.model with Llama's conventions.

    BOS comes first unless add_bos_token is false, and only the start of a text gets the invisible
    leading space. Tokens of added_tokens.json and added_tokens_decoder are found before the rest of
    a text is encoded; one with the id of a piece takes its place, as in InternLM.
    """

    def __init__(self, file: CheckedFile, config: TextConfig) -> None:
        try:
            self._first, self._rest = load_sentencepiece(file.data)
            num_pieces = int(self._first.vocab_size())
        except (OSError, RuntimeError, ValueError, TypeError) as error:
            raise ModelLoadError(f"{file.path} cannot be used: {error}") from error
        self._limits = file.limits
        self.large = LargeTexts(file, self.growth)
        self.max_growth = file.limits.growth
        if num_pieces < 1:
            raise ModelLoadError(f"{file.path} has an empty vocabulary")
        names = [str(self._first.id_to_piece(index)) for index in range(num_pieces)]
        added = _added_tokens(file, config, num_pieces)
        self.highest_plain_id = max(set(range(num_pieces)) - added.keys(), default=-1)
        self.size = max(num_pieces, max(added, default=0) + 1)
        self._ids = {name: index for index, name in enumerate(names) if index not in added}
        self._ids |= {item.content: index for index, item in added.items()}
        controls = {
            index: name
            for index, name in enumerate(names)
            if index not in added
            and (self._first.is_control(index) or self._first.is_unknown(index))
        }
        named = config.named_tokens
        for key, index in (
            ("bos_token", self._first.bos_id()),
            ("eos_token", self._first.eos_id()),
            ("unk_token", self._first.unk_id()),
        ):
            if index >= 0:
                named.setdefault(key, names[index])
        marked = {item.content for item in added.values() if item.special}
        marked |= {*named.values(), *extra_tokens(config.values)}
        self.special = controls | {self._ids[name]: name for name in marked if name in self._ids}
        self._bytes = [
            piece_bytes(name, has_bytes=bool(self._first.is_byte(index)))
            for index, name in enumerate(names)
        ] + [b""] * (self.size - num_pieces)
        for index, item in added.items():
            self._bytes[index] = item.content.encode("utf-8", errors="replace")
        self.pieces: list[bytes] | None = list(self._bytes)
        self.strips_leading_space = self._first.encode("a", out_type=str)[0].startswith(SPACE)
        self._set_ends(named, config.values)
        self._set_patterns({item.content for item in added.values()})

    def _set_ends(self, named: dict[str, str], values: dict[str, Any]) -> None:
        bos, eos = (self._ids.get(named.get(key, "")) for key in ("bos_token", "eos_token"))
        self._before = [bos] if bos is not None and values.get("add_bos_token", True) else []
        self._after = [eos] if eos is not None and values.get("add_eos_token", False) else []

    def _set_patterns(self, added: set[str]) -> None:
        plain = added - set(self.special.values())
        self._split = _any_of({*self.special.values(), *plain})
        self._split_plain = _any_of(plain)
        # pieces that the library itself finds in a text, although they are special
        self._hidden = _any_of({name for index, name in self.special.items() if self._finds(index)})

    def _finds(self, index: int) -> bool:
        ids: list[int] = self._rest.encode(self.special[index])
        return index in ids

    def growth(self, text: str) -> float:
        return self._limits.measure_growth(text, self._first.normalize)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self._limits.check(text, self._first.normalize)
        ids = self._encode_around(self._split, text)
        return [*self._before, *ids, *self._after] if add_special_tokens else ids

    def encode_plain(self, text: str) -> list[int]:
        self._limits.check(text, self._first.normalize)
        return self._encode_around(self._split_plain, text, is_plain=True)

    def _encode_around(
        self, tokens: re.Pattern[str], text: str, *, is_plain: bool = False
    ) -> list[int]:
        """Encodes a text whose tokens of a pattern become their ids."""
        ids: list[int] = []
        end = 0
        for match in tokens.finditer(text):
            ids += self._encode_part(text[end : match.start()], end == 0, is_plain=is_plain)
            ids.append(self._ids[match.group()])
            end = match.end()
        return ids + self._encode_part(text[end:], end == 0, is_plain=is_plain)

    def _encode_part(self, text: str, is_first: bool, *, is_plain: bool) -> list[int]:
        ids: list[int] = []
        start = 0
        if is_plain:
            for match in self._hidden.finditer(text):  # cut, so that the library does not find it
                ids += self._encode_piece(text[start : match.start() + 1], is_first and not start)
                start = match.start() + 1
        return ids + self._encode_piece(text[start:], is_first and not start)

    def _encode_piece(self, text: str, is_first: bool) -> list[int]:
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


def _added_tokens(file: CheckedFile, config: TextConfig, num_pieces: int) -> dict[int, _Added]:
    """Returns the tokens that the directory adds or renames, by their ids."""
    added = {index: _Added(token, False) for token, index in config.added_tokens.items()}
    declared = config.values.get("added_tokens_decoder")
    for key, item in declared.items() if isinstance(declared, dict) else ():
        token = token_string(item)
        if token is None or not str(key).isdecimal():
            raise ModelLoadError(
                f"{config.path / 'tokenizer_config.json'}: added_tokens_decoder has no token for"
                f" {key!r:.40}"
            )
        added[int(key)] = _Added(token, isinstance(item, dict) and bool(item.get("special")))
    highest = max(added, default=0)
    if highest >= num_pieces + MAX_ADDED:
        raise ModelLoadError(
            f"{file.path} has {num_pieces} tokens, and an added one has the id {highest}"
        )
    return added


def _any_of(tokens: set[str]) -> re.Pattern[str]:
    """Returns the pattern of the longest token at a place, which matches nothing for none."""
    longest_first = sorted(filter(None, tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def piece_bytes(token: str, *, has_bytes: bool) -> bytes:
    match = BYTE_PIECE.fullmatch(token) if has_bytes else None
    if match is not None:
        return bytes([int(match.group(1), 16)])
    return token.replace(SPACE, " ").encode("utf-8", errors="replace")
