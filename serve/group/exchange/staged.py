"""The exchange of ranks with devices through the memory of their hosts.

Each result passes through the host twice, and the host waits for the device, so this is for devices
that cannot exchange directly: two ranks on one device, or hosts that are connected by the group's
own connections alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from serve.group.exchange.arena import ArenaExchange
from serve.group.exchange.slots import check_bounds
from serve.group.exchange.windows import WindowExchange


class StagedExchange:
    """Buffers on a device, whose columns go through another exchange's buffers in this machine's
    memory. Buffers come from torch's allocator, so they are valid as long as they are referred to.
    """

    def __init__(self, inner: ArenaExchange | WindowExchange, device: torch.device) -> None:
        self.rank, self.size = inner.rank, inner.size
        self._inner, self._device = inner, device

    def begin(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(rows, columns, dtype=dtype, device=self._device)

    def complete(self, buffer: Tensor, bounds: Sequence[int]) -> None:
        """Raises ExchangeError; the host has then waited for this rank's columns."""
        check_bounds(bounds, self.size, buffer.shape[1])
        staged = self._inner.begin(len(buffer), buffer.shape[1], buffer.dtype)
        own = slice(bounds[self.rank], bounds[self.rank + 1])
        staged[:, own].copy_(buffer[:, own])
        self._inner.complete(staged, bounds)
        for others in (slice(0, own.start), slice(own.stop, bounds[-1])):
            if others.start < others.stop:
                # memory that is not page-locked is read before the call returns
                buffer[:, others].copy_(staged[:, others])

    def prepare(self) -> None:
        """It is ready."""

    def settle(self) -> None:
        """The host waits in `complete`."""

    @property
    def waited_s(self) -> float:
        return self._inner.waited_s

    @property
    def num_completed(self) -> int:
        return self._inner.num_completed

    def abort(self) -> None:
        self._inner.abort()

    def abort_group(self) -> None:
        """Makes `complete` raise Aborted on all ranks."""
        self._inner.abort_group()

    def join(self, generation: int) -> None:
        self._inner.join(generation)

    def close(self) -> None:
        self._inner.close()
