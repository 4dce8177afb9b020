"""The address space of a group's K/V accounting: it records edits, which every rank applies to its
own memory when it computes the step that needs them.

All ranks lay out their ranges alike, so an edit has the same offsets on each. The recorder has no
memory of its own.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Generic, NamedTuple, TypeVar

from memory.pages.virtual_memory import VirtualMemory


class MemoryEditKind(IntEnum):
    MAP = 0
    UNMAP = 1
    COPY = 2
    RELEASE = 3
    # of a rank's page store
    STORE = 4
    LOAD = 5
    USE = 6
    DISCARD = 7
    FLUSH = 8


class MemoryEdit(NamedTuple):
    """An edit: MAP (offset, first page, pages), UNMAP (offset, 0, pages), COPY (source page, target
    page, 1) or RELEASE (0, first page, pages).

    Those of a page store, from STORE on, have a ticket above the lowest TICKET_BITS of `kind`, then
    a page and the halves of a key of 16 bytes.
    """

    kind: int
    first: int
    second: int
    num_pages: int


TICKET_BITS = 8
_KEY = struct.Struct("<qq")


def store_edit(kind: MemoryEditKind, ticket: int, page: int, key: bytes) -> MemoryEdit:
    """Returns an edit of a page store. key: 16 bytes."""
    return MemoryEdit(kind | ticket << TICKET_BITS, page, *_KEY.unpack(key))


class StoreEdit(NamedTuple):
    """An edit of a page store, unpacked."""

    kind: int
    ticket: int
    page: int
    key: bytes

    @classmethod
    def of(cls, edit: Sequence[int]) -> StoreEdit:
        kind, page, *key = edit
        ticket, kind = divmod(kind, 1 << TICKET_BITS)
        return cls(kind, ticket, page, _KEY.pack(*key))


def is_of_store(edit: Sequence[int]) -> bool:
    return edit[0] % (1 << TICKET_BITS) >= MemoryEditKind.STORE


EditT = TypeVar("EditT")


class RecordedMemory(Generic[EditT]):
    """What records of edits share: a VirtualMemory without memory. One thread uses it."""

    maps_during_kernels = False

    def __init__(self, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.on_release: Callable[[], None] = lambda: None
        """Called after `release`, because no step may follow soon that would carry the edits."""
        self._edits: list[EditT] = []

    def take(self) -> list[EditT]:
        """Returns the recorded edits and forgets them."""
        edits, self._edits = self._edits, []
        return edits

    def reserve(self, size_bytes: int) -> int:
        return 0  # these addresses are not used: ranks and nodes reserve their own

    def prepare(self, first_page: int, num_pages: int) -> None:
        pass

    def close(self) -> None:
        self._edits.clear()


class EditRecorder(RecordedMemory[MemoryEdit]):
    """A VirtualMemory whose edits have the same offsets on all ranks."""

    def __init__(self, page_bytes: int) -> None:
        super().__init__(page_bytes)
        self.has_transfers = False  # of a page store, among the recorded edits

    def take(self) -> list[MemoryEdit]:
        self.has_transfers = False
        return super().take()

    def add(self, edits: Iterable[MemoryEdit]) -> None:
        """Records edits of a page store, which come after those recorded before."""
        self._edits += edits
        self.has_transfers = True

    def map(self, offset: int, first_page: int, num_pages: int) -> None:
        self._edits.append(MemoryEdit(MemoryEditKind.MAP, offset, first_page, num_pages))

    def unmap(self, offset: int, num_pages: int) -> None:
        self._edits.append(MemoryEdit(MemoryEditKind.UNMAP, offset, 0, num_pages))

    def copy_page(self, source: int, target: int) -> None:
        self._edits.append(MemoryEdit(MemoryEditKind.COPY, source, target, 1))

    def release(self, first_page: int, num_pages: int) -> None:
        self._edits.append(MemoryEdit(MemoryEditKind.RELEASE, 0, first_page, num_pages))
        self.on_release()


def apply_edits(memory: VirtualMemory, edits: Iterable[tuple[int, int, int, int]]) -> None:
    """Applies recorded edits in their order. Raises OSError; the rest is then not applied."""
    for kind, first, second, count in edits:
        if kind == MemoryEditKind.MAP:
            memory.map(first, second, count)
        elif kind == MemoryEditKind.UNMAP:
            memory.unmap(first, count)
        elif kind == MemoryEditKind.COPY:
            memory.copy_page(first, second)
        else:
            memory.release(second, count)
