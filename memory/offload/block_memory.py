"""Memory of the recent tokens of ranges, in blocks of positions: addresses for all tokens, and
memory for the blocks that are held."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Collection

from memory.pages.linux_vmm import MAP_NORESERVE
from memory.tiers.direct_io import address_of
from quant.kv import RECENT_BLOCK, TILE_TOKENS

_NO_BLOCKS: frozenset[int] = frozenset()
_ADVICE = (mmap.MADV_NOHUGEPAGE, mmap.MADV_DONTFORK)  # a huge page is more than a block may be


class BlockMemory:
    """The memory of num_ranges ranges of range_tokens tokens each, in tiles of tile_bytes. The
    system gives memory to a block when it is written first, and takes it back when it is not held.
    """

    def __init__(self, tile_bytes: int, num_ranges: int, range_tokens: int) -> None:
        """tile_bytes: a multiple of 4096. range_tokens: a multiple of a tile. Raises OSError."""
        assert tile_bytes % mmap.PAGESIZE == 0 and range_tokens % TILE_TOKENS == 0
        self._tile_bytes, self._range_tokens = tile_bytes, range_tokens
        self._held: dict[int, frozenset[int]] = {}  # by a range's start
        size = num_ranges * range_tokens // TILE_TOKENS * tile_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self._memory = mmap.mmap(-1, size, flags=flags)
        for advice in _ADVICE:
            with contextlib.suppress(OSError):  # a system without it does as well
                self._memory.madvise(advice)
        self.address = address_of(self._memory)

    def hold(self, start: int, blocks: Collection[int]) -> None:
        """Lets these blocks of the range at token address `start` have memory, and no others."""
        held = frozenset(blocks)
        for block in self._held.get(start, _NO_BLOCKS) - held:
            first = block * RECENT_BLOCK
            count = min(RECENT_BLOCK, self._range_tokens - first)  # the next range follows
            at, size = (n // TILE_TOKENS * self._tile_bytes for n in (start + first, count))
            self._memory.madvise(mmap.MADV_DONTNEED, at, size)
        self._held[start] = held

    def holds(self, start: int, block: int) -> bool:
        """Returns whether the block was among those of the last `hold`."""
        return block in self._held.get(start, _NO_BLOCKS)

    def close(self) -> None:
        """Ends the memory. No block is used any more."""
        self._memory.close()
