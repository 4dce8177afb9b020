"""Tokenizers and chat templates from the keys of GGUF files."""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.text import gguf_tokenizer, gguf_vocabulary
from serve.text.gguf_tokenizer import generation_ids, tokenizer_files
from serve.text.tokenizer import Tokenizer
from serve.text.tokenizer_config import read_text_config
from tests.support.engine import tokenizer_pipelines as make
from tests.support.engine.checkpoints import BOS, EOS, Json
from tests.support.engine.tokenizer_files import LEARNED
from tests.support.profile import examples
from tests.support.text import gguf_keys
from tests.support.text.gguf_keys import (
    END,
    THOUGHT,
    TURN,
    awkward_texts,
    byte_level_tokenizer,
    keys_of_json,
    keys_of_sentencepiece,
)
from tests.support.text.trials import try_for_real

pytestmark = pytest.mark.usefixtures("no_trials")
OWN = ("\n\n", "▁▁", "▁▁▁", "<h1>")
Keys = dict[str, Any]


def llama3_state() -> Json:
    split = make.sequence("pretokenizers", make.split(make.GPT4), make.byte_level())
    return byte_level_tokenizer(split, None, ignore_merges=True)


def llama3_keys(**others: Any) -> Keys:
    return keys_of_json(llama3_state(), "llama-bpe", bos_token_id=0, eos_token_id=1, **others)


@functools.cache
def model(kind: str, *, prefix: bool = True, own: bool = False, trims: bool = False) -> bytes:
    import sentencepiece

    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LEARNED * 5),
        model_writer=made,
        vocab_size=400,
        model_type=kind,
        byte_fallback=kind == "bpe",
        hard_vocab_limit=False,
        normalization_rule_name="identity" if kind == "bpe" else "nmt_nfkc",
        remove_extra_whitespaces=trims,
        add_dummy_prefix=prefix,
        user_defined_symbols=list(OWN) if own else [],
        minloglevel=2,
    )
    return made.getvalue()


def library(data: bytes) -> Any:
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_proto=data)


def fast(keys: Keys) -> Any:
    from tokenizers import Tokenizer as Fast

    return Fast.from_str(tokenizer_files(keys)["tokenizer.json"])


def load(keys: Keys, path: Path) -> Tokenizer:
    path.mkdir(exist_ok=True)
    for name, content in tokenizer_files(keys).items():
        (path / name).write_text(content, encoding="utf-8")
    return Tokenizer.load(path)


def ordinary(text: str) -> bool:
    return not any(token in text for token in (BOS, EOS, "<unk>", *OWN[:1], OWN[3]))


# -- sentencepiece


@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_are_those_of_sentencepiece(prefix: bool, tmp_path: Path) -> None:
    data = model("bpe", prefix=prefix)
    keys = keys_of_sentencepiece(data, "llama", add_space_prefix=prefix)
    tokenizer, reference = load(keys, tmp_path / "model"), library(data)
    for text in filter(ordinary, awkward_texts(500)):
        ids = reference.encode(text)
        assert tokenizer.encode(text) == [1, *ids], text
        assert tokenizer.encode_plain(text) == ids
        assert tokenizer.decode(ids) == reference.decode(ids)
    assert tokenizer.strips_leading_space == prefix
    assert tokenizer.pieces is not None and tokenizer.pieces[3 + 0x41] == b"A"


def test_a_text_after_a_special_token_begins_with_a_space() -> None:
    data = model("bpe")
    made = fast(keys_of_sentencepiece(data, "llama", add_bos_token=False))
    fox = library(data).encode("fox")
    assert library(data).id_to_piece(fox[0]).startswith("▁")
    assert made.encode(f"fox{EOS}fox").ids == [*fox, 2, *fox]


def test_a_users_own_pieces() -> None:
    """Gemma: line ends and tags are cut out of a text; spaces are merged before anything else."""
    data = model("bpe", prefix=False, own=True)
    keys = keys_of_sentencepiece(
        data, "llama", own=OWN, add_space_prefix=False, add_bos_token=False
    )
    assert "  " in keys["tokenizer.ggml.tokens"] and OWN[1] not in keys["tokenizer.ggml.tokens"]
    made, reference = fast(keys), library(data)
    for text in awkward_texts(500):
        if BOS in text or EOS in text or "    " in text.replace("▁", " ") or "▁▁" in text:
            continue  # sentencepiece does not know the former as tokens of a text
        assert made.encode(text).ids == reference.encode(text), text
    ids = [reference.piece_to_id(piece) for piece in OWN]
    assert made.encode("<h1>\n\n").ids == [ids[3], ids[0]]
    special = made.get_added_tokens_decoder()
    assert not special[ids[3]].special and special[1].special


def test_equals_what_transformers_makes_of_the_keys() -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    keys = keys_of_sentencepiece(model("bpe"), "llama", add_bos_token=False)
    short = {name.removeprefix("tokenizer.ggml."): value for name, value in keys.items()}
    theirs, _ = convert_gguf_tokenizer("phi3", short | {"tokenizer_type": "llama"})
    made = fast(keys)
    for text in awkward_texts(500):
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert made.encode(text).ids == expected, text


def test_merges_of_a_file_take_the_place_of_scores() -> None:
    """Gemma 4: the tokens are pieces, and the file has the merges."""
    data = model("bpe", prefix=False)
    keys = keys_of_sentencepiece(data, "llama", add_space_prefix=False)
    merges = json.loads(tokenizer_files(keys)["tokenizer.json"])["model"]["merges"]
    keys["tokenizer.ggml.model"] = "gemma4"
    del keys["tokenizer.ggml.scores"]
    with pytest.raises(ValueError, match=r"has no tokenizer\.ggml\.merges"):
        tokenizer_files(keys)
    keys["tokenizer.ggml.merges"] = [" ".join(pair) for pair in merges]
    made, reference = fast(keys), library(data)
    for text in filter(ordinary, awkward_texts(300)):
        assert made.encode(text).ids == reference.encode(text), text
        assert made.decode(made.encode(text).ids) == text.replace("▁", " ")


@pytest.mark.parametrize("trims", [True, False])
@pytest.mark.parametrize("prefix", [True, False])
def test_unigram_pieces_are_those_of_sentencepiece(prefix: bool, trims: bool) -> None:
    data = model("unigram", prefix=prefix, trims=trims)
    keys = keys_of_sentencepiece(
        data,
        "t5",
        precompiled_charsmap=list(make.charsmap()),
        remove_extra_whitespaces=trims,
        add_space_prefix=prefix,
    )
    made, reference = fast(keys), library(data)
    for text in filter(ordinary, awkward_texts(500)):
        if "\r\n" in text:
            continue  # Transformers' library normalizes the two as one
        assert made.encode(text).ids == [*reference.encode(text), 2], repr(text)


# -- byte-level


@examples(300)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text_has_the_ids_of_the_original(text: str) -> None:
    original, made, pieces, reference = _loaded()
    assert made.encode(text).ids == original.encode(text).ids
    assert made.decode(original.encode(text).ids) == text or BOS in text or EOS in text
    if ordinary(text):
        assert pieces.encode(text).ids == reference.encode(text)


@functools.cache
def _loaded() -> tuple[Any, Any, Any, Any]:
    from tokenizers import Tokenizer as Fast

    data = model("bpe")
    original = Fast.from_str(json.dumps(llama3_state()))
    pieces = keys_of_sentencepiece(data, "llama", add_bos_token=False)
    return original, fast(llama3_keys()), fast(pieces), library(data)


def test_special_tokens(tmp_path: Path) -> None:
    keys = llama3_keys(add_bos_token=True, padding_token_id=0)
    tokenizer = load(keys, tmp_path / "model")
    ids = {name: tokenizer.special_token_ids[name] for name in (BOS, EOS, TURN, END)}
    text = f"{TURN}fox{THOUGHT}{END}"
    got = tokenizer.encode(text)
    assert got[:2] == [ids[BOS], ids[TURN]] and got[-1] == ids[END]
    assert THOUGHT not in tokenizer.special_token_strings
    assert tokenizer.decode(got) == f"fox{THOUGHT}"
    plain = tokenizer.encode_plain(text)
    assert not tokenizer.special_ids.intersection(plain) and got[-2] in plain
    assert tokenizer.decode(plain) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.named_tokens == {"bos_token": BOS, "eos_token": EOS, "pad_token": BOS}
    assert tokenizer.vocab_size == len(keys["tokenizer.ggml.tokens"]) - gguf_keys.PADDING


def test_tokens_around_a_text() -> None:
    keys = llama3_keys()
    del keys["tokenizer.ggml.add_bos_token"]
    assert fast(keys).encode("").ids == [0]  # Llama 3's files do not say so
    keys["tokenizer.ggml.add_eos_token"] = True
    assert fast(keys).encode("").ids == [0, 1]
    assert fast(keys_of_json(llama3_state(), "dbrx", add_bos_token=False)).encode("").ids == []
    # what no token has is not there
    keys["tokenizer.ggml.bos_token_id"] = 2**32 - 1
    with pytest.raises(ValueError, match="puts a bos_token around texts, but does not say which"):
        tokenizer_files(keys)


def test_a_special_token_that_is_a_word_stays_out_of_plain_text(tmp_path: Path) -> None:
    """The piece is in the vocabulary, where a tokenizer that takes pieces whole would find it."""
    keys = llama3_keys()
    at = keys["tokenizer.ggml.tokens"].index(TURN)
    keys["tokenizer.ggml.tokens"][at] = "xyzzy"
    tokenizer = load(keys, tmp_path / "model")
    assert at in tokenizer.encode("xyzzy")
    assert at not in tokenizer.encode_plain("xyzzy")
    model = json.loads((tmp_path / "model" / "tokenizer.json").read_text())["model"]
    assert not model["ignore_merges"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["gpt2", "llama", "t5"])
def test_the_trial_accepts(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try_for_real(monkeypatch)
    models = {"llama": "bpe", "t5": "unigram"}
    keys = llama3_keys() if kind == "gpt2" else keys_of_sentencepiece(model(models[kind]), kind)
    assert load(keys, tmp_path / "model").encode("the fox")


def test_tokens_of_phi3_take_the_space_behind_them() -> None:
    keys = keys_of_sentencepiece(model("bpe"), "llama", add_bos_token=False)
    plain = fast(keys).encode(f"{EOS}\nfox").ids
    keys["general.architecture"] = "phi3"
    assert fast(keys).encode(f"{EOS}\nfox").ids == fast(keys).encode(f"{EOS}fox").ids != plain
    assert fast(keys).encode(f"{BOS} fox").ids != fast(keys).encode(f"{BOS}fox").ids


# -- ends of answers, chat templates


def test_ends_of_answers() -> None:
    keys = llama3_keys(eot_token_id=5)
    turn_end = keys["tokenizer.ggml.tokens"].index(END)
    assert generation_ids(keys) == {"bos_token_id": 0, "eos_token_id": [1, 5, turn_end]}
    tokens, types = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    normal = tokens.index("e")
    for at, text in enumerate(("<|end|>", "<|call|>", "<|return|>")):
        tokens[-3 + at], types[-3 + at] = text, gguf_keys.CONTROL
    last = len(tokens) - 1
    found = generation_ids(keys)["eos_token_id"]
    assert found == [1, 5, turn_end, last - 1, last]  # calls and answers have ends of their own
    tokens[-2], tokens[-1] = "<eos>", "<end_of_turn>"
    types[-3:] = [gguf_keys.CONTROL, gguf_keys.USER_DEFINED, gguf_keys.USER_DEFINED]
    found = generation_ids(keys)["eos_token_id"]
    assert found == [1, 5, turn_end, last - 2, last]
    keys["tokenizer.ggml.eot_token_id"] = keys["tokenizer.ggml.eos_token_id"] = 1 << 31
    assert normal not in generation_ids(keys)["eos_token_id"]  # type: ignore[operator]


def test_chat_templates(tmp_path: Path) -> None:
    keys = llama3_keys()
    load(keys, tmp_path / "none")
    assert read_text_config(tmp_path / "none").chat_template is None
    keys["tokenizer.chat_template"] = "{{ messages }}"
    load(keys, tmp_path / "one")
    found = read_text_config(tmp_path / "one")
    assert (found.chat_template, found.tool_template) == ("{{ messages }}", None)
    keys["tokenizer.chat_template.tool_use"] = "{{ tools }}"
    keys["tokenizer.chat_templates"] = ["tool_use"]
    load(keys, tmp_path / "two")
    found = read_text_config(tmp_path / "two")
    assert (found.chat_template, found.tool_template) == ("{{ messages }}", "{{ tools }}")


# -- files that are wrong


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
