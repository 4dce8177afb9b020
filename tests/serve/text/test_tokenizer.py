"""The tokenizer equals SentencePiece and Transformers, and its byte pieces give the text."""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.errors import RequestError
from serve.text.fast_codec import LONG_TEXT, FastCodec
from serve.text.tokenizer import Tokenizer
from tests.support.engine.checkpoints import BOS, EOS
from tests.support.engine.tokenizer_files import (
    make_directory,
    metaspace_json,
    sentencepiece_directory,
    sentencepiece_model,
    write_config,
)
from tests.support.profile import examples

pytestmark = pytest.mark.usefixtures("no_trials")

TEXTS = [
    "",
    " ",
    "   ",
    "the quick brown fox",
    " leading and  double spaces ",
    "line\nbreaks\r\n\n\tand tabs",
    "naïve café über groß",
    "e\u0301 combining o\u0308 marks",
    "日本語のテキスト 한국어 中文",
    "👍🏽 👩‍👩‍👧‍👦 🇩🇪 emoji",
    "\u200d\u202e\ufeff\ufffe odd",
    "0123456789 3.14159",
    f"inside{EOS}special {BOS} tokens{EOS}",
    f"{BOS}{EOS}",
    "x" * 500,
]


@pytest.fixture(scope="module", params=["bytes", "metaspace", "never", "sentencepiece"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_directory(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def reference(directory: Path) -> Any:
    """Transformers' tokenizer, which needs protobuf to read tokenizer.model."""
    if (directory / "tokenizer.model").exists():
        pytest.importorskip("google.protobuf")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.load(directory)


# -- text to ids


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_encode_and_decode_equal_transformers(
    text: str, directory: Path, tokenizer: Tokenizer, reference: Any
) -> None:
    if (directory / "tokenizer.model").exists() and text.startswith(" "):
        pytest.skip("sentencepiece itself, unlike Transformers' copy, always adds its space")
    ids = tokenizer.encode(text)
    assert ids == reference.encode(text)
    assert ids[0] == tokenizer.bos_token_id
    without = tokenizer.encode(text, add_special_tokens=False)
    assert without == reference.encode(text, add_special_tokens=False)
    for skip in (True, False):
        expected = reference.decode(ids, skip_special_tokens=skip)
        assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


def test_encode_equals_sentencepiece(tmp_path: Path) -> None:
    import sentencepiece

    path = sentencepiece_directory(tmp_path)
    tokenizer = Tokenizer.load(path)
    library = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model())
    for text in TEXTS:
        ids = library.encode(text)
        assert tokenizer.encode_plain(text) == ids
        assert tokenizer.decode(ids) == library.decode(ids)
        if EOS not in text:
            assert tokenizer.encode(text) == [1, *ids]
            assert tokenizer.encode(text, add_special_tokens=False) == ids
    fox = library.encode("fox")
    assert library.id_to_piece(fox[0]).startswith("▁")
    inside = tokenizer.encode(f"fox{EOS}fox", add_special_tokens=False)
    assert inside[: len(fox) + 1] == [*fox, 2]
    assert tokenizer.decode(inside, skip_special_tokens=False) == f"fox{EOS}fox"
    write_config(path, add_bos_token=False, add_eos_token=True)
    assert Tokenizer.load(path).encode("fox") == [*fox, 2]
    (path / "tokenizer_config.json").unlink()
    alone = Tokenizer.load(path)
    assert (alone.bos_token_id, alone.eos_token_id, alone.encode("fox")) == (1, 2, [1, *fox])


@pytest.mark.row("T6")
def test_plain_text_never_gives_special_tokens(tokenizer: Tokenizer) -> None:
    for text in (EOS, f"a{BOS}b", f"{EOS}{EOS} {BOS}", "<unk>"):
        ids = tokenizer.encode_plain(text)
        assert not tokenizer.special_ids.intersection(ids)
        assert tokenizer.decode(ids) == text


def test_special_tokens(tokenizer: Tokenizer) -> None:
    assert {BOS, EOS} <= set(tokenizer.special_token_strings)
    assert len(tokenizer.special_token_strings) == len(tokenizer.special_ids)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    assert bos is not None
    assert eos is not None
    assert {bos, eos} <= tokenizer.special_ids
    assert tokenizer.named_tokens["bos_token"] == BOS
    assert tokenizer.encode(EOS, add_special_tokens=False) == [eos]
    assert tokenizer.token_text(eos) == EOS
    assert tokenizer.decode([bos, eos]) == ""


def test_a_lone_surrogate_is_a_request_error(tokenizer: Tokenizer) -> None:
    for encode in (tokenizer.encode, tokenizer.encode_plain):
        with pytest.raises(RequestError, match="character 4") as caught:
            encode("text\ud83d")
        assert caught.value.param == "prompt"


def test_encode_from_many_threads(tokenizer: Tokenizer) -> None:
    """The ids are those of one thread, with and without special tokens at the same time."""
    picker = random.Random(0)
    texts = [" ".join(picker.choices(TEXTS, k=6)) for _ in range(120)]
    expected = [(tokenizer.encode(x), tokenizer.encode_plain(x)) for x in texts]
    with ThreadPoolExecutor(8) as pool:
        encoded = list(pool.map(tokenizer.encode, texts * 3))
        pairs = list(pool.map(lambda x: (tokenizer.encode(x), tokenizer.encode_plain(x)), texts))
    assert encoded == [ids for ids, _ in expected] * 3
    assert pairs == expected


@pytest.mark.row("T12")
def test_long_text_is_encoded_in_linear_time(tokenizer: Tokenizer) -> None:
    """Long runs of one letter, space or mark do not take quadratic time."""
    for unit in ("a", " ", "\n", "e\u0301", "日"):
        text = unit * (200_000 // len(unit))
        start = time.monotonic()
        tokenizer.encode(text)
        assert time.monotonic() - start < 5.0, repr(unit)


def test_long_texts_have_the_ids_and_the_text_of_short_calls(tokenizer: Tokenizer) -> None:
    """Long ones go other ways through the library, which release the GIL."""
    picker = random.Random(1)
    text = " ".join(picker.choices([text for text in TEXTS if text], k=2000))
    assert len(text) > 2 * LONG_TEXT
    codec = tokenizer._codec
    ids = tokenizer.encode(text)
    shown = tokenizer.decode(ids, skip_special_tokens=False)
    if isinstance(codec, FastCodec):
        assert ids == codec._fast.encode(text).ids
        assert shown == codec._fast.decode(ids, skip_special_tokens=False)


# -- ids to bytes


def joined(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Returns the text of the ids' pieces."""
    assert tokenizer.pieces is not None
    data = b"".join(tokenizer.pieces[index] for index in ids)
    if tokenizer.strips_leading_space and data.startswith(b" "):
        data = data[1:]
    return data.decode("utf-8")


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_pieces_give_the_decoded_text(text: str, tokenizer: Tokenizer) -> None:
    for ids in (tokenizer.encode(text, add_special_tokens=False), tokenizer.encode_plain(text)):
        assert joined(tokenizer, ids) == tokenizer.decode(ids, skip_special_tokens=False)
    if not (tokenizer.strips_leading_space and text.startswith(" ")):
        assert joined(tokenizer, tokenizer.encode_plain(text)) == text


@pytest.mark.parametrize("kind", ["bytes", "metaspace", "sentencepiece"])
def test_pieces_of_any_text(kind: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(make_directory(kind, tmp_path))

    @examples(200)
    @given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
    def check(text: str) -> None:
        ids = tokenizer.encode_plain(text)
        shown = tokenizer.decode(ids, skip_special_tokens=False)
        assert joined(tokenizer, ids) == shown
        if "▁" not in text and not text.startswith(" "):
            assert shown == text

    check()


def test_every_id_has_its_piece(tokenizer: Tokenizer) -> None:
    assert tokenizer.pieces is not None
    assert len(tokenizer.pieces) >= tokenizer.vocab_size
    for index in range(tokenizer.vocab_size):
        piece = tokenizer.pieces[index]
        shown = tokenizer.decode([index], skip_special_tokens=False)
        if tokenizer.strips_leading_space:
            piece = piece.removeprefix(b" ")
        assert piece.decode("utf-8", errors="replace") == shown


def test_ids_without_a_token_are_empty(directory: Path, tokenizer: Tokenizer) -> None:
    """A model's vocabulary is often padded beyond the tokenizer's."""
    assert tokenizer.pieces is not None
    beyond = max(len(tokenizer.pieces), tokenizer.vocab_size)
    assert tokenizer.token_text(beyond) == ""
    assert tokenizer.decode([beyond + 5]) == ""
    if (directory / "config.json").exists():
        assert tokenizer.vocab_size == 315
        assert tokenizer.pieces[315:] == [b""] * 5


def test_characters_split_over_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_plain("🦜")
    assert len(ids) > 2
    assert "\ufffd" in tokenizer.token_text(ids[-1])
    assert tokenizer.decode(ids) == "🦜"


def test_other_decoders_have_no_pieces(tmp_path: Path) -> None:
    path = write_config(tmp_path / "model", unk_token="[UNK]")
    model = {"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 1, "b": 2}, "unk_token": "[UNK]"}
    state = json.loads(metaspace_json("first")) | {"model": model, "added_tokens": []}
    state |= {"post_processor": None, "pre_tokenizer": {"type": "Whitespace"}}
    for decoder in (None, {"type": "WordPiece", "prefix": "##", "cleanup": False}):
        (path / "tokenizer.json").write_text(json.dumps(state | {"decoder": decoder}))
        tokenizer = Tokenizer.load(path)
        assert tokenizer.pieces is None
        assert tokenizer.encode("a b") == [1, 2]
        assert tokenizer.token_text(2) == "b"
        assert tokenizer.bos_token_id is None
