"""Tokenizer: equality with the libraries and with Transformers, byte pieces, and bad files."""

from __future__ import annotations

import functools
import io
import json
import random
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.errors import ModelLoadError, RequestError
from serve.tokenizer import Tokenizer
from tests.checkpoints import BOS, CHAT_TEMPLATE, CORPUS, EOS, checkpoint, edit_json

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


@pytest.fixture(scope="module", params=["bytes", "metaspace", "never", "sentencepiece"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind: str = request.param
    if kind == "bytes":
        return checkpoint("llama")
    path = write_config(
        tmp_path_factory.mktemp(kind) / "model",
        tokenizer_class="LlamaTokenizer" if kind == "sentencepiece" else "TokenizersBackend",
        clean_up_tokenization_spaces=False,
    )
    if kind == "sentencepiece":
        (path / "tokenizer.model").write_bytes(sentencepiece_model())
    else:
        scheme = "never" if kind == "never" else "first"
        (path / "tokenizer.json").write_text(metaspace_json(scheme), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def reference(directory: Path):  # type: ignore[no-untyped-def]
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_encode_and_decode_equal_transformers(text: str, directory: Path, reference) -> None:  # type: ignore[no-untyped-def]
    tokenizer = Tokenizer.load(directory)
    ids = tokenizer.encode(text)
    assert ids == reference.encode(text)
    assert ids[0] == tokenizer.bos_token_id
    plain = tokenizer.encode(text, add_special_tokens=False)
    assert plain == reference.encode(text, add_special_tokens=False)
    for skip in (True, False):
        expected = reference.decode(ids, skip_special_tokens=skip)
        assert tokenizer.decode(ids, skip_special_tokens=skip) == expected
