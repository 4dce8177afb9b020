"""Layers in page-locked host memory, or on the disk, that come to a device through a ring of
buffers.

Every layer of the ring has its buffer from the start, by its number among them modulo the number of
buffers, so that no pointer changes. As soon as a layer has been given to the device, the copy of
the next one of its buffer is queued behind it on a stream of its own, over the end of the step. For
layers in host memory the host waits for nothing. One on the disk is copied ahead if it has been
read by then; else the host waits for it when it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Protocol

import torch
from torch import Tensor

from serve.loading.host_weights.disk import DiskFeed, DiskFile, pages
from serve.loading.host_weights.link import Link, Wait
from serve.loading.streaming.units import Unit

ALIGNMENT = 256


class RingPart(Protocol):
    """What shares the buffers of a ring. memory: [num_bytes], page-locked; unit: of the file. One
    of them is None."""

    num_bytes: int

    @property
    def memory(self) -> Tensor | None: ...

    @property
    def unit(self) -> Unit | None: ...

    def place(self, buffer: Tensor) -> None:
        """Tells it its place in a buffer of the device, for good."""


class RingLayer:
    """The weights of a layer, moved from the device to one piece of page-locked memory, or to a
    file. memory, unit: where they are; one of them is None."""

    def __init__(
        self, tensors: Sequence[Tensor], link: Link, file: DiskFile | None = None, name: str = ""
    ) -> None:
        """The tensors are empty until `place` gives them memory again. name: of the layer in the
        file. ConfigError if the file cannot be written."""
        self._tensors = list(tensors)
        self._shapes = [(tuple(each.shape), each.dtype) for each in tensors]
        self._places: list[slice] = []
        end = 0
        for each in tensors:
            assert each.is_contiguous(), "packed weights are dense"
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + each.nbytes
            self._places.append(slice(start, end))
        self.num_bytes = end
        memory = link.pinned(end) if file is None else pages(end)
        for each, place in zip(tensors, self._places, strict=True):
            memory[place].copy_(each.view(-1).view(torch.uint8))
            each.data = torch.empty(0, dtype=each.dtype, device=each.device)
        self.memory: Tensor | None = memory if file is None else None
        self.unit: Unit | None = None if file is None else file.add(name, memory)

    def place(self, buffer: Tensor) -> None:
        """Gives the tensors their places in a buffer of the device, for good."""
        found = zip(self._tensors, self._shapes, self._places, strict=True)
        for tensor, (shape, dtype), place in found:
            tensor.data = buffer[place].view(dtype).view(shape)


class DeviceRing:
    """The buffers of a device and the layers that share them. Only the compute thread calls it."""

    def __init__(
        self,
        layers: Sequence[RingPart],
        num_buffers: int,
        link: Link,
        feed: DiskFeed | None = None,
    ) -> None:
        """feed: of the layers on the disk, in their order."""
        self.layers, self._link, self._feed = list(layers), link, feed
        on_disk = count()
        self._on_disk = [None if each.unit is None else next(on_disk) for each in layers]
        size = max(each.num_bytes for each in layers)
        size = -(-size // ALIGNMENT) * ALIGNMENT
        memory = torch.empty(size * num_buffers, dtype=torch.uint8, device=link.device)
        self._buffers = [memory[at : at + size] for at in range(0, len(memory), size)]
        self._content: list[int | None] = [None] * num_buffers
        self._waits: list[Wait | None] = [None] * num_buffers
        self.copied_bytes = 0
        for number, layer in enumerate(layers):
            layer.place(self._buffers[number % num_buffers])
        for number in range(min(num_buffers, len(layers))):
            self._fetch_ahead(number)

    @property
    def buffer_bytes(self) -> int:
        """The device memory of all buffers."""
        return sum(each.nbytes for each in self._buffers)

    def enter(self, number: int) -> None:
        """Makes the device's later work wait until the layer is there. WeightsLostError."""
        self._fetch(number)  # unless the pass before was not finished, it is on its way
        wait = self._waits[number % len(self._buffers)]
        if wait is not None:
            wait()
            self._waits[number % len(self._buffers)] = None

    def leave(self, number: int) -> None:
        """Queues the next layer of the buffer behind the work that the device has been given."""
        if self._feed is not None:
            self._feed.release()
        after = number + len(self._buffers)
        self._fetch_ahead(after if after < len(self.layers) else number % len(self._buffers))

    def _fetch_ahead(self, number: int) -> None:
        """Starts to copy a layer unless the host would wait for it."""
        on_disk = self._on_disk[number]
        if on_disk is None or (self._feed is not None and self._feed.is_ready(on_disk)):
            self._fetch(number)

    def _fetch(self, number: int) -> None:
        at = number % len(self._buffers)
        if self._content[at] == number:
            return
        layer, on_disk = self.layers[number], self._on_disk[number]
        self._content[at] = self._waits[at] = None  # nothing whole, if this fails
        target = self._buffers[at][: layer.num_bytes]
        if layer.memory is not None:
            self._waits[at] = self._link.fetch(target, layer.memory)
        else:
            assert self._feed is not None and on_disk is not None
            self._waits[at] = self._feed.take(on_disk, target)
        self._content[at] = number
        self.copied_bytes += layer.num_bytes
