"""What a row of the tables of small checkpoints is, and settings that many rows share."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """A checkpoint: settings over the family's base, and a change of the saved directory.

    is_steady: Transformers' logits of a prefix stay as they are when the sequence grows, so greedy
    tokens can be compared. LongRoPE changes its factors for all positions at a length.
    rounding: the largest difference of fp32 logits that rounding causes.
    """

    family: str
    name: str
    settings: Json = field(default_factory=dict)
    finish: Callable[[Path], None] | None = None
    max_shard_size: str = "1GB"
    is_steady: bool = True
    rounding: float = 1e-4

    def __str__(self) -> str:
        return f"{self.family}-{self.name}"


def edit_json(file: Path, change: Callable[[Json], object]) -> None:
    """Rewrites a JSON file after `change` has edited its object in place."""
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


COMMON: Json = {"vocab_size": 320, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
LLAMA: Json = COMMON | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
YARN: Json = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
}
LLAMA3: Json = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
