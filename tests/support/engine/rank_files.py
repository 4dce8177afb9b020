"""Files of ranks, and a slow encoder for them."""

from __future__ import annotations

import base64
import functools
import itertools
import json
from pathlib import Path
from typing import Any

import regex

ROOT = Path(__file__).parents[3]
NUM_SPECIAL = 40
V7_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)


@functools.cache
def learned_ranks(size: int = 1500) -> dict[bytes, int]:
    """Returns byte pairs of this repository's documents, merged as they are most frequent."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    texts = [file.read_text(encoding="utf-8") for file in sorted((ROOT / "docs").glob("*.md"))]
    fast.train_from_iterator(
        [*texts, "日本語 naïve 👍🏽 中文字 " * 20, " " * 64 + "-" * 64], trainer
    )
    state = json.loads(fast.to_str())["model"]["vocab"]
    back = {char: byte for byte, char in _byte_chars().items()}
    return {bytes(back[char] for char in token): rank for token, rank in state.items()}


def _byte_chars() -> dict[int, str]:
    """Returns the alphabet of byte-level tokenizers, as transformers writes it."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    made: dict[int, str] = bytes_to_unicode()
    return made


def tiktoken_file(ranks: dict[bytes, int]) -> bytes:
    lines = (b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items())
    return b"".join(lines)


def tekken_file(
    ranks: dict[bytes, int],
    *,
    pattern: str,
    version: str = "v7",
    special: tuple[str, ...] | None = V7_SPECIAL,
    unused: int = 3,
) -> dict[str, Any]:
    """Returns a tekken.json. unused: tokens behind those that are used."""
    vocab = [
        {
            "rank": rank,
            "token_bytes": base64.b64encode(token).decode(),
            "token_str": token.decode("utf-8", "replace"),
        }
        for token, rank in ranks.items()
    ]
    for number in range(unused):
        token_bytes = base64.b64encode(b"unused%d" % number).decode()
        vocab.append({"rank": len(vocab), "token_bytes": token_bytes, "token_str": None})
    config = {
        "pattern": pattern,
        "num_vocab_tokens": len(vocab),
        "default_vocab_size": len(ranks) + NUM_SPECIAL,
        "default_num_special_tokens": NUM_SPECIAL,
        "version": version,
    }
    file: dict[str, Any] = {"config": config, "vocab": vocab}
    if special is not None:
        file["special_tokens"] = [
            {"rank": rank, "token_str": token, "is_control": True}
            for rank, token in enumerate(special)
        ]
    return file


def slow_encode(ranks: dict[bytes, int], pattern: str, text: str) -> list[int]:
    """Merges as tiktoken does: always the first pair of neighbours of the lowest rank."""
    ids: list[int] = []
    for piece in regex.findall(f"(?V1){pattern}", text):
        data = piece.encode()
        if data in ranks:
            ids.append(ranks[data])
            continue
        parts = [data[at : at + 1] for at in range(len(data))]
        while True:
            pairs = [left + right for left, right in itertools.pairwise(parts)]
            found = [(ranks[pair], at) for at, pair in enumerate(pairs) if pair in ranks]
            if not found:
                break
            _, at = min(found)
            parts[at : at + 2] = [pairs[at]]
        ids += [ranks[part] for part in parts]
    return ids
