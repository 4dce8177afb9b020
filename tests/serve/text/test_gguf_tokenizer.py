"""Tokenizers and chat templates from the keys of GGUF files."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.text.gguf_tokenizer import generation_ids, tokenizer_files
from serve.text.tokenizer import Tokenizer
from serve.text.tokenizer_config import read_text_config
from tests.support.engine import tokenizer_pipelines as make
from tests.support.engine.checkpoints import BOS, EOS
from tests.support.profile import examples
from tests.support.text import gguf_keys
from tests.support.text.gguf_keys import (
    END,
    OWN,
    THOUGHT,
    TURN,
    awkward_texts,
    keys_of_json,
    keys_of_sentencepiece,
    llama3_keys,
    llama3_state,
    model,
)
from tests.support.text.trials import try_for_real

pytestmark = pytest.mark.usefixtures("no_trials")
Keys = dict[str, Any]


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
    for text in ("  the", "a   the quick", "the  fox", *awkward_texts(500)):
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


def test_rows_without_a_token_do_not_change_what_is_unknown() -> None:
    """What is unknown costs 10 more than the least likely piece, and not than a row that pads."""
    pieces = {"<pad>": 0.0, "</s>": 0.0, "<unk>": 0.0}
    pieces |= {"ab": -30.0, "cd": -30.0, "bcd": -1.0, "[PAD6]": -10000.0}
    keys = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": list(pieces),
        "tokenizer.ggml.scores": list(pieces.values()),
        "tokenizer.ggml.token_type": [3, 3, 2, 1, 1, 1, 5],
        "tokenizer.ggml.add_eos_token": False,
    }
    assert fast(keys).encode("abcd").ids == [2, 5]


# -- byte-level


@examples(300)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text_has_the_ids_of_the_original(text: str) -> None:
    original, ours, pieces, reference = _loaded()
    assert ours.encode(text).ids == original.encode(text).ids
    assert ours.decode(original.encode(text).ids) == text or BOS in text or EOS in text
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
    found = json.loads((tmp_path / "model" / "tokenizer.json").read_text())["model"]
    assert not found["ignore_merges"]


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
