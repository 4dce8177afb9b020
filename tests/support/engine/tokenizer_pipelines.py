"""The steps of tokenizers that are in use, each with a small vocabulary."""

from __future__ import annotations

import base64
import functools
import io
import json
import struct
from typing import Any

from tests.support.engine.checkpoints import BOS, EOS, Json, checkpoint
from tests.support.engine.tokenizer_files import LEARNED, metaspace_json

SPACE = "▁"
GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
THREES = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))"
CLIP = r"<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
DEEPSEEK = [
    r"[\r\n]",
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-Ⴥ]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    r"[一-龥ࠀ-一가-퟿]+",
]


def replace(content: str, **pattern: str) -> Json:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(key: str, *steps: Json) -> Json:
    return {"type": "Sequence", key: list(steps)}


def split(regex: str) -> Json:
    return {
        "type": "Split",
        "pattern": {"Regex": regex},
        "behavior": "Isolated",
        "invert": False,
    }


def byte_level() -> Json:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }


def metaspace() -> Json:
    return {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": True}


def bytes_state() -> Json:
    """Returns a byte-level BPE, with BOS in front."""
    state: Json = json.loads((checkpoint("llama") / "tokenizer.json").read_text())
    return state


def bytes_with(normalizer: Json | None, *splits: str) -> Json:
    steps = [*map(split, splits), byte_level()]
    return bytes_state() | {
        "normalizer": normalizer,
        "pre_tokenizer": sequence("pretokenizers", *steps),
    }


def pieces_with(normalizer: Json, pre_tokenizer: Json | None) -> Json:
    """Returns a BPE with byte fallback, in the style of sentencepiece."""
    state: Json = json.loads(metaspace_json("first"))
    return state | {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer}


@functools.cache
def unigram_model(rule: str = "nmt_nfkc") -> bytes:
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LEARNED * 5),
        model_writer=model,
        vocab_size=150,
        model_type="unigram",
        hard_vocab_limit=False,
        normalization_rule_name=rule,
        minloglevel=2,
    )
    return model.getvalue()


@functools.cache
def charsmap() -> bytes:
    """Returns sentencepiece's table of nmt_nfkc: the size of its trie, the trie, and the texts."""
    data = unigram_model()
    # the field precompiled_charsmap behind the field name of the normalizer's specification
    at = data.index(b"\x0a\x08nmt_nfkc\x12") + 11
    size = shift = 0
    while True:
        byte = data[at]
        at += 1
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return data[at : at + size]


def charsmap_texts() -> list[bytes]:
    return charsmap()[4 + struct.unpack("<I", charsmap()[:4])[0] :].split(b"\0")


def precompiled(table: bytes | None = None) -> Json:
    encoded = base64.b64encode(table or charsmap()).decode()
    return {"type": "Precompiled", "precompiled_charsmap": encoded}


def unigram_with(normalizer: Json) -> Json:
    pieces = [["<unk>", 0.0], [BOS, 0.0], [EOS, 0.0], [SPACE, -2.0]]
    pieces += [[char, -4.0] for char in "abcdefghijklmnopqrstuvwxyz0123456789.,"]
    return bytes_state() | {
        "added_tokens": [],
        "normalizer": normalizer,
        "pre_tokenizer": sequence("pretokenizers", {"type": "WhitespaceSplit"}, metaspace()),
        "post_processor": template(EOS, 2),
        "decoder": metaspace(),
        "model": {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": False},
    }


def template(token: str, index: int) -> Json:
    text, end = (
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": token, "type_id": 0}},
    )
    second = {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [text, end],
        "pair": [text, end, second, end],
        "special_tokens": {token: {"id": token, "ids": [index], "tokens": [token]}},
    }


def bert() -> Json:
    words = ["[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz", "##a", "##b", "fox", "##es"]
    return bytes_state() | {
        "added_tokens": [],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": template("[SEP]", 2),
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {word: index for index, word in enumerate(words)},
        },
    }


def pipelines() -> dict[str, Any]:
    """Returns functions that make a tokenizer.json, by the model whose steps it has."""
    spaces = replace(SPACE, String=" ")
    squeeze = replace(SPACE, Regex=" {2,}")
    nfkd = [{"type": "NFKD"}, {"type": "StripAccents"}, {"type": "Lowercase"}]
    quotes = [replace('"', String="``"), replace('"', String="''")]
    strip = {"type": "Strip", "strip_left": False, "strip_right": True}
    llama2 = sequence("normalizers", {"type": "Prepend", "prepend": SPACE}, spaces)
    between = {
        "type": "Split",
        "pattern": {"String": " "},
        "behavior": "MergedWithPrevious",
        "invert": False,
    }
    clip = [{"type": "NFC"}, replace(" ", Regex=r"\s+"), {"type": "Lowercase"}]
    return {
        "GPT-2": bytes_state,
        "Llama 2, Mistral": lambda: pieces_with(llama2, None),
        "Llama 3": lambda: bytes_with(None, GPT4),
        "Qwen": lambda: bytes_with({"type": "NFC"}, GPT4),
        "GPT-OSS": lambda: bytes_with(None, O200K),
        "DeepSeek": lambda: bytes_with(sequence("normalizers"), *DEEPSEEK),
        "digits in threes": lambda: bytes_with(None, THREES, GPT4),
        "Gemma": lambda: pieces_with(spaces, between),
        "CLIP": lambda: bytes_with(sequence("normalizers", *clip), CLIP),
        "BERT": bert,
        "XLM-R": lambda: unigram_with(sequence("normalizers", precompiled(), squeeze)),
        "T5": lambda: unigram_with(sequence("normalizers", precompiled(), strip, squeeze)),
        "ALBERT": lambda: unigram_with(
            sequence("normalizers", *quotes, *nfkd, precompiled(), squeeze)
        ),
    }
