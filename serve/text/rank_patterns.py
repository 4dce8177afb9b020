"""Which file of a directory is its tokenizer, and the rules of the rank files that are known.

A rank file has neither its pattern nor its special tokens; the checkpoints that have one bring code
for them, which is never run. The rules are of tokenizers, by their class in tokenizer_config.json.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from serve.errors import ModelLoadError
from serve.regular_file import open_regular
from serve.text.rank_file import RankRules, is_rank_file
from serve.text.tokenizer_config import token_string

TEKKEN_FILE = "tekken.json"
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
ONE_DIGIT = rf"{_WORDS}|\p{{N}}|{_OTHERS}"
THREE_DIGITS = rf"{_WORDS}|\p{{N}}{{1,3}}|{_OTHERS}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_NO_HAN = r"&&[^\p{Han}]"
HAN_APART = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}{_NO_HAN}]*[{_LOWER}{_NO_HAN}]+{CONTRACTIONS}?",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}{_NO_HAN}]+[{_LOWER}{_NO_HAN}]*{CONTRACTIONS}?",
        r"\p{N}{1,3}",
        _OTHERS,
    )
)
_QWEN = RankRules(
    pattern=ONE_DIGIT,
    normalizer="NFC",
    names=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    filler="<|extra_{number}|>",
    fillers=205,
)
_RULES = {
    "QWenTokenizer": _QWEN,
    "HYTokenizer": replace(
        _QWEN,
        names=("<|endoftext|>", "<|startoftext|>", "<|bos|>", "<|eos|>", "<|pad|>"),
        prefix=("<|startoftext|>",),
    ),
    "TikTokenTokenizer": RankRules(
        pattern=HAN_APART, filler="<|reserved_token_{id}|>", fillers=256
    ),
    "ChatGLM4Tokenizer": RankRules(pattern=THREE_DIGITS, prefix=("[gMASK]", "<sop>")),
}


def find_tokenizer(path: Path) -> Path:
    """Returns the tokenizer's file in a directory. ModelLoadError if it has none, or several rank
    files."""
    if not path.is_dir():
        raise ModelLoadError(f"{path}, where the tokenizer should be, is not a directory")
    for name in ("tokenizer.json", TEKKEN_FILE, "tiktoken.model"):
        if (file := path / name).exists():
            return file
    ranks = sorted(path.glob("*.tiktoken"))
    if len(ranks) > 1:
        raise ModelLoadError(f"{path} has {len(ranks)} files *.tiktoken; one is its tokenizer")
    if ranks:
        return ranks[0]
    if (file := path / "tokenizer.model").exists():
        return file
    raise ModelLoadError(
        f"{path} has no tokenizer: tokenizer.json, tokenizer.model, {TEKKEN_FILE}, tiktoken.model"
        " or *.tiktoken"
    )


def rules_of(file: Path, config: dict[str, Any]) -> RankRules | None:
    """Returns the rules of a rank file, None for other files. config: of tokenizer_config.json.
    ModelLoadError for a rank file of an unknown tokenizer."""
    if file.name == TEKKEN_FILE:
        return RankRules(is_tekken=True)
    if file.suffix == ".json" or (file.name == "tokenizer.model" and not _has_ranks(file)):
        return None
    name = config.get("tokenizer_class")
    rules = _RULES.get(name) if isinstance(name, str) else None
    if rules is None:
        raise ModelLoadError(
            f"{file} says neither how texts are split nor what its special tokens are, and"
            f" tokenizer_class is {name!r:.60}; known are {', '.join(_RULES)}. Another model"
            " needs a tokenizer.json"
        )
    return replace(rules, declared=_declared(file, config.get("added_tokens_decoder")))


def _has_ranks(file: Path) -> bool:
    try:
        with open_regular(file) as opened:
            return is_rank_file(opened.read(4096))
    except OSError:  # who reads all of it reports it
        return False


def _declared(file: Path, items: object) -> dict[str, str]:
    declared: dict[str, str] = {}
    for index, item in items.items() if isinstance(items, dict) else ():
        content = token_string(item)
        if content is None or not str(index).isdecimal():
            raise ModelLoadError(
                f"{file.with_name('tokenizer_config.json')}: added_tokens_decoder has no token"
                f" for {index!r:.40}"
            )
        declared[str(int(index))] = content
    return declared
