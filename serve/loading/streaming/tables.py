"""Tables on the disk of which a step reads some rows."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from memory.tiers.direct_io import address_of
from serve.loading.streaming.reader import WeightReader
from serve.loading.streaming.units import Piece
from serve.models.packed_cache.layout import Span

BLOCK_BYTES = 64 << 10
"""What is read at once and has a checksum. It divides the chunks of a file."""
READ_BLOCKS = 64  # at once


def block(number: int, data_end: int, at: int = 0) -> Piece:
    """Returns a block of the file; the last one may be shorter. at: its place in memory."""
    start = number * BLOCK_BYTES
    return Piece(start, min(BLOCK_BYTES, data_end - start), at)


def blocks_of(span: Span, data_end: int) -> list[Piece]:
    """Returns the blocks of a table."""
    first, end = span.start // BLOCK_BYTES, -(-(span.start + span.num_bytes) // BLOCK_BYTES)
    return [block(number, data_end) for number in range(first, end)]


def memory_for(row_bytes: int) -> int:
    """Returns the bytes of memory into which rows are read."""
    return max(READ_BLOCKS, -(-row_bytes // BLOCK_BYTES) + 1) * BLOCK_BYTES


class StreamedTable:
    """A `Lookup` of a table in the file."""

    columns = None

    def __init__(
        self,
        reader: WeightReader,
        span: Span,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        data_end: int,
    ) -> None:
        """data_end: of the file's data, at which the last block may end."""
        self._reader, self._start, self._dtype, self._end = reader, span.start, dtype, data_end
        self._width = shape[1]
        self._row_bytes = shape[1] * dtype.itemsize
        self._memory = mmap.mmap(-1, memory_for(self._row_bytes))
        self._at_once = len(self._memory) // BLOCK_BYTES
        self._address = address_of(self._memory)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        return len(self._memory)

    def __call__(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns [T, width] of `dtype` for rows: [T] int64. WeightsLostError."""
        wanted, inverse = torch.unique(rows, return_inverse=True)
        found = torch.empty(len(wanted), self._row_bytes, dtype=torch.uint8)
        todo = list(enumerate(wanted.tolist()))
        while todo:
            blocks: dict[int, int] = {}  # block -> place in memory
            taken = []
            for item in todo:
                needed = sorted(set(self._blocks(item[1])) - blocks.keys())
                if len(blocks) + len(needed) > self._at_once:
                    break
                blocks |= {number: len(blocks) + i for i, number in enumerate(needed)}
                taken.append(item)
            self._read(blocks)
            for place, row in taken:
                self._copy(row, blocks, found[place])
            todo = todo[len(taken) :]
        return found.view(self._dtype)[inverse].to(dtype)

    def _span(self, row: int) -> tuple[int, int]:
        first = self._start + row * self._row_bytes
        return first, first + self._row_bytes

    def _blocks(self, row: int) -> range:
        first, end = self._span(row)
        return range(first // BLOCK_BYTES, -(-end // BLOCK_BYTES))

    def _read(self, blocks: dict[int, int]) -> None:
        pieces = [block(number, self._end, at * BLOCK_BYTES) for number, at in blocks.items()]
        fetch = self._reader.fetch_pieces("rows of a table", tuple(pieces), self._address)
        self._reader.wait(fetch)

    def _copy(self, row: int, blocks: dict[int, int], to: Tensor) -> None:
        first, end = self._span(row)
        for number in self._blocks(row):
            start = number * BLOCK_BYTES
            begin, stop = max(first, start), min(end, start + BLOCK_BYTES)
            at = blocks[number] * BLOCK_BYTES + begin - start
            to[begin - first : stop - first] = self._bytes[at : at + stop - begin]
