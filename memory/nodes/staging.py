"""Rows of q, k, v and results between the memory where the model computes and this machine's.

Messages are posted from, and arrive in, this machine's memory. A model on a device passes its rows
through page-locked buffers: a copy beside the kernels fills a buffer, and the thread that runs the
model posts it when the copy has ended. Until then it launches more work, so k and v are computed
while q is copied and posted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

Post = Callable[[Sequence[Tensor]], None]

_ALIGNMENT = 64  # of tensors in a buffer
_SMALLEST_BYTES = 1 << 16  # of a buffer


class Staging(Protocol):
    """Moves rows between the memory where the model computes and this machine's memory."""

    def send(self, tensors: Sequence[Tensor], rows: tuple[int, int], post: Post) -> None:
        """Calls post with copies of the tensors in this machine's memory, of which only the rows
        [first, end) are there: now, or in `flush`, in the order of the sends. post may use them
        until it returns."""

    def flush(self) -> None:
        """Calls the posts that are left, each when its rows have arrived."""

    def receive(self, x: Tensor) -> Tensor:
        """Returns x, which is in this machine's memory, where the model computes. x may be
        overwritten afterwards."""

    def reset(self) -> None:
        """Drops the posts that a failed step has left."""

    def close(self) -> None:
        """Waits for the copies and frees the buffers."""


class HostStaging:
    """The Staging of a model that computes in this machine's memory: nothing is copied."""

    def send(self, tensors: Sequence[Tensor], rows: tuple[int, int], post: Post) -> None:
        post(tensors)

    def flush(self) -> None:
        """Does nothing: `send` has posted."""

    def receive(self, x: Tensor) -> Tensor:
        return x

    def reset(self) -> None:
        """Does nothing: no post is left."""

    def close(self) -> None:
        """Does nothing: there are no buffers."""


HOST_STAGING = HostStaging()


class Copy(Protocol):
    """Copies that were started together."""

    @property
    def is_over(self) -> bool:
        """Whether they have ended. It raises OSError if the device has failed."""

    def wait(self) -> None:
        """Waits for their end, or raises OSError."""


class Copier(Protocol):
    """Copies between a device and page-locked memory, in the order of the device's work."""

    def pinned(self, num_bytes: int) -> Tensor:
        """Returns [num_bytes] uint8 of page-locked memory, valid until `close`."""

    def to_host(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Copy:
        """Starts to copy from device to host, for pairs (host, device) of dense tensors, after the
        work that has been launched and beside what will be. It keeps the tensors until then."""

    def to_device(self, host: Tensor) -> tuple[Tensor, Copy]:
        """Starts a copy, before the work that will be launched."""

    def close(self) -> None:
        """Waits for all copies and frees the memory."""


class _Buffer(NamedTuple):
    """Page-locked memory. copy: the last one that used it; None if it has ended."""

    memory: Tensor
    copy: Copy | None


class PinnedBuffers:
    """Page-locked buffers, each used again when its copy has ended. Sizes are powers of two."""

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self._free: dict[int, deque[_Buffer]] = {}
        self.num_made = 0
        self.num_taken = 0

    def take(self, num_bytes: int) -> Tensor:
        """Returns a buffer of at least num_bytes, which the caller gives back."""
        size = max(_SMALLEST_BYTES, 1 << (num_bytes - 1).bit_length())
        free = self._free.setdefault(size, deque())
        if free and ((copy := free[0].copy) is None or copy.is_over):
            memory = free.popleft().memory
        else:
            memory = self._copier.pinned(size)
            self.num_made += 1
        self.num_taken += 1
        return memory

    def give(self, memory: Tensor, copy: Copy | None) -> None:
        """Gives a buffer back; it is used again when the copy has ended."""
        self.num_taken -= 1
        self._free[len(memory)].append(_Buffer(memory, copy))


class _Send(NamedTuple):
    copy: Copy
    buffer: Tensor
    tensors: list[Tensor]
    post: Post


class DeviceStaging:
    """The Staging of a model on a device. Only the compute thread uses it."""

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self.buffers = PinnedBuffers(copier)
        self._sends: deque[_Send] = deque()

    def send(self, tensors: Sequence[Tensor], rows: tuple[int, int], post: Post) -> None:
        sizes = [-(-x.numel() * x.element_size() // _ALIGNMENT) * _ALIGNMENT for x in tensors]
        buffer = self.buffers.take(sum(sizes))
        made: list[Tensor] = []
        at = 0
        for x, size in zip(tensors, sizes, strict=True):
            made.append(_view(buffer, at, x))
            at += size
        own = slice(*rows)
        pairs = [(host[own], x[own].contiguous()) for host, x in zip(made, tensors, strict=True)]
        try:
            copy = self._copier.to_host(pairs)
        except BaseException:
            self.buffers.give(buffer, None)
            raise
        self._sends.append(_Send(copy, buffer, made, post))
        while self._sends and self._sends[0].copy.is_over:
            self._post_first()

    def flush(self) -> None:
        while self._sends:
            self._sends[0].copy.wait()
            self._post_first()

    def _post_first(self) -> None:
        """Posts the first send, whose copy has ended."""
        send = self._sends.popleft()
        try:
            send.post(send.tensors)
        finally:
            self.buffers.give(send.buffer, None)

    def receive(self, x: Tensor) -> Tensor:
        buffer = self.buffers.take(x.numel() * x.element_size())
        copy = None
        try:
            host = _view(buffer, 0, x)
            host.copy_(x)
            found, copy = self._copier.to_device(host)
        finally:
            self.buffers.give(buffer, copy)
        return found

    def reset(self) -> None:
        while self._sends:
            send = self._sends.popleft()
            self.buffers.give(send.buffer, send.copy)

    def close(self) -> None:
        self.reset()
        self._copier.close()


def _view(buffer: Tensor, first: int, x: Tensor) -> Tensor:
    """Returns a dense tensor of x's shape and type in a buffer, from this byte on."""
    size = x.numel() * x.element_size()
    return buffer[first : first + size].view(x.dtype).view(x.shape)


class _Ended:
    """A copy that has always ended."""

    is_over = True

    def wait(self) -> None:
        """Returns at once."""


class HostCopier:
    """The Copier of a device that is this machine's CPU, on which Triton's interpreter runs."""

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def to_host(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Copy:
        for host, x in pairs:
            host.copy_(x)
        return _Ended()

    def to_device(self, host: Tensor) -> tuple[Tensor, Copy]:
        return host.clone(), _Ended()

    def close(self) -> None:
        """Does nothing: torch frees the memory."""
