"""Pages that outlive their sequence: who holds them, what is forgotten, what goes to the disk.

The cache holds one reference on each page it knows. A page that only the cache holds can be had
by whoever needs memory (`evict`). With a store, the oldest pages are written ahead of that, and
what memory has forgotten may come back from there (`fetch`). Everything here happens in the
thread that computes, between steps; the store's own threads only end futures.

+--------------------------------------------------------------------------------------+
| invariant: num_evictable pages are known and have one reference, the cache's. A page that|
| is being written or read has one more.                                                  |
+--------------------------------------------------------------------------------------+
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Protocol

from memory.allocator import PageAllocator
from memory.prefix_index import PrefixIndex

# Pages that can be had without losing something, as a share of all: below it old ones are written.
_CLEAN_SHARE = 0.25
# Under way at once, and not more than an eighth of the pages: nobody can have them meanwhile.
_MAX_WRITES = 64


class PageStore(Protocol):
    """Where pages go for longer; `memory.spill.SpillStore`. Futures: whether it worked."""

    def store_many(self, pages: Sequence[tuple[bytes, int]]) -> list[Future[bool]]:
        """Write the pages at these addresses under these keys; they do not change meanwhile."""

    def load_many(self, pages: Sequence[tuple[bytes, int]]) -> list[Future[bool]]:
        """Read the keys' pages to these addresses."""

    def contains(self, key: bytes) -> bool:
        """It can probably be loaded."""

    def flush(self, timeout_s: float) -> bool:
        """Wait until what was stored is safe; False: it is not."""

    def close(self) -> None:
        """After everything that is under way."""


@dataclass(slots=True)
class PrefixStats:
    """Since the start: tokens asked for and found in memory; pages that memory has forgotten,
    that were written to the store, that came back from there, and that did not."""

    num_asked_tokens: int = 0
    num_hit_tokens: int = 0
    num_evicted: int = 0
    num_stored: int = 0
    num_loaded: int = 0
    num_lost: int = 0


@dataclass(frozen=True, slots=True)
class _Load:
    key: bytes
    parent: bytes | None
    page: int
    future: Future[bool]


class PrefixCache:
    """References, the index, and pages on their way to or from the store."""

    def __init__(self, allocator: PageAllocator) -> None:
        self.index = PrefixIndex()
        self.stats = PrefixStats()
        self.num_evictable = 0
        self._allocator = allocator
        self._store: PageStore | None = None
        self._address_of: Callable[[int], int] = lambda page: 0
        self._unwritten: OrderedDict[int, bytes] = OrderedDict()  # oldest first
        self._writes: deque[tuple[int, Future[bool]]] = deque()
        self._loads: deque[_Load] = deque()
        self._max_writes = max(1, min(_MAX_WRITES, allocator.num_pages // 8))

    def use_store(self, store: PageStore, address_of: Callable[[int], int]) -> None:
        """address_of: where a page's bytes are, whatever range it is in."""
        self._store, self._address_of = store, address_of

    @property
    def has_store(self) -> bool:
        return self._store is not None

    # ---- references

    def hold(self, page: int) -> None:
        """One more range, or copy that is due, needs a page that the cache knows."""
        self.num_evictable -= self._allocator.num_references(page) == 1
        self._allocator.share(page)

    def let_go(self, page: int) -> None:
        """One less, of whatever page."""
        if not self._allocator.give_back(page) and page in self.index:
            self.num_evictable += self._allocator.num_references(page) == 1

    def remember(self, key: bytes, parent: bytes | None, page: int) -> None:
        """A page whose tokens are computed; nothing happens if the key is known already."""
        if page in self.index or not self.index.insert(key, parent, page):
            return
        self._allocator.share(page)
        if self._store is not None:
            self._unwritten[page] = key

    def use_alone(self, pages: Sequence[int]) -> None:
        """These, which have no parents, were used just now: the last of them is to go first,
        because without the first ones it is worth nothing."""
        for page in reversed(pages):
            if page in self.index:
                self.index.touch(self.index.key_of(page))

    def evict(self) -> None:
        """Forget something so that at least one page becomes free. There is an evictable one."""
        references = self._allocator.num_references
        found = self.index.forget_oldest(lambda page: references(page) == 1)
        if found is not None:
            self._forget([found[1]])
        else:  # a page that nobody uses, continued by one that somebody does
            page = next(page for page in self.index.pages if references(page) == 1)
            self._forget(self.index.forget_tree(page))

    def _forget(self, pages: list[int]) -> None:
        for page in pages:
            self._unwritten.pop(page, None)
            self.num_evictable -= self._allocator.give_back(page)
        self.stats.num_evicted += len(pages)

    # ---- the store

    def poll(self) -> None:
        """Take in what has been written and read; begin to write what is old."""
        if self._store is None:
            return
        while self._writes and self._writes[0][1].done():
            page, future = self._writes.popleft()
            self.stats.num_stored += future.result()
            self.let_go(page)
        while self._loads and self._loads[0].future.done():
            self._take_in(self._loads.popleft())
        clean = self._allocator.num_free + self.num_evictable - len(self._unwritten)
        if self._unwritten and clean < _CLEAN_SHARE * self._allocator.num_pages:
            self._write(min(len(self._unwritten), self._max_writes - len(self._writes)))

    def write_some(self) -> bool:
        """With nothing else to do, begin to write what is not on the disk yet; False: all is."""
        if self._store is None:
            return False
        self.poll()
        self._write(min(len(self._unwritten), self._max_writes - len(self._writes)))
        return bool(self._unwritten or self._writes)

    def _write(self, count: int) -> None:
        assert self._store is not None
        chosen = [self._unwritten.popitem(last=False) for _ in range(count)]
        new = [(page, key) for page, key in chosen if not self._store.contains(key)]
        for page, _ in new:
            self.hold(page)
        futures = self._store.store_many([(key, self._address_of(page)) for page, key in new])
        self._writes.extend((page, f) for (page, _), f in zip(new, futures, strict=True))

    def _take_in(self, load: _Load) -> None:
        is_right = load.future.result() and self.index.insert(load.key, load.parent, load.page)
        if is_right:  # the load's reference becomes the cache's
            self.num_evictable += 1
            self.stats.num_loaded += 1
        else:
            self._allocator.give_back(load.page)
            self.stats.num_lost += 1

    def is_stored(self, key: bytes) -> bool:
        """The store can probably load it."""
        return self._store is not None and self._store.contains(key)

    def num_free_beside(self, known: Sequence[int]) -> int:
        """Pages that can be had without forgetting these."""
        references = self._allocator.num_references
        num_kept = sum([references(page) == 1 for page in known])
        return self._allocator.num_free + self.num_evictable - num_kept

    def fetch(self, known: Sequence[int], wanted: Sequence[tuple[bytes, bytes | None]]) -> bool:
        """Begin to load (key, parent) from the store, parents first, as many as
        num_free_beside(known) at most. known: pages that must not be forgotten for them. True:
        something is on its way; ask again when it is not any more."""
        assert self._store is not None and not self._loads, "one fetch at a time"
        if not wanted:
            return False
        for page in known:
            self.hold(page)
        pages = [self._free_page() for _ in wanted]
        for page in known:
            self.let_go(page)
        places = [
            (key, self._address_of(page)) for (key, _), page in zip(wanted, pages, strict=True)
        ]
        futures = self._store.load_many(places)
        for (key, parent), page, future in zip(wanted, pages, futures, strict=True):
            self._loads.append(_Load(key, parent, page, future))
        return True

    def _free_page(self) -> int:
        if not self._allocator.num_free:
            self.evict()
        return self._allocator.take()

    @property
    def is_fetching(self) -> bool:
        return bool(self._loads)

    @property
    def is_transferring(self) -> bool:
        """Pages are on their way to or from the store; nobody else can have them meanwhile."""
        return bool(self._loads or self._writes)

    def wait(self, timeout_s: float) -> None:
        """Until something on its way to or from the store has come, or the time is over."""
        futures = [load.future for load in self._loads] + [future for _, future in self._writes]
        if futures:
            wait(futures, timeout_s, return_when=FIRST_COMPLETED)

    def close(self, timeout_s: float = 30.0) -> None:
        """Write what is not written yet, forget everything, close the store."""
        if self._store is not None:
            for load in self._loads:
                load.future.result()
            self.poll()
            while self._unwritten:
                self._write(min(len(self._unwritten), self._max_writes))
                for _, future in self._writes:
                    future.result()
                self.poll()
            self._store.flush(timeout_s)
            self._store.close()
            self.poll()
            self._store = None
        self._forget(self.index.forget_all())

    def check_integrity(self, owners: dict[int, int]) -> None:
        """Adds what is held here to `owners` (page -> how many). AssertionError: what is off."""
        for page in self.index.pages:
            owners[page] = owners.get(page, 0) + 1
        for page, _ in self._writes:
            owners[page] = owners.get(page, 0) + 1
        evictable = sum(owners[page] == 1 for page in self.index.pages)
        assert evictable == self.num_evictable, f"{evictable}, counted {self.num_evictable}"
        for load in self._loads:
            owners[load.page] = owners.get(load.page, 0) + 1
        assert all(page in self.index for page in self._unwritten)
        self.index.check_integrity()
