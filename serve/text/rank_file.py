"""Describes a rank file, or Mistral's tekken.json, as a tokenizer.json.

tiktoken's files have a token in base64 and its rank in each line. The ranks are the ids, and also
the order in which neighbours are merged: always those whose text together has the lowest rank. A
tokenizer.json names pairs instead, so each way to cut a token in two tokens becomes a pair.

The file is untrusted. What this takes grows like the file, and like the squares of its tokens'
lengths, which are bounded. Imports are minimal, since the child process starts with them.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from serve.text.tokenizer_file import MAX_VOCAB, Refused, read_description

MAX_TOKEN_BYTES = 1024
MAX_SQUARES = 1 << 28  # of the lengths of tokens together; files in use have up to 40 million
MAX_PATTERN_CHARS = 4096
MAX_SPECIAL_CHARS = 256
MAX_SPECIAL = 1 << 16  # special tokens, and also ids without a token
_FIRST_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")
_TEKKEN_FILLER = "<SPECIAL_{id}>"
_TEKKEN_PREFIX = "<s>"
# The special tokens of files that do not list theirs.
_TEKKEN_DEFAULTS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)


@dataclass(frozen=True, slots=True)
class RankRules:
    """What a rank file does not say. None of it is needed for a tekken.json.

    pattern: splits a text. normalizer: its Unicode form. names: special tokens that follow the last
    rank, in this order; then as many as `fillers` whose names `filler` makes of {id} and {number}.
    declared: special tokens by their ids, before all others. prefix: special tokens that begin a
    text.
    """

    pattern: str = ""
    normalizer: str | None = None
    names: tuple[str, ...] = ()
    filler: str = ""
    fillers: int = 0
    declared: dict[str, str] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()
    is_tekken: bool = False

    def as_json(self) -> dict[str, Any]:
        """Returns the fields as the child process gets them."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """ranks: the id of each token; merges follow the ids. special: by their ids."""

    ranks: dict[bytes, int]
    special: dict[int, str]
    pattern: str
    normalizer: str | None = None
    prefix: tuple[str, ...] = ()


def is_rank_file(data: bytes) -> bool:
    """Returns whether a tokenizer.model is a rank file and not one of sentencepiece."""
    return _FIRST_LINE.match(data) is not None


def describe_ranks(data: bytes, rules: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of a tokenizer.json. rules: the fields of RankRules. Raises Refused."""
    known = RankRules(**rules)
    vocabulary = _read_tekken(data) if known.is_tekken else _read_tiktoken(data, known)
    return _description(vocabulary)


def encoded(description: dict[str, Any]) -> bytes:
    return json.dumps(description, ensure_ascii=False, separators=(",", ":")).encode()


def byte_chars() -> list[str]:
    """Returns GPT-2's character for each byte: printable ones stand for themselves, and the others
    have the characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    chars = {byte: chr(0x100 + index) for index, byte in enumerate(hidden)}
    return [chars.get(byte, chr(byte)) for byte in range(256)]


def _read_tiktoken(data: bytes, rules: RankRules) -> _Vocabulary:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not (fields := line.split()):
            continue
        try:
            text, rank = fields
            token, index = base64.b64decode(text, validate=True), int(rank)
        except ValueError:
            raise Refused(
                f"is not a file of ranks: line {number} is not a token in base64 and its rank"
            ) from None
        if not 0 <= index < MAX_VOCAB:
            raise Refused(f"has the rank {index} in line {number}; at most {MAX_VOCAB - 1} is used")
        if token in ranks:
            raise Refused(f"has a token twice, the second time in line {number}")
        ranks[token] = index
    size = max(ranks.values(), default=-1) + 1
    if size > len(ranks) + MAX_SPECIAL:
        raise Refused(f"has {len(ranks)} tokens with ranks up to {size - 1}")
    fillers = [
        rules.filler.format(id=size + len(rules.names) + number, number=number)
        for number in range(rules.fillers)
    ]
    declared = {int(index): content for index, content in rules.declared.items()}
    names = set(declared.values())
    special = dict(enumerate((*rules.names, *fillers), size))
    special = {at: name for at, name in special.items() if name not in names} | declared
    return _Vocabulary(ranks, special, rules.pattern, rules.normalizer, rules.prefix)


def _read_tekken(data: bytes) -> _Vocabulary:
    """The first ids are special tokens, and the file may have more tokens than are used."""
    file = read_description(data)
    config = _object(file, "config")
    size = _integer(config, "default_vocab_size", MAX_VOCAB)
    num_special = _integer(config, "default_num_special_tokens", min(size, MAX_SPECIAL))
    items = file.get("vocab")
    if not isinstance(items, list) or len(items) < size - num_special:
        raise Refused(f"has fewer than {size - num_special} tokens in its vocab")
    ranks: dict[bytes, int] = {}
    for number, item in enumerate(items[: size - num_special]):
        if not isinstance(item, dict) or item.get("rank") != number:
            raise Refused(f"has no token of rank {number} in its place in vocab")
        try:
            token = base64.b64decode(item["token_bytes"], validate=True)
        except (KeyError, TypeError, ValueError):
            raise Refused(f"has no base64 in token_bytes of the token of rank {number}") from None
        if token in ranks:
            raise Refused(f"has a token twice, the second time with rank {number}")
        ranks[token] = num_special + number
    special = _tekken_special(file, num_special)
    pattern = config.get("pattern")
    if not isinstance(pattern, str):
        raise Refused("has no pattern in its config")
    prefix = (_TEKKEN_PREFIX,) if _TEKKEN_PREFIX in special.values() else ()
    return _Vocabulary(ranks, special, pattern, prefix=prefix)


def _tekken_special(file: dict[str, Any], count: int) -> dict[int, str]:
    listed = file.get("special_tokens")
    if listed is None:
        listed = [{"rank": at, "token_str": name} for at, name in enumerate(_TEKKEN_DEFAULTS)]
    if not isinstance(listed, list):
        raise Refused("has special_tokens that are not a list")
    special: dict[int, str] = {}
    for item in listed:
        if not isinstance(item, dict) or not isinstance(item.get("token_str"), str):
            raise Refused("has a special token without a token_str")
        index = _integer(item, "rank", count - 1)
        if index in special:
            raise Refused(f"has two special tokens of rank {index}")
        special[index] = item["token_str"]
    fillers = {at: _TEKKEN_FILLER.format(id=at) for at in range(count) if at not in special}
    return special | fillers


def _object(values: dict[str, Any], key: str) -> dict[str, Any]:
    found = values.get(key)
    if not isinstance(found, dict):
        raise Refused(f"has no object {key}")
    return found


def _integer(values: dict[str, Any], key: str, high: int) -> int:
    found = values.get(key)
    if type(found) is not int or not 0 <= found <= high:
        raise Refused(f"has {found!r:.40} for {key}, which must be an integer from 0 to {high}")
    return found


def _description(vocabulary: _Vocabulary) -> dict[str, Any]:
    """Returns a byte-level BPE, whose merges are in the order of the ranks."""
    _check_tokens(vocabulary.ranks)
    chars = dict(enumerate(byte_chars()))
    texts = {token: token.decode("latin-1").translate(chars) for token in vocabulary.ranks}
    ids = {texts[token]: index for token, index in vocabulary.ranks.items()}
    used = set(ids.values())
    if len(used) < len(ids):
        raise Refused("has two tokens of one rank")
    _check_special(vocabulary, ids, used)
    ids |= {content: index for index, content in vocabulary.special.items()}
    special = {content: index for index, content in sorted(vocabulary.special.items())}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added_token(content, index) for content, index in special.items()],
        "normalizer": {"type": vocabulary.normalizer} if vocabulary.normalizer else None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                split_step(vocabulary.pattern),
                byte_level_step(add_prefix_space=False),
            ],
        },
        "post_processor": begins_with(vocabulary.prefix, special) if vocabulary.prefix else None,
        "decoder": byte_level_step(add_prefix_space=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            # tiktoken takes a piece that is a token as it is, before it merges anything
            "ignore_merges": not _has_a_piece(vocabulary.pattern, special),
            "vocab": ids,
            "merges": [[texts[left], texts[right]] for left, right in _merges(vocabulary.ranks)],
        },
    }


def _check_tokens(ranks: dict[bytes, int]) -> None:
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise Refused(f"has no token for the byte {missing[0]:#04x}")
    longest = max(map(len, ranks))
    if longest > MAX_TOKEN_BYTES:
        raise Refused(f"has a token of {longest} bytes; at most {MAX_TOKEN_BYTES} can be used")
    if sum(len(token) ** 2 for token in ranks) > MAX_SQUARES:
        raise Refused("has too many long tokens")


def _check_special(vocabulary: _Vocabulary, ids: dict[str, int], used: set[int]) -> None:
    contents = list(vocabulary.special.values())
    most = max(used) + MAX_SPECIAL
    if len(set(contents)) < len(contents):
        raise Refused("has two special tokens of one text")
    for index, content in vocabulary.special.items():
        if index in used or content in ids:
            raise Refused(f"has the special token {content!r:.60} ({index}) as a plain one, too")
        if not 0 < len(content) <= MAX_SPECIAL_CHARS or not 0 <= index <= most:
            raise Refused(f"has a special token that is empty, too long or too far: {index}")
    for content in vocabulary.prefix:
        if content not in contents:
            raise Refused(f"has no special token {content!r:.60}, which begins its texts")
    if not 0 < len(vocabulary.pattern) <= MAX_PATTERN_CHARS:
        raise Refused("has an empty pattern, or one that is too long")


def _merges(ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    for token in sorted(ranks, key=ranks.__getitem__):
        found = [
            (token[:at], token[at:])
            for at in range(1, len(token))
            if token[:at] in ranks and token[at:] in ranks
        ]
        if len(found) > 1:
            found.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        yield from found


def _has_a_piece(pattern: str, special: dict[str, int]) -> bool:
    """Returns whether the pattern makes a piece of a special token's text. The vocabulary has it,
    so that plain text would become the special token if pieces were looked up as they are."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Split

    split = Split(Regex(pattern), "isolated").pre_tokenize_str
    return any(
        content == piece
        for content in special
        for text in (content, f"\n{content}\n", f"a{content}a", f" {content} ")
        for piece, _ in split(text)
    )


def added_token(content: str, index: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": content, **flags, "special": True}


def split_step(pattern: str) -> dict[str, Any]:
    found = {"Regex": pattern}
    return {"type": "Split", "pattern": found, "behavior": "Isolated", "invert": False}


def byte_level_step(*, add_prefix_space: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": add_prefix_space,
        "trim_offsets": True,
        "use_regex": False,
    }


def begins_with(prefix: tuple[str, ...], special: dict[str, int]) -> dict[str, Any]:
    """Returns the post-processor that puts special tokens before a text."""
    before = [{"SpecialToken": {"id": content, "type_id": 0}} for content in prefix]
    texts = [{"Sequence": {"id": name, "type_id": at}} for at, name in enumerate("AB")]
    return {
        "type": "TemplateProcessing",
        "single": [*before, texts[0]],
        "pair": [*before, texts[0], *before, texts[1]],
        "special_tokens": {
            content: {"id": content, "ids": [special[content]], "tokens": [content]}
            for content in prefix
        },
    }
