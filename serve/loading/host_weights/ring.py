"""Layers in page-locked host memory that come to a device through a ring of buffers.

Every layer of the ring has its buffer from the start, by its number among them modulo the number of
buffers, so that no pointer changes. As soon as a layer has been given to the device, the copy of
the next one of its buffer is queued behind it on a stream of its own, over the end of the step. The
host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from serve.loading.host_weights.link import Link, Wait

_ALIGNMENT = 256


class RingLayer:
    """The weights of a layer, moved from the device to one piece of page-locked memory."""

    def __init__(self, tensors: Sequence[Tensor], link: Link) -> None:
        """The tensors are empty until `place` gives them memory again."""
        self._tensors = list(tensors)
        self._shapes = [(tuple(each.shape), each.dtype) for each in tensors]
        self._places: list[slice] = []
        end = 0
        for each in tensors:
            assert each.is_contiguous(), "packed weights are dense"
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + each.nbytes
            self._places.append(slice(start, end))
        self.num_bytes = end
        self.memory = link.pinned(end)
        for each, place in zip(tensors, self._places, strict=True):
            self.memory[place].copy_(each.view(-1).view(torch.uint8))
            each.data = torch.empty(0, dtype=each.dtype, device=each.device)

    def place(self, buffer: Tensor) -> None:
        """Gives the tensors their places in a buffer of the device, for good."""
        found = zip(self._tensors, self._shapes, self._places, strict=True)
        for tensor, (shape, dtype), place in found:
            tensor.data = buffer[place].view(dtype).view(shape)


class DeviceRing:
    """The buffers of a device and the layers that share them. Only the compute thread calls it."""

    def __init__(self, layers: Sequence[RingLayer], num_buffers: int, link: Link) -> None:
        self.layers, self._link = list(layers), link
        size = max(each.num_bytes for each in layers)
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        memory = torch.empty(size * num_buffers, dtype=torch.uint8, device=link.device)
        self._buffers = [memory[at : at + size] for at in range(0, len(memory), size)]
        self._content: list[int | None] = [None] * num_buffers
        self._waits: list[Wait | None] = [None] * num_buffers
        self.copied_bytes = 0
        for number, layer in enumerate(layers):
            layer.place(self._buffers[number % num_buffers])
        for number in range(min(num_buffers, len(layers))):
            self._fetch(number)

    @property
    def buffer_bytes(self) -> int:
        """The device memory of all buffers."""
        return sum(each.nbytes for each in self._buffers)

    def enter(self, number: int) -> None:
        """Makes the device's later work wait until the layer is there."""
        self._fetch(number)  # unless the pass before was not finished, it is on its way
        wait = self._waits[number % len(self._buffers)]
        if wait is not None:
            wait()
            self._waits[number % len(self._buffers)] = None

    def leave(self, number: int) -> None:
        """Queues the next layer of the buffer behind the work that the device has been given."""
        after = number + len(self._buffers)
        self._fetch(after if after < len(self.layers) else number % len(self._buffers))

    def _fetch(self, number: int) -> None:
        at = number % len(self._buffers)
        if self._content[at] == number:
            return
        layer = self.layers[number]
        self._content[at] = None  # nothing whole, if this fails
        target = self._buffers[at][: layer.num_bytes]
        self._waits[at] = self._link.fetch(target, layer.memory)
        self._content[at] = number
        self.copied_bytes += layer.num_bytes
