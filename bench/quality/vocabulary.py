"""The words of the small model: one token each, so that a text and its tokens are the same list."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NUM_NAMES = 256  # keys and values of facts
NUM_CLASSES = 32  # of the items of a mapping; an item's class is the same in every text
ITEMS_PER_CLASS = 6
NUM_LABELS = 32
NUM_WORDS = 128  # of running text

SPACE = "\u0120"  # how byte-level tokenizers write it
BOS, END, ASK, ASK_CHAIN, COLON, STOP = range(6)
SPECIALS = ("<|bos|>", "<|end|>", "?", "!", ":", ".")
NAMES = len(SPECIALS)
ITEMS = NAMES + NUM_NAMES
LABELS = ITEMS + NUM_CLASSES * ITEMS_PER_CLASS
WORDS = LABELS + NUM_LABELS
NUM_TOKENS = WORDS + NUM_WORDS
VOCAB_SIZE = 640  # rounded up; the rest are never used


def all_words() -> list[str]:
    """Returns the word of each token. None is the beginning of another one."""
    words = list(SPECIALS)
    words += [f"n{i:03}" for i in range(NUM_NAMES)]
    words += [f"i{i:03}" for i in range(NUM_CLASSES * ITEMS_PER_CLASS)]
    words += [f"l{i:03}" for i in range(NUM_LABELS)]
    words += [f"w{i:03}" for i in range(NUM_WORDS)]
    words += [f"unused{i:02}" for i in range(VOCAB_SIZE - NUM_TOKENS)]
    return words


def text_of(tokens: Sequence[int]) -> str:
    """Returns the text that the tokenizer reads as these tokens."""
    words = all_words()
    return "".join(words[t] if t in (BOS, END) else f" {words[t]}" for t in tokens)


def item(class_index: int, index: int) -> int:
    """Returns the token of an item of a class."""
    return ITEMS + class_index * ITEMS_PER_CLASS + index


def write_tokenizer(directory: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json: words that begin with a space."""
    words = all_words()
    added = [
        {
            "id": token,
            "content": words[token],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token in (BOS, END)
    ]
    space = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    spaced = [word if token in (BOS, END) else f"{SPACE}{word}" for token, word in enumerate(words)]
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": r" ?[^ ]+"},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {**space, "use_regex": False},
            ],
        },
        "post_processor": None,
        "decoder": {**space, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {word: token for token, word in enumerate(spaced)},
            "merges": [],
        },
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer, indent=1) + "\n")
    settings = {"bos_token": words[BOS], "eos_token": words[END], "add_bos_token": False}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
