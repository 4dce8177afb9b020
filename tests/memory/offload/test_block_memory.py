"""Recent tokens have memory for the blocks that are held alone, and ranges do not touch."""

from __future__ import annotations

import ctypes

from memory.offload.block_memory import BlockMemory
from quant.kv import RECENT_BLOCK

TILE = 4096
RANGE_TOKENS = 2 * RECENT_BLOCK + 32  # the last block is cut off by the next range


def test_blocks_that_are_not_held_give_their_memory_back() -> None:
    memory = BlockMemory(TILE, 2, RANGE_TOKENS)
    size = 2 * RANGE_TOKENS // 16 * TILE
    ctypes.memset(memory.address, 7, size)
    memory.hold(0, range(3))
    memory.hold(RANGE_TOKENS, range(3))
    memory.hold(0, (1,))
    whole = ctypes.string_at(memory.address, size)
    block, both = RECENT_BLOCK // 16 * TILE, size // 2
    assert whole[:block] == bytes(block), "given back"
    assert whole[block : 2 * block] == b"\x07" * block
    assert whole[2 * block : both] == bytes(both - 2 * block)
    assert whole[both:] == b"\x07" * both, "another range"
    assert memory.holds(0, 1) and not memory.holds(0, 0) and memory.holds(RANGE_TOKENS, 0)
    memory.close()
