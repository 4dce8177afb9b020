"""Sets of tokens as bits, 32 in a word."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint32]


def num_words(vocab_size: int) -> int:
    return (vocab_size + 31) // 32


def bits_of(token_ids: Iterable[int], vocab_size: int) -> Bits:
    """Returns uint32 [words] with these bits set; ids beyond the vocabulary are ignored."""
    bits = np.zeros(num_words(vocab_size), dtype=np.uint32)
    ids = np.fromiter(token_ids, dtype=np.int64)
    ids = ids[(ids >= 0) & (ids < vocab_size)]
    np.bitwise_or.at(bits, ids >> 5, np.uint32(1) << (ids & 31).astype(np.uint32))
    return bits


def all_bits(vocab_size: int) -> Bits:
    """Returns uint32 [words] with exactly the bits of the vocabulary set."""
    bits = np.full(num_words(vocab_size), 0xFFFFFFFF, dtype=np.uint32)
    if vocab_size % 32:
        bits[-1] = (1 << vocab_size % 32) - 1
    return bits
