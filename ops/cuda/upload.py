"""Copies weights from files to a device, in chunks through pinned memory.

A copy from memory that the system may move goes through a buffer of the driver, one piece after the
other, and waits for the disk where the file is not in memory yet. Here several threads read chunks
into pinned buffers, whose copies to the device run meanwhile (as in ServerlessLLM, Fu et al., OSDI
2024).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

_CHUNK_BYTES = 16 << 20
_NUM_CHUNKS = 4
# Smaller tensors are copied as they are.
_LEAST_BYTES = 4 << 20


class CopyEvent(Protocol):
    """A point in the device's work: torch.cuda.Event."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


def _pinned(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


class Uploader:
    """The buffers and threads of copies to one device. One thread calls it."""

    def __init__(
        self,
        device: torch.device,
        *,
        chunk_bytes: int = _CHUNK_BYTES,
        make_buffer: Callable[[int], Tensor] = _pinned,
        make_event: Callable[[], CopyEvent] = torch.cuda.Event,
    ) -> None:
        self._device = device
        self._chunk_bytes = chunk_bytes
        self._buffers = [(make_buffer(chunk_bytes), make_event()) for _ in range(_NUM_CHUNKS)]
        self._threads = ThreadPoolExecutor(_NUM_CHUNKS, "mergestep-upload")

    def copy(self, tensor: Tensor) -> Tensor:
        """Returns a contiguous copy of a contiguous tensor of the host on the device. The device
        may still copy when the call returns; its later work waits for that."""
        out = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        source, target = (x.view(-1).view(torch.uint8) for x in (tensor, out))
        size, free = len(source), deque(self._buffers)
        reading: deque[tuple[int, Tensor, CopyEvent, Future[Tensor]]] = deque()

        def send() -> None:
            first, buffer, event, read = reading.popleft()
            count = len(read.result())
            target[first : first + count].copy_(buffer[:count], non_blocking=True)
            event.record()
            free.append((buffer, event))

        for first in range(0, size, self._chunk_bytes):
            if not free:
                send()
            buffer, event = free.popleft()
            part = source[first : first + self._chunk_bytes]
            read = self._threads.submit(_read, part, buffer, event)
            reading.append((first, buffer, event, read))
        while reading:
            send()
        return out

    def close(self) -> None:
        """Waits for the copies and frees the buffers."""
        self._threads.shutdown()
        for _, event in self._buffers:
            event.synchronize()
        self._buffers.clear()


def _read(part: Tensor, buffer: Tensor, event: CopyEvent) -> Tensor:
    """Reads a chunk into a buffer whose last copy has ended."""
    event.synchronize()
    return buffer[: len(part)].copy_(part)


_uploaders: dict[torch.device, Uploader] = {}


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns the tensor on the device: itself if it is there, else a copy."""
    is_small = tensor.numel() * tensor.element_size() < _LEAST_BYTES
    if device.type != "cuda" or tensor.device.type != "cpu" or is_small:
        return tensor.to(device)
    if not tensor.is_contiguous():
        return tensor.to(device)
    if device not in _uploaders:
        _uploaders[device] = Uploader(device)
    return _uploaders[device].copy(tensor)


def free_uploaders() -> None:
    """Frees the pinned memory, once all weights are loaded."""
    while _uploaders:
        _, uploader = _uploaders.popitem()
        uploader.close()
