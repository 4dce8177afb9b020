"""What is known of each unit, and the order in which units give their memory up.

A unit is the slice of one layer in one tile of the pool. Layers are visited in a circle, once a
step, so of two units that will be read at each visit, the one whose layer comes later is given up
first: then a circle that is larger than memory still finds what fits, where the oldest one first
would find nothing. Before that, units go that were read at few of the last visits to their layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from memory.offload.offloaded_memory import Tiles

Flags = npt.NDArray[np.uint8]

RESIDENT = 1  # in memory, readable
DIRTY = 2  # the file does not have its content
OPEN = 4  # written at the last visit to its layer, so probably at the next one too
WRITING = 8  # resident, on its way to the file
BUSY = 16  # on its way to memory
STORED = 32  # the file has its content, unless it is dirty
HELD = 64  # is being copied
CONTENT = RESIDENT | STORED | BUSY
_STAYS = RESIDENT | DIRTY | WRITING | BUSY | HELD

_THIS_VISIT = 0x80
_EXPECTED = 0x20
_WEIGHTS = (1, 1, 1, 2, 3, 4, 6, 8)
"""Of the bits of a history, the last visit's at the end."""
_WARMER = (1, 6, 14)
"""The least sums of weights of the warmth classes 1, 2 and 3."""
NUM_CLASSES = len(_WARMER) + 1


def _warmth() -> Flags:
    """Returns the class of each history."""
    bits = (np.arange(256)[:, None] >> np.arange(8)) & 1
    classes: Flags = np.searchsorted(_WARMER, bits @ np.array(_WEIGHTS), side="right").astype("u1")
    return classes


_CLASS = _warmth()


class UnitStates:
    """The states of all units, [layers, tiles of the pool]. The owner's lock protects them."""

    def __init__(self, num_layers: int, num_tiles: int) -> None:
        self.num_layers, self.num_tiles = num_layers, num_tiles
        self.flags: Flags = np.zeros((num_layers, num_tiles), dtype=np.uint8)
        self.sums = np.zeros((num_layers, num_tiles), dtype=np.uint32)
        # Bit 7: read at the last visit to its layer; bit 6: at the one before; and so on.
        self._history: Flags = np.zeros((num_layers, num_tiles), dtype=np.uint8)
        self.layer = num_layers - 1  # visited last
        self._pinned: Flags = np.zeros(num_tiles, dtype=np.uint8)  # of that layer; _THIS_VISIT: yes
        self._written: list[Tiles] = [np.empty(0, dtype=np.int64) for _ in range(num_layers)]
        self.complete: set[int] = set()
        """Layers that may have dirty units which are not open."""
        # A class below this one has no unit of the layer that can be given up.
        self._least_class = [0] * num_layers
        # Fetched ahead since the last visit to the layer, and how many these are.
        self._is_ahead = np.zeros((num_layers, num_tiles), dtype=np.bool_)
        self._num_ahead = [0] * num_layers

    # ---- visits

    def visit(self, layer: int, read: Tiles, written: Tiles) -> tuple[int, int]:
        """Pins these units of the layer, in place of those of the last visit. Returns how many of
        them were fetched ahead since then, and how many of these are still on their way."""
        pinned, history = self._pinned, self._history[layer]
        pinned.fill(0)
        pinned[read] = _THIS_VISIT
        pinned[written] = _THIS_VISIT
        np.right_shift(history, 1, out=history)
        np.bitwise_or(history, pinned, out=history)
        self._least_class[self.layer] = self._least_class[layer] = 0
        self.layer = layer
        return self._end_ahead(layer) if self._num_ahead[layer] else (0, 0)

    def _end_ahead(self, layer: int) -> tuple[int, int]:
        used = np.flatnonzero(self._is_ahead[layer] & (self._pinned != 0))
        num_here = int(np.count_nonzero(self.flags[layer][used] & RESIDENT))
        self._is_ahead[layer], self._num_ahead[layer] = False, 0
        return len(used), len(used) - num_here

    def unpin(self) -> None:
        self._pinned.fill(0)
        self._least_class[self.layer] = 0

    def num_pinned(self) -> int:
        return int(np.count_nonzero(self._pinned))

    def are_resident(self, layer: int, tiles: Tiles) -> bool:
        return bool((self.flags[layer][tiles] & RESIDENT).all())

    def absent(self, layer: int, tiles: Tiles) -> Tiles:
        """Returns those of the tiles, each once and in order, that are not resident."""
        return np.unique(tiles[(self.flags[layer][tiles] & RESIDENT) == 0])

    def mark_written(self, layer: int, tiles: Tiles) -> None:
        row, before = self.flags[layer], self._written[layer]
        if len(before):
            row[before] &= ~np.uint8(OPEN)
        row[tiles] |= DIRTY | OPEN
        if len(before) and not (row[before] & OPEN).all():
            self.complete.add(layer)
        self._written[layer] = tiles

    # ---- changes; each is of tiles of one layer

    def add(self, layer: int, tiles: Tiles, flags: int) -> None:
        self.flags[layer][tiles] |= np.uint8(flags)

    def remove(self, layer: int, tiles: Tiles, flags: int) -> None:
        self.flags[layer][tiles] &= np.uint8(~flags & 0xFF)

    def freed(self, layer: int) -> None:
        """Notes that units of the layer may be given up that could not before."""
        self._least_class[layer] = 0

    def expect(self, layer: int, tiles: Tiles) -> None:
        """Notes that these units, which are fetched ahead, will probably be read, so that they are
        not cold."""
        self._history[layer][tiles] |= _EXPECTED
        self._is_ahead[layer][tiles] = True
        self._num_ahead[layer] += len(tiles)

    def erase(self, first: int, end: int) -> None:
        """Forgets all units of these tiles of the pool."""
        self.flags[:, first:end] = 0
        self._history[:, first:end] = 0
        self._is_ahead[:, first:end] = False

    # ---- who goes

    def farthest_first(self, before: int | None = None) -> list[int]:
        """Returns the layers in the order in which they will be visited last. before: only those
        that are visited after this one."""
        n = self.num_layers
        order = [(self.layer - i) % n for i in range(n)]  # the last visited comes again last
        return order if before is None else order[: (self.layer - before) % n]

    def choose(self, order: Sequence[int], most: int) -> list[tuple[int, Tiles]]:
        """Returns (layer, tiles) of `most` units of these layers to give up, or of as many as can
        go."""
        chosen: list[tuple[int, Tiles]] = []
        for warmth in range(NUM_CLASSES):
            for layer in order:
                if most <= 0:
                    return chosen
                if self._least_class[layer] > warmth:
                    continue
                found = self._idle(layer, warmth)
                if len(found) <= most:
                    self._least_class[layer] = warmth + 1
                found = found[:most]
                if len(found):
                    chosen.append((layer, found))
                    most -= len(found)
        return chosen

    def _idle(self, layer: int, warmth: int) -> Tiles:
        """Returns the units of a layer and a class that can be given up at once."""
        can_go = (self.flags[layer] & _STAYS) == RESIDENT
        if layer == self.layer:
            can_go &= self._pinned == 0
        tiles = np.flatnonzero(can_go)
        idle: Tiles = tiles[_CLASS[self._history[layer][tiles]] == warmth]
        return idle

    def dirty(self, layer: int, *, with_open: bool) -> Tiles:
        """Returns the units of a layer that can be written to the file now."""
        stays = WRITING | BUSY | HELD | (0 if with_open else OPEN)
        can_go = (self.flags[layer] & (RESIDENT | DIRTY | stays)) == (RESIDENT | DIRTY)
        if layer == self.layer:
            can_go &= self._pinned == 0
        return np.flatnonzero(can_go)
