"""The size and the time of a step's message: it does not depend on the lengths of contexts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from memory.attention.seam import AttentionStep
from memory.edit_recorder import MemoryEdit, MemoryEditKind
from serve.group.links import messages

_CALLS = 200


@dataclass(frozen=True, slots=True)
class MessageCost:
    num_bytes: int
    pack_us: float
    read_us: float


def message_cost(num_sequences: int, context: int, num_edits: int = 4) -> MessageCost:
    """Returns the cost of a decode step's message."""
    starts = [number * (context + 64) for number in range(num_sequences)]
    step = AttentionStep(num_sequences, starts, [1] * num_sequences, [context] * num_sequences)
    edits = [MemoryEdit(MemoryEditKind.MAP, number << 21, number, 1) for number in range(num_edits)]
    ids = np.arange(num_sequences, dtype=np.int64)
    message = messages.pack_step(1, 2, edits, step, ids)
    return MessageCost(
        len(message),
        _median_us(lambda: messages.pack_step(1, 2, edits, step, ids)),
        _median_us(lambda: messages.read_step(messages.read(memoryview(message)))),
    )


def _median_us(call: Callable[[], object]) -> float:
    times = []
    for _ in range(_CALLS):
        began = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - began))
    return statistics.median(times)
