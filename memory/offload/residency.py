"""Keeps the K/V that the computing layer reads in memory, and the rest of it in a file.

Each layer of a step says which tiles it reads and writes (`begin_layer`): their units of K/V are in
memory until the next layer begins. Other units leave when memory is needed, those first that will
be read last (unit_states.py). Two threads work beside the steps: one fetches what the next layer
will probably read, one writes new K/V before its memory is needed.

Bytes that were read have the checksum they were written with, or the layer fails with an OSError.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from memory.offload.frames import Frames, Places
from memory.offload.offloaded_memory import OffloadedMemory, Tiles
from memory.offload.scratch_file import Lane, UnitFile
from memory.offload.unit_pool import MOVED_TOGETHER, OffloadCounts, UnitPool
from memory.offload.unit_states import BUSY, CONTENT, DIRTY, HELD, RESIDENT, STORED, WRITING

logger = logging.getLogger(__name__)

_ALIGNMENT = 4096
_WRITE_ABOVE = 0.875  # of memory: below it new K/V need not be written, and may end before
_RETRY_S = 1.0


class Residency:
    """Units of K/V in memory and in the file. One thread computes; any thread may call the other
    methods."""

    def __init__(
        self,
        memory: OffloadedMemory,
        file: UnitFile,
        frames: Frames,
        unit_bytes: Sequence[int],
    ) -> None:
        """Owns the file and the frames from now on. unit_bytes: of each layer's K/V in a tile, at
        most a frame; a layer that asks for more units than there are frames fails. Raises OSError
        if the file cannot be used."""
        assert all(n % _ALIGNMENT == 0 for n in unit_bytes), f"{unit_bytes=}"
        self._pool = UnitPool(frames, unit_bytes, memory.num_tiles)
        self._states = self._pool.states
        self._memory = memory
        self._file = file
        self._lane = file.lane()
        self._write_above = int(self.max_bytes * _WRITE_ABOVE)
        self._ahead: dict[int, Tiles] = {}
        self._is_closed = False
        self._wake_ahead = threading.Condition(self._pool.lock)
        self._wake_writer = threading.Condition(self._pool.lock)
        works = {"ahead": self._fetch_all_ahead, "write": self._write_all}
        lanes = [file.lane() for _ in works]  # first: if one is refused, no thread has been started
        self._threads = [
            _start(name, work, lane)
            for (name, work), lane in zip(works.items(), lanes, strict=True)
        ]
        memory.units = self

    @property
    def max_bytes(self) -> int:
        """The most memory of K/V."""
        return self._pool.frames.num_frames * self._pool.frames.frame_bytes

    @property
    def fetched_bytes(self) -> int:
        """What was read from the file so far."""
        return self._pool.counts.fetched_bytes

    # ---- layers

    def begin_layer(
        self, layer: int, read: Tiles, written: Tiles, fresh: npt.NDArray[np.bool_]
    ) -> None:
        """Brings the units of a layer into memory, where they stay until the next layer begins.

        written: tiles that the layer writes to; fresh: which of them it begins, so that their old
        content is of no use. Numbers may be repeated. Raises OSError if K/V cannot be brought in
        or is damaged; then no unit stays.
        """
        pool, states = self._pool, self._states
        begun = written[fresh]
        with pool.lock:
            self._ahead.pop(layer, None)
            num_ahead, num_coming = states.visit(layer, read, written)
            pool.counts.ahead_used_bytes += num_ahead * pool.num_bytes[layer]
            pool.counts.units_coming += num_coming
            pool.counts.units_read += states.num_pinned() - len(begun)
            if states.are_resident(layer, read) and states.are_resident(layer, written):
                pool.counts.units_held += states.num_pinned() - len(begun)
                self._mark_written(layer, written)
                return
        began = time.perf_counter()
        try:
            self._bring(layer, np.concatenate((read, written)), begun)
        except BaseException:
            self.end()
            raise
        with pool.lock:
            pool.counts.waited_s += time.perf_counter() - began
            self._mark_written(layer, written)

    def locate(self, layer: int, tiles: Tiles, places: Places) -> None:
        """Writes the addresses of units of a layer to `places`. Those of units that the layer has
        asked for are good until the next layer begins; the others are of no use."""
        np.take(self._pool.places[layer], tiles, out=places)

    def _bring(self, layer: int, tiles: Tiles, begun: Tiles) -> None:
        pool, states = self._pool, self._states
        with pool.lock:
            absent = states.absent(layer, tiles)
            num_absent = len(absent) - int(np.isin(absent, begun).sum())
            pool.counts.units_held += states.num_pinned() - len(begun) - num_absent
        pool.bring(self._lane, layer, tiles, begun)

    def _mark_written(self, layer: int, written: Tiles) -> None:
        states = self._states
        states.mark_written(layer, written)
        if states.complete and self._pool.frames.used_bytes > self._write_above:
            self._wake_writer.notify()

    def end(self) -> None:
        """Ends the step: no unit has to stay."""
        with self._pool.lock:
            self._states.unpin()

    def fetch_ahead(self, layer: int, tiles: Tiles) -> None:
        """Begins to fetch what a layer will probably read, if others can leave for it that will be
        read later."""
        states = self._states
        with self._pool.lock:
            if states.are_resident(layer, tiles):
                return
            self._ahead[layer] = tiles
            self._wake_ahead.notify()

    def counts(self) -> OffloadCounts:
        with self._pool.lock:
            return replace(self._pool.counts, resident_bytes=self._pool.frames.used_bytes)

    # ---- pages

    def forget(self, first_page: int, num_pages: int) -> None:
        """Gives the frames of pages back; what they hold is lost. Waits for their transfers."""
        pool, per_page = self._pool, self._memory.tiles_per_page
        first, end = first_page * per_page, (first_page + num_pages) * per_page
        flags = self._states.flags[:, first:end]
        with pool.lock:
            while (flags & (BUSY | WRITING | HELD)).any():
                pool.change.wait()
            pool.erase(first, end)
            pool.change.notify_all()

    def copy_page(self, source: int, target: int) -> None:
        """Copies the K/V of a page, layer by layer, wherever it is. Raises OSError; the call can be
        repeated."""
        per_page = self._memory.tiles_per_page
        for layer in range(self._states.num_layers):
            with self._pool.lock:
                tiles = np.arange(per_page) + source * per_page
                tiles = tiles[(self._states.flags[layer][tiles] & CONTENT) != 0]
                copies = tiles + (target - source) * per_page
                self._states.add(layer, np.concatenate((tiles, copies)), HELD)
            try:
                self._copy_units(layer, tiles, copies)
            finally:
                with self._pool.lock:
                    self._states.remove(layer, np.concatenate((tiles, copies)), HELD)
                    self._states.freed(layer)
                    self._pool.change.notify_all()

    def _copy_units(self, layer: int, tiles: Tiles, copies: Tiles) -> None:
        pool = self._pool
        pool.bring(self._lane, layer, np.concatenate((tiles, copies)), copies)
        with pool.lock:
            while (self._states.flags[layer][copies] & WRITING).any():
                pool.change.wait()
            self._states.add(layer, copies, DIRTY)
            self._states.complete.add(layer)
        places = pool.places[layer]
        for to, place in zip(places[copies].tolist(), places[tiles].tolist(), strict=True):
            ctypes.memmove(to, place, pool.num_bytes[layer])

    # ---- threads

    def _fetch_all_ahead(self, lane: Lane) -> None:
        while (request := self._next_ahead()) is not None:
            layer, tiles = request
            try:
                self._pool.fetch(lane, layer, tiles)
            except OSError as error:  # the layer itself will try again and fail
                logger.debug("K/V was not fetched ahead: %s", error)
                with self._pool.lock:
                    self._ahead.pop(layer, None)
            else:
                with self._pool.lock:
                    self._pool.counts.ahead_bytes += len(tiles) * self._pool.num_bytes[layer]

    def _next_ahead(self) -> tuple[int, Tiles] | None:
        """Returns a layer and units of it to fetch, now marked as busy, or None at the end."""
        pool, states = self._pool, self._states
        with pool.lock:
            while not self._is_closed:
                if not self._ahead:
                    self._wake_ahead.wait()
                    continue
                layer, tiles = next(iter(self._ahead.items()))
                is_away = (states.flags[layer][tiles] & (RESIDENT | BUSY | STORED)) == STORED
                away = np.unique(tiles[is_away])[:MOVED_TOGETHER]
                room = pool.make_room(states.farthest_first(before=layer), len(away))
                if room < len(away) or not room:  # what has no room is up to the layer
                    del self._ahead[layer]
                if room:
                    pool.begin_fetch(layer, away[:room])
                    states.expect(layer, away[:room])
                    return layer, away[:room]
            return None

    def _write_all(self, lane: Lane) -> None:
        while (units := self._next_write()) is not None:
            try:
                self._pool.write(lane, *units)
            except OSError as error:
                logger.warning("K/V was not written: %s; trying again", error)
                with self._pool.lock:
                    if not self._is_closed:
                        self._wake_writer.wait(_RETRY_S)

    def _next_write(self) -> tuple[int, Tiles] | None:
        """Returns units to write, or None at the end. They are complete, so that they need not be
        written again."""
        states = self._states
        with self._pool.lock:
            while not self._is_closed:
                is_due = self._pool.frames.used_bytes > self._write_above
                for layer in states.farthest_first() if is_due and states.complete else ():
                    if layer not in states.complete:
                        continue
                    tiles = self._pool.begin_write(layer, with_open=False)
                    if len(tiles):
                        return layer, tiles
                    if layer != states.layer:  # there, pinned units may be complete
                        states.complete.discard(layer)
                self._wake_writer.wait()
            return None

    def close(self) -> None:
        """Ends the threads after their transfers, and closes the file. The memory's `close` calls
        it too."""
        with self._pool.lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._wake_ahead.notify_all()
            self._wake_writer.notify_all()
        for thread in self._threads:
            thread.join()
        self._memory.units = None
        self._file.close()
        self._pool.frames.close()


def _start(name: str, work: Callable[[Lane], None], lane: Lane) -> threading.Thread:
    thread = threading.Thread(target=work, args=(lane,), name=f"mergestep-kv-{name}", daemon=True)
    thread.start()
    return thread
