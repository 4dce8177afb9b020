"""Copies of single tensors between a CUDA device and page-locked memory, in the order of kernels.

Copies to the host run in a stream of their own, which waits on the device for the kernels launched
so far, so later kernels run beside them. Copies to the device run in the kernels' stream. Waiting
polls an event, because a driver call that waits may hold the GIL (cuda-bindings before 13).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from memory.pages.cuda_device import CudaDevice, CudaError

_NON_BLOCKING = 1  # CUstream_flags: does not wait for the legacy stream
_DISABLE_TIMING = 2  # CUevent_flags
_SPIN_S = 2e-3  # then a wait sleeps between two looks
_POLL_S = 50e-6


class CudaCopy:
    """Copies that end with an event. tensors: their device memory, which torch must not reuse."""

    def __init__(self, copies: CudaCopies, event: Any, tensors: Sequence[Tensor]) -> None:
        self._copies, self._event, self._tensors = copies, event, tensors

    @property
    def is_over(self) -> bool:
        if self._event is None:
            return True
        if not self._copies.is_past(self._event):
            return False
        self._event, self._tensors = None, ()
        return True

    def wait(self) -> None:
        spin_until_s = time.monotonic() + _SPIN_S
        while not self.is_over:
            if time.monotonic() < spin_until_s:
                os.sched_yield()
            else:
                time.sleep(_POLL_S)


class CudaCopies:
    """Copies on one device. One thread uses it; torch has made the device's context current."""

    def __init__(
        self, *, device: torch.device, compute_stream: int, index: int = 0, driver: Any = None
    ) -> None:
        """compute_stream: the stream of the kernels. index: the device's number. Raises
        CudaUnavailableError and CudaError."""
        self._torch_device, self._compute = device, compute_stream
        self._device = CudaDevice(driver, index)
        self._events: list[Any] = []  # for reuse
        with contextlib.ExitStack() as made:
            made.callback(self._device.close)
            self._stream = self._call("cuStreamCreate", _NON_BLOCKING)
            made.callback(self._call, "cuStreamDestroy", self._stream)
            self._launched = self._call("cuEventCreate", _DISABLE_TIMING)
            made.callback(self._call, "cuEventDestroy", self._launched)
            self._made = made.pop_all()

    def _call(self, name: str, *arguments: Any) -> Any:
        return self._device.call(name, *arguments)

    def pinned(self, num_bytes: int) -> Tensor:
        self._device.enter()
        address = int(self._call("cuMemHostAlloc", num_bytes, 0))
        self._made.callback(self._call, "cuMemFreeHost", address)
        memory = (ctypes.c_uint8 * num_bytes).from_address(address)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def to_host(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> CudaCopy:
        self._device.enter()
        self._call("cuEventRecord", self._launched, self._compute)
        self._call("cuStreamWaitEvent", self._stream, self._launched, 0)
        with self._waiting_for(self._stream):
            for host, x in pairs:
                assert host.is_contiguous() and x.is_contiguous() and host.dtype == x.dtype
                size = x.numel() * x.element_size()
                self._call("cuMemcpyDtoHAsync", host.data_ptr(), x.data_ptr(), size, self._stream)
            return self._ending(self._stream, [x for _, x in pairs])

    def to_device(self, host: Tensor) -> tuple[Tensor, CudaCopy]:
        assert host.is_contiguous()
        self._device.enter()
        x = self.empty(host)
        size = host.numel() * host.element_size()
        with self._waiting_for(self._compute):
            self._call("cuMemcpyHtoDAsync", x.data_ptr(), host.data_ptr(), size, self._compute)
            return x, self._ending(self._compute, [])

    def empty(self, like: Tensor) -> Tensor:
        """Returns device memory for a tensor's shape and type."""
        return torch.empty(like.shape, dtype=like.dtype, device=self._torch_device)

    @contextlib.contextmanager
    def _waiting_for(self, stream: Any) -> Iterator[None]:
        """Waits for the stream after an error, because some copies may run in it."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(CudaError):
                self._call("cuStreamSynchronize", stream)
            raise

    def _ending(self, stream: Any, tensors: Sequence[Tensor]) -> CudaCopy:
        event = self._events.pop() if self._events else None
        if event is None:
            event = self._call("cuEventCreate", _DISABLE_TIMING)
            self._made.callback(self._call, "cuEventDestroy", event)
        self._call("cuEventRecord", event, stream)
        return CudaCopy(self, event, tensors)

    def is_past(self, event: Any) -> bool:
        """Returns whether the device has passed an event, which is then used again."""
        if not self._device.is_over(event):
            return False
        self._events.append(event)
        return True

    def close(self) -> None:
        self._device.enter()
        self._call("cuStreamSynchronize", self._stream)
        self._call("cuStreamSynchronize", self._compute)
        self._made.close()
