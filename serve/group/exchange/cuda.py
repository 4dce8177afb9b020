"""The exchange between GPUs: copies into symmetric memory where the devices have it, and otherwise
an all-gather of the process group (NCCL)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from serve.group.exchange.slots import BufferTooLarge, check_bounds
from transport.arena import ExchangeError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_ALIGNMENT = 16


class CudaExchange:
    """Ranks of a process group, each with a device; a gloo group with CPU tensors works as well.

    It is ordered by the current stream: `complete` returns at once, and what is launched after it
    sees all columns. Buffers come from torch's allocator, so they are valid as long as they
    are referred to. Failures of a rank are noticed by the group (its timeout).
    """

    def __init__(
        self,
        group: ProcessGroup,
        device: torch.device,
        max_rows: int,
        max_row_bytes: int,
        *,
        symmetric: bool | None = None,
    ) -> None:
        """Every rank of the group makes one at the same time. symmetric=None takes symmetric memory
        if all of them have it; True raises ExchangeError if they do not."""
        self.rank, self.size = group.rank(), group.size()
        self.waited_s = 0.0  # of the host; devices wait on their own
        self.num_completed = 0
        self._group: ProcessGroup | None = group
        self._device = device
        self._max_rows, self._max_row_bytes = max_rows, max_row_bytes
        self._staging: SymmetricStaging | None = None
        if symmetric is not False:
            self._staging = symmetric_staging(group, device, max_rows * max_row_bytes)
        if symmetric and self._staging is None:
            raise ExchangeError(f"not every rank has symmetric memory on {device}")

    def begin(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        self._check(rows, columns * dtype.itemsize)
        return torch.empty(rows, columns, dtype=dtype, device=self._device)

    def complete(self, buffer: Tensor, bounds: Sequence[int]) -> None:
        check_bounds(bounds, self.size, buffer.shape[1])
        began = time.monotonic()
        try:
            if self._staging is None:
                self._gather(buffer, bounds)
            else:
                self._staging.gather(buffer, bounds)
        except RuntimeError as error:
            raise ExchangeError(f"rank {self.rank}: {error}") from error
        finally:
            self.waited_s += time.monotonic() - began
        self.num_completed += 1

    def close(self) -> None:
        """Gives back the symmetric memory, and its hold of the process group."""
        self._staging = self._group = None

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


class SymmetricStaging:
    """Two halves of symmetric memory on every rank, used in turn.

    A rank copies its columns into its own half, waits for the others on the device, and reads their
    halves. It writes a half again after the next exchange's barrier, which the others reach after
    they have read this one.
    """

    def __init__(self, handle: Any, half_bytes: int) -> None:
        """handle is a torch _SymmetricMemory of two halves."""
        self._handle, self._half_bytes = handle, half_bytes
        self._number = 0

    def gather(self, buffer: Tensor, bounds: Sequence[int]) -> None:
        at = self._number % 2 * self._half_bytes // buffer.element_size()
        self._number += 1
        own = self._handle.rank
        self._columns_of(own, buffer, bounds, at).copy_(_columns(buffer, bounds, own))
        self._handle.barrier(channel=0)
        for step in range(1, self._handle.world_size):  # not all from the same one at once
            rank = (own + step) % self._handle.world_size
            _columns(buffer, bounds, rank).copy_(self._columns_of(rank, buffer, bounds, at))

    def _columns_of(self, rank: int, buffer: Tensor, bounds: Sequence[int], at: int) -> Tensor:
        shape = (len(buffer), bounds[rank + 1] - bounds[rank])
        part: Tensor = self._handle.get_buffer(rank, shape, buffer.dtype, at)
        return part


def symmetric_staging(
    group: ProcessGroup, device: torch.device, max_bytes: int
) -> SymmetricStaging | None:
    """Returns staging if every rank of the group can have it, else None on all of them."""
    if device.type != "cuda":
        return None
    half_bytes = -(-max_bytes // _ALIGNMENT) * _ALIGNMENT
    memory: Tensor | None = None
    handle = None
    with contextlib.suppress(ImportError, RuntimeError):
        from torch.distributed import _symmetric_memory as symmetric

        memory = symmetric.empty(2 * half_bytes, dtype=torch.uint8, device=device)
    if not _all_have(group, device, memory is not None) or memory is None:
        return None
    with contextlib.suppress(RuntimeError):
        handle = symmetric.rendezvous(memory, group)
    if not _all_have(group, device, handle is not None):
        return None
    return SymmetricStaging(handle, half_bytes)


def _all_have(group: ProcessGroup, device: torch.device, has: bool) -> bool:
    """Tells every rank of the group whether all have it, so that they go on in the same way."""
    import torch.distributed as dist

    flag = torch.tensor([int(has)], device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group)
    return bool(flag.item())


def _widest(bounds: Sequence[int]) -> int:
    return max(end - begin for begin, end in pairwise(bounds))


def _columns(buffer: Tensor, bounds: Sequence[int], rank: int) -> Tensor:
    return buffer[:, bounds[rank] : bounds[rank + 1]]
