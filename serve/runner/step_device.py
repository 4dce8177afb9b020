"""What a runner that works ahead needs of a device: order, marks, pinned memory, graphs, sizes.

`CudaStepDevice` is a CUDA stream. `HostStepDevice` does everything at once; Triton's interpreter
runs on it.
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
    """A place in the order of the device's work."""

    def wait(self) -> None:
        """Until the device has passed it. Raises what went wrong before it."""


class StepDevice(Protocol):
    """One queue of work. All calls in the thread that computes."""

    device: torch.device
    stream: int
    """For the driver's calls; 0 where there is none."""

    def submit(self, work: Work) -> Event:
        """Queue kernels and copies, in the order of submission; `work` does not wait for them."""

    def pinned(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8 that the device copies from and to while the host goes on."""

    def capture(self, work: Work) -> Work:
        """What does the same again, to the same addresses, in one launch. `work` has run once."""

    def peak_bytes(self, work: Work) -> int:
        """What `work` takes of the device's memory at most, beside what is taken already."""

    def free_bytes(self) -> int:
        """That K/V could take now."""

    def wait(self) -> None:
        """For all that was submitted."""

    def check(self) -> None:
        """Raises if the device cannot compute any more, after an error of its own."""


class CompletedEvent:
    """A mark that is always behind us."""

    def wait(self) -> None:
        """Nothing to wait for."""


class HostStepDevice:
    """Work is done when it is submitted."""

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
        return 0  # what a step takes is not taken from K/V here

    def free_bytes(self) -> int:
        return local_kv_bytes()

    def wait(self) -> None:
        """Nothing to wait for."""

    def check(self) -> None:
        """It is this process."""


class CudaStepDevice:
    """A stream of its own, which becomes torch's current one in the thread that makes this."""

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
        # Another thread may make pages meanwhile ("thread_local"); graphs run one after the
        # other, so they share the memory of what they compute.
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
        """What torch only keeps for itself is given back first."""
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
