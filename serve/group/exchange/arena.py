"""The exchange of one host: its ranks write into one shared memory; a collective is a barrier."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from serve.group.exchange.slots import Ring, check_bounds
from transport.arena import Arena


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

    def meet(self) -> None:
        """Waits for all ranks. Raises ExchangeError."""
        self._arena.barrier(self._deadline_s)

    @property
    def is_over(self) -> bool:
        """Whether the generation that this rank has joined is aborted or followed by another."""
        return self._arena.is_over

    def prepare(self) -> None:
        """It is ready."""

    def settle(self) -> None:
        """The host waits in `complete`."""

    @property
    def waited_s(self) -> float:
        return self._arena.waited_s

    @property
    def num_completed(self) -> int:
        return self._arena.num_barriers

    def abort(self) -> None:
        """Makes `complete` raise Aborted on every rank. Any thread may call it."""
        self._arena.abort()

    def abort_group(self) -> None:
        """The same."""
        self._arena.abort()

    def join(self, generation: int) -> None:
        """Takes part in a generation, which the engine has begun by `reset`. Raises Aborted."""
        self._arena.join(generation)
        self._ring.restart()

    def close(self) -> None:
        self._arena.close()
