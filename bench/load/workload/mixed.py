"""The workload `mixed`: conversations of the built-in model's own mixture.

bench/data/mixed.jsonl holds them, in the form of `--dataset jsonl:FILE`;
examples/default_model/corpus wrote it.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import orjson

FILE = Path(__file__).parents[2] / "data" / "mixed.jsonl"
Messages = list[dict[str, Any]]


def mixed_requests(seed: int, count: int) -> list[Messages]:
    """Returns count conversations, each of which ends with a question.

    Seed 0 takes them in the file's order, every other seed in an order of its own. Where count
    is larger than the file, the file is read again, each time in a new order.
    """
    conversations = _conversations()
    chosen: list[int] = []
    while len(chosen) < count:
        order = list(range(len(conversations)))
        if seed or chosen:
            random.Random(f"mixed-{seed}-{len(chosen)}").shuffle(order)
        chosen += order
    return [[dict(message) for message in conversations[i]] for i in chosen[:count]]


def num_mixed() -> int:
    """Returns how many different conversations there are."""
    return len(_conversations())


@cache
def _conversations() -> list[Messages]:
    return [orjson.loads(line)["messages"] for line in FILE.read_bytes().splitlines()]
