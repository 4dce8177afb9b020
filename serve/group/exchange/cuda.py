"""The exchange between GPUs: an all-gather of the process group (NCCL)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from serve.group.exchange.slots import BufferTooLarge, check_bounds
from transport.arena import ExchangeError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class CudaExchange:
    """Ranks of a process group, each with a device; a gloo group with CPU tensors works as well.

    It is ordered by the current stream: `complete` returns at once, and what is launched after it
    sees all columns. Buffers come from torch's allocator, so they are valid as long as they
    are referred to. Failures of a rank are noticed by the group (its timeout).
    """

    def __init__(
        self, group: ProcessGroup, device: torch.device, max_rows: int, max_row_bytes: int
    ) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.waited_s = 0.0  # of the host; devices wait on their own
        self.num_completed = 0
        self._group: ProcessGroup | None = group
        self._device = device
        self._max_rows, self._max_row_bytes = max_rows, max_row_bytes

    def begin(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        self._check(rows, columns * dtype.itemsize)
        return torch.empty(rows, columns, dtype=dtype, device=self._device)

    def complete(self, buffer: Tensor, bounds: Sequence[int]) -> None:
        check_bounds(bounds, self.size, buffer.shape[1])
        began = time.monotonic()
        try:
            self._gather(buffer, bounds)
        except RuntimeError as error:
            raise ExchangeError(f"rank {self.rank}: {error}") from error
        finally:
            self.waited_s += time.monotonic() - began
        self.num_completed += 1

    def close(self) -> None:
        """Gives back its hold of the process group."""
        self._group = None

    def _gather(self, buffer: Tensor, bounds: Sequence[int]) -> None:
        """Gathers the columns as contiguous blocks of the widest rank's size, and copies each to
        its place. As bytes, since not every group knows every number format."""
        import torch.distributed as dist

        rows, widest = len(buffer), _widest(bounds)
        if rows * widest == 0:
            return
        own = buffer.new_empty(rows, widest)
        begin, end = bounds[self.rank], bounds[self.rank + 1]
        own[:, : end - begin].copy_(buffer[:, begin:end])
        every = buffer.new_empty(self.size * rows, widest)
        gather = getattr(dist, "all_gather_single", None)  # its name since torch 2.13
        gather = gather or dist.all_gather_into_tensor
        gather(every.view(torch.uint8), own.view(torch.uint8), group=self._group)
        for rank, block in enumerate(every.view(self.size, rows, widest)):
            if rank != self.rank:
                begin, end = bounds[rank], bounds[rank + 1]
                buffer[:, begin:end].copy_(block[:, : end - begin])

    def _check(self, rows: int, row_bytes: int) -> None:
        if rows * row_bytes > self._max_rows * self._max_row_bytes:
            raise BufferTooLarge(
                f"a result of {rows} rows of {row_bytes} bytes; the exchange was made for "
                f"{self._max_rows} rows of {self._max_row_bytes} bytes"
            )


def _widest(bounds: Sequence[int]) -> int:
    return max(end - begin for begin, end in pairwise(bounds))
