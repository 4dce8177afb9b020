"""Attention within chunks of positions (Llama 4): a row sees keys from its chunk's start on.

Each chunk of a sequence is planned as a sequence of its own that begins where the chunk begins, so
any implementation of the seam computes it. A step's rows that cross a chunk's end are two parts.
"""

from __future__ import annotations

from memory.attention.seam import Attention, AttentionStep, PlannedAttention


class ChunkedAttention:
    """Implements PlannedAttention with one that knows no chunks, for layers of one chunk size."""

    def __init__(self, inner: PlannedAttention, chunk: int) -> None:
        """chunk: positions; a multiple of the tokens that inner stores together."""
        self._inner = inner
        self._chunk = chunk

    @property
    def is_remote(self) -> bool:
        return self._inner.is_remote

    def plan(self, step: AttentionStep) -> Attention:
        return self._inner.plan(split_chunks(step, self._chunk))


def split_chunks(step: AttentionStep, chunk: int) -> AttentionStep:
    """Returns the step with a sequence for each chunk that has rows, in the order of the rows."""
    starts: list[int] = []
    num_rows: list[int] = []
    kv_lens: list[int] = []
    num_decodes = step.num_decodes
    for i, (start, rows, length) in enumerate(
        zip(step.starts, step.num_rows, step.kv_lens, strict=True)
    ):
        first = length - rows
        if i < step.num_decodes:
            num_decodes += (length - 1) // chunk - first // chunk
        while first < length:
            begin = first // chunk * chunk
            end = min(length, begin + chunk)
            starts.append(start + begin)
            num_rows.append(end - first)
            kv_lens.append(end - begin)
            first = end
    return AttentionStep(num_decodes, starts, num_rows, kv_lens)
