"""The tokenizer of a tokenizer.json, of ranks or of a tekken.json (the tokenizers library)."""

from __future__ import annotations

import codecs
import threading
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from serve.errors import ModelLoadError
from serve.text.large_texts import LargeTexts, encode_error
from serve.text.rank_file import byte_chars
from serve.text.sentencepiece_codec import SPACE, piece_bytes
from serve.text.tokenizer_check import CheckedFile, as_tokenizer_json
from serve.text.tokenizer_file import MAX_VOCAB, is_panic, load_fast

LONG_TEXT = 4096


class FastCodec:
    """Uses tokenizer.json, whose post-processor decides about BOS, as in Transformers 5."""

    def __init__(self, file: CheckedFile) -> None:
        try:
            self._fast = load_fast(as_tokenizer_json(file), file.declared, file.names)
        except BaseException as error:
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            raise ModelLoadError(f"{file.path} cannot be used: {error}") from error
        self._limits = file.limits
        self.large = LargeTexts(file, self.growth)
        self.max_growth = file.limits.growth
        self._plain: FastTokenizer | None = None
        self._plain_lock = threading.Lock()
        vocab: dict[str, int] = self._fast.get_vocab(with_added_tokens=True)
        self.size = max(vocab.values(), default=-1) + 1
        if not 0 < self.size <= MAX_VOCAB:
            raise ModelLoadError(
                f"{file.path} has {self.size} token ids; 1 to {MAX_VOCAB} can be used"
            )
        added: dict[int, Any] = self._fast.get_added_tokens_decoder()
        self.highest_plain_id = max((i for i in vocab.values() if i not in added), default=-1)
        self.special = {index: str(item.content) for index, item in added.items() if item.special}
        self.pieces, self.strips_leading_space = _fast_pieces(file.decoder, vocab, self.size)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        kind = "special" if add_special_tokens else "bare"
        return self._encode(self._fast, text, kind)

    def encode_plain(self, text: str) -> list[int]:
        with self._plain_lock:
            if self._plain is None:
                # a second instance, since the option applies to the whole tokenizer
                plain = FastTokenizer.from_str(self._fast.to_str())
                plain.encode_special_tokens = True
                self._plain = plain
        return self._encode(self._plain, text, "plain")

    def growth(self, text: str) -> float:
        return self._limits.measure_growth(text, self._normalize)

    def _normalize(self, text: str) -> str:
        normalizer = self._fast.normalizer
        return text if normalizer is None else str(normalizer.normalize_str(text))

    def _encode(self, fast: FastTokenizer, text: str, kind: str) -> list[int]:
        """Encodes the text. RequestError if the library panics, as regular expressions may, or has
        no token for a part of the text."""
        add_special_tokens = kind == "special"
        try:
            self._limits.check(text, self._normalize)
            if self.large.has(text):
                return self.large.encode(text, kind)
            if len(text) * self.max_growth < LONG_TEXT:
                return list(fast.encode(text, add_special_tokens=add_special_tokens).ids)
            # Only a batch call releases the GIL. This one finds no offsets of the tokens in the
            # text, which take as much memory as all the rest.
            found = fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return list(found[0].ids)
        except BaseException as error:
            if type(error) is not Exception and not is_panic(error):
                raise
            problem = str(error) if type(error) is Exception else "it cannot be split"
            raise encode_error(problem) from None

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        ids, skips = list(token_ids), skip_special_tokens
        if len(ids) < LONG_TEXT:
            return str(self._fast.decode(ids, skip_special_tokens=skips))
        # only the batch call releases the GIL
        return str(self._fast.decode_batch([ids], skip_special_tokens=skips)[0])

    def token_to_id(self, token: str) -> int | None:
        index: int | None = self._fast.token_to_id(token)
        return index


def _fast_pieces(
    decoder: object, vocab: dict[str, int], size: int
) -> tuple[list[bytes] | None, bool]:
    """Returns the bytes that each id adds, and whether decoding strips a leading space."""
    steps = _decoder_steps(decoder)
    kinds = [str(step.get("type")) for step in steps]
    pieces = [b""] * size
    if kinds == ["ByteLevel"]:
        alphabet = {ord(char): byte for byte, char in enumerate(byte_chars())}
        for token, index in vocab.items():
            try:
                pieces[index] = codecs.charmap_encode(token, "strict", alphabet)[0]
            except UnicodeEncodeError:  # an added token that stands for its own characters
                pieces[index] = token.encode()
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
        pieces[index] = piece_bytes(token, has_bytes="ByteFallback" in kinds)
    return pieces, strips


def _decoder_steps(decoder: object) -> list[dict[str, Any]]:
    if not isinstance(decoder, dict):
        return []
    inner = decoder.get("decoders")
    if decoder.get("type") == "Sequence" and isinstance(inner, list):
        return [step for step in inner if isinstance(step, dict)]
    return [decoder]
