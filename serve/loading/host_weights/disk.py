"""Weights that neither the device nor host memory can take: a file of them, and reading ahead.

A start writes the file, in the form that the device or the CPU computes with. It has no name, so
that the system frees it with the process, however that ends. It is read past the page cache by the
reader of serve/loading/streaming, which compares checksums.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from memory.tiers.direct_io import choose_read_io, open_block_file, open_direct
from ops.backend import LinearOp
from ops.cpu import native_library
from ops.cpu.native_stored import stored
from serve.errors import ConfigError, reason
from serve.loading.host_weights.link import Link, Wait
from serve.loading.streaming.cache import DEPTH
from serve.loading.streaming.reader import WeightReader
from serve.loading.streaming.ring import Ring
from serve.loading.streaming.units import Unit, unit_of
from serve.models.packed_cache.folder import UNFINISHED
from serve.models.packed_cache.layout import LINE, PAGE, LayerEntry, Span
from serve.models.packed_cache.writer import SYNCED_BYTES, round_up, write_at
from serve.units import format_memory


class DiskFile:
    """A file without a name that takes weights one by one and is then read."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        """num_bytes: about as many as it will have. ConfigError if there is no room."""
        self._path, self._end, self._synced = folder / "weights beyond host memory", 0, 0
        self._checksums: dict[tuple[int, int], int] = {}
        self._fd = self._read_fd = -1
        try:
            self._fd, name = tempfile.mkstemp(dir=folder, suffix=UNFINISHED)
            try:
                self._read_fd, self._is_direct = open_direct(name, os.O_RDONLY)
                self._io = choose_read_io(folder)
            finally:
                os.unlink(name)
            os.posix_fallocate(self._fd, 0, num_bytes)  # a full disk is noticed here
        except OSError as error:
            self.close()
            raise ConfigError(
                f"packed_cache: {format_memory(num_bytes)} of weights cannot be written to"
                f" {folder}: {reason(error)}"
            ) from error

    @property
    def num_bytes(self) -> int:
        return self._end

    def add(self, name: str, memory: Tensor) -> Unit:
        """Writes weights, uint8 in whole pages, and returns what reads them. ConfigError."""
        unit = unit_of(name, [Span(self._end, len(memory))])
        checksum, start = native_library.library().checksum, self._end
        for piece in unit.pieces:
            at = memory.data_ptr() + piece.start - start
            self._checksums[piece.start, piece.num_bytes] = checksum(at, piece.num_bytes)
        try:
            write_at(self._fd, memory.numpy().data, start)
            self._end += len(memory)
            if self._end - self._synced >= SYNCED_BYTES:
                self._sync()
        except OSError as error:
            raise ConfigError(f"packed_cache: {self._path}: {reason(error)}") from error
        return unit

    def add_layer(self, name: str, op: LinearOp) -> LayerEntry:
        """Writes a layer of the CPU's and returns where it is. ConfigError if it cannot be."""
        found = stored(op)
        if found is None:
            raise ConfigError(
                f"host_weight_bytes: {name} is not packed as the native kernels have it, so that it"
                " cannot be read from a file"
            )
        kind, buffers = found
        spans, end = [], self._end
        for each in buffers:
            spans.append(Span(end, each.num_bytes))
            end = round_up(end + each.num_bytes, LINE)
        memory = pages(end - self._end)
        for span, each in zip(spans, buffers, strict=True):
            ctypes.memmove(memory[span.start - self._end :].data_ptr(), *each)
        self.add(name, memory)
        return LayerEntry(kind, tuple(spans))

    def _sync(self) -> None:
        """Waits for the disk, and gives the pages of the cache back."""
        os.fdatasync(self._fd)
        os.posix_fadvise(self._fd, self._synced, self._end - self._synced, os.POSIX_FADV_DONTNEED)
        self._synced = self._end

    def open(self) -> WeightReader:
        """Ends writing and returns what reads the file and owns it. ConfigError."""
        try:
            self._sync()
            fd = self._read_fd
            file = open_block_file(fd, is_direct=self._is_direct, depth=DEPTH, io=self._io)
        except OSError as error:
            raise ConfigError(f"packed_cache: {self._path}: {reason(error)}") from error
        self._read_fd = -1  # the reader's
        self.close()
        return WeightReader(self._path, file, self._checksums)

    def close(self) -> None:
        for fd in (self._fd, self._read_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._read_fd = -1


def pages(num_bytes: int) -> Tensor:
    """Returns zeros, uint8 in whole pages."""
    return torch.zeros(round_up(num_bytes, PAGE), dtype=torch.uint8)


class DiskFeed:
    """Brings layers from the disk through page-locked buffers to the device.

    Reads run ahead by themselves, as in the ring of serve/loading/streaming: when a layer has left
    its buffer for the device, the next one is read into it. Only the compute thread calls it.
    """

    def __init__(
        self, reader: WeightReader, units: Sequence[Unit], num_buffers: int, link: Link
    ) -> None:
        self._link, self._units = link, list(units)
        size = max(unit.num_bytes for unit in units)
        memory = link.pinned(size * num_buffers + PAGE)
        first = -memory.data_ptr() % PAGE  # as direct reads want it
        self._buffers = [memory[first + at * size :][:size] for at in range(num_buffers)]
        addresses = [each.data_ptr() for each in self._buffers]
        reader.register([(address, size) for address in addresses])
        self._ring = Ring(reader, units, addresses)
        self._held: tuple[int, Wait] | None = None  # a layer that is on its way to the device
        self._ring.start()

    def is_ready(self, number: int) -> bool:
        """Returns whether a layer is in its buffer, so that `take` waits for no read."""
        return self._ring.has_come(number)

    def take(self, number: int, target: Tensor) -> Wait:
        """Waits until a layer has been read and starts to copy it, as `Link.fetch` does.
        WeightsLostError."""
        self.release()
        self._ring.enter(number)
        try:
            buffer = self._buffers[number % len(self._buffers)]
            wait = self._link.fetch(target, buffer[: len(target)])
        except BaseException:
            self._ring.leave(number)
            raise
        self._held = number, self._link.copied()
        return wait

    def release(self) -> None:
        """Waits for the copy that was started last, and reads ahead into its buffer."""
        if self._held is not None:
            (number, join), self._held = self._held, None
            join()
            self._ring.leave(number)
