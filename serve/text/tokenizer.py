"""Tokenizers of tokenizer.json, tekken.json and files of ranks (tokenizers) and of
tokenizer.model (sentencepiece).

A Tokenizer is immutable after `load` and thread-safe; long texts are encoded without the GIL.
detokenizer.py decodes incrementally from `pieces`; chat_template.py renders chats. Tokenizer code
in a checkpoint is never run.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from serve.errors import ModelLoadError, RequestError
from serve.text.fast_codec import FastCodec
from serve.text.large_texts import LargeTexts
from serve.text.rank_patterns import TEKKEN_FILE, find_tokenizer, rules_of
from serve.text.sentencepiece_codec import SentencePieceCodec
from serve.text.tokenizer_check import check_file
from serve.text.tokenizer_config import (
    TextConfig,
    extra_tokens,
    optional_json,
    read_text_config,
)

TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
TEKKEN_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}

logger = logging.getLogger(__name__)


class _Codec(Protocol):
    """A library's tokenizer. Ids are below `size`; some of them may have no token.
    highest_plain_id: of the tokens that are not added ones."""

    size: int
    highest_plain_id: int
    max_growth: float
    special: dict[int, str]
    pieces: list[bytes] | None
    strips_leading_space: bool
    large: LargeTexts

    def growth(self, text: str) -> float: ...
    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...
    def encode_plain(self, text: str) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str: ...
    def token_to_id(self, token: str) -> int | None: ...


class Tokenizer:
    """The tokenizer of one checkpoint.

    vocab_size: the largest token id plus one. named_tokens: "bos_token" -> "<s>" and so on, for
    chat templates. pieces: the bytes that each id adds to the text, for byte-level and
    sentencepiece-like decoders, padded with b"" to the model's vocabulary; None for other
    decoders. strips_leading_space: decoding removes the first space of a text. max_growth: the most
    characters that the normalizer makes of one. tool_template: see TextConfig.
    """

    def __init__(
        self,
        codec: _Codec,
        named_tokens: dict[str, str],
        chat_template: str | None,
        min_size: int,
        tool_template: str | None = None,
    ) -> None:
        self._codec = codec
        self.vocab_size = codec.size
        self.max_growth = codec.max_growth
        self.named_tokens = named_tokens
        self.chat_template = chat_template
        self.tool_template = tool_template
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        self.special_ids = frozenset(codec.special)
        self.special_token_strings = tuple(codec.special.values())
        self.special_token_ids = {token: index for index, token in codec.special.items()}
        self.strips_leading_space = codec.strips_leading_space
        self.pieces = codec.pieces
        self._max_piece_bytes = max(map(len, codec.pieces)) if codec.pieces else None
        if self.pieces is not None:
            self.pieces.extend([b""] * (min_size - len(self.pieces)))

    @classmethod
    def load(
        cls,
        path: Path,
        config: TextConfig | None = None,
        *,
        model: Path | None = None,
        kept: Path | None = None,
    ) -> Tokenizer:
        """Loads a Hugging Face directory; ModelLoadError names the file that is wrong. config: that
        of the directory, if it has been read. model: the model's directory, if it is another.
        kept: see check_file."""
        config = config or read_text_config(path)
        file = find_tokenizer(path)
        codec = _load_codec(file, config, kept)
        size = _vocab_size(optional_json((model or path) / "config.json"))
        if size is not None:
            _check_size(file, codec, size)
        named, template = config.named_tokens, config.chat_template
        return cls(codec, named, template, size or 0, config.tool_template)

    def growth(self, text: str) -> float:
        """Returns how many times longer the normalizer makes the text, at least 1.0: what it takes
        to encode the text grows with it. A long text takes a while, unless max_growth is 1.0."""
        return self._codec.growth(check_encodable(text))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encodes the text; special tokens in it become their ids.

        add_special_tokens: add those that the checkpoint puts around a text (BOS).
        """
        return self._codec.encode(check_encodable(text), add_special_tokens)

    def encode_plain(self, text: str) -> list[int]:
        """Encodes the text without special tokens: "</s>" is four characters."""
        return self._codec.encode_plain(check_encodable(text))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._codec.decode(token_ids, skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Decodes one token for display; parts of characters become U+FFFD."""
        if self.pieces is None:
            return self._codec.decode([token_id], False)
        if not 0 <= token_id < len(self.pieces):
            return ""
        return self.pieces[token_id].decode("utf-8", errors="replace")

    def has_ids_of(self, other: Tokenizer) -> bool:
        """Returns whether the same tokens have the same ids, up to the end of the smaller
        vocabulary: a model's may end with ids that are not used."""
        size = min(self.vocab_size, other.vocab_size)
        mine, others = (
            {token: i for token, i in each.special_token_ids.items() if i < size}
            for each in (self, other)
        )
        if mine != others:
            return False
        return all(self.token_text(i) == other.token_text(i) for i in range(size))

    def worker_bytes(self) -> int:
        """Returns the resident memory of the child process that encodes large texts."""
        return self._codec.large.worker_bytes()

    def close(self) -> None:
        """Ends the child process that encodes large texts. Idempotent."""
        self._codec.large.close()

    @property
    def max_piece_bytes(self) -> int | None:
        """The most bytes that a token adds to the text; None if that is unknown."""
        return self._max_piece_bytes

    def _named_id(self, name: str) -> int | None:
        token = self.named_tokens.get(name)
        return None if token is None else self._codec.token_to_id(token)


def check_encodable(text: str) -> str:
    """Rejects lone surrogates, which JSON escapes and str allow but UTF-8 does not."""
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text has a lone surrogate at character {error.start}", param="prompt"
            ) from None
    return text


def _load_codec(file: Path, config: TextConfig, kept: Path | None) -> _Codec:
    values, named = config.values, config.named_tokens
    rules = rules_of(file, values)
    if rules is None and file.name == "tokenizer.model":
        return SentencePieceCodec(check_file(file, kept=kept), config)
    if file.name == TEKKEN_FILE:
        for key, token in TEKKEN_NAMES.items():
            named.setdefault(key, token)
    declared = values.get("added_tokens_decoder")
    names = (*named.values(), *extra_tokens(values))
    return FastCodec(check_file(file, declared, names, rules, kept=kept))


def _vocab_size(config: dict[str, Any]) -> int | None:
    """Returns the rows of the model's embedding, which the part for text of a multimodal
    configuration has."""
    for values in (config, *(config.get(key) for key in TEXT_CONFIGS)):
        size = values.get("vocab_size") if isinstance(values, dict) else None
        if type(size) is int and size > 0:
            return size
    return None


def _check_size(file: Path, codec: _Codec, size: int) -> None:
    """Refuses the tokenizer of another model. Added tokens beyond the embedding are of parts that
    are not loaded, such as Gemma 3's images; the model can neither read nor write them."""
    highest = codec.highest_plain_id
    if highest >= size:
        raise ModelLoadError(
            f"{file} has tokens up to the id {highest}, but the model's vocabulary has {size}"
            f" (vocab_size in config.json): it is the tokenizer of another model"
        )
    if codec.size > size:
        logger.warning(
            "%s has added tokens up to the id %d, and the model none beyond %d: they are not used",
            file,
            codec.size - 1,
            size - 1,
        )
