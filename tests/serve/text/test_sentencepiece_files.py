"""tokenizer.model as families publish it: unigram and BPE, added tokens, tokens of turns."""

from __future__ import annotations

import functools
import io
import json
from pathlib import Path
from typing import Any

import pytest

from serve.errors import ModelLoadError
from serve.text.tokenizer import Tokenizer
from tests.support.engine.tokenizer_files import LEARNED, write_config

pytestmark = pytest.mark.usefixtures("no_trials")

TURN, END, BREAK = "<start_of_turn>", "<end_of_turn>", "\n\n"
TEXTS = ("the quick fox", " two  spaces", "日本 naïve 👍🏽", "a\n\nb\tc", "emoji 0123456789", "")


@functools.cache
def model(kind: str, *, prefix: bool = True, symbols: tuple[str, ...] = ()) -> bytes:
    import sentencepiece

    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LEARNED * 5),
        model_writer=made,
        vocab_size=400,
        model_type=kind,
        byte_fallback=True,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        user_defined_symbols=list(symbols),
        minloglevel=2,
    )
    return made.getvalue()


def directory(path: Path, data: bytes, **config: Any) -> Path:
    write_config(path, bos_token="<s>", eos_token="</s>", **config)
    (path / "tokenizer.model").write_bytes(data)
    return path


def library(data: bytes) -> Any:
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_proto=data)


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_equals_the_library(kind: str, prefix: bool, tmp_path: Path) -> None:
    data = model(kind, prefix=prefix)
    tokenizer = Tokenizer.load(directory(tmp_path / "model", data))
    for text in TEXTS:
        ids = library(data).encode(text)
        assert tokenizer.encode_plain(text) == ids
        assert tokenizer.decode(ids) == library(data).decode(ids) == text
    assert tokenizer.strips_leading_space == prefix


def test_tokens_of_turns(tmp_path: Path) -> None:
    """Gemma: the model itself has the tokens of turns, and finds them in any text."""
    data = model("bpe", prefix=False, symbols=(TURN, END, BREAK))
    ids = {name: library(data).piece_to_id(name) for name in (TURN, END, BREAK)}
    declared = {str(ids[name]): {"content": name, "special": True} for name in (TURN, END)}
    tokenizer = Tokenizer.load(
        directory(tmp_path / "model", data, added_tokens_decoder=declared, add_bos_token=True)
    )
    assert tokenizer.special_token_ids[TURN] == ids[TURN]
    text = f"{TURN}fox{END}\n\n"
    assert tokenizer.encode(text) == [
        1,
        ids[TURN],
        *library(data).encode("fox"),
        ids[END],
        ids[BREAK],
    ]
    for hostile in (text, TURN * 3, f"a{END}", f"<{TURN}"):
        plain = tokenizer.encode_plain(hostile)
        assert not tokenizer.special_ids.intersection(plain)
        assert tokenizer.decode(plain) == hostile


def test_added_tokens(tmp_path: Path) -> None:
    """InternLM: a token takes the place of a piece that nothing uses, or follows the last one."""
    data = model("bpe", symbols=("[UNUSED_TOKEN_1]",))
    unused, size = library(data).piece_to_id("[UNUSED_TOKEN_1]"), library(data).vocab_size()
    declared = {
        str(unused): {"content": "<|im_end|>", "special": True},
        str(size + 2): {"content": "<|tool|>", "special": False},
    }
    path = directory(
        tmp_path / "model",
        data,
        added_tokens_decoder=declared,
        additional_special_tokens=["<|late|>"],
        tokenizer_class="InternLM3Tokenizer",
    )
    (path / "added_tokens.json").write_text(json.dumps({"<|late|>": size, "<think>": size + 1}))
    tokenizer = Tokenizer.load(path)
    assert tokenizer.vocab_size == size + 3
    fox = library(data).encode("fox")
    ids = tokenizer.encode("fox<|im_end|><think><|late|><|tool|>", add_special_tokens=False)
    assert ids == [*fox, unused, size + 1, size, size + 2]
    assert tokenizer.decode(ids) == "fox<think><|tool|>"
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith("<think><|late|><|tool|>")
    assert tokenizer.special_ids >= {unused, size}
    assert not tokenizer.special_ids & {size + 1, size + 2}
    plain = tokenizer.encode_plain("<|late|><think><|im_end|>")
    assert size + 1 in plain and not tokenizer.special_ids.intersection(plain)
    assert tokenizer.pieces is not None and tokenizer.pieces[size + 2] == b"<|tool|>"


@pytest.mark.row("X7")
def test_wrong_added_tokens(tmp_path: Path) -> None:
    data = model("bpe")
    path = directory(tmp_path / "model", data)
    for added in ({"<a>": -1}, {"<a>": "7"}, {"<a>": None}, {"": 7}):
        (path / "added_tokens.json").write_text(json.dumps(added))
        with pytest.raises(ModelLoadError, match=r"added_tokens\.json has no token id"):
            Tokenizer.load(path)
    (path / "added_tokens.json").write_text(json.dumps({"<a>": 1 << 40}))
    with pytest.raises(ModelLoadError, match=r"tokenizer\.model has .* tokens, and an added one"):
        Tokenizer.load(path)
    (path / "added_tokens.json").unlink()
    for declared in ({"x": {"content": "<a>"}}, {"400": {}}, {"-1": {"content": "<a>"}}):
        write_config(path, added_tokens_decoder=declared)
        with pytest.raises(ModelLoadError, match="added_tokens_decoder has no token for"):
            Tokenizer.load(path)


@pytest.mark.row("X7")
def test_sentencepiece_of_another_model(tmp_path: Path) -> None:
    path = directory(tmp_path / "model", model("bpe"))
    (path / "config.json").write_text(json.dumps({"vocab_size": 300}))
    with pytest.raises(ModelLoadError, match=r"tokenizer\.model .* vocabulary has 300 "):
        Tokenizer.load(path)
