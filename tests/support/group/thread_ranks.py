"""Ranks that are threads of one process, for models and kernels without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from ops.sharded import NUM_LIVE_BUFFERS

T = TypeVar("T")


class ThreadExchange:
    """An Exchange of threads. Buffers that are no longer valid hold NaN."""

    def __init__(self, shared: _Shared, rank: int) -> None:
        self.rank, self.size = rank, shared.size
        self._shared = shared
        self._begun: list[Tensor] = []

    def begin(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        buffer = self._shared.buffer(len(self._begun), rows, columns, dtype)
        self._begun.append(buffer)
        return buffer

    def complete(self, buffer: Tensor, bounds: Sequence[int]) -> None:
        assert buffer is self._begun[-1]
        assert bounds[0] == 0 and bounds[-1] == buffer.shape[1]
        self._shared.barrier.wait(20)
        if self.rank == 0 and len(self._begun) > NUM_LIVE_BUFFERS:
            self._begun[-1 - NUM_LIVE_BUFFERS].fill_(float("nan"))
        self._shared.barrier.wait(20)


class _Shared:
    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self._lock = threading.Lock()
        self._buffers: list[Tensor] = []

    def buffer(self, number: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        with self._lock:
            if number == len(self._buffers):
                self._buffers.append(torch.full((rows, columns), -1, dtype=dtype))
            buffer = self._buffers[number]
        assert buffer.shape == (rows, columns) and buffer.dtype == dtype, "ranks differ"
        return buffer


def on_ranks(size: int, work: Callable[[ThreadExchange], T]) -> list[T]:
    """Returns the results of work on each rank, by rank."""
    shared = _Shared(size)
    with ThreadPoolExecutor(size) as pool:
        running = [pool.submit(_guarded, work, ThreadExchange(shared, r)) for r in range(size)]
        return [each.result() for each in running]


def _guarded(work: Callable[[ThreadExchange], T], exchange: ThreadExchange) -> T:
    try:
        return work(exchange)
    except BaseException:
        exchange._shared.barrier.abort()
        raise
