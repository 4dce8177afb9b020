"""The exchange of ranks on one machine that have a device each: a process group of
torch.distributed (NCCL), which the arena of the same ranks watches.

A kernel that waits for a lost rank waits for ever, and the host with it. So an abort of the arena,
which every rank and the engine can cause, ends the group on all ranks: a thread looks for it.
Symmetric memory is not used here, since nothing ends a kernel that waits in its barrier.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from serve.group.exchange.arena import ArenaExchange
from serve.group.exchange.cuda import CudaExchange
from serve.group.exchange.staged import StagedExchange
from transport.arena import Aborted, ExchangeError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

_LOOK_S = 0.02  # between two looks at the arena
_GUARD_END_S = 5.0
OpenGroup = Callable[[str], "ProcessGroup"]
"""Returns this rank's end of a new process group of a name. It returns when all ranks have called
it, and raises RuntimeError."""


class DirectExchange:
    """Buffers on devices that exchange by themselves. `complete` returns at once: a step has failed
    if `settle` raises.

    One thread uses it, but for `abort`. A group belongs to a generation: an abort ends it. Where it
    cannot be made, columns pass through the arena, on all ranks alike.
    """

    def __init__(
        self,
        inner: ArenaExchange,
        device: torch.device,
        wait: Callable[[], None],
        open_group: OpenGroup,
        max_bytes: int,
        deadline_s: float,
    ) -> None:
        """inner: the arena of the same ranks, which this owns. wait: blocks until the device has
        done what was launched. max_bytes: of the largest result."""
        self.rank, self.size = inner.rank, inner.size
        self.waited_s = 0.0  # of the host
        self.num_completed = 0
        self._inner, self._device, self._wait = inner, device, wait
        self._open_group, self._max_bytes, self._deadline_s = open_group, max_bytes, deadline_s
        self._generation = 0
        self._exchange: CudaExchange | StagedExchange | None = None  # of this generation
        self._is_impossible = False  # to make a group, on all ranks
        self._waits_since: float | None = None
        self._lock = threading.Lock()  # guards the group and the generation
        self._group: ProcessGroup | None = None
        self._stop = threading.Event()
        self._guard: threading.Thread | None = None

    def prepare(self) -> None:
        """Makes the group of this generation, together with the other ranks, if there is none yet.
        Raises ExchangeError."""
        if self._exchange is not None:
            return
        if self._is_impossible:
            self._exchange = StagedExchange(self._inner, self._device)
            return
        self._inner.meet()  # a rank that is missing is named, and nothing waits for it in a library
        if self._guard is None:
            name = "mergestep-device-exchange"
            self._guard = threading.Thread(target=self._watch, name=name, daemon=True)
            self._guard.start()
        reason = self._make_group()
        flags = self._inner.begin(1, self.size, torch.uint8)
        flags[0, self.rank] = not reason
        self._inner.complete(flags, range(self.size + 1))
        if bool(flags.all()):
            return
        self._drop_group()
        self._is_impossible = True
        self._exchange = StagedExchange(self._inner, self._device)
        logger.warning(
            "tensor rank %d: devices cannot exchange, so the host's memory is used; "
            'group_exchange = "host" does so from the start: %s',
            self.rank,
            reason or "another rank says why",
        )

    def _make_group(self) -> str:
        """Makes the group and exchanges once; returns why that failed, or ""."""
        try:
            with self._waiting():
                group = self._open_group(f"generation {self._generation}")
                with self._lock:
                    self._group = group
                self._exchange = CudaExchange(group, self._device, 1, self._max_bytes)
                first = self._exchange.begin(1, self.size, torch.uint8)
                self._exchange.complete(first, range(self.size + 1))
                self._wait()
        except (RuntimeError, ExchangeError) as error:
            return str(error) or type(error).__name__
        return ""

    def begin(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        self.prepare()
        assert self._exchange is not None
        return self._exchange.begin(rows, columns, dtype)

    def complete(self, buffer: Tensor, bounds: Sequence[int]) -> None:
        """Raises ExchangeError if this rank already knows that the exchange fails."""
        if self._exchange is None:
            raise Aborted(f"generation {self._generation} is aborted")
        try:
            with self._waiting():
                self._exchange.complete(buffer, bounds)
        except ExchangeError:
            self.abort_group()  # the others may wait for this rank
            raise
        self.num_completed += 1

    def settle(self) -> None:
        """Waits for the device. Raises ExchangeError if not all results of this generation were
        exchanged; what was computed is then of no use."""
        if self._exchange is not None:
            with self._waiting():
                self._wait()
        if self._inner.is_over:
            raise Aborted(f"generation {self._generation} is aborted")

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Lets the guard end what takes longer than the deadline."""
        began = self._waits_since = time.monotonic()
        try:
            yield
        finally:
            self._waits_since = None
            self.waited_s += time.monotonic() - began

    def abort(self) -> None:
        """Ends this generation's group on all ranks. Any thread may call it."""
        self._inner.abort()

    def abort_group(self) -> None:
        """The same; it also gives back this rank's end."""
        self._inner.abort()
        self._drop_group()

    def join(self, generation: int) -> None:
        """Takes part in a generation, which the engine has begun. Raises Aborted."""
        self._drop_group()
        with self._lock:
            self._generation = generation
            self._inner.join(generation)

    def close(self) -> None:
        self._stop.set()
        if self._guard is not None:
            self._guard.join(_GUARD_END_S)
        self._drop_group()
        self._inner.close()

    def _drop_group(self) -> None:
        exchange, self._exchange = self._exchange, None
        if isinstance(exchange, CudaExchange):
            exchange.close()
        self._end_group(lambda: True)

    def _end_group(self, is_due: Callable[[], bool]) -> None:
        """Ends the kernels of the group, if that is due; they return with no result."""
        with self._lock:
            if self._group is None or not is_due():
                return
            group, self._group = self._group, None
        with contextlib.suppress(RuntimeError):
            group.abort()

    def _watch(self) -> None:
        """Ends the group when its generation is over or a wait has taken too long."""
        while not self._stop.wait(_LOOK_S):
            since = self._waits_since
            is_late = since is not None and time.monotonic() > since + self._deadline_s
            if is_late and not self._inner.is_over:
                logger.error("tensor rank %d: no result for %.0f s", self.rank, self._deadline_s)
                self._inner.abort()
            self._end_group(lambda: self._inner.is_over)


def group_opener(
    path: str, device: torch.device, rank: int, size: int, deadline_s: float
) -> OpenGroup:
    """Returns what opens groups of ranks that find one another through a file of this machine; NCCL
    for GPUs, gloo for ranks on Triton's interpreter."""

    def open_group(name: str) -> ProcessGroup:
        import torch.distributed as dist

        file = dist.FileStore(path, size)  # type: ignore[attr-defined]
        store = dist.PrefixStore(name, file)  # type: ignore[attr-defined]
        timeout = timedelta(seconds=deadline_s)
        kind = dist.ProcessGroup.BackendType.GLOO
        backend: Any
        if device.type == "cuda":
            # A failure must reach `settle`: torch would end the process.
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
            # The sockets through which NCCL begins know no key, and the ranks are on one machine.
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
            kind = dist.ProcessGroup.BackendType.NCCL
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = 2 * timeout  # the guard is earlier
            backend = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            backend = dist.ProcessGroupGloo(store, rank, size, timeout)
        group = dist.ProcessGroup(store, rank, size)
        group._register_backend(
            device if device.type == "cpu" else torch.device("cuda"), kind, backend
        )
        group._set_default_backend(kind)
        return group

    return open_group
