"""The tokens of a GGUF file: texts, scores, kinds, and those with a name or a meaning.

Everything in the file is untrusted: what is taken from its keys is checked here, and counted
against limits. Whether the tokenizer that is made of it can be used is found out later, in the
child process that tries every tokenizer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from serve.text.rank_file import MAX_SPECIAL, MAX_SPECIAL_CHARS
from serve.text.tokenizer_file import Refused

ADVICE = "give the directory of the model's tokenizer (--tokenizer DIR)"
MAX_TOKENS = 1 << 20  # vocabularies in use have up to 262,144
MAX_TOKEN_CHARS = 1024
MAX_MERGES = 1 << 22
MAX_TEXT_CHARS = 1 << 26  # of all tokens, and of all merges
PREFIX = "tokenizer.ggml."

# The tokens that end a turn or a text in formats in use. Converters often store one of them only.
_ENDS = frozenset(
    (
        *(
            "<|eot_id|>",
            "<|eom_id|>",
            "<|im_end|>",
            "<|end|>",
            "<|return|>",
            "<|call|>",
            "<|flush|>",
        ),
        *("<|calls|>", "<end_of_turn>", "<turn|>", "<|tool_response>", "<|endoftext|>", "<EOT>"),
        *(
            "<|end_of_text|>",
            "<end_of_utterance>",
            "<｜end▁of▁sentence｜>",
            "[EOT]",
            "[EOS]",
            "[e~[",
        ),
    )
)
# These also are tokens of HTML, or of parts of a text, unless the file says that they are special.
_ENDS_IF_CONTROL = frozenset(("</s>", "<eos>"))
_CALLS = frozenset(("<|call|>", "<|calls|>"))
_FINAL = frozenset(("<|return|>", "<|flush|>"))
_MESSAGE_END = "<|end|>"  # ends a part of an answer where calls and answers have ends of their own


class Kind(IntEnum):
    """`tokenizer.ggml.token_type`, as sentencepiece counts."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_KINDS = {int(kind): kind for kind in Kind}
_NAMES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """texts, scores, kinds: by id; a text is "" for an id without a token. scores: empty if the
    file has none. ids: of all texts. named: the id of "bos_token" and so on."""

    texts: list[str]
    scores: list[float]
    kinds: list[Kind]
    ids: dict[str, int]
    named: dict[str, int]

    @property
    def special(self) -> list[int]:
        """The ids of tokens that are found in a text before it is split: those that a user cannot
        write, and those that are a user's own."""
        named = set(self.named.values())
        return [
            index
            for index, kind in enumerate(self.kinds)
            if self.texts[index]
            and (index in named or kind in (Kind.CONTROL, Kind.UNKNOWN, Kind.USER_DEFINED))
        ]

    def is_own(self, index: int) -> bool:
        """Returns whether a special token is a part of what a user writes and reads."""
        return self.kinds[index] is Kind.USER_DEFINED and index not in self.named.values()


def read_vocabulary(metadata: Mapping[str, Any], defaults: Mapping[str, int]) -> Vocabulary:
    """Reads and checks the tokens. defaults: the ids of named tokens that the file does not name.
    Raises Refused, whose message goes after the file's name."""
    texts = _texts(metadata)
    kinds = [_KINDS.get(number, Kind.UNDEFINED) for number in _column(metadata, "token_type", int)]
    if not kinds:
        kinds = [Kind.NORMAL] * len(texts)
    scores = [float(score) for score in _column(metadata, "scores", (int, float))]
    for values, name in ((kinds, "token_type"), (scores, "scores")):
        if values and len(values) < len(texts):
            raise Refused(f"has {len(values)} values in {PREFIX}{name} for {len(texts)} tokens")
        del values[len(texts) :]
    if not all(map(math.isfinite, scores)):
        raise Refused(f"has a score in {PREFIX}scores that is not a number")
    for index, text in enumerate(texts):
        if kinds[index] is Kind.UNUSED and text == f"[PAD{index}]":
            texts[index] = ""  # a row that the converter has counted, beyond the tokens
    ids = {text: index for index, text in enumerate(texts) if text}
    if len(ids) < len(texts) - texts.count(""):
        twice = next(text for index, text in enumerate(texts) if text and ids[text] != index)
        raise Refused(f"has the token {twice!r:.60} twice")
    named = {name: token_id(metadata, key, len(texts)) for name, key in _NAMES.items()}
    found = {name: defaults.get(name) if at is None else at for name, at in named.items()}
    vocabulary = Vocabulary(
        texts,
        scores,
        kinds,
        ids,
        {
            name: at
            for name, at in found.items()
            if at is not None and at < len(texts) and texts[at]
        },
    )
    _check_special(vocabulary)
    return vocabulary


def token_id(metadata: Mapping[str, Any], key: str, size: int) -> int | None:
    """Returns the id that a key names. Files in use have ids that no token has, for none."""
    value = metadata.get(PREFIX + key)
    if value is None:
        return None
    if type(value) is not int:
        raise Refused(f"has {value!r:.40} for {PREFIX}{key}, which must be an integer")
    return value if 0 <= value < size else None


def flag(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    value = metadata.get(PREFIX + key, default)
    if type(value) is not bool:
        raise Refused(f"has {value!r:.40} for {PREFIX}{key}, which must be true or false")
    return value


def end_ids(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> list[int]:
    """Returns the ids that end an answer, the file's own end of a text first."""
    size = len(vocabulary.texts)
    declared = [token_id(metadata, key, size) for key in ("eot_token_id", "eom_token_id")]
    ends = [vocabulary.named.get("eos_token"), *declared]
    for index in vocabulary.special:
        text, kind = vocabulary.texts[index], vocabulary.kinds[index]
        if text in _ENDS or (text in _ENDS_IF_CONTROL and kind is Kind.CONTROL):
            ends.append(index)
    found = dict.fromkeys(index for index in ends if index is not None)
    texts = {vocabulary.texts[index] for index in found}
    if _MESSAGE_END in texts and texts & _CALLS and texts & _FINAL:
        del found[vocabulary.ids[_MESSAGE_END]]
    return list(found)


def read_merges(metadata: Mapping[str, Any], ids: Mapping[str, int]) -> list[list[str]]:
    """Returns the pairs of tokens that are merged, those of the highest priority first."""
    items = _list(metadata, "merges")
    if not items:
        raise Refused(f"has no {PREFIX}merges; {ADVICE}")
    if len(items) > MAX_MERGES:
        raise Refused(f"has {len(items)} merges; at most {MAX_MERGES} are read")
    pairs: dict[tuple[str, str], None] = {}
    size = 0
    for item in items:
        text = item if isinstance(item, str) else ""
        size += len(text)
        if size > MAX_TEXT_CHARS:
            raise Refused(f"has more than {MAX_TEXT_CHARS} characters of merges")
        at = text.find(" ", 1)
        left, right = text[:at], text[at + 1 :]
        if at < 0 or not {left, right, left + right} <= ids.keys():
            raise Refused(f"has the merge {item!r:.60}, which is not of two tokens; {ADVICE}")
        pairs[left, right] = None  # the first of two alike counts
    return [list(pair) for pair in pairs]


def _texts(metadata: Mapping[str, Any]) -> list[str]:
    items = _list(metadata, "tokens")
    if not 0 < len(items) <= MAX_TOKENS:
        raise Refused(f"has {len(items)} tokens in {PREFIX}tokens; 1 to {MAX_TOKENS} are read")
    size = 0
    for item in items:
        if not isinstance(item, str):
            raise Refused(f"has {item!r:.40} in {PREFIX}tokens, which is not a text")
        size += len(item)
        if len(item) > MAX_TOKEN_CHARS or size > MAX_TEXT_CHARS:
            raise Refused(
                f"has a token of {len(item)} characters, or too many in all tokens; at most"
                f" {MAX_TOKEN_CHARS} and {MAX_TEXT_CHARS} are read"
            )
    return list(items)


def _column(metadata: Mapping[str, Any], key: str, kind: type | tuple[type, ...]) -> list[Any]:
    items = _list(metadata, key)
    if len(items) > MAX_TOKENS:
        raise Refused(f"has {len(items)} values in {PREFIX}{key}; at most {MAX_TOKENS} are read")
    for item in items:
        if not isinstance(item, kind) or type(item) is bool:
            raise Refused(f"has {item!r:.40} in {PREFIX}{key}, which is not a number")
    return items


def _list(metadata: Mapping[str, Any], key: str) -> list[Any]:
    items = metadata.get(PREFIX + key)
    if items is not None and not isinstance(items, list):
        raise Refused(f"has {items!r:.40} for {PREFIX}{key}, which must be a list")
    return items or []


def _check_special(vocabulary: Vocabulary) -> None:
    special = vocabulary.special
    longest = max((len(vocabulary.texts[index]) for index in special), default=0)
    if len(special) > MAX_SPECIAL or longest > MAX_SPECIAL_CHARS:
        raise Refused(
            f"has {len(special)} special tokens of up to {longest} characters; at most"
            f" {MAX_SPECIAL} of {MAX_SPECIAL_CHARS} are read"
        )
