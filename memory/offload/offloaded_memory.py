"""Pages of K/V of which only a part is in memory, and the bounds of their keys, which always are.

Pages of K/V have numbers and no addresses: `units` know where their parts are. The bounds are a
memfd with a reservation. A page's bounds are mapped at the slot of the page, so a tile's bounds
have the same number in their range as the tile in its own.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from memory.pages.linux_vmm import LinuxMemory
from memory.pages.lost_kv import KVLostError

Tiles = npt.NDArray[np.int64]
"""Numbers of tiles in the pool: page * tiles_per_page + tile in the page."""

_NONE = -1


class PageUnits(Protocol):
    """Who decides which parts of the pages are in memory."""

    def forget(self, first_page: int, num_pages: int) -> None:
        """Ends the pages' K/V. Its memory is free."""

    def copy_page(self, source: int, target: int) -> None:
        """Copies the K/V of a page, wherever it is. Raises OSError."""

    def close(self) -> None:
        """Ends all transfers."""


class OffloadedMemory:
    """A `VirtualMemory` whose reservation has slots, at which pages of K/V are found by number, and
    no memory but that of the bounds."""

    maps_during_kernels = True

    def __init__(
        self, page_bytes: int, num_pages: int, bounds_page_bytes: int, *, tile_bytes: int
    ) -> None:
        """bounds_page_bytes: of the bounds of a page's tiles, a multiple of 4096; 0: none."""
        assert page_bytes % tile_bytes == 0, f"{page_bytes=} {tile_bytes=}"
        self.page_bytes = page_bytes
        self.num_pages = num_pages
        self.tile_bytes = tile_bytes
        self.tiles_per_page = page_bytes // tile_bytes
        self.bounds_page_bytes = bounds_page_bytes
        self.bounds_address = 0
        """Where the bounds of the reservation's first page begin; 0 without bounds."""
        self.units: PageUnits | None = None
        self._bounds = LinuxMemory(bounds_page_bytes, num_pages) if bounds_page_bytes else None
        self._pages = np.empty(0, dtype=np.int64)  # mapped at each slot of the reservation

    @property
    def num_tiles(self) -> int:
        """Tiles of the pool."""
        return self.num_pages * self.tiles_per_page

    # ---- VirtualMemory

    def reserve(self, size_bytes: int) -> int:
        """Returns the address of the bounds, 0 without bounds."""
        num_slots = size_bytes // self.page_bytes
        self._pages = np.full(num_slots, _NONE, dtype=np.int64)
        if self._bounds is not None:
            self.bounds_address = self._bounds.reserve(num_slots * self.bounds_page_bytes)
        return self.bounds_address

    def prepare(self, first_page: int, num_pages: int) -> None:
        """Allocates the memory of the bounds; K/V has a frame where it is in memory."""
        if self._bounds is not None:
            self._bounds.prepare(first_page, num_pages)

    def map(self, offset: int, first_page: int, num_pages: int) -> None:
        slot = offset // self.page_bytes
        if self._bounds is not None:
            self._bounds.map(slot * self.bounds_page_bytes, first_page, num_pages)
        self._pages[slot : slot + num_pages] = np.arange(first_page, first_page + num_pages)

    def copy_page(self, source: int, target: int) -> None:
        if self.units is not None:
            try:
                self.units.copy_page(source, target)
            except OSError as error:
                raise KVLostError.of(error) from error
        if self._bounds is not None:
            self._bounds.copy_page(source, target)

    def unmap(self, offset: int, num_pages: int) -> None:
        slot = offset // self.page_bytes
        self._pages[slot : slot + num_pages] = _NONE
        if self._bounds is not None:
            self._bounds.unmap(slot * self.bounds_page_bytes, num_pages)

    def release(self, first_page: int, num_pages: int) -> None:
        if self.units is not None:
            self.units.forget(first_page, num_pages)
        if self._bounds is not None:
            self._bounds.release(first_page, num_pages)

    def close(self) -> None:
        if self.units is not None:
            self.units.close()
            self.units = None
        if self._bounds is not None:
            self._bounds.close()

    # ---- what is mapped

    def pool_tiles(self, start_bytes: int, first_tile: int, count: int) -> Tiles:
        """Returns the numbers in the pool of `count` tiles from first_tile on in the range that
        begins at this byte of the reservation, whose pages are mapped."""
        assert start_bytes % self.page_bytes == 0, f"{start_bytes=}"
        per_page = self.tiles_per_page
        skipped, first = divmod(first_tile, per_page)
        slot = start_bytes // self.page_bytes + skipped
        num_pages = -(-(first + count) // per_page)
        pages = self._pages[slot : slot + num_pages]
        assert len(pages) == num_pages and (pages != _NONE).all(), "tiles of mapped pages"
        tiles = pages[:, None] * per_page + np.arange(per_page)
        return tiles.reshape(-1)[first : first + count]
