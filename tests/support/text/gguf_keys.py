"""The keys of GGUF files for a tokenizer, as llama.cpp's converter writes them, and texts."""

from __future__ import annotations

import functools
import io
import json
import random
from collections.abc import Iterator
from typing import Any

from tests.support.engine import tokenizer_pipelines as make
from tests.support.engine.checkpoints import BOS, EOS, Json
from tests.support.engine.tokenizer_files import LEARNED

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "▁"
OWN = ("\n\n", "▁▁", "▁▁▁", "<h1>")  # of a user, in a model of sentencepiece
PADDING = 3  # rows of the embedding beyond the tokens
TURN, END, THOUGHT, TAB = "<|im_start|>", "<|im_end|>", "<think>", "\t\t"
PARTS = (
    *LEARNED,
    *(
        BOS,
        EOS,
        TURN,
        END,
        THOUGHT,
        TAB,
        "<0x41>",
        "[PAD7]",
        SPACE,
        " ",
        "   ",
        "\n",
        "\r\n\r\n",
        "\t",
    ),
    *(
        "I'LL",
        "don't ",
        "'s",
        "'S",
        "1234567",
        "٣٤",
        "½",
        "3.14",
        "x_y",
        "CamelCase",
        "ÀÉé",
        "ǅabc",
    ),
    *(
        "日本語",
        "中文字",
        "한국어",
        "naïve",
        "cafe\u0301",
        "\u0301",
        "👍🏽",
        "👨\u200d👩\u200d👧",
        "\ufdfa",
    ),
    *("ẞß", "!!!", "://", "{[(", "\u3000", "\xa0", "\x00", "\x7f", "\U000e0001", "कि", "กำ"),
)


def awkward_texts(count: int, seed: int = 0) -> Iterator[str]:
    """Yields texts of parts that split differently, cut at random places."""
    chance = random.Random(seed)
    for _ in range(count):
        parts = chance.choices(PARTS, k=chance.randrange(6))
        text = "".join(part[chance.randrange(len(part)) :][:24] for part in parts)
        yield text[chance.randrange(4) :]


@functools.cache
def _wide_model() -> Json:
    """Returns byte pairs that were learned across words, digits and line ends."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[BOS, EOS],
        show_progress=False,
    )
    ordinary = [part for part in PARTS if part not in (BOS, EOS, TURN, END, THOUGHT, TAB)]
    chance = random.Random(7)
    lines = ["".join(chance.choices(ordinary, k=3)) for _ in range(300)]
    fast.train_from_iterator(lines, trainer)
    model: Json = json.loads(fast.to_str())["model"]
    return model


def byte_level_tokenizer(pre_tokenizer: Json, normalizer: Json | None, **model: Any) -> Json:
    """Returns a tokenizer.json with tokens of turns, and two that are a user's own."""
    wide = dict(_wide_model())
    size = len(wide["vocab"])
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    names = {TURN: True, END: True, THOUGHT: False, TAB: False}
    ids = {BOS: 0, EOS: 1} | {name: size + at for at, name in enumerate(names)}
    return make.bytes_state() | {
        "added_tokens": [
            {"id": at, "content": name, "special": names.get(name, True), **flags}
            for name, at in ids.items()
        ],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "model": wide | model,
    }


def keys_of_json(state: Json, pre: str, **others: Any) -> dict[str, Any]:
    """Returns the keys for a byte-level tokenizer.json."""
    added = {item["id"]: item for item in state["added_tokens"]}
    texts = {index: text for text, index in state["model"]["vocab"].items()}
    texts |= {index: item["content"] for index, item in added.items()}
    size = max(texts) + 1 + PADDING
    types = [
        UNUSED
        if index not in texts
        else NORMAL
        if index not in added
        else CONTROL
        if added[index]["special"]
        else USER_DEFINED
        for index in range(size)
    ]
    merges = [
        pair if isinstance(pair, str) else " ".join(pair) for pair in state["model"]["merges"]
    ]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [texts.get(index, f"[PAD{index}]") for index in range(size)],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": False,
    } | {f"tokenizer.ggml.{name}": value for name, value in others.items()}


def keys_of_sentencepiece(data: bytes, kind: str, **others: Any) -> dict[str, Any]:
    """Returns the keys for a tokenizer.model. A user's own tokens are written with plain spaces,
    and without a score."""
    import sentencepiece

    library = sentencepiece.SentencePieceProcessor(model_proto=data)
    ids = range(library.vocab_size())
    own = set(others.pop("own", ()))
    texts = [str(library.id_to_piece(index)) for index in ids]
    types = [
        USER_DEFINED
        if texts[index] in own
        else UNKNOWN
        if library.is_unknown(index)
        else CONTROL
        if library.is_control(index)
        else UNUSED
        if library.is_unused(index)
        else BYTE
        if library.is_byte(index)
        else NORMAL
        for index in ids
    ]
    scores = [-1000.0 if texts[at] in own else float(library.get_score(at)) for at in ids]
    texts = [text.replace(SPACE, " ") if text in own else text for text in texts]
    rows = range(len(texts), len(texts) + PADDING)
    return {
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": texts + [f"[PAD{index}]" for index in rows],
        "tokenizer.ggml.scores": scores + [-10000.0] * PADDING,
        "tokenizer.ggml.token_type": types + [UNUSED] * PADDING,
        "tokenizer.ggml.bos_token_id": library.bos_id(),
        "tokenizer.ggml.eos_token_id": library.eos_id(),
        "tokenizer.ggml.unknown_token_id": library.unk_id(),
        "general.architecture": "llama",
    } | {f"tokenizer.ggml.{name}": value for name, value in others.items()}


def llama3_state() -> Json:
    split = make.sequence("pretokenizers", make.split(make.GPT4), make.byte_level())
    return byte_level_tokenizer(split, None, ignore_merges=True)


def llama3_keys(**others: Any) -> dict[str, Any]:
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
