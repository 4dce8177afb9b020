"""How texts are split before byte pairs are merged, by the name in a GGUF file.

A GGUF file has the vocabulary of a byte-level tokenizer, but of its pre-tokenizer and normalizer
only a name, `tokenizer.ggml.pre`. The rules are those of the tokenizer.json of the models that
llama.cpp's converter gives the name to; llama.cpp's src/llama-vocab.cpp has the list of names. A
name is left out where it is not known what those files say.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from serve.text.rank_file import byte_level_step, split_step
from serve.text.rank_patterns import CONTRACTIONS, HAN_APART, ONE_DIGIT, THREE_DIGITS

Step = dict[str, Any]
_BYTES = "ByteLevel"


@dataclass(frozen=True, slots=True)
class Splitting:
    """steps: pre-tokenizers of a tokenizer.json. normalizer: a Unicode form. takes_whole: a piece
    that is a token is not merged from its characters. begins_with_bos: unless the file says
    otherwise."""

    steps: tuple[Step, ...]
    normalizer: str | None = None
    takes_whole: bool = False
    begins_with_bos: bool = False

    def pre_tokenizer(self) -> Step:
        """Returns all steps; characters that stand for bytes are made by the last one, unless an
        earlier one makes them."""
        steps = list(self.steps)
        if all(step["type"] != _BYTES for step in steps):
            steps.append(byte_level_step(add_prefix_space=False))
        return {"type": "Sequence", "pretokenizers": steps}


def _regexes(*patterns: str) -> Splitting:
    return Splitting(tuple(map(split_step, patterns)))


def _ranges(*ends: str) -> str:
    """Returns characters of a class of a regular expression. ends: hexadecimal, "41-5a"."""
    parts = (tuple(chr(int(end, 16)) for end in each.split("-")) for each in ends)
    return "".join("-".join(part) for part in parts)


_GPT2_STEP = byte_level_step(add_prefix_space=False) | {"use_regex": True}
_DIGITS: Step = {"type": "Digits", "individual_digits": True}
_GPT2 = Splitting((_GPT2_STEP,))
_DIGITS_APART = Splitting((_DIGITS, _GPT2_STEP))
_FALCON = Splitting(
    (
        {"type": "Punctuation", "behavior": "Contiguous"},
        _GPT2_STEP,
        _DIGITS | {"individual_digits": False},
        split_step("[0-9][0-9][0-9]"),
    )
)
_THREE = _regexes(THREE_DIGITS)
_LLAMA3 = replace(_THREE, takes_whole=True, begins_with_bos=True)
_ONE = _regexes(ONE_DIGIT)
_QWEN = replace(_ONE, normalizer="NFC")
_MARKS_WITH_LETTERS = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _by_case(after_word: str, digits: str) -> str:
    """Returns the pattern whose words end where small letters are followed by large ones."""
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{after_word}"
        rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{after_word}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_O200K = _regexes(_by_case(f"{CONTRACTIONS}?", r"\p{N}{1,3}"))
_THOUSANDS = _regexes(r"\d{1,3}(?=(?:\d{3})*\b)", _by_case(f"{CONTRACTIONS}?", r"\p{N}{1,3}"))
_TEKKEN = replace(_regexes(_by_case("", r"\p{N}")), takes_whole=True, begins_with_bos=True)
_WORDS_AND_SIGNS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_V3 = _regexes(
    r"\p{N}{1,3}", r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _WORDS_AND_SIGNS
)
_CASED = _ranges(
    *("41-5a", "61-7a", "b5", "c0-d6", "d8-f6", "f8-1ba", "1bc-1bf", "1c4-293", "295-2af"),
    *("370-373", "376", "377", "37b-37d", "37f", "386", "388-38a", "38c", "38e-3a1", "3a3-3f5"),
    *("3f7-481", "48a-52f", "531-556", "10a0-10c5", "13a0-13f5", "13f8-13fd", "1c90-1cba"),
    *("1cbd-1cbf", "1d00-1d2b", "1d6b-1d77", "1d79-1d9a", "1e00-1f15", "1f18-1f1d", "1f20-1f45"),
    *("1f48-1f4d", "1f50-1f57", "1f59", "1f5b", "1f5d", "1f5f-1f7d", "1f80-1fb4", "1fb6-1fbc"),
    *("1fbe", "1fc2-1fc4", "1fc6-1fcc", "1fd0-1fd3", "1fd6-1fdb", "1fe0-1fec", "1ff2-1ff4"),
    *("1ff6-1ffc", "2102", "2107", "210a-2113", "2115", "2119-211d", "2124", "2126", "2128"),
    *("212a-212d", "212f-2134", "2139", "213c-213f", "2145-2149", "214e", "2183", "2184"),
    *("2c00-2c7b", "2c7e-2ce4", "2ceb-2cee", "2cf2", "2cf3", "a640-a66d", "a680-a69b"),
    *("a722-a76f", "a771-a787", "a78b-a78e", "ab70-abbf", "fb00-fb06", "fb13-fb17"),
    *("ff21-ff3a", "ff41-ff5a", "10400-1044f", "104b0-104d3", "104d8-104fb", "10c80-10cb2"),
    *("10cc0-10cf2", "118a0-118df", "1e900-1e943"),
)
_ASIAN = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LLM = Splitting(
    (
        split_step(r"[\r\n]"),
        split_step(rf"\s?[{_CASED}]+"),
        split_step(r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"),
        split_step(r"\s+$"),
        split_step(_ASIAN),
        _DIGITS,
    )
)
_DEEPSEEK_CODER = Splitting(
    (
        *map(split_step, (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN)),
        _DIGITS,
    )
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SEED = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PHRASES = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_MINICPM5 = _regexes(r"\p{N}{1,3}", THREE_DIGITS.replace("{1,3}", "+"))
_GPT_NEOX = replace(_GPT2, normalizer="NFC")

SPLITTINGS: dict[str, Splitting] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mellum", "trillion", "jais", "exaone4"), _GPT2),
    **dict.fromkeys(("mpt", "olmo"), _GPT_NEOX),
    **dict.fromkeys(("starcoder", "refact", "smollm", "codeshell", "exaone"), _DIGITS_APART),
    "minerva-7b": _DIGITS_APART,
    "command-r": replace(_DIGITS_APART, normalizer="NFC"),
    "falcon": _FALCON,
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "midm-2.0", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _THREE),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN),
    **dict.fromkeys(("hunyuan", "stablelm2", "solar-open", "grok-2", "kormo"), _ONE),
    "qwen35": replace(_regexes(_MARKS_WITH_LETTERS), normalizer="NFC"),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _O200K),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), _THOUSANDS),
    "tekken": _TEKKEN,
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK_V3),
    **dict.fromkeys(("kimi-k2", "kimi-k25"), _regexes(HAN_APART)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _regexes(_BAILING)),
    "seed-coder": _regexes(_SEED),
    "exaone-moe": _regexes(_PHRASES),
    "minicpm5": replace(_MINICPM5, takes_whole=True),
}
