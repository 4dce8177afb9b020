"""The words of the small model: one token each, so that a text and its tokens are the same list."""

from __future__ import annotations

import json
from pathlib import Path

NUM_NAMES = 256  # keys and values of facts
NUM_CLASSES = 32  # of the items of a mapping; an item's class is the same in every text
ITEMS_PER_CLASS = 6
NUM_LABELS = 32
NUM_WORDS = 128  # of running text

BOS, END, ASK, ASK_CHAIN, COLON, STOP = range(6)
SPECIALS = ("<|bos|>", "<|end|>", "?", "??", ":", ".")
NAMES = len(SPECIALS)
ITEMS = NAMES + NUM_NAMES
LABELS = ITEMS + NUM_CLASSES * ITEMS_PER_CLASS
WORDS = LABELS + NUM_LABELS
NUM_TOKENS = WORDS + NUM_WORDS
VOCAB_SIZE = 640  # rounded up; the rest are never used


def all_words() -> list[str]:
    """Returns the word of each token."""
    words = list(SPECIALS)
    words += [f"n{i}" for i in range(NUM_NAMES)]
    words += [f"i{i}" for i in range(NUM_CLASSES * ITEMS_PER_CLASS)]
    words += [f"l{i}" for i in range(NUM_LABELS)]
    words += [f"w{i}" for i in range(NUM_WORDS)]
    words += [f"unused{i}" for i in range(VOCAB_SIZE - NUM_TOKENS)]
    return words


def item(class_index: int, index: int) -> int:
    """Returns the token of an item of a class."""
    return ITEMS + class_index * ITEMS_PER_CLASS + index


def write_tokenizer(directory: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json: words between spaces."""
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
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: token for token, word in enumerate(words)},
            "unk_token": "<|end|>",
        },
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer, indent=1) + "\n")
    settings = {"bos_token": words[BOS], "eos_token": words[END], "add_bos_token": False}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
