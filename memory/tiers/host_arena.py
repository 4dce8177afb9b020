"""Slots of the host tier, in integers only: which page is in which slot, and which is evicted next.

A page without users is young or ready. Ready pages may be evicted at once. Young pages become ready
in the order of their last use, when the store below has them. So pages are evicted in the order of
their last use, except for the time that writing takes.

+--------------------------------------------------------------------------------------+
| Invariant: a slot is free, or has one entry. An entry with users is neither young    |
| nor ready, and its slot is not given to another entry, even if the entry was         |
| dropped.                                                                             |
+--------------------------------------------------------------------------------------+
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Waiting = TypeVar("Waiting")


class HostEntry(Generic[Waiting]):
    """A page in a slot, or one that is being copied there (is_there is False)."""

    __slots__ = ("is_aged", "is_there", "key", "slot", "users", "waiting")

    def __init__(self, key: bytes, slot: int) -> None:
        self.key = key
        self.slot = slot
        self.users = 1  # the transfer that fills the slot
        self.is_there = False
        self.is_aged = False
        self.waiting: list[Waiting] = []


class HostArena(Generic[Waiting]):
    """The num_slots slots of the host tier, their entries and the order of eviction.

    All operations but `age_again` take O(1).
    """

    def __init__(self, num_slots: int, on_evict: Callable[[bytes], None]) -> None:
        self.num_slots = num_slots
        self.entries: dict[bytes, HostEntry[Waiting]] = {}
        self._on_evict = on_evict
        self._free = list(range(num_slots - 1, -1, -1))
        self._young: OrderedDict[bytes, HostEntry[Waiting]] = OrderedDict()  # oldest first
        self._ready: OrderedDict[bytes, HostEntry[Waiting]] = OrderedDict()

    @property
    def num_reusable(self) -> int:
        """Slots that are free or can be evicted at once."""
        return len(self._free) + len(self._ready)

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    @property
    def has_young(self) -> bool:
        return bool(self._young)

    def add(self, key: bytes) -> HostEntry[Waiting] | None:
        """Returns a new entry with one user for a page to be copied, or None without a slot."""
        assert key not in self.entries, "it is there"
        if not self._free:
            if not self._ready:
                return None
            evicted, oldest = self._ready.popitem(last=False)
            del self.entries[evicted]
            self._free.append(oldest.slot)
            self._on_evict(evicted)
        entry = self.entries[key] = HostEntry(key, self._free.pop())
        return entry

    def use(self, entry: HostEntry[Waiting], *, is_wanted: bool) -> None:
        """Adds a user. is_wanted: counts as a use for the order of eviction."""
        entry.users += 1
        self._young.pop(entry.key, None)
        self._ready.pop(entry.key, None)
        entry.is_aged &= not is_wanted

    def release(self, entry: HostEntry[Waiting]) -> None:
        """Removes a user."""
        assert entry.users > 0, f"{entry.key!r} has no user"
        entry.users -= 1
        if entry.users:
            return
        if self.entries.get(entry.key) is not entry:
            self._free.append(entry.slot)
        elif entry.is_aged:
            self._ready[entry.key] = entry
        else:
            self._young[entry.key] = entry

    def drop(self, entry: HostEntry[Waiting]) -> None:
        """Drops a page that has users; its slot is free when the last user releases it."""
        assert entry.users, f"{entry.key!r} has no user"
        del self.entries[entry.key]

    def age(self) -> HostEntry[Waiting] | None:
        """Returns the least recently used young page with one more user, or None. The page is ready
        when that user releases it, unless the page is used again before."""
        if not self._young:
            return None
        entry = next(iter(self._young.values()))
        self.use(entry, is_wanted=False)
        entry.is_aged = True
        return entry

    def age_again(self, is_due: Callable[[bytes], bool]) -> None:
        """Makes ready pages for which is_due(key) holds young again, as the oldest ones."""
        for entry in reversed([e for e in self._ready.values() if is_due(e.key)]):
            del self._ready[entry.key]
            entry.is_aged = False
            self._young[entry.key] = entry
            self._young.move_to_end(entry.key, last=False)

    def check_integrity(self) -> None:
        """Raises AssertionError for a broken invariant. No dropped page may have users."""
        slots = sorted([*self._free, *(entry.slot for entry in self.entries.values())])
        assert slots == list(range(self.num_slots)), f"{slots}"
        for key, entry in self.entries.items():
            assert entry.key == key
            places = (key in self._young) + (key in self._ready)
            assert places == (entry.users == 0), f"{key!r}: {entry.users} users, in {places} lists"
            assert entry.is_there or entry.users, f"{key!r} does not come"
        assert len(self._young.keys() | self._ready.keys()) <= len(self.entries)


@dataclass(slots=True)
class HostCounters:
    """Counters of pages, except where a comment says otherwise."""

    hits: int = 0  # loaded from host memory
    hits_below: int = 0  # loaded from the store below
    misses: int = 0  # for any reason
    stores: int = 0
    refused: int = 0  # too many requests, closed, or broken
    pushed_down: int = 0  # written to the store below
    lost: int = 0  # evicted, and not in the store below
    copy_errors: int = 0  # batches
    bytes_in: int = 0
    bytes_out: int = 0


@dataclass(slots=True, eq=False)
class TransferRequest:
    """A request to store or to load one page."""

    key: bytes
    address: int
    is_store: bool
    is_from_below: bool = False
    is_discarded: bool = False  # a store whose page may have changed
    future: Future[bool] = field(default_factory=Future)
