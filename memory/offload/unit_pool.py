"""The frames of units in memory and on their way: brings units in, and writes them.

All threads that move units share one `UnitPool`. Its lock protects states and counts, and is free
while bytes move: a unit on its way is marked, so that no other thread moves it.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memory.offload.frames import Frames, Places
from memory.offload.offloaded_memory import Tiles
from memory.offload.scratch_file import Lane
from memory.offload.unit_states import BUSY, DIRTY, RESIDENT, STORED, WRITING, UnitStates

MOVED_TOGETHER = 256
"""Units of one transfer: long enough for a disk's queue, and short to wait for."""
NOWHERE = 0
"""The address of a unit that is not in memory, so that a kernel that reads it by mistake faults
instead of giving a wrong result."""


@dataclass(slots=True)
class OffloadCounts:
    """units_read: units that layers asked for, without those they began; units_held: of these, the
    units that were in memory; units_coming: those that were on their way, fetched ahead.
    fetched_bytes: read from the file, ahead_bytes of them before a layer asked; the layer then
    asked for ahead_used_bytes of these. waited_s: how long layers waited for their units."""

    units_read: int = 0
    units_held: int = 0
    units_coming: int = 0
    fetched_bytes: int = 0
    ahead_bytes: int = 0
    ahead_used_bytes: int = 0
    written_bytes: int = 0
    waited_s: float = 0.0
    resident_bytes: int = 0


class UnitPool:
    """Moves units between frames of memory and the file."""

    def __init__(self, frames: Frames, unit_bytes: Sequence[int], num_tiles: int) -> None:
        """unit_bytes: of each layer, at most those of a frame."""
        assert max(unit_bytes) <= frames.frame_bytes, "a unit has a frame"
        self.frames = frames
        self.num_bytes = list(unit_bytes)
        self.states = UnitStates(len(unit_bytes), num_tiles)
        self.places: Places = np.full((len(unit_bytes), num_tiles), NOWHERE, dtype=np.int64)
        """The address of each unit's frame, or NOWHERE."""
        self.counts = OffloadCounts()
        self.lock = threading.Lock()
        self.change = threading.Condition(self.lock)
        """Notified whenever a unit is no longer on its way."""
        self._num_moving = 0  # transfers
        self._file_offsets: list[int] = []  # the file has one layer after the other
        self.file_bytes = 0
        for size in self.num_bytes:
            self._file_offsets.append(self.file_bytes)
            self.file_bytes += size * num_tiles

    def _file_places(self, layer: int, tiles: Tiles) -> Places:
        return tiles * self.num_bytes[layer] + self._file_offsets[layer]

    # ---- bringing units in

    def bring(self, lane: Lane, layer: int, tiles: Tiles, begun: Tiles) -> None:
        """Makes units resident, which the caller has pinned or holds. begun: those whose old
        content is of no use. Raises OSError."""
        while True:
            with self.lock:
                absent = self.states.absent(layer, tiles)
                if not len(absent):
                    return
                idle = self._idle(layer, absent)[:MOVED_TOGETHER]
                order = self.states.farthest_first()
                granted = self.make_room(order, len(idle))
                stored, dirty = self._begin_units(layer, idle[:granted], begun), None
                if not granted:
                    dirty = self._next_dirty(order) if len(idle) else None
                    if dirty is None:
                        if len(idle) and not self._num_moving:
                            raise OSError(errno.ENOMEM, "no K/V can leave memory")
                        self.change.wait()
                        continue
            if dirty is not None:
                self.write(lane, *dirty)
            elif len(stored):
                self.fetch(lane, layer, stored)

    def _idle(self, layer: int, tiles: Tiles) -> Tiles:
        """Returns those of the tiles that are neither resident nor on their way."""
        idle: Tiles = tiles[(self.states.flags[layer][tiles] & (RESIDENT | BUSY)) == 0]
        return idle

    def _begin_units(self, layer: int, idle: Tiles, begun: Tiles) -> Tiles:
        """Makes those that are begun resident, with any content, and returns the others, which the
        caller fetches. There are free frames for all. The caller has the lock."""
        states = self.states
        is_begun = np.isin(idle, begun)
        new, rest = idle[is_begun], idle[~is_begun]
        lost = rest[(states.flags[layer][rest] & STORED) == 0]
        if len(lost):
            raise OSError(errno.EIO, f"K/V of layer {layer}, tile {lost[0]} was never written")
        self.places[layer][new] = self.frames.take(len(new))
        states.remove(layer, new, STORED)
        states.add(layer, new, RESIDENT)
        if len(rest):
            self.begin_fetch(layer, rest)
        return rest

    def begin_fetch(self, layer: int, tiles: Tiles) -> None:
        """Marks units as busy that the caller fetches next. There are free frames for all. The
        caller has the lock."""
        self.places[layer][tiles] = self.frames.take(len(tiles))
        self.states.add(layer, tiles, BUSY)
        self._num_moving += 1

    def fetch(self, lane: Lane, layer: int, tiles: Tiles) -> None:
        """Reads units that `begin_fetch` has marked. After an OSError none is resident."""
        size = self.num_bytes[layer]
        is_read = False
        try:
            sums = lane.read(self.places[layer][tiles], self._file_places(layer, tiles), size)
            damaged = tiles[sums != self.states.sums[layer][tiles]]
            if len(damaged):
                what = f"K/V of layer {layer}, tile {damaged[0]} is damaged on disk"
                raise OSError(errno.EIO, what)
            is_read = True
        finally:
            with self.lock:
                self.states.remove(layer, tiles, BUSY)
                if is_read:
                    self.counts.fetched_bytes += len(tiles) * size
                    self.states.add(layer, tiles, RESIDENT)
                    self.states.freed(layer)
                else:
                    self._free(layer, tiles)
                self._note_moved()

    def _note_moved(self) -> None:
        self._num_moving -= 1
        self.change.notify_all()

    # ---- room

    def make_room(self, order: Sequence[int], wanted: int) -> int:
        """Returns how many frames are free, at most `wanted`; if there are fewer, units of these
        layers leave that need not be written. The caller has the lock."""
        missing = wanted - self.frames.num_free
        if missing > 0:
            for layer, tiles in self.states.choose(order, missing):
                self.states.remove(layer, tiles, RESIDENT)
                self._free(layer, tiles)
        return min(wanted, self.frames.num_free)

    def _free(self, layer: int, tiles: Tiles) -> None:
        self.frames.give_back(self.places[layer][tiles])
        self.places[layer][tiles] = NOWHERE

    def erase(self, first: int, end: int) -> None:
        """Forgets all units of these tiles, none of which is on its way or held. The caller has the
        lock."""
        places = self.places[:, first:end]
        self.frames.give_back(places[places != NOWHERE])
        places.fill(NOWHERE)
        self.states.erase(first, end)

    # ---- writing

    def _next_dirty(self, order: Sequence[int]) -> tuple[int, Tiles] | None:
        """Returns units of a layer to write, now marked; those that are open last."""
        for with_open in (False, True):
            for layer in order:
                tiles = self.begin_write(layer, with_open=with_open)
                if len(tiles):
                    return layer, tiles
        return None

    def begin_write(self, layer: int, *, with_open: bool) -> Tiles:
        """Returns units of the layer that the caller writes next, now marked as being written. The
        caller has the lock."""
        tiles = self.states.dirty(layer, with_open=with_open)[:MOVED_TOGETHER]
        self.states.remove(layer, tiles, DIRTY)
        self.states.add(layer, tiles, WRITING | STORED)
        if len(tiles):
            self._num_moving += 1
        return tiles

    def write(self, lane: Lane, layer: int, tiles: Tiles) -> None:
        """Writes units that `begin_write` has marked. Those that are written to meanwhile are dirty
        again, and so are all after an OSError."""
        size = self.num_bytes[layer]
        sums = None
        try:
            sums = lane.write(self.places[layer][tiles], self._file_places(layer, tiles), size)
        finally:
            with self.lock:
                if sums is None:
                    self.states.add(layer, tiles, DIRTY)
                else:
                    self.states.sums[layer][tiles] = sums
                    self.counts.written_bytes += len(tiles) * size
                self.states.remove(layer, tiles, WRITING)
                self.states.freed(layer)
                self._note_moved()
