"""The weights of one model that are not all in memory: what has to be kept, asked and closed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from serve.loading.streaming.experts import ExpertSlots
from serve.loading.streaming.placement import Placement
from serve.loading.streaming.reader import ReadStats, WeightReader
from serve.loading.streaming.ring import Ring
from serve.loading.streaming.stats import StreamStats
from serve.loading.streaming.units import Piece
from serve.models.layers.blocks import Block


class WeightStream:
    """Hands out the blocks of a model when their weights are in memory."""

    def __init__(
        self,
        reader: WeightReader,
        ring: Ring | None,
        numbers: Sequence[int | None],
        slots: Sequence[ExpertSlots],
        placement: Placement,
        memory: Sequence[Tensor],
        table_bytes: int,
    ) -> None:
        """numbers: of each layer in the ring; None: it is resident. memory: all there is, but for
        table_bytes for rows of tables."""
        self.reader, self.ring, self.slots, self.placement = reader, ring, slots, placement
        self._numbers = numbers
        self._memory, self._table_bytes = list(memory), table_bytes

    def blocks(self, blocks: Sequence[Block]) -> Iterator[Block]:
        """Yields the blocks; the weights of one are in memory until the next is asked for.
        WeightsLostError."""
        for number, block in zip(self._numbers, blocks, strict=True):
            if number is None or self.ring is None:
                yield block
            else:
                with self.ring.using(number):
                    yield block

    @property
    def pieces(self) -> list[Piece]:
        """What a step reads from the disk, and all experts."""
        units = [] if self.ring is None else list(self.ring.units)
        for slots in self.slots:
            units += slots.all_units
        return [piece for unit in units for piece in unit.pieces]

    def stats(self) -> StreamStats:
        return stats_of(self.num_bytes, self.reader.stats, self.slots)

    @property
    def num_bytes(self) -> int:
        """The bytes of the memory of all weights; 0 after `close`."""
        return sum(part.nbytes for part in self._memory) + self._table_bytes

    def close(self) -> None:
        """Ends all reads. The model must not be computed any more."""
        self.reader.close()
        self._memory.clear()
        self._table_bytes = 0


def stats_of(resident_bytes: int, read: ReadStats, slots: Sequence[ExpertSlots]) -> StreamStats:
    """Returns the figures of a reader and of the experts that it reads."""
    experts = [each.stats for each in slots]
    return StreamStats(
        resident_bytes,
        read.num_bytes,
        read.stalled_s,
        read.repeated,
        read.failed,
        sum(each.hits for each in experts),
        sum(each.late for each in experts),
        sum(each.misses for each in experts),
        sum(each.guesses for each in experts),
        sum(each.used_guesses for each in experts),
    )
