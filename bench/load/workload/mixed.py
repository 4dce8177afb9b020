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

NUM_WARM_UP = 64  # conversations at the end of the file that no load uses
FILE = Path(__file__).parents[2] / "data" / "mixed.jsonl"
Messages = list[dict[str, Any]]


def mixed_requests(seed: int, count: int) -> list[Messages]:
    """Returns count conversations, each of which ends with a question.

    Seed 0 takes them in the file's order, every other seed in a different order. If count exceeds
    the file, the file is read again, each time in a new order.
    """
    conversations = _conversations()
    chosen: list[int] = []
    while len(chosen) < count:
        order = list(range(num_mixed()))
        if seed or chosen:
            random.Random(f"mixed-{seed}-{len(chosen)}").shuffle(order)
        chosen += order
    return [[dict(message) for message in conversations[i]] for i in chosen[:count]]


def warm_up_requests(count: int) -> list[Messages]:
    """Returns count conversations that mixed_requests never returns."""
    conversations = _conversations()
    loads = conversations[:-NUM_WARM_UP]
    reserved = [messages for messages in conversations[-NUM_WARM_UP:] if messages not in loads]
    return [[dict(message) for message in reserved[i % len(reserved)]] for i in range(count)]


def num_mixed() -> int:
    """Returns the number of different conversations that a load can have."""
    return len(_conversations()) - NUM_WARM_UP


@cache
def _conversations() -> list[Messages]:
    return [orjson.loads(line)["messages"] for line in FILE.read_bytes().splitlines()]
