"""Buffers of an exchange: parts of one memory, given out in the same order on every rank."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ops.sharded import NUM_LIVE_BUFFERS
from transport.arena import ExchangeError

NUM_SLOTS = NUM_LIVE_BUFFERS + 1
"""A buffer is valid until NUM_SLOTS - 1 further ones have been taken. The slot itself is reused one
later, when every rank is known to have taken that many."""
_SMALLEST_SLOT = 4096


class BufferTooLarge(ExchangeError):
    """A result is larger than what the exchange was made for."""


def ring_bytes(max_rows: int, max_row_bytes: int) -> int:
    """Returns the size of the memory that buffers of up to these sizes need."""
    largest = _slot_bytes(max_rows * max_row_bytes)
    return NUM_SLOTS * (2 * largest - _SMALLEST_SLOT)


class Ring:
    """Gives out parts of a memory: NUM_SLOTS slots of each power of two, in turn.

    The sequence of addresses depends on the sizes asked for alone. Small results take turns on
    small slots, which stay in the cache.
    """

    def __init__(self, max_rows: int, max_row_bytes: int, memory: mmap.mmap | None = None) -> None:
        self.max_rows, self.max_row_bytes = max_rows, max_row_bytes
        size = ring_bytes(max_rows, max_row_bytes)
        if memory is None:
            self._bytes = torch.empty(size, dtype=torch.uint8)
        else:
            self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        if self._bytes.numel() < size:
            raise BufferTooLarge(
                f"{max_rows} rows of {max_row_bytes} bytes need a memory of {size} bytes; "
                f"this has {self._bytes.numel()}"
            )
        self._typed: dict[torch.dtype, Tensor] = {}  # the same memory as other numbers
        self._num_given: dict[int, int] = {}  # by the slot's size

    def take(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        self.check(rows, columns * dtype.itemsize)
        size = rows * columns * dtype.itemsize
        slot = _slot_bytes(size)
        number = self._num_given.get(slot, 0)
        self._num_given[slot] = (number + 1) % NUM_SLOTS
        # All smaller slots lie before those of one size.
        at = NUM_SLOTS * (slot - _SMALLEST_SLOT) + number * slot
        memory = self._typed.get(dtype)
        if memory is None:
            memory = self._typed[dtype] = self._bytes.view(dtype)
        return memory.as_strided((rows, columns), (columns, 1), at // dtype.itemsize)

    def check(self, rows: int, row_bytes: int) -> None:
        if rows * row_bytes > self.max_rows * self.max_row_bytes:
            raise BufferTooLarge(
                f"a result of {rows} rows of {row_bytes} bytes; the exchange was made for "
                f"{self.max_rows} rows of {self.max_row_bytes} bytes"
            )

    def restart(self) -> None:
        """Begins again with the first slots, as a rank does that has just started."""
        self._num_given.clear()


def _slot_bytes(size: int) -> int:
    return max(_SMALLEST_SLOT, 1 << (size - 1).bit_length()) if size else _SMALLEST_SLOT


def check_bounds(bounds: Sequence[int], size: int, columns: int) -> None:
    if len(bounds) != size + 1 or bounds[0] != 0 or bounds[-1] != columns:
        raise ValueError(
            f"bounds {list(bounds)}: {size} ranks divide {columns} columns at {size + 1} bounds, "
            f"from 0 to {columns}"
        )
    if any(begin > end for begin, end in pairwise(bounds)):
        raise ValueError(f"bounds {list(bounds)} do not rise")
