"""Byte-level tokenizers of GGUF files: every name of a pre-tokenizer splits as its model does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import regex

from serve.config import default_model_path
from serve.text.gguf_splits import SPLITTINGS
from serve.text.gguf_tokenizer import tokenizer_files
from serve.text.tokenizer import Tokenizer
from tests.support.engine import tokenizer_pipelines as make
from tests.support.engine.checkpoints import Json
from tests.support.source_tree import ROOT
from tests.support.text.gguf_keys import awkward_texts, byte_level_tokenizer, keys_of_json
from tests.support.text.trials import try_for_real

pytestmark = pytest.mark.usefixtures("no_trials")
NFC: Json = {"type": "NFC"}
CASES = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
LLAMA3 = rf"{CASES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{REST}"
QWEN2 = rf"{CASES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{REST}"
SIGNS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NO_HAN = r"&&[^\p{Han}]"
_UPPER, _LOWER = (
    rf"[{kinds}{_NO_HAN}]"
    for kinds in (r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}")
)
KIMI = "|".join(
    (
        r"(?V1)\p{Han}+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{CASES}?",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{CASES}?",
        rf"\p{{N}}{{1,3}}|{REST}",
    )
)
# What llama.cpp does for a name: it splits by one pattern after the other.
LLAMA_CPP: dict[str, tuple[str, ...]] = {
    "gpt-2": (GPT2,),
    "exaone4": (GPT2,),
    "starcoder": (r"\p{N}", GPT2),
    "smollm": (r"\p{N}", GPT2),
    "llama-bpe": (LLAMA3,),
    "dbrx": (LLAMA3,),
    "smaug-bpe": (LLAMA3,),
    "glm4": (LLAMA3,),
    "hunyuan": (QWEN2,),
    "stablelm2": (QWEN2,),
    "deepseek-v3": (r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", SIGNS),
    "hunyuan-dense": (r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", SIGNS),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
    "bailingmoe": (
        r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    "seed-coder": (
        rf"{CASES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "exaone-moe": (
        rf"{CASES}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    "kimi-k2": (KIMI,),
    "minicpm5": (r"\p{N}{1,3}", LLAMA3.replace("{1,3}", "+")),
}


def slow_split(patterns: tuple[str, ...], text: str) -> list[str]:
    """Cuts a text at every match of the first pattern, each part at those of the second, and so
    on."""
    parts = [text]
    for pattern in patterns:
        found: list[str] = []
        for part in parts:
            end = 0
            for match in regex.finditer(pattern, part):
                found += [part[end : match.start()], match[0]]
                end = match.end()
            found.append(part[end:])
        parts = [part for part in found if part]
    return parts


def originals() -> dict[str, tuple[Json, Json | None, dict[str, Any]]]:
    """Returns the pre-tokenizers and normalizers of published tokenizer.json files, and options of
    their models."""
    from tests.serve.text import test_family_tokenizers as families

    digits = {"type": "Digits", "individual_digits": True}
    gpt2 = make.byte_level() | {"use_regex": True}
    digits_apart = make.sequence("pretokenizers", digits, gpt2)

    def splits(*patterns: str, **last: Any) -> Json:
        steps = [make.split(pattern) for pattern in patterns]
        return make.sequence("pretokenizers", *steps, make.byte_level() | last)

    tekken = make.O200K.replace("{1,3}", "")
    one_digit = make.GPT4.replace("{1,3}", "")
    whole = {"ignore_merges": True}
    return {
        "gpt-2": (gpt2, None, {}),
        "olmo": (gpt2, NFC, {}),
        "starcoder": (digits_apart, None, {}),
        "command-r": (digits_apart, NFC, {}),
        "falcon": (families.falcon()["pre_tokenizer"], None, {}),
        "llama-bpe": (splits(make.GPT4), None, whole),
        "dbrx": (splits(make.GPT4), None, {}),
        "qwen2": (splits(one_digit), NFC, {}),
        "gpt-4o": (splits(families.O200K_WITH_CONTRACTIONS), None, {}),
        "tekken": (splits(tekken), None, whole),
        "deepseek-v3": (splits(*families.DEEPSEEK_V3), None, {}),
    }


def pieces(step: Json, text: str) -> list[str]:
    from tokenizers import Tokenizer

    model = {"type": "BPE", "vocab": {}, "merges": []}
    state = {"model": model, "pre_tokenizer": step, "added_tokens": []}
    fast = Tokenizer.from_str(json.dumps(state))
    return [text[start:end] for _, (start, end) in fast.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize("name", LLAMA_CPP)
def test_splits_as_llama_cpp_does(name: str) -> None:
    from tokenizers import Tokenizer

    model = {"type": "BPE", "vocab": {}, "merges": []}
    step = SPLITTINGS[name].pre_tokenizer()
    state = {"model": model, "pre_tokenizer": step, "added_tokens": []}
    split = Tokenizer.from_str(json.dumps(state)).pre_tokenizer.pre_tokenize_str
    for text in awkward_texts(400):
        expected = slow_split(LLAMA_CPP[name], text)
        assert [text[start:end] for _, (start, end) in split(text)] == expected, text


@pytest.mark.parametrize("name", originals())
def test_ids_are_those_of_the_original(name: str) -> None:
    """The tokenizer that is made of a file's keys gives the ids of the one they were made of."""
    from tokenizers import Tokenizer

    pre_tokenizer, normalizer, model = originals()[name]
    state = byte_level_tokenizer(pre_tokenizer, normalizer, **model)
    original = Tokenizer.from_str(json.dumps(state))
    made = Tokenizer.from_str(tokenizer_files(keys_of_json(state, name))["tokenizer.json"])
    for text in awkward_texts(400):
        ids = original.encode(text).ids
        assert made.encode(text).ids == ids, text
        for skip in (True, False):
            expected = original.decode(ids, skip_special_tokens=skip)
            assert made.decode(ids, skip_special_tokens=skip) == expected


def test_the_embedded_model() -> None:
    from tokenizers import Tokenizer as Fast

    state: Json = json.loads((default_model_path() / "tokenizer.json").read_text())
    original = Fast.from_str(json.dumps(state))
    made = Fast.from_str(tokenizer_files(keys_of_json(state, "smollm"))["tokenizer.json"])
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for part in (text, *awkward_texts(300)):
        assert made.encode(part).ids == original.encode(part).ids
    assert made.decode(made.encode(text).ids) == text


def test_names_that_transformers_knows_split_alike() -> None:
    from transformers.integrations.gguf import gguf_tokenizer_mapping as theirs

    shared = theirs.GGUF_PRE_TOKENIZER_SPLITS.keys() & SPLITTINGS.keys()
    assert len(shared) > 12
    texts = list(awkward_texts(150))
    for name in shared:
        step = make.sequence(
            "pretokenizers",
            make.split(theirs.GGUF_PRE_TOKENIZER_SPLITS[name]),
            make.byte_level(),
        )
        for text in texts:
            assert pieces(SPLITTINGS[name].pre_tokenizer(), text) == pieces(step, text), name


def test_every_splitting_loads() -> None:
    for splitting in SPLITTINGS.values():
        assert "".join(pieces(splitting.pre_tokenizer(), "a 12 中 b")) == "a 12 中 b"


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SPLITTINGS)
def test_the_trial_accepts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try_for_real(monkeypatch)
    state = byte_level_tokenizer(make.byte_level(), None)
    for file, content in tokenizer_files(keys_of_json(state, name, bos_token_id=0)).items():
        (tmp_path / file).write_text(content, encoding="utf-8")
    assert Tokenizer.load(tmp_path).pieces is not None


def test_cased_letters_of_deepseek() -> None:
    """The class has the letters with case of the Unicode that the model's authors had, in the
    order in which they stand in their file."""
    step = SPLITTINGS["deepseek-llm"].steps[1]["pattern"]["Regex"]
    assert regex.fullmatch(step, " ÀéΩжǅẞﬀＡ𐐀Ꭰ") and regex.fullmatch(
        step, "\u2126\u212a\u1fd3\u1fbe"
    )
    for char in "ƻǀ\u0294ʰ中ª_1 ":
        assert not regex.fullmatch(step, char), char
