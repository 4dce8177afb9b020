"""Directories of small tokenizers."""

from __future__ import annotations

import functools
import io
import json
from pathlib import Path

from tests.support.engine.checkpoints import BOS, CORPUS, EOS, checkpoint

LEARNED = [*CORPUS, "the the the fox fox dog", "line\nbreaks", "emoji 0123456789 special tokens"]


@functools.cache
def metaspace_json(scheme: str) -> str:
    """Returns a tokenizer.json in the style of Llama 2: BPE, Metaspace, byte fallback."""
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


def sentencepiece_directory(parent: Path) -> Path:
    path = write_config(parent / "model", tokenizer_class="LlamaTokenizer", add_bos_token=True)
    (path / "tokenizer.model").write_bytes(sentencepiece_model())
    return path
