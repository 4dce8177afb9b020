"""Tokenizer: equality with the libraries and with Transformers, byte pieces, and bad files."""

from __future__ import annotations

import functools
import io
import json
import random
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.errors import ModelLoadError, RequestError
from serve.tokenizer import Tokenizer
from tests.checkpoints import BOS, CHAT_TEMPLATE, CORPUS, EOS, Json, checkpoint, edit_json

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

LEARNED = [*CORPUS, "the the the fox fox dog", "line\nbreaks", "emoji 0123456789 special tokens"]


@functools.cache
def metaspace_json(scheme: str) -> str:
    """tokenizer.json in the style of Llama 2: BPE, Metaspace, byte fallback."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    fast = Fast(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=True)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if scheme != "never":
        steps.append(decoders.Strip(content=" ", left=1))
    fast.decoder = decoders.Sequence(steps)
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<unk>", BOS, EOS],
        initial_alphabet=[],
        limit_alphabet=60,
        show_progress=False,
    )
    fast.train_from_iterator(LEARNED * 3, trainer)
    state = json.loads(fast.to_str())
    vocab = state["model"]["vocab"]
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    fast = Fast.from_str(json.dumps(state))
    fast.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, 1)]
    )
    return fast.to_str()


@functools.cache
def sentencepiece_model() -> bytes:
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LEARNED * 5),
        model_writer=model,
        vocab_size=400,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return model.getvalue()


def write_config(path: Path, **config: object) -> Path:
    path.mkdir(exist_ok=True)
    values = {"bos_token": BOS, "eos_token": EOS, "unk_token": "<unk>"} | config
    (path / "tokenizer_config.json").write_text(json.dumps(values))
    return path


def make_directory(kind: str, parent: Path) -> Path:
    if kind == "bytes":
        return checkpoint("llama")
    if kind == "sentencepiece":
        return sentencepiece_directory(parent)
    path = write_config(parent / "model", clean_up_tokenization_spaces=False)
    scheme = "never" if kind == "never" else "first"
    (path / "tokenizer.json").write_text(metaspace_json(scheme), encoding="utf-8")
    return path


@pytest.fixture(scope="module", params=["bytes", "metaspace", "never", "sentencepiece"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_directory(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def reference(directory: Path) -> Any:
    """Transformers' tokenizer. It needs protobuf to read tokenizer.model."""
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


def test_lone_surrogate_is_the_callers_mistake(tokenizer: Tokenizer) -> None:
    for encode in (tokenizer.encode, tokenizer.encode_plain):
        with pytest.raises(RequestError, match="character 4") as caught:
            encode("text\ud83d")
        assert caught.value.param == "prompt"


def test_encode_from_many_threads(tokenizer: Tokenizer) -> None:
    """Same ids as alone, with both switches of special tokens in use at once."""
    picker = random.Random(0)
    texts = [" ".join(picker.choices(TEXTS, k=6)) for _ in range(120)]
    expected = [(tokenizer.encode(x), tokenizer.encode_plain(x)) for x in texts]
    with ThreadPoolExecutor(8) as pool:
        encoded = list(pool.map(tokenizer.encode, texts * 3))
        pairs = list(pool.map(lambda x: (tokenizer.encode(x), tokenizer.encode_plain(x)), texts))
    assert encoded == [ids for ids, _ in expected] * 3
    assert pairs == expected


def test_long_text_is_encoded_in_linear_time(tokenizer: Tokenizer) -> None:
    """A megabyte of one letter, of spaces, of marks: bounded, not quadratic."""
    for unit in ("a", " ", "\n", "e\u0301", "日"):
        text = unit * (200_000 // len(unit))
        start = time.monotonic()
        tokenizer.encode(text)
        assert time.monotonic() - start < 5.0, repr(unit)


# -- ids to bytes


def joined(tokenizer: Tokenizer, ids: list[int]) -> str:
    """What an incremental decoder makes of `pieces`."""
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

    @settings(max_examples=200, deadline=None)
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


# -- the directory


def sentencepiece_directory(parent: Path) -> Path:
    path = write_config(parent / "model", tokenizer_class="LlamaTokenizer", add_bos_token=True)
    (path / "tokenizer.model").write_bytes(sentencepiece_model())
    return path


def test_tokens_declared_only_in_tokenizer_config(tmp_path: Path) -> None:
    """Added with the ids they declare; not added where the id would differ."""
    path = shutil.copytree(checkpoint("llama"), tmp_path / "copy")
    declared = {
        "315": {"content": "<|tool|>", "special": True, "normalized": False},
        "400": {"content": "<|far|>", "special": True},
    }
    edit_json(
        path / "tokenizer_config.json", lambda config: config.update(added_tokens_decoder=declared)
    )
    tokenizer = Tokenizer.load(path)
    assert tokenizer.encode("a<|tool|>", add_special_tokens=False)[-1] == 315
    assert 315 in tokenizer.special_ids
    assert "<|far|>" not in tokenizer.special_token_strings
    assert tokenizer.vocab_size == 316


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    path = shutil.copytree(checkpoint("llama"), tmp_path / "copy")

    def change(state: Json) -> None:
        state["truncation"] = {
            "direction": "Right",
            "max_length": 4,
            "strategy": "LongestFirst",
            "stride": 0,
        }
        state["padding"] = {
            "strategy": {"Fixed": 64},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": BOS,
        }

    edit_json(path / "tokenizer.json", change)
    text = "the quick brown fox jumps over"
    assert Tokenizer.load(path).encode(text) == Tokenizer.load(checkpoint("llama")).encode(text)


def test_chat_template(tmp_path: Path) -> None:
    path = shutil.copytree(checkpoint("llama"), tmp_path / "copy")
    config = path / "tokenizer_config.json"
    assert Tokenizer.load(path).chat_template == CHAT_TEMPLATE
    several = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}]
    edit_json(config, lambda values: values.update(chat_template=several))
    assert Tokenizer.load(path).chat_template == "y"
    edit_json(config, lambda values: values.pop("chat_template"))
    assert Tokenizer.load(path).chat_template is None
    (path / "chat_template.jinja").write_text("{{ 'ü' }}", encoding="utf-8")
    assert Tokenizer.load(path).chat_template == "{{ 'ü' }}"
    (path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelLoadError, match=r"chat_template\.jinja"):
        Tokenizer.load(path)


def test_special_tokens_map_is_a_fallback(tmp_path: Path) -> None:
    path = shutil.copytree(checkpoint("llama"), tmp_path / "copy")
    (path / "tokenizer_config.json").unlink()
    assert Tokenizer.load(path).bos_token_id is None
    (path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": BOS}}))
    assert Tokenizer.load(path).bos_token_id == 0


BROKEN: dict[str, Callable[[Json], object]] = {
    "no model": lambda state: state.pop("model"),
    "unknown model": lambda state: state["model"].update(type="Telepathy"),
    "merge of unknown tokens": lambda state: state["model"]["merges"].append(["qq", "zz"]),
    "merges of another type": lambda state: state["model"].update(merges=5),
    "negative id": lambda state: state["model"]["vocab"].update(a=-1),
    "id of 2^40": lambda state: state["model"]["vocab"].update(a=1 << 40),
    "id of 2^32 - 1": lambda state: state["model"]["vocab"].update(a=(1 << 32) - 1),
    "empty vocabulary": lambda state: (
        state.update(added_tokens=[], post_processor=None),
        state["model"].update(vocab={}, merges=[]),
    ),
    "template of an unknown token": lambda state: state["post_processor"].update(special_tokens={}),
    "bad regex": lambda state: state.update(
        pre_tokenizer={
            "type": "Split",
            "pattern": {"Regex": "(("},
            "behavior": "Isolated",
            "invert": False,
        }
    ),
}


@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN)
def test_broken_tokenizer_json(change: Callable[[Json], object], tmp_path: Path) -> None:
    path = shutil.copytree(checkpoint("llama"), tmp_path / "copy")
    edit_json(path / "tokenizer.json", change)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        Tokenizer.load(path)


def test_broken_files(tmp_path: Path) -> None:
    path = shutil.copytree(checkpoint("llama"), tmp_path / "copy")
    data = (path / "tokenizer.json").read_bytes()
    for bad in (b"", b"{}", b"[]", b"\xff\xfe", data[: len(data) // 2], b"[" * 200_000):
        (path / "tokenizer.json").write_bytes(bad)
        with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
            Tokenizer.load(path)
    (path / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match="neither"):
        Tokenizer.load(path)
    model = sentencepiece_model()
    for bad in (b"", b"xx", b"\xff" * 100, model[:100], model[: len(model) // 2]):
        (path / "tokenizer.model").write_bytes(bad)
        with pytest.raises(ModelLoadError, match=r"tokenizer\.model"):
            Tokenizer.load(path)
    (path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": "evil.T"}}')
    with pytest.raises(ModelLoadError, match="auto_map"):
        Tokenizer.load(path)
