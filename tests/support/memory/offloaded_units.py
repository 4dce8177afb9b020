"""A small pool of K/V of which a part is in memory, with a model of what each unit holds."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
from collections.abc import Iterator, Sequence

import numpy as np

from memory.offload.frames import Frames
from memory.offload.offloaded_memory import OffloadedMemory
from memory.offload.residency import Residency
from memory.offload.scratch_file import BlockLane, Lane, ScratchFile, open_file
from memory.offload.unit_pool import NOWHERE
from memory.offload.unit_states import BUSY, RESIDENT
from memory.tiers.direct_io import open_block_file
from tests.support.memory.faulty_storage import FaultyFile, Plan

BLOCK = 4096


class Units:
    """All pages of a pool are mapped in one range, page n at slot n. Bytes are read and written
    where units are, as attention does."""

    def __init__(
        self,
        directory,
        *,
        sizes: Sequence[int] = (BLOCK, 3 * BLOCK, BLOCK, 2 * BLOCK),
        tiles_per_page: int = 2,
        num_pages: int = 16,
        max_bytes: int | None = None,
        bounds_page_bytes: int = 0,
        plan: Plan | None = None,
    ) -> None:
        """plan: what goes wrong with transfers."""
        self.sizes = list(sizes)
        self.tile_bytes = sum(sizes) + BLOCK  # with padding
        self.num_tiles = num_pages * tiles_per_page
        self.max_bytes = max_bytes or 2 * max(sizes) * self.num_tiles
        page_bytes = tiles_per_page * self.tile_bytes
        self.memory = OffloadedMemory(
            page_bytes, num_pages, bounds_page_bytes, tile_bytes=self.tile_bytes
        )
        self.memory.reserve(num_pages * page_bytes)
        self.memory.map(0, 0, num_pages)
        self.scratch = open_file(directory, sum(sizes) * self.num_tiles)
        file = self.scratch if plan is None else FaultyUnits(self.scratch, plan)
        frames = Frames(max(sizes), self.max_bytes // max(sizes))
        self.residency = Residency(self.memory, file, frames, self.sizes)
        self.model: dict[tuple[int, int], bytes] = {}

    def close(self) -> None:
        self.residency.close()
        self.memory.close()

    # ---- steps

    def begin(self, layer: int, read: Sequence[int], written: Sequence[int] = ()) -> None:
        """Begins a layer. Tiles are fresh if the model does not know them."""
        fresh = [(layer, tile) not in self.model for tile in written]
        self.residency.begin_layer(
            layer,
            np.array(read, dtype=np.int64),
            np.array(written, dtype=np.int64),
            np.array(fresh, dtype=bool),
        )

    def visit(self, layer: int, read: Sequence[int], written: Sequence[int] = ()) -> None:
        """Begins a layer, compares what it reads, and writes something new."""
        self.begin(layer, read, written)
        self.compare(layer, read)
        for tile in written:
            self.write(layer, tile)

    def compare(self, layer: int, tiles: Sequence[int]) -> None:
        for tile in tiles:
            if (layer, tile) in self.model:
                assert self.content(layer, tile) == self.model[layer, tile], f"{layer=} {tile=}"

    def content(self, layer: int, tile: int) -> bytes:
        return ctypes.string_at(self.address(layer, tile), self.sizes[layer])

    def write(self, layer: int, tile: int) -> None:
        """Writes a part of a unit anew, or all of one that is begun."""
        size = self.sizes[layer]
        content = os.urandom(16) * (size // 16)
        if (layer, tile) in self.model:
            part = random.randrange(0, size, 256)
            old = self.model[layer, tile]
            content = old[:part] + content[part : part + 256] + old[part + 256 :]
        ctypes.memmove(self.address(layer, tile), content, size)
        self.model[layer, tile] = content

    def address(self, layer: int, tile: int) -> int:
        place = np.zeros(1, dtype=np.int64)
        self.residency.locate(layer, np.array([tile]), place)
        assert place[0] != NOWHERE, f"{layer=} {tile=} is not in memory"
        return int(place[0])

    def write_all(self) -> None:
        """Gives every unit content."""
        for layer in range(len(self.sizes)):
            self.visit(layer, [], range(self.num_tiles))
        self.residency.end()

    # ---- pages

    def tiles_of(self, page: int) -> range:
        per_page = self.memory.tiles_per_page
        return range(page * per_page, (page + 1) * per_page)

    def release(self, page: int) -> None:
        self.memory.release(page, 1)
        for layer in range(len(self.sizes)):
            for tile in self.tiles_of(page):
                self.model.pop((layer, tile), None)

    def copy(self, source: int, target: int) -> None:
        pairs = list(zip(self.tiles_of(source), self.tiles_of(target), strict=True))
        copies = {
            (layer, copy): self.model[layer, tile]
            for layer in range(len(self.sizes))
            for tile, copy in pairs
            if (layer, tile) in self.model
        }
        for layer in range(len(self.sizes)):  # what is there now is of no use, also after an error
            for _, copy in pairs:
                self.model.pop((layer, copy), None)
        self.memory.copy_page(source, target)
        self.model |= copies

    # ---- memory and the file

    def away(self) -> tuple[int, int]:
        """Returns the layer and the tile of a unit that is only in the file."""
        states = self.residency._states
        for layer in range(states.num_layers):
            tiles = states.absent(layer, np.arange(self.num_tiles))
            if len(tiles):
                return layer, int(tiles[0])
        raise AssertionError("all units are in memory")

    def memory_bytes(self) -> int:
        """The memory of the frames that units have, each its own."""
        pool = self.residency._pool
        with pool.lock:
            used = pool.places[pool.places != NOWHERE]
            numbers, rest = np.divmod(used - pool.frames.address, pool.frames.frame_bytes)
            assert len(np.unique(used)) == len(used) and (rest == 0).all()
            assert ((numbers >= 0) & (numbers < pool.frames.num_frames)).all()
            assert len(used) * pool.frames.frame_bytes == pool.frames.used_bytes
            is_here = (pool.states.flags & (RESIDENT | BUSY)) != 0
            assert ((pool.places != NOWHERE) == is_here).all()
        return len(used) * pool.frames.frame_bytes

    def flip_byte(self, layer: int, tile: int) -> None:
        """Changes a byte of a unit in the file."""
        offset = sum(self.sizes[:layer]) * self.num_tiles + tile * self.sizes[layer]
        fd = os.open(f"/proc/self/fd/{self.scratch.fileno()}", os.O_RDWR)
        with contextlib.closing(os.fdopen(fd, "r+b", buffering=0)) as file:
            (byte,) = os.pread(fd, 1, offset + 100)
            os.pwrite(fd, bytes([byte ^ 4]), offset + 100)
            os.fsync(file.fileno())


class FaultyUnits:
    """A file of units whose transfers fail as a plan says."""

    def __init__(self, scratch: ScratchFile, plan: Plan) -> None:
        self._scratch = scratch
        file = open_block_file(os.dup(scratch.fileno()), is_direct=scratch.is_direct, depth=8)
        self.file = FaultyFile(file, plan)

    def lane(self) -> Lane:
        return BlockLane(self.file)

    def close(self) -> None:
        self.file.close()
        self._scratch.close()


@contextlib.contextmanager
def units(directory, **options) -> Iterator[Units]:
    made = Units(directory, **options)
    try:
        yield made
    finally:
        made.close()
