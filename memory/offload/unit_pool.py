"""The bytes of units in memory and on their way: brings units in, writes them, gives memory back.

All threads that move units share one `UnitPool`. Its lock protects states and counts, and is free
while bytes move: a unit on its way is marked, so that no other thread moves it.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memory.offload.offloaded_memory import OffloadedMemory, Tiles
from memory.offload.scratch_file import NOTHING, Lane, Leaving
from memory.offload.unit_states import BUSY, DIRTY, RESIDENT, STORED, WRITING, UnitStates

MOVED_TOGETHER = 256
"""Units of one transfer: long enough for a disk's queue, and short to wait for."""
_RESERVE = 64  # a part of memory


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
    """Moves units between memory and the file, within max_bytes of memory.

    A caller of `reserve` owns the bytes that it is granted, until units that it marks have them.
    """

    def __init__(
        self,
        memory: OffloadedMemory,
        slices: Sequence[tuple[int, int]],
        max_bytes: int,
    ) -> None:
        """slices: the (offset in a tile, bytes) of each layer."""
        self.memory = memory
        self.max_bytes = max_bytes
        self.num_bytes = [size for _, size in slices]
        self.states = UnitStates(len(slices), memory.num_tiles)
        self.counts = OffloadCounts()
        self.lock = threading.Lock()
        self.change = threading.Condition(self.lock)
        """Notified whenever a unit is no longer on its way."""
        self.used_bytes = 0
        self._num_moving = 0
        # Kept free, so that room for the next units is made while these are read.
        self._reserve_bytes = min(MOVED_TOGETHER * max(self.num_bytes), max_bytes // _RESERVE)
        self._offsets = [offset for offset, _ in slices]
        self._file_offsets: list[int] = []  # the file has one layer after the other
        self.file_bytes = 0
        for size in self.num_bytes:
            self._file_offsets.append(self.file_bytes)
            self.file_bytes += size * memory.num_tiles

    def addresses(self, layer: int, tiles: Tiles) -> npt.NDArray[np.int64]:
        return self._memory_offsets(layer, tiles) + self.memory.pool_address

    def _memory_offsets(self, layer: int, tiles: Tiles) -> npt.NDArray[np.int64]:
        return tiles * self.memory.tile_bytes + self._offsets[layer]

    def _places(self, layer: int, tiles: Tiles) -> npt.NDArray[np.int64]:
        return tiles * self.num_bytes[layer] + self._file_offsets[layer]

    # ---- bringing units in

    def bring(self, lane: Lane, layer: int, tiles: Tiles, begun: Tiles) -> None:
        """Makes units resident, which the caller has pinned or holds. begun: those whose old
        content is of no use. Raises OSError."""
        size = self.num_bytes[layer]
        while True:
            with self.lock:
                absent = self.states.absent(layer, tiles)
                if not len(absent):
                    return
                idle = self._idle(layer, absent)[:MOVED_TOGETHER]
                if not len(idle):
                    self.change.wait()
                    continue
            granted = self._reserve(lane, len(idle) * size, size) // size
            with self.lock:
                idle = self._idle(layer, idle)[:granted]  # a thread may have begun with some
                self.used_bytes -= (granted - len(idle)) * size
                stored = self._begin_units(layer, idle, begun)
                order = self.states.farthest_first()
                leaving = self.leave_next(order) if len(stored) else []
            if len(stored):
                self.fetch(lane, layer, stored, leaving)

    def _idle(self, layer: int, tiles: Tiles) -> Tiles:
        """Returns those of the tiles that are neither resident nor on their way."""
        idle: Tiles = tiles[(self.states.flags[layer][tiles] & (RESIDENT | BUSY)) == 0]
        return idle

    def _begin_units(self, layer: int, idle: Tiles, begun: Tiles) -> Tiles:
        """Makes those that are begun resident, empty, and returns the others, which the caller
        fetches. All have bytes."""
        states = self.states
        is_begun = np.isin(idle, begun)
        new, rest = idle[is_begun], idle[~is_begun]
        lost = rest[(states.flags[layer][rest] & STORED) == 0]
        if len(lost):
            self.used_bytes -= len(idle) * self.num_bytes[layer]
            raise OSError(errno.EIO, f"K/V of layer {layer}, tile {lost[0]} was never written")
        states.remove(layer, new, STORED)
        states.add(layer, new, RESIDENT)
        states.add(layer, rest, BUSY)
        return rest

    def fetch(
        self, lane: Lane, layer: int, tiles: Tiles, leaving: Sequence[tuple[int, Tiles]]
    ) -> None:
        """Reads units that are marked as busy and have bytes. After an OSError none is resident,
        and their bytes are free. leaving: what `leave_next` has chosen."""
        size = self.num_bytes[layer]
        places = self.addresses(layer, tiles), self._places(layer, tiles)
        with self.moving():
            try:
                try:
                    sums = lane.read(*places, size, self._parts(leaving))
                finally:
                    with self.lock:
                        self._note_gone(leaving)
                damaged = tiles[sums != self.states.sums[layer][tiles]]
                if len(damaged):
                    what = f"K/V of layer {layer}, tile {damaged[0]} is damaged on disk"
                    raise OSError(errno.EIO, what)
            except BaseException:
                self._give_back([(layer, tiles)])
                raise
            with self.lock:
                self.counts.fetched_bytes += len(tiles) * size
                self.states.remove(layer, tiles, BUSY)
                self.states.add(layer, tiles, RESIDENT)
                self.states.freed(layer)

    # ---- room

    def _reserve(self, lane: Lane, wanted: int, least: int) -> int:
        """Takes `wanted` bytes, or fewer, but at least `least` of which it is a multiple. Writes
        units and waits for other threads if it must. Raises OSError."""
        while True:
            dirty = None
            with self.lock:
                order = self.states.farthest_first()
                granted, victims = self._try_reserve(order, wanted)
                if not victims and granted < least:
                    dirty = self._next_dirty(order)
                    if dirty is None:
                        if not self._num_moving:
                            raise OSError(errno.ENOMEM, "no K/V can leave memory")
                        self.change.wait()
                        continue
                elif not victims:
                    granted -= granted % least
                    self.used_bytes += granted
                    return granted
            if dirty is not None:
                self.write(lane, *dirty)
            self._give_back(victims)

    def reserve_clean(self, order: Sequence[int], wanted: int) -> int:
        """Takes `wanted` bytes or fewer, perhaps none: only units of these layers leave for them
        that need not be written."""
        while True:
            with self.lock:
                granted, victims = self._try_reserve(order, wanted)
                if not victims:
                    self.used_bytes += granted
                    return granted
            self._give_back(victims)

    def _try_reserve(
        self, order: Sequence[int], wanted: int
    ) -> tuple[int, list[tuple[int, Tiles]]]:
        """Returns how many bytes are free, at most `wanted`, and units to be given back before, now
        marked as busy."""
        free = min(wanted, self.max_bytes - self.used_bytes)
        if free >= wanted:
            return wanted, []
        return free, self._leave(order, wanted - free)

    def leave_next(self, order: Sequence[int]) -> list[tuple[int, Tiles]]:
        """Returns units of these layers to be given back while others are read, now marked as busy,
        so that there is room for the next ones. The caller has the lock."""
        missing = self._reserve_bytes - (self.max_bytes - self.used_bytes)
        return self._leave(order, missing) if missing > 0 else []

    def _leave(self, order: Sequence[int], num_bytes: int) -> list[tuple[int, Tiles]]:
        states = self.states
        victims = states.choose(order, self.num_bytes, num_bytes, MOVED_TOGETHER)
        for layer, tiles in victims:
            states.remove(layer, tiles, RESIDENT)
            states.add(layer, tiles, BUSY)
        return victims

    def _give_back(self, units: Sequence[tuple[int, Tiles]]) -> None:
        """Gives the memory of busy units back, which then are not resident."""
        if not units:
            return
        with self.moving():
            try:
                self._parts(units).give_back()
            finally:
                with self.lock:
                    self._note_gone(units)

    def _parts(self, units: Sequence[tuple[int, Tiles]]) -> Leaving:
        """Returns the places of units in the K/V's memory."""
        if not units:
            return NOTHING
        offsets = [self._memory_offsets(layer, tiles) for layer, tiles in units]
        sizes = [np.full(len(tiles), self.num_bytes[layer]) for layer, tiles in units]
        return Leaving(self.memory.fileno(), np.concatenate(offsets), np.concatenate(sizes))

    def _note_gone(self, units: Sequence[tuple[int, Tiles]]) -> None:
        for layer, tiles in units:
            self.states.remove(layer, tiles, BUSY)
            self.used_bytes -= len(tiles) * self.num_bytes[layer]

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
        """Returns units of the layer that the caller writes next, now marked as being written."""
        tiles = self.states.dirty(layer, with_open=with_open)[:MOVED_TOGETHER]
        self.states.remove(layer, tiles, DIRTY)
        self.states.add(layer, tiles, WRITING | STORED)
        return tiles

    def write(self, lane: Lane, layer: int, tiles: Tiles) -> None:
        """Writes units that `begin_write` has marked. Those that are written to meanwhile are dirty
        again, and so are all after an OSError."""
        size = self.num_bytes[layer]
        sums = None
        with self.moving():
            try:
                sums = lane.write(self.addresses(layer, tiles), self._places(layer, tiles), size)
            finally:
                with self.lock:
                    if sums is None:
                        self.states.add(layer, tiles, DIRTY)
                    else:
                        self.states.sums[layer][tiles] = sums
                        self.counts.written_bytes += len(tiles) * size
                    self.states.remove(layer, tiles, WRITING)
                    self.states.freed(layer)

    @contextlib.contextmanager
    def moving(self) -> Iterator[None]:
        """Units are on their way, or bytes are reserved for them: others may wait for `change`."""
        with self.lock:
            self._num_moving += 1
        try:
            yield
        finally:
            with self.lock:
                self._num_moving -= 1
                self.change.notify_all()
