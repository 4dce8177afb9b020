"""Reads pages by name for peers, in any thread: from memory, and from the store below it.

A cached page does not change while it is in the index. So a page of memory is copied without a
lock, and the copy counts only if the page was in the index all that time; the computing thread
removes a page from the index before anything else is written there. It is never delayed.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait

from memory.peers.page_copies import PageCopies
from memory.prefix.index import PrefixIndex
from memory.prefix.page_store import PageStore

logger = logging.getLogger(__name__)

BUFFER_PAGES = 4
_LOAD_S = 1.0  # the longest wait for the store below

# Buffers that a store which hangs may still write. They are never freed.
_abandoned: list[mmap.mmap] = []


class PageBuffer:
    """Memory for a few pages on their way to a peer."""

    def __init__(self, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self._memory = mmap.mmap(-1, BUFFER_PAGES * page_bytes)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def address(self, slot: int) -> int:
        return self._base + slot * self.page_bytes

    def view(self, slot: int) -> memoryview:
        return memoryview(self._memory)[slot * self.page_bytes : (slot + 1) * self.page_bytes]

    def abandon(self) -> None:
        _abandoned.append(self._memory)


class PageSource:
    """The pages of one engine."""

    def __init__(
        self,
        index: PrefixIndex,
        address_of: Callable[[int], int],
        below: PageStore | None,
        copies: PageCopies | None = None,
    ) -> None:
        """address_of: a page's address, whatever range maps it. below: has further pages, and
        loads them for any thread. copies: those of others' pages."""
        self._index = index
        self._address_of = address_of
        self._below = below
        self._copies = copies

    def contains(self, name: bytes) -> bool:
        if self._index.has_key(name) or (self._copies is not None and self._copies.contains(name)):
            return True
        return self._below is not None and self._below.contains(name)

    def read(self, names: Sequence[bytes], buffer: PageBuffer) -> list[bool] | None:
        """Reads pages into the buffer's slots; returns which are there. None: the store below does
        not answer, and may still write to the buffer."""
        found = [self._copy(name, buffer, slot) for slot, name in enumerate(names)]
        loads: dict[int, Future[bool]] = {}
        if self._below is not None:
            lacks = [slot for slot, is_there in enumerate(found) if not is_there]
            lacks = [slot for slot in lacks if self._below.contains(names[slot])]
            pages = [(names[slot], buffer.address(slot)) for slot in lacks]
            loads = dict(zip(lacks, self._below.load_many(pages), strict=True)) if pages else {}
        if wait(loads.values(), _LOAD_S).not_done:
            buffer.abandon()
            logger.warning("K/V for peers: the store does not answer")
            return None
        for slot, load in loads.items():
            found[slot] = not load.cancelled() and not load.exception() and load.result()
        return found

    def _copy(self, name: bytes, buffer: PageBuffer, slot: int) -> bool:
        seen = self._index.seen(name)
        if seen is None:
            return self._copies is not None and self._copies.read(name, buffer.address(slot))
        page, node = seen
        ctypes.memmove(buffer.address(slot), self._address_of(page), buffer.page_bytes)
        return self._index.is_still(name, node)
