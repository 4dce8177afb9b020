"""Slots of the host tier as integers: which page is in which, and which one goes first.

A page that nobody uses is young or ready. Ready ones may be pushed out at once; young ones become
ready in the order of their last use, when the store below has them. So the order in which pages go
is that of their last use, but for the time that writing takes.

+--------------------------------------------------------------------------------------+
| invariant: a slot is free, or has one entry. An entry with users is neither young nor |
| ready, and its slot is not given to another one, whether it is still known or not.   |
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
    """A page in a slot, or on its way there."""

    __slots__ = ("is_aged", "is_there", "key", "slot", "users", "waiting")

    def __init__(self, key: bytes, slot: int) -> None:
        self.key = key
        self.slot = slot
        self.users = 1  # whoever brings it
        self.is_there = False
        self.is_aged = False
        self.waiting: list[Waiting] = []


class HostArena(Generic[Waiting]):
    """num_slots slots; everything is O(1)."""

    def __init__(self, num_slots: int, on_evict: Callable[[bytes], None]) -> None:
        self.num_slots = num_slots
        self.entries: dict[bytes, HostEntry[Waiting]] = {}
        self._on_evict = on_evict
        self._free = list(range(num_slots - 1, -1, -1))
        self._young: OrderedDict[bytes, HostEntry[Waiting]] = OrderedDict()  # oldest first
        self._ready: OrderedDict[bytes, HostEntry[Waiting]] = OrderedDict()

    @property
    def num_reusable(self) -> int:
        """Slots that can be had at once."""
        return len(self._free) + len(self._ready)

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    @property
    def has_young(self) -> bool:
        return bool(self._young)

    def add(self, key: bytes) -> HostEntry[Waiting] | None:
        """A slot for a page that is to come, with one user; None if there is no slot."""
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
        """One more user. is_wanted: counts as a use for the order in which pages go."""
        entry.users += 1
        self._young.pop(entry.key, None)
        self._ready.pop(entry.key, None)
        entry.is_aged &= not is_wanted

    def release(self, entry: HostEntry[Waiting]) -> None:
        """One user less."""
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
        """Forget a page that has a user; its slot is free when the last one has let go."""
        assert entry.users, f"{entry.key!r} has no user"
        del self.entries[entry.key]

    def age(self) -> HostEntry[Waiting] | None:
        """The page used longest ago of the young ones, with one more user; ready when that lets
        go, unless somebody wants it meanwhile."""
        if not self._young:
            return None
        entry = next(iter(self._young.values()))
        self.use(entry, is_wanted=False)
        entry.is_aged = True
        return entry

    def age_again(self, is_due: Callable[[bytes], bool]) -> None:
        """Ready pages for which that is so are young again, older than the others."""
        for entry in reversed([e for e in self._ready.values() if is_due(e.key)]):
            del self._ready[entry.key]
            entry.is_aged = False
            self._young[entry.key] = entry
            self._young.move_to_end(entry.key, last=False)

    def check_integrity(self) -> None:
        """AssertionError: what is off. Only while no page that was dropped has users."""
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
    """Pages, unless it says otherwise."""

    hits: int = 0  # loaded from host memory
    hits_below: int = 0  # loaded from the store below
    misses: int = 0  # for every reason
    stores: int = 0
    refused: int = 0  # too many requests, closed, or out of order
    pushed_down: int = 0  # written to the store below
    lost: int = 0  # had to give way, and the store below does not have them
    copy_errors: int = 0  # batches
    bytes_in: int = 0
    bytes_out: int = 0


@dataclass(slots=True, eq=False)
class TransferRequest:
    """A page to be kept, or to be brought back."""

    key: bytes
    address: int
    is_store: bool
    is_from_below: bool = False
    is_discarded: bool = False  # a store whose page may have changed
    future: Future[bool] = field(default_factory=Future)
