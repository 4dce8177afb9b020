"""GGUF files whose tokenizer's keys are wrong, or too large."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from serve.text import gguf_tokenizer, gguf_vocabulary
from serve.text.gguf_tokenizer import generation_ids, tokenizer_files
from tests.support.text.gguf_keys import keys_of_sentencepiece, llama3_keys, model

Keys = dict[str, Any]


def _set(name: str, value: object) -> Callable[[Keys], None]:
    return lambda keys: keys.update({f"tokenizer.{name}": value})


def _item(name: str, index: int, value: object) -> Callable[[Keys], None]:
    def change(keys: Keys) -> None:
        keys[f"tokenizer.ggml.{name}"][index] = value

    return change


WRONG: dict[str, tuple[Callable[[Keys], object], str]] = {
    "no model": (lambda keys: keys.pop("tokenizer.ggml.model"), r"no tokenizer.*--tokenizer DIR"),
    "another model": (_set("ggml.model", "rwkv"), r"kind 'rwkv'.*gpt2, llama.*--tokenizer DIR"),
    "bert": (_set("ggml.model", "bert"), r"kind 'bert'.*--tokenizer DIR"),
    "a model of numbers": (_set("ggml.model", [1]), r"kind .* \(tokenizer\.ggml\.model\)"),
    "another splitting": (_set("ggml.pre", "xyz"), r"'xyz' for tokenizer\.ggml\.pre.*--tokenizer"),
    "a splitting of a kind": (_set("ggml.pre", {}), r"for tokenizer\.ggml\.pre"),
    "no tokens": (_set("ggml.tokens", []), "has 0 tokens"),
    "tokens that are none": (_set("ggml.tokens", 7), r"7 for tokenizer\.ggml\.tokens"),
    "a number as a token": (_item("tokens", 9, 9), r"9 in tokenizer\.ggml\.tokens"),
    "a token twice": (_item("tokens", 9, "e"), "has the token 'e' twice"),
    "a long token": (_item("tokens", 9, "a" * 2000), "a token of 2000 characters"),
    "a surrogate": (_item("tokens", -1, "\ud800"), "not Unicode"),
    "few types": (_set("ggml.token_type", [1, 1]), r"2 values in tokenizer\.ggml\.token_type"),
    "a type of text": (_item("token_type", 3, "1"), r"'1' in tokenizer\.ggml\.token_type"),
    "a true type": (_item("token_type", 3, True), r"True in tokenizer\.ggml\.token_type"),
    "no merges": (_set("ggml.merges", []), r"no tokenizer\.ggml\.merges"),
    "a merge of one": (_item("merges", 3, "ab"), "the merge 'ab', which is not of two tokens"),
    "a merge of none": (_item("merges", 3, None), "the merge None"),
    "a merge of others": (_item("merges", 3, "q zz"), "the merge 'q zz'"),
    "a BOS of text": (_set("ggml.bos_token_id", "<s>"), "must be an integer"),
    "a flag of text": (_set("ggml.add_bos_token", "yes"), "must be true or false"),
    "an infinite score": (
        lambda keys: keys.update(
            {"tokenizer.ggml.scores": [float("nan")] * len(keys["tokenizer.ggml.tokens"])}
        ),
        "a score in .* that is not a number",
    ),
    "a template of numbers": (_set("chat_template", 5), r"for tokenizer\.chat_template"),
    "many templates": (
        lambda keys: keys.update({f"tokenizer.chat_template.{at}": "" for at in range(65)}),
        "more than 64 chat templates",
    ),
    "a large template": (_set("chat_template.rag", "a" * ((4 << 20) + 1)), "no text of up to"),
    "a long special token": (
        lambda keys: keys["tokenizer.ggml.tokens"].__setitem__(1, "<" * 300),
        "special tokens of up to 300 characters",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_keys(case: str) -> None:
    change, message = WRONG[case]
    keys = llama3_keys()
    change(keys)
    with pytest.raises(ValueError, match=message):
        tokenizer_files(keys)


ODD: list[Any] = [
    *(0, 1, -1, 1 << 31, (1 << 64) - 1, True, 0.0, 1e308, math.nan, math.inf, b"a", None),
    *("", "text", "\0", "\ud800", "a b", [], [0], ["a"], ["a", "a"], [True], [math.nan], [[]], {}),
]


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma4", "t5"])
def test_any_value_of_a_key(kind: str) -> None:
    """Whatever stands in a key, or in the place of an item: a tokenizer, or a refusal."""
    piece_model = model("unigram" if kind == "t5" else "bpe")
    keys = llama3_keys() if kind == "gpt2" else keys_of_sentencepiece(piece_model, kind)
    keys |= {"tokenizer.ggml.merges": ["t h"], "tokenizer.chat_template": ""}
    for key, value in list(keys.items()):
        for odd in ODD:
            convert(keys | {key: odd})
            if isinstance(value, list):
                convert(keys | {key: [*value[:-1], odd]})
                convert(keys | {key: [odd, *value[1:]]})
        convert({name: item for name, item in keys.items() if name != key})


def convert(keys: Keys) -> None:
    with contextlib.suppress(ValueError):
        for content in tokenizer_files(keys).values():
            json.loads(content)
            content.encode()
    with contextlib.suppress(ValueError):
        json.dumps(generation_ids(keys))


@pytest.mark.parametrize("value", [[256], [-129], ["a"], "abc", [0.5]])
def test_a_wrong_table_of_characters(value: object) -> None:
    keys = keys_of_sentencepiece(model("unigram"), "t5", precompiled_charsmap=value)
    with pytest.raises(ValueError, match="precompiled_charsmap"):
        tokenizer_files(keys)


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, pieces = llama3_keys(), keys_of_sentencepiece(model("bpe"), "llama")
    for name, limit, wrong, message in (
        ("MAX_TOKENS", 100, keys, "has 12.. tokens in"),
        ("MAX_MERGES", 100, keys, "merges; at most 100"),
        ("MAX_TEXT_CHARS", 3000, keys, "too many in all tokens|characters of merges"),
        ("MAX_SQUARES", 100, pieces, "too many long tokens"),
        ("MAX_FILE_BYTES", 5000, keys, "a tokenizer of .* bytes; at most 5000"),
    ):
        with monkeypatch.context() as patch:
            for module in (gguf_vocabulary, gguf_tokenizer):
                if hasattr(module, name):
                    patch.setattr(module, name, limit)
            with pytest.raises(ValueError, match=message):
                tokenizer_files(wrong)
    del pieces["tokenizer.ggml.scores"]
    with pytest.raises(ValueError, match="neither"):
        tokenizer_files(pieces)
