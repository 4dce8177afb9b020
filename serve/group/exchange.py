"""The collective of tensor parallelism by outputs: every rank computes some columns of a result,
and all ranks need all of them. Nothing is summed, so the bits are those of one process.

Every rank makes the same calls in the same order: for each result
`begin`, its own columns, `complete`, before the next `begin`. A buffer is valid until the call of
`begin` that is NUM_SLOTS - 1 later; it is not written again by this rank once it is complete, since
the others read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ops import sharded
from serve.group.cuda_exchange import CudaExchange
from serve.group.slots import NUM_SLOTS, BufferTooLarge, Ring, check_bounds, ring_bytes
from serve.group.window_exchange import WindowExchange
from transport.arena import Aborted, Arena, ExchangeError, RankMissing

__all__ = [
    "NUM_SLOTS",
    "Aborted",
    "ArenaExchange",
    "BufferTooLarge",
    "CudaExchange",
    "Exchange",
    "ExchangeError",
    "RankMissing",
    "WindowExchange",
    "ring_bytes",
]


class Exchange(sharded.Exchange, Protocol):
    """An exchange as products use it, with what it has measured. `begin` raises BufferTooLarge;
    `complete` raises ExchangeError, after which a new generation is needed."""

    @property
    def waited_s(self) -> float:
        """The seconds that this rank has spent in `complete`."""

    @property
    def num_completed(self) -> int:
        """The number of results that are complete."""

    def close(self) -> None:
        """Gives back what the exchange holds. Buffers that are still referred to stay."""


class ArenaExchange:
    """The ranks of one host write into one shared memory, and a collective is a barrier."""

    def __init__(
        self,
        arena: Arena,
        max_rows: int,
        max_row_bytes: int,
        deadline_s: float = 10.0,
    ) -> None:
        self.rank, self.size = arena.rank, arena.num_ranks
        self._arena = arena
        self._ring = Ring(max_rows, max_row_bytes, arena.data)
        self._deadline_s = deadline_s

    def begin(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return self._ring.take(rows, columns, dtype)

    def complete(self, buffer: Tensor, bounds: Sequence[int]) -> None:
        check_bounds(bounds, self.size, buffer.shape[1])
        self._arena.barrier(self._deadline_s)

    @property
    def waited_s(self) -> float:
        return self._arena.waited_s

    @property
    def num_completed(self) -> int:
        return self._arena.num_barriers

    def abort(self) -> None:
        """Makes `complete` raise Aborted on every rank. Any thread may call it."""
        self._arena.abort()

    def join(self, generation: int) -> None:
        """Takes part in a generation, which the engine has begun by `reset`. Raises Aborted."""
        self._arena.join(generation)
        self._ring.restart()

    def close(self) -> None:
        self._arena.close()
