"""Copies between device memory and page-locked host memory, beside the kernels.

Copies run in their own stream. `follow` makes this stream wait on the device for the work submitted
to the compute stream so far, and no thread waits for that. The copying thread polls for the end of
its copies, because a driver call that waits may hold the GIL (cuda-bindings before 13).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

from memory.pages.cuda_device import CudaDevice, CudaError

logger = logging.getLogger(__name__)

_ALIGNMENT = 4096  # for direct I/O from the host memory; the driver does not guarantee it
_NON_BLOCKING = 1  # CUstream_flags: does not wait for the legacy stream
_DISABLE_TIMING = 2  # CUevent_flags
_POLL_S = 50e-6


class CudaCopier:
    """`PageCopier` on the driver's calls."""

    def __init__(self, *, device: int = 0, driver: Any = None, compute_stream: int = 0) -> None:
        """compute_stream: the stream of the kernels; 0 is the legacy stream, torch's default.
        Raises CudaUnavailableError or CudaError if the device cannot be used."""
        self._device = CudaDevice(driver, device)
        self._compute_stream = compute_stream
        self._following = threading.Lock()  # `follow` uses one event, from any thread
        self._memory: int | None = None
        with contextlib.ExitStack() as made:
            made.callback(self._device.close)
            call = self._device.call
            self._stream = call("cuStreamCreate", _NON_BLOCKING)
            made.callback(call, "cuStreamDestroy", self._stream)
            self._given = call("cuEventCreate", _DISABLE_TIMING)
            made.callback(call, "cuEventDestroy", self._given)
            self._copied = call("cuEventCreate", _DISABLE_TIMING)
            made.callback(call, "cuEventDestroy", self._copied)
            self._made = made.pop_all()

    def allocate(self, size_bytes: int) -> int:
        assert self._memory is None, "once per object"
        self._device.enter()
        self._memory = int(self._device.call("cuMemHostAlloc", size_bytes + _ALIGNMENT, 0))
        self._made.callback(self._device.call, "cuMemFreeHost", self._memory)
        return -(-self._memory // _ALIGNMENT) * _ALIGNMENT

    def follow(self) -> None:
        self._device.enter()
        with self._following:
            self._device.call("cuEventRecord", self._given, self._compute_stream)
            self._device.call("cuStreamWaitEvent", self._stream, self._given, 0)

    def copy(self, copies: Sequence[tuple[int, int]], size_bytes: int, *, to_host: bool) -> bool:
        self._device.enter()
        name = "cuMemcpyDtoHAsync" if to_host else "cuMemcpyHtoDAsync"
        try:
            for target, source in copies:
                self._device.call(name, target, source, size_bytes, self._stream)
            self._device.call("cuEventRecord", self._copied, self._stream)
            while not self._device.is_over(self._copied):
                time.sleep(_POLL_S)
        except CudaError as error:
            logger.warning("K/V in host memory: copying failed (%s)", error.strerror)
            self._device.call("cuStreamSynchronize", self._stream)  # some copies may still run
            return False
        return True

    def close(self) -> None:
        self._device.enter()
        self._made.close()
