"""The link between host memory and a device: page-locked memory, copies and their order.

`CudaLink` is for a GPU; `HostLink` copies at once, for Triton's interpreter, whose device is the
host.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from serve.errors import ModelLoadError
from serve.models.packed_cache.region import huge_pages

Wait = Callable[[], None]
_MEASURED_BYTES = 64 << 20


class Link(Protocol):
    """Copies of one device. Only the compute thread calls it, with its stream as torch's current
    one."""

    device: torch.device

    def pinned(self, num_bytes: int) -> Tensor:
        """Returns [num_bytes] uint8 of page-locked memory for good; it is freed by `close`."""

    def staging(self, num_bytes: int) -> Tensor:
        """Returns [num_bytes] uint8 of page-locked memory, which may be dropped at any time."""

    def fetch(self, target: Tensor, source: Tensor) -> Wait:
        """Starts a copy from page-locked memory to the device beside the computation, but behind
        what the device was given until now. The device's later work does not wait for it until the
        result is called, which does not block."""

    def mark(self) -> Wait:
        """Returns what blocks the host until the device has done what it was given until now."""

    def copied(self) -> Wait:
        """Returns what blocks the host until the copies that were fetched until now have ended."""

    def close(self) -> None:
        """Ends all copies and frees the memory."""


class HostLink:
    """Copies within host memory, at once."""

    device = torch.device("cpu")

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def staging(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def fetch(self, target: Tensor, source: Tensor) -> Wait:
        target.copy_(source)
        return _nothing

    def mark(self) -> Wait:
        return _nothing

    def copied(self) -> Wait:
        return _nothing

    def close(self) -> None:
        """Does nothing."""


def _nothing() -> None:
    """Has nothing to wait for."""


class CudaLink:
    """Copies to a GPU on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._registered: list[Tensor] = []

    def pinned(self, num_bytes: int) -> Tensor:
        # torch's own page-locked memory has sizes of powers of two
        memory = huge_pages(num_bytes)
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        if int(error) != 0:
            raise ModelLoadError(
                f"{num_bytes >> 20} MiB of host memory for weights cannot be page-locked (CUDA"
                f" error {int(error)})"
            )
        self._registered.append(memory)
        return memory

    def staging(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def fetch(self, target: Tensor, source: Tensor) -> Wait:
        before, done = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]
        computing = torch.cuda.current_stream(self.device)
        before.record(computing)
        self._stream.wait_event(before)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        done.record(self._stream)
        return lambda: torch.cuda.current_stream(self.device).wait_event(done)

    def mark(self) -> Wait:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        wait: Wait = event.synchronize
        return wait

    def copied(self) -> Wait:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        wait: Wait = event.synchronize
        return wait

    def close(self) -> None:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        try:
            self._stream.synchronize()
        finally:
            for memory in self._registered:
                runtime.cudaHostUnregister(memory.data_ptr())
            self._registered.clear()


def open_link(device: torch.device) -> Link:
    """Returns the link of a back end's device."""
    return CudaLink(device) if device.type == "cuda" else HostLink()


def link_speed(link: Link) -> float:
    """Returns the bytes a second at which page-locked memory is copied to the device."""
    source = link.staging(_MEASURED_BYTES)
    source.zero_()
    target = torch.empty(_MEASURED_BYTES, dtype=torch.uint8, device=link.device)
    return _best(link, lambda: link.fetch(target, source)())


def device_speed(link: Link) -> float:
    """Returns the bytes a second at which the device reads and writes its memory."""
    one, other = (torch.zeros(_MEASURED_BYTES, dtype=torch.uint8, device=link.device) for _ in "ab")

    def copy() -> None:
        one.copy_(other)

    return 2 * _best(link, copy)


def _best(link: Link, work: Callable[[], None]) -> float:
    """Returns the most bytes a second of a few runs."""
    best = 0.0
    for _ in range(4):
        link.mark()()
        began = time.monotonic()
        work()
        link.mark()()
        best = max(best, _MEASURED_BYTES / max(time.monotonic() - began, 1e-9))
    return best
