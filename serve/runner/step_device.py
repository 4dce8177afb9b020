"""The device as overlapping runners use it: order, events, pinned memory, graphs and sizes.

`CudaStepDevice` is a CUDA stream. `HostStepDevice` runs work when it is submitted; Triton's
interpreter runs on it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from serve.machine import local_kv_bytes

Work = Callable[[], None]


class Event(Protocol):
    """A point in the order of the device's work."""

    def wait(self) -> None:
        """Blocks until the device has passed the event. Raises the error of the work before it."""


class StepDevice(Protocol):
    """One queue of work. Only the compute thread calls it."""

    device: torch.device
    stream: int
    """The stream's handle for calls of the driver; 0 if there is none."""

    def submit(self, work: Work) -> Event:
        """Queues the kernels and copies that `work` launches; `work` does not wait for them."""

    def pinned(self, num_bytes: int) -> Tensor:
        """Returns [num_bytes] uint8 of memory that the device copies from and to asynchronously."""

    def capture(self, work: Work) -> Work:
        """Returns a graph of `work`, which has run once. The graph repeats it at the same addresses
        with one launch."""

    def peak_bytes(self, work: Work) -> int:
        """Runs `work` and returns its peak of device memory beside what is in use, in bytes."""

    def free_bytes(self) -> int:
        """Returns the bytes of memory that K/V could take now."""

    def wait(self) -> None:
        """Blocks until all submitted work is done."""

    def check(self) -> None:
        """Raises if the device cannot compute any more after an error."""


class CompletedEvent:
    """An event that the device has always passed."""

    def wait(self) -> None:
        """Returns at once."""


class HostStepDevice:
    """Runs work on the CPU when it is submitted."""

    device = torch.device("cpu")
    stream = 0

    def submit(self, work: Work) -> Event:
        work()
        return CompletedEvent()

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def capture(self, work: Work) -> Work:
        return work

    def peak_bytes(self, work: Work) -> int:
        return 0  # K/V on the host does not compete with a step

    def free_bytes(self) -> int:
        return local_kv_bytes()

    def wait(self) -> None:
        """Returns at once."""

    def check(self) -> None:
        """Never raises: the device is this process."""


class CudaStepDevice:
    """Owns a CUDA stream, which becomes torch's current one in the constructing thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        torch.cuda.set_device(device)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        torch.cuda.set_stream(self._stream)
        self.stream = int(self._stream.cuda_stream)
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._pool = torch.cuda.graph_pool_handle()

    def submit(self, work: Work) -> Event:
        work()
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return _CudaEvent(event)

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    def capture(self, work: Work) -> Work:
        # Another thread may map pages meanwhile ("thread_local"). Graphs run one after the other,
        # so they share the memory of their results.
        graph = torch.cuda.CUDAGraph()
        self.wait()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            work()
        self._graphs.append(graph)
        return graph.replay

    def peak_bytes(self, work: Work) -> int:
        self.wait()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        work()
        self.wait()
        return int(torch.cuda.max_memory_allocated(self.device) - before)

    def free_bytes(self) -> int:
        """Returns the free bytes after torch has released its unused cache."""
        gc.collect()
        torch.cuda.empty_cache()
        free, _total = torch.cuda.mem_get_info(self.device)
        return int(free)

    def wait(self) -> None:
        self._stream.synchronize()

    def check(self) -> None:
        # after an illegal access every call fails until the process ends
        torch.zeros(1, device=self.device).item()


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()
