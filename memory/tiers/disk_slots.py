"""Assigns slots of the file to pages and chooses pages to evict, with integers and keys only.

+--------------------------------------------------------------------------------------+
| A slot is free, or belongs to one entry until that is dropped and no load reads it.  |
| An entry is being written (`stored` is set), or can be loaded. Entries that are not  |
| being written or read and not pinned are evictable, least recently used first.       |
+--------------------------------------------------------------------------------------+
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from memory.tiers.disk_index import StoredPage

_FULL_S = 30.0  # after the disk was full, no new slots for so long


@dataclass(slots=True)
class DiskEntry:
    """A page in a slot of the file."""

    key: bytes
    slot: int
    length: int
    checksum: int = 0
    pins: int = 0
    readers: int = 0
    is_logged: bool = False  # survives a restart
    is_dropped: bool = False
    stored: Future[bool] | None = None
    waiting: list[Callable[[bool], None]] = field(default_factory=list)  # loads, for the write


class SlotTable:
    """The slots of the file and their entries. It has no lock of its own: the caller holds the
    store's lock."""

    def __init__(
        self, num_slots: int, forget: Callable[[DiskEntry], None], clock: Callable[[], float]
    ) -> None:
        """forget: called with each entry that is dropped."""
        self.num_slots = num_slots
        self.num_begun = 0  # slots below this number were used before
        self.num_pinned = self.num_evicted = 0
        self.entries: dict[bytes, DiskEntry] = {}
        self._evictable: OrderedDict[bytes, DiskEntry] = OrderedDict()
        self._free: deque[int] = deque()
        self._unbacked: list[int] = []  # the disk was full when they were written
        self._full_until = 0.0
        self._forget = forget
        self._clock = clock

    @property
    def num_used(self) -> int:
        return self.num_begun - len(self._free) - len(self._unbacked)

    def adopt(self, placed: Sequence[StoredPage]) -> None:
        """Takes over the pages of an earlier process, the oldest first."""
        for key, slot, length, checksum in placed:
            entry = DiskEntry(key, slot, length, checksum, is_logged=True)
            self.entries[key] = self._evictable[key] = entry
        used = {entry.slot for entry in self.entries.values()}
        self.num_begun = max(used, default=-1) + 1
        self._free.extend(slot for slot in range(self.num_begun) if slot not in used)

    def add(self, key: bytes, length: int, *, is_pinned: bool) -> DiskEntry | None:
        """Returns a new entry that is being written, or None without a slot. It evicts the oldest
        evictable entry if no slot is free."""
        slot = self._take()
        if slot is None:
            return None
        entry = DiskEntry(key, slot, length, is_logged=not is_pinned, stored=Future())
        self.entries[key] = entry
        self.add_pins(entry, int(is_pinned))
        return entry

    def _take(self) -> int | None:
        if not self._free and self._clock() >= self._full_until:
            self._free.extend(self._unbacked)
            self._unbacked.clear()
            if not self._free and self.num_begun < self.num_slots:
                self.num_begun += 1
                return self.num_begun - 1
        if not self._free and self._evictable:
            self.num_evicted += 1
            self.drop(next(iter(self._evictable.values())))
        return self._free.popleft() if self._free else None

    def add_pins(self, entry: DiskEntry, change: int) -> None:
        self.num_pinned -= entry.pins > 0
        entry.pins += change
        assert entry.pins >= 0, "more unpins than pins"
        self.num_pinned += entry.pins > 0
        self.settle(entry)

    def settle(self, entry: DiskEntry) -> None:
        """Marks the entry as just used: it is evicted last, or it is not evictable."""
        if entry.is_dropped:  # the key may have another entry by now
            return
        self._evictable.pop(entry.key, None)
        if entry.stored is None and not entry.readers and not entry.pins:
            self._evictable[entry.key] = entry

    def use(self, keys: Iterable[bytes]) -> int:
        """Marks these pages as used, in this order. Returns how many slots can be had without
        evicting any of them."""
        num_used = 0
        for key in keys:
            if key in self._evictable:
                self._evictable.move_to_end(key)
                num_used += 1
        num_new = self.num_slots - self.num_begun
        return len(self._free) + num_new + len(self._evictable) - num_used

    def drop(self, entry: DiskEntry) -> None:
        """Makes the entry impossible to find. Its slot is free when no transfer uses it."""
        if not entry.is_dropped:
            entry.is_dropped = True
            del self.entries[entry.key]
            self._evictable.pop(entry.key, None)
            self.num_pinned -= entry.pins > 0
            self._forget(entry)
        self.release(entry)

    def release(self, entry: DiskEntry) -> None:
        """Frees the slot of a dropped entry if no transfer uses it. The slot may be defective, so
        it goes to the end of the queue."""
        if entry.slot >= 0 and entry.stored is None and not entry.readers:
            self._free.append(entry.slot)
            entry.slot = -1

    def disk_is_full(self, entry: DiskEntry) -> None:
        """Records that the disk has no space for this entry's slot. Slots written before have."""
        self._full_until = self._clock() + _FULL_S
        self._unbacked.append(entry.slot)
        entry.slot = -1

    def logged(self) -> list[StoredPage]:
        """Returns the pages that survive a restart, the oldest first."""
        busy = [entry for entry in self.entries.values() if entry.key not in self._evictable]
        return [
            StoredPage(entry.key, entry.slot, entry.length, entry.checksum)
            for entry in [*self._evictable.values(), *busy]
            if entry.is_logged and entry.stored is None
        ]

    def check_integrity(self) -> None:
        """Raises AssertionError for a broken invariant. For tests, while no transfer is running."""
        used = [entry.slot for entry in self.entries.values()]
        all_slots = sorted([*used, *self._free, *self._unbacked])
        assert all_slots == list(range(self.num_begun)), f"{all_slots=}"
        pinned = {key for key, entry in self.entries.items() if entry.pins}
        assert self.num_pinned == len(pinned)
        assert self._evictable.keys() == self.entries.keys() - pinned
