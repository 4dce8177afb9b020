"""The recent tokens of int4 K/V of which a part is in a file: in int8, and always in memory.

A row reads the keys of its own block of positions here (quant/kv.py: RECENT_BLOCK). The blocks of a
sequence that no row can read any more give their memory back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from memory.attention.seam import AttentionStep
from memory.attention.tiled import RecentLayers, RecentStore
from ops.cpu.native_tiled_attention import TiledAttentionStep
from quant.kv import RECENT_BLOCK


class BlockMemory(Protocol):
    """The memory of blocks of ranges."""

    def hold(self, start: int, blocks: Collection[int]) -> None:
        """Lets these blocks of the range at token address `start` have memory, and no others."""

    def holds(self, start: int, block: int) -> bool:
        """Returns whether the block was among those of the last `hold`."""


class Span(NamedTuple):
    """The blocks that a step's rows of a sequence are in, from the first to the last one."""

    start: int
    first: int
    last: int


class RecentBlocks:
    """The store of recent tokens, and which of its blocks have memory."""

    def __init__(self, store: RecentStore, memory: BlockMemory) -> None:
        self._store, self._memory = store, memory
        self.layers: RecentLayers = store.of(range(len(store.layout.layers)))

    def begin(self, step: AttentionStep) -> list[Span]:
        """Gives memory to the blocks of a step's rows, and takes that of earlier blocks."""
        spans: list[Span] = []
        for start, rows, kv_len in zip(step.starts, step.num_rows, step.kv_lens, strict=True):
            row = kv_len - rows
            span = Span(start, row // RECENT_BLOCK, (kv_len - 1) // RECENT_BLOCK)
            is_begun = row % RECENT_BLOCK == 0 or self._memory.holds(start, span.first)
            assert is_begun, f"row {row} of the range at {start} needs the tokens of its block"
            self._memory.hold(start, range(span.first, span.last + 1))
            spans.append(span)
        return spans

    def end(self, spans: Sequence[Span]) -> None:
        """Takes the memory of the blocks between the first and the last one of each span, after all
        layers. The first one stays until the next step, since the same rows may be computed again,
        or later ones of the same block, where drafts were wrong."""
        for start, first, last in spans:
            if last > first + 1:
                self._memory.hold(start, (first, last))

    def add_to(self, native: TiledAttentionStep, starts: Sequence[int]) -> None:
        """Adds the store to a planned step of the ranges at these token addresses."""
        layout = self._store.layout
        offsets = [start * layout.token_bytes for start in starts]
        native.add_recent(self._store.address, layout.tile_bytes, offsets)
