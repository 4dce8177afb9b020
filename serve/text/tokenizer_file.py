"""Loads a tokenizer's file, and checks what the file says that it does with texts.

The server and the child process of tokenizer_worker.py use the same functions. The file is
untrusted: its steps can make a text longer. Imports are minimal so that the child starts fast.
"""

from __future__ import annotations

import base64
import json
import unicodedata
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor
    from tokenizers import Tokenizer as FastTokenizer

MAX_VOCAB = 1 << 24
MAX_STEPS = 128
MAX_CONTENT_CHARS = 64  # what a step may insert at one place
MAX_WORD_CHARS = 1000
MAX_SPECIAL_IDS = 256  # that a post-processor adds to a text
MAX_GROWTH = 1024.0
# What a regular expression matches may depend on text far away, so that the server cannot foresee
# the growth from a part of a text.
MAX_REGEX_GROWTH = 16.0
# These bytes follow a serialized model: protobuf merges them as
# normalizer_spec.add_dummy_prefix = false.
NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"

_INNER = ("normalizers", "pretokenizers", "decoders", "processors")
# The most characters that these make of one, also together; a test tries every character.
_FORMS = {"NFC": 3.0, "NFD": 4.0, "NFKC": 18.0, "NFKD": 18.0, "Lowercase": 2.0}
_FORMS["BertNormalizer"] = 4.0  # it has NFD
# And these every time: spaces around an ideograph, and a character for each byte.
_EVERY_TIME = {"BertNormalizer": 3.0, "ByteLevel": 4.0}
_NORMALIZER_SPEC, _PRECOMPILED_CHARSMAP = 3, 2  # fields of sentencepiece's ModelProto
_VARINT, _BYTES, _FIXED = 0, 2, {1: 8, 5: 4}  # protobuf's wire types


class Refused(ValueError):
    """The file cannot be used; the message says why and goes after the file's name."""


def load_fast(data: bytes, declared: object, names: Iterable[str]) -> FastTokenizer:
    """Loads a tokenizer.json. declared: the added_tokens_decoder of tokenizer_config.json. names:
    tokens that are special if the tokenizer has them.

    The library raises Exception for a malformed file, and panics at the first use of an
    inconsistent one.
    """
    from tokenizers import AddedToken, Tokenizer  # each process needs one of the libraries

    fast = Tokenizer.from_buffer(data)
    fast.no_truncation()
    fast.no_padding()
    known = {item.content for item in fast.get_added_tokens_decoder().values()}
    items = declared.items() if isinstance(declared, dict) else ()
    for index, item in sorted((int(index), item) for index, item in items):
        token = item["content"]
        ours = fast.token_to_id(token) or fast.get_vocab_size()
        if token in known or ours != index:  # the two files disagree
            continue
        flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
        options = {flag: item[flag] for flag in flags if flag in item}
        fast.add_tokens([AddedToken(token, **options)])
        known.add(token)
    for name in names:
        if name and name not in known and fast.token_to_id(name) is not None:
            fast.add_special_tokens([AddedToken(name, special=True, normalized=False)])
    fast.encode("a", add_special_tokens=True)
    return fast


def load_sentencepiece(data: bytes) -> tuple[SentencePieceProcessor, SentencePieceProcessor]:
    """Loads a tokenizer.model: for the start of a text, and for the rest of it."""
    from sentencepiece import SentencePieceProcessor

    return (
        SentencePieceProcessor(model_proto=data),
        SentencePieceProcessor(model_proto=data + NO_DUMMY_PREFIX),
    )


def read_description(data: bytes) -> dict[str, Any]:
    """Parses a tokenizer.json. Refuses what the two parsers might read differently."""
    try:
        description = json.loads(data.decode("utf-8"), object_pairs_hook=_object)
    except RecursionError:
        raise Refused("is nested too deeply") from None
    if not isinstance(description, dict):
        raise Refused("must hold a JSON object")
    return description


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs) and len(pairs) <= MAX_STEPS:  # a vocabulary is larger
        raise Refused(f"has a key twice in one object: {min(made)!r} or another")
    return made


def check_description(description: dict[str, Any]) -> float:
    """Returns the most characters that the normalizer makes of one character of a text.

    Refuses steps that could make a text, its tokens or a decoded text too long.
    """
    growth, by_regex = _growth(_steps(description.get("normalizer")))
    splits = _steps(description.get("pre_tokenizer"))
    if sum(step.get("type") == "ByteLevel" for step in splits) > 1:
        raise Refused("has a pre-tokenizer that makes characters of bytes more than once")
    decoding, decoding_by_regex = _growth(_steps(description.get("decoder")))
    if growth > MAX_GROWTH or by_regex > MAX_REGEX_GROWTH:
        raise Refused("has a normalizer that can make a text too many times longer")
    if decoding > MAX_REGEX_GROWTH or decoding_by_regex > MAX_REGEX_GROWTH:
        raise Refused("has a decoder that can make a text too many times longer")
    _check_templates(_steps(description.get("post_processor")))
    _check_model(description["model"])
    return float(growth)


def _steps(component: object) -> list[dict[str, Any]]:
    """Returns the steps of a component, with those of sequences in their place, in any order."""
    steps: list[dict[str, Any]] = []
    waiting = [component]
    while waiting:
        step = waiting.pop()
        if not isinstance(step, dict):
            continue
        steps.append(step)
        for key in _INNER:
            inner = step.get(key)
            waiting.extend(inner if isinstance(inner, list) else ())
        if len(steps) + len(waiting) > MAX_STEPS:
            raise Refused(f"has a component of more than {MAX_STEPS} steps")
    return steps


def _growth(steps: list[dict[str, Any]]) -> tuple[float, float]:
    """Returns the most characters made of one: by all steps, and by regular expressions alone.

    A step counts by its keys, since the library also reads one without a type. Forms of Unicode
    count once, as they do not change what one of them has made.
    """
    forms = total = by_regex = 1.0
    for step in steps:
        forms = max(forms, _FORMS.get(str(step.get("type")), 1.0))
        total *= _EVERY_TIME.get(str(step.get("type")), 1.0)
        if isinstance(step.get("prepend"), str):
            total *= 1.0 + _inserted(step["prepend"])
        if isinstance(step.get("precompiled_charsmap"), str):
            total *= max(1, _longest_of_charsmap(base64.b64decode(step["precompiled_charsmap"])))
        if isinstance(step.get("content"), str) and isinstance(step.get("pattern"), dict):
            content = _inserted(step["content"])
            pattern = step["pattern"].get("String")
            if isinstance(pattern, str) and pattern:
                total *= max(1.0, content / len(pattern))
            else:  # it may match nothing, beside each character
                by_regex *= 1.0 + content
    return forms * total * by_regex, by_regex


def _inserted(text: str) -> int:
    """Returns the number of characters of an inserted text after later steps."""
    size = max(len(text), len(unicodedata.normalize("NFKD", text.lower())))
    if size > MAX_CONTENT_CHARS:
        raise Refused(f"has a step that inserts {size} characters at one place")
    return size


def _longest_of_charsmap(charsmap: bytes) -> int:
    """Returns the most characters that sentencepiece's table of replacements makes of one.

    The table begins with the size of its trie; behind the trie are texts that end at null bytes.
    """
    texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :].decode("utf-8", "replace")
    expanded = unicodedata.normalize("NFKD", texts)
    return _inserted(max(expanded.split("\0"), key=len))


def _check_templates(steps: list[dict[str, Any]]) -> None:
    """Refuses templates that repeat the text or add many tokens to it."""
    for step in steps:
        for template in (step.get("single"), step.get("pair")):
            pieces = template if isinstance(template, list) else []
            texts = [piece["Sequence"]["id"] for piece in pieces if "Sequence" in piece]
            special = [piece["SpecialToken"]["id"] for piece in pieces if "SpecialToken" in piece]
            if len(set(texts)) < len(texts):
                raise Refused("has a post-processor that repeats the text")
            if sum(len(step["special_tokens"][name]["ids"]) for name in special) > MAX_SPECIAL_IDS:
                raise Refused(f"has a post-processor that adds more than {MAX_SPECIAL_IDS} tokens")


def _check_model(model: dict[str, Any]) -> None:
    ids = model.get("vocab")
    if isinstance(ids, dict) and len(set(map(repr, ids.values()))) < len(ids):
        # the library picks one of them arbitrarily
        raise Refused("has two tokens with the same id in its vocabulary")
    word = model.get("max_input_chars_per_word")
    if isinstance(word, int | float) and word > MAX_WORD_CHARS:  # a word takes its square
        raise Refused(f"has a max_input_chars_per_word above {MAX_WORD_CHARS}")
    for key in ("unk_token", "continuing_subword_prefix", "end_of_word_suffix"):
        if len(model.get(key) or "") > MAX_CONTENT_CHARS:
            raise Refused(f"has a {key} of more than {MAX_CONTENT_CHARS} characters")


def regexes_of(description: dict[str, Any]) -> Iterator[str]:
    for key in ("normalizer", "pre_tokenizer", "decoder"):
        for step in _steps(description.get(key)):
            pattern = step.get("pattern")
            if isinstance(pattern, dict) and isinstance(pattern.get("Regex"), str):
                yield pattern["Regex"]


def is_panic(error: BaseException) -> bool:
    """Returns whether it is a panic of the library, whose class is not exported."""
    return type(error).__name__ == "PanicException"


def sentencepiece_growth(data: bytes) -> float:
    """Returns the most characters that the normalizer of a sentencepiece model makes of one."""
    normalizers = [spec for number, spec in _fields(data) if number == _NORMALIZER_SPEC]
    charsmaps = [
        charsmap
        for spec in normalizers
        for number, charsmap in _fields(spec)
        if number == _PRECOMPILED_CHARSMAP and charsmap
    ]
    return float(max(map(_longest_of_charsmap, charsmaps), default=1))


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields number and content of the fields of a protobuf message that hold bytes."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        if key & 7 == _VARINT:
            _, at = _varint(message, at)
        elif key & 7 == _BYTES:
            size, at = _varint(message, at)
            yield key >> 3, message[at : at + size]
            at += size
        elif key & 7 in _FIXED:
            at += _FIXED[key & 7]
        else:
            raise Refused("is not a sentencepiece model")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Returns a number and where it ends."""
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
