"""Tokenizers of tokenizer.json (tokenizers) and tokenizer.model (sentencepiece).

A Tokenizer is immutable after `load` and thread-safe; long texts are encoded without the GIL.
detokenizer.py decodes incrementally from `pieces`; chat_template.py renders chats. Tokenizer code
in a checkpoint is never run.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import sentencepiece
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from serve.errors import ModelLoadError, RequestError
from serve.models.config_file import read_json
from serve.text.tokenizer_config import (
    chat_template_of,
    listed,
    named_tokens_of,
    optional_json,
    token_string,
)

MAX_FILE_BYTES = 256 << 20
MAX_VOCAB = 1 << 24
LONG_TEXT = 4096
EXTRA_TOKENS = ("additional_special_tokens", "extra_special_tokens")
SPACE = "\u2581"  # sentencepiece's visible space
# These bytes follow a serialized model: protobuf merges them as
# normalizer_spec.add_dummy_prefix = false.
NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class _Codec(Protocol):
    """A library's tokenizer. Ids are below `size`; some of them may have no token."""

    size: int
    special: dict[int, str]
    pieces: list[bytes] | None
    strips_leading_space: bool

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...
    def encode_plain(self, text: str) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str: ...
    def token_to_id(self, token: str) -> int | None: ...


class Tokenizer:
    """The tokenizer of one checkpoint.

    vocab_size: the largest token id plus one. named_tokens: "bos_token" -> "<s>" and so on, for
    chat templates. pieces: the bytes that each id adds to the text, for byte-level and
    sentencepiece-like decoders, padded with b"" to the model's vocabulary; None for other
    decoders. strips_leading_space: decoding removes the first space of a text.
    """

    def __init__(
        self, codec: _Codec, named_tokens: dict[str, str], chat_template: str | None, min_size: int
    ) -> None:
        self._codec = codec
        self.vocab_size = codec.size
        self.named_tokens = named_tokens
        self.chat_template = chat_template
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
    def load(cls, path: Path) -> Tokenizer:
        """Loads a Hugging Face directory; ModelLoadError names the file that is wrong."""
        config = optional_json(path / "tokenizer_config.json")
        if config.get("auto_map") is not None:
            raise ModelLoadError(
                f"{path / 'tokenizer_config.json'}: auto_map asks for code from the checkpoint, "
                "which is never run"
            )
        named = named_tokens_of(optional_json(path / "special_tokens_map.json")) | named_tokens_of(
            config
        )
        codec: _Codec
        if (path / "tokenizer.json").is_file():
            codec = _FastCodec(path / "tokenizer.json", config, named)
        elif (path / "tokenizer.model").is_file():
            codec = _SentencePieceCodec(path / "tokenizer.model", config, named)
        else:
            raise ModelLoadError(f"{path} has neither tokenizer.json nor tokenizer.model")
        min_size = optional_json(path / "config.json").get("vocab_size")
        return cls(
            codec, named, chat_template_of(path, config), min_size if type(min_size) is int else 0
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encodes the text; special tokens in it become their ids.

        add_special_tokens: add those that the checkpoint puts around a text (BOS).
        """
        return self._codec.encode(_checked(text), add_special_tokens)

    def encode_plain(self, text: str) -> list[int]:
        """Encodes the text without special tokens: "</s>" is four characters."""
        return self._codec.encode_plain(_checked(text))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._codec.decode(token_ids, skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Decodes one token for display; parts of characters become U+FFFD."""
        if self.pieces is None:
            return self._codec.decode([token_id], False)
        if not 0 <= token_id < len(self.pieces):
            return ""
        return self.pieces[token_id].decode("utf-8", errors="replace")

    @property
    def max_piece_bytes(self) -> int | None:
        """The most bytes that a token adds to the text; None if that is unknown."""
        return self._max_piece_bytes

    def _named_id(self, name: str) -> int | None:
        token = self.named_tokens.get(name)
        return None if token is None else self._codec.token_to_id(token)


def _checked(text: str) -> str:
    """Rejects lone surrogates, which JSON escapes and str allow but UTF-8 does not."""
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text has a lone surrogate at character {error.start}", param="prompt"
            ) from None
    return text


class _FastCodec:
    """Uses tokenizer.json, whose post-processor decides about BOS, as in Transformers 5."""

    def __init__(self, file: Path, config: dict[str, Any], named: dict[str, str]) -> None:
        description = read_json(file, max_bytes=MAX_FILE_BYTES)
        _check_ids(description, file)
        try:
            self._fast = FastTokenizer.from_file(str(file))
            self._fast.no_truncation()
            self._fast.no_padding()
            self._add_configured(config, named)
            self._fast.encode("a", add_special_tokens=True)
        except BaseException as error:
            # the library raises Exception for a malformed file, and panics at the first use of an
            # inconsistent one
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ModelLoadError(f"{file} cannot be used: {error}") from error
        self._plain: FastTokenizer | None = None
        self._plain_lock = threading.Lock()
        vocab: dict[str, int] = self._fast.get_vocab(with_added_tokens=True)
        self.size = max(vocab.values(), default=-1) + 1
        if not 0 < self.size <= MAX_VOCAB:
            raise ModelLoadError(f"{file} has {self.size} token ids; 1 to {MAX_VOCAB} can be used")
        added = self._fast.get_added_tokens_decoder()
        self.special = {index: str(item.content) for index, item in added.items() if item.special}
        self.pieces, self.strips_leading_space = _fast_pieces(
            description.get("decoder"), vocab, self.size
        )

    def _add_configured(self, config: dict[str, Any], named: dict[str, str]) -> None:
        """Adds the tokens that only tokenizer_config.json declares, where their ids agree."""
        known = {item.content for item in self._fast.get_added_tokens_decoder().values()}
        declared = config.get("added_tokens_decoder")
        items = declared.items() if isinstance(declared, dict) else ()
        for index, item in sorted((int(index), item) for index, item in items):
            token = item["content"]
            ours = self._fast.token_to_id(token) or self._fast.get_vocab_size()
            if token in known or ours != index:
                continue
            flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
            options = {flag: item[flag] for flag in flags if flag in item}
            self._fast.add_tokens([AddedToken(token, **options)])
            known.add(token)
        extra = [token_string(item) for key in EXTRA_TOKENS for item in listed(config, key)]
        for name in (*named.values(), *extra):
            if name and name not in known and self._fast.token_to_id(name) is not None:
                self._fast.add_special_tokens([AddedToken(name, special=True, normalized=False)])

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return _fast_ids(self._fast, text, add_special_tokens)

    def encode_plain(self, text: str) -> list[int]:
        with self._plain_lock:
            if self._plain is None:
                # a second instance, since the option applies to the whole tokenizer
                plain = FastTokenizer.from_str(self._fast.to_str())
                plain.encode_special_tokens = True
                self._plain = plain
        return _fast_ids(self._plain, text, False)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        text: str = self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_to_id(self, token: str) -> int | None:
        index: int | None = self._fast.token_to_id(token)
        return index


def _fast_ids(fast: FastTokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Encodes the text; RequestError if the library panics, as its regular expressions may."""
    try:
        if len(text) < LONG_TEXT:
            return list(fast.encode(text, add_special_tokens=add_special_tokens).ids)
        # only the batch call releases the GIL
        return list(fast.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids)
    except BaseException as error:  # a panic is not an Exception, and its class is not exported
        if type(error).__name__ != "PanicException":
            raise
        text = "the tokenizer cannot split the text"
        raise RequestError(text, param="prompt", code="invalid_prompt") from None


def _check_ids(description: dict[str, Any], file: Path) -> None:
    """Rejects two tokens with one id, between which the library picks arbitrarily."""
    model = description.get("model")
    ids = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(ids, dict) and len(set(map(repr, ids.values()))) < len(ids):
        raise ModelLoadError(f"{file}: two tokens of its vocabulary have the same id")


class _SentencePieceCodec:
    """Uses tokenizer.model with Llama's conventions.

    BOS comes first unless add_bos_token is false, and only the start of a text gets the invisible
    leading space.
    """

    def __init__(self, file: Path, config: dict[str, Any], named: dict[str, str]) -> None:
        try:
            if file.stat().st_size > MAX_FILE_BYTES:
                raise ModelLoadError(f"{file} is larger than {MAX_FILE_BYTES} bytes")
            data = file.read_bytes()
            self._first = sentencepiece.SentencePieceProcessor(model_proto=data)
            self._rest = sentencepiece.SentencePieceProcessor(model_proto=data + NO_DUMMY_PREFIX)
            self.size = int(self._first.vocab_size())
        except (OSError, RuntimeError, ValueError, TypeError) as error:
            raise ModelLoadError(f"{file} cannot be used: {error}") from error
        if self.size < 1:
            raise ModelLoadError(f"{file} has an empty vocabulary")
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
            _piece_bytes(name, has_bytes=bool(self._first.is_byte(index)))
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

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = []
        end = 0
        for match in self._split.finditer(text):
            ids += self._encode_part(text[end : match.start()], is_first=end == 0)
            ids.append(self._ids[match.group()])
            end = match.end()
        ids += self._encode_part(text[end:], is_first=end == 0)
        return [*self._before, *ids, *self._after] if add_special_tokens else ids

    def encode_plain(self, text: str) -> list[int]:
        return self._encode_part(text, is_first=True)

    def _encode_part(self, text: str, *, is_first: bool) -> list[int]:
        if not text:
            return []
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


def _piece_bytes(token: str, *, has_bytes: bool) -> bytes:
    match = BYTE_PIECE.fullmatch(token) if has_bytes else None
    if match is not None:
        return bytes([int(match.group(1), 16)])
    return token.replace(SPACE, " ").encode("utf-8", errors="replace")


def _byte_alphabet() -> dict[str, int]:
    """Returns GPT-2's characters for bytes: printable ones map to themselves, the others to the
    characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    hidden = [byte for byte in range(256) if byte not in printable]
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(hidden)})
    return alphabet


def _fast_pieces(
    decoder: object, vocab: dict[str, int], size: int
) -> tuple[list[bytes] | None, bool]:
    """Returns the bytes that each id adds, and whether decoding strips a leading space."""
    steps = _decoder_steps(decoder)
    kinds = [str(step.get("type")) for step in steps]
    pieces = [b""] * size
    if kinds == ["ByteLevel"]:
        alphabet = _byte_alphabet()
        for token, index in vocab.items():
            mapped = [alphabet.get(char, -1) for char in token]
            pieces[index] = token.encode() if -1 in mapped else bytes(mapped)
        return pieces, False
    if not kinds or not set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return None, False
    strips = False
    for step in steps:
        if step["type"] == "Replace":
            if step.get("pattern") != {"String": SPACE} or step.get("content") != " ":
                return None, False
        elif step["type"] == "Strip":
            if (step.get("content"), step.get("start"), step.get("stop")) != (" ", 1, 0):
                return None, False
            strips = True
        elif step["type"] == "Metaspace":
            if step.get("replacement") != SPACE:
                return None, False
            strips = step.get("prepend_scheme", "always") != "never"
    for token, index in vocab.items():
        pieces[index] = _piece_bytes(token, has_bytes="ByteFallback" in kinds)
    return pieces, strips


def _decoder_steps(decoder: object) -> list[dict[str, Any]]:
    if not isinstance(decoder, dict):
        return []
    inner = decoder.get("decoders")
    if decoder.get("type") == "Sequence" and isinstance(inner, list):
        return [step for step in inner if isinstance(step, dict)]
    return [decoder]
