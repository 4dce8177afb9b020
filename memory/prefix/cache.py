"""The prefix cache: pages that outlive their sequence, their eviction, and their copies in a store.

The cache holds one reference to each of its pages. A page that only the cache holds is evicted when
memory is needed (`evict`). With a page store, the oldest pages are written before that, and `fetch`
loads evicted pages again. All of this runs in the computing thread, between steps; the store's own
threads only end futures. Any failure of the store, exceptions included, is a miss and a counter. A
page that was not written waits for its next turn, and after some failures in a row there is a
pause.

+--------------------------------------------------------------------------------------+
| Invariant: num_evictable pages are cached and have one reference, the cache's. A     |
| page that is being written or loaded has one more.                                   |
+--------------------------------------------------------------------------------------+
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from memory.pages.allocator import PageAllocator
from memory.prefix.backoff import FAILURES_IN_A_ROW, Backoff
from memory.prefix.index import PrefixIndex
from memory.prefix.load_times import LoadTimes
from memory.prefix.page_store import Chain, Load, PageStore, PrefixStats, Write, suppressed
from memory.prefix.question import Question
from memory.prefix.store_stats import StoreStats
from memory.prefix.waiting import WaitFor, is_success, wait_for_any

logger = logging.getLogger(__name__)

# Old pages are written when fewer than this share of all pages are free or already in the store.
_CLEAN_SHARE = 0.25
_MAX_WRITES = 64  # at once, and at most an eighth of the pages, which cannot be evicted meanwhile
_HUNG_S = 10.0  # a write that takes longer is abandoned
_CLOSE_SHARE = 0.7  # `close` starts writes during this share of its time


class PrefixCache:
    """References, the index, and transfers to and from the store. Implements `PrefixState`."""

    def __init__(self, allocator: PageAllocator, num_reserved: int = 0) -> None:
        """num_reserved: pages that loads from a hung disk must leave, if there are enough."""
        self.index = PrefixIndex()
        self.stats = PrefixStats()
        self.num_evictable = 0
        self.num_references = allocator.num_references
        self._allocator = allocator
        self._store: PageStore | None = None
        self._is_written = False  # the store
        self._address_of: Callable[[int], int] = lambda page: 0
        self._keep_memory: Callable[[], None] = lambda: None
        self._clock: Callable[[], float] = time.monotonic
        self._wait_for: WaitFor = wait_for_any
        self._unwritten: OrderedDict[int, bytes] = OrderedDict()  # oldest first
        self._writes: deque[Write] = deque()
        self._loads: deque[Load] = deque()
        self.load_times = LoadTimes()
        self.question = Question()
        self._rest: tuple[Chain, int] | None = None  # to fetch after the loads
        # No page is taken from a load that hangs, so the longest sequence fits beside the loads,
        # unless too few pages would be left for them.
        num_pages = allocator.num_pages
        self._max_writes = max(1, min(_MAX_WRITES, num_pages // 8))
        self._max_loads = max(1, min(num_pages // 4, max(num_pages - num_reserved, num_pages // 8)))
        self._backoff = Backoff()

    def use_store(
        self,
        store: PageStore,
        address_of: Callable[[int], int],
        keep_memory: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        wait_for: WaitFor = wait_for_any,
        writes: bool = True,
    ) -> None:
        """address_of: a page's address, whatever range maps it. keep_memory: called if it must stay
        mapped for ever: a closed store may use it. wait_for: ends transfers, unless threads do.
        writes: whether pages are written to it."""
        self._store, self._address_of = store, address_of
        self._keep_memory, self._clock, self._wait_for = keep_memory, clock, wait_for
        self._is_written = writes

    @property
    def has_store(self) -> bool:
        return self._store is not None

    def store_stats(self) -> StoreStats:
        return StoreStats() if self._store is None else self._store.stats()

    def is_cached(self, key: bytes) -> bool:
        return self.index.has_key(key)

    # ---- references

    def hold(self, page: int) -> None:
        """Adds a reference to a cached page, for a range or for a copy that is due."""
        self.num_evictable -= self._allocator.num_references(page) == 1
        self._allocator.share(page)

    def release(self, page: int) -> None:
        """Removes a reference from any page."""
        if not self._allocator.give_back(page) and page in self.index:
            self.num_evictable += self._allocator.num_references(page) == 1

    def insert(self, key: bytes, parent: bytes | None, page: int, is_minor: bool = False) -> None:
        """Inserts a page that a sequence has computed, unless the parent is not cached.

        A page of the key that no sequence holds is replaced: later pages of the sequence must not
        depend on one that can be evicted. is_minor: evicted first and not written, until used."""
        if page in self.index:
            return
        if self.index.has_key(key):
            if not self._is_idle(self.index.page_of(key)):
                return
            self._replace(key, page)
        elif not self.index.insert(key, parent, page, is_minor=is_minor):
            return
        elif self._is_written and not is_minor:
            self._unwritten[page] = key
        self._allocator.share(page)

    def _replace(self, key: bytes, page: int) -> None:
        old = self.index.page_of(key)
        self.index.replace(key, page)
        if self._unwritten.pop(old, None) is not None:
            self._unwritten[page] = key
        self.num_evictable -= self._allocator.give_back(old)

    def _is_idle(self, page: int) -> bool:
        """Returns whether no sequence holds the cached page."""
        references = self._allocator.num_references(page)
        return references == 1 or (references == 2 and any(w.page == page for w in self._writes))

    def use(self, pages: Sequence[int]) -> None:
        """Marks pages as just used. The last is evicted first: alone it is worth nothing."""
        for page in [page for page in reversed(pages) if page in self.index]:
            key = self.index.key_of(page)
            if self._is_written and self.index.is_minor(key):
                self._unwritten[page] = key
            self.index.touch(key)

    def demote(self, keys: Sequence[bytes]) -> None:
        """Makes pages minor that were not used since they were inserted."""
        for key in keys:
            if self.index.has_key(key) and self.index.demote(key):
                self._unwritten.pop(self.index.page_of(key), None)

    def evict(self) -> None:
        """Evicts until at least one more page is free. The caller has checked num_evictable."""
        references = self._allocator.num_references
        found = self.index.evict_oldest(lambda page: references(page) == 1)
        if found is not None:
            self.drop([found[1]])
        else:  # every evictable page has a child that a sequence holds
            page = next(page for page in self.index.pages if references(page) == 1)
            self.drop(self.index.evict_tree(page))

    def drop(self, pages: list[int]) -> None:
        """Gives back pages that have left the index."""
        for page in pages:
            self._unwritten.pop(page, None)
            self.num_evictable -= self._allocator.give_back(page)
        self.stats.num_evicted += len(pages)

    # ---- the store

    def poll(self) -> None:
        if self._store is None:
            return
        self.question.poll()
        self._complete_transfers()
        if self._rest is not None and not self._loads:
            self.fetch(*self._rest)
        clean = self._allocator.num_free + self.num_evictable - len(self._unwritten)
        if self._unwritten and clean < _CLEAN_SHARE * self._allocator.num_pages:
            self._write()

    def write_unwritten(self) -> bool:
        if self._store is None:
            return False
        self.poll()
        self._write()
        return bool(self._writes or (self._unwritten and not self._backoff.is_longest))

    def _write(self) -> None:
        """Starts to write the oldest unwritten pages, unless there is a pause after failures."""
        assert self._store is not None
        now_s = self._clock()
        count = min(len(self._unwritten), self._max_writes - len(self._writes), self._store.room)
        if count <= 0 or self._backoff.is_paused(now_s):
            return
        chosen = [self._unwritten.popitem(last=False) for _ in range(count)]
        try:
            new = [(page, key) for page, key in chosen if not self._store.contains(key)]
            # A page is worth nothing without its ancestors, so none is evicted to make room for it.
            room = self._use([key for _, key in reversed(new)])
            new = new[: max(0, room)]
            futures = self._store.store_many([(key, self._address_of(page)) for page, key in new])
        except Exception:
            logger.exception("K/V on disk: storing pages failed")
            self._unwritten.update(chosen)
            self.stats.num_failed += len(chosen)
            self._backoff.pause(now_s)
            return
        for (page, key), future in zip(new, futures, strict=True):
            self.hold(page)
            self._writes.append(Write(key, page, now_s, future))

    def _complete_transfers(self) -> None:
        """Completes the transfers that have ended, and abandons writes that hang."""
        assert self._store is not None
        self._wait_for((), 0.0)
        now_s = self._clock()
        last: Write | Load | None = None
        for _ in range(len(self._writes)):
            write = self._writes.popleft()
            if write.future.done():
                last = write
                self._end_write(write, now_s, is_stored=is_success(write.future))
            elif now_s - write.began_s > _HUNG_S and self._discards(write.key):
                # so that the page can be used again
                self._backoff.failed(now_s, FAILURES_IN_A_ROW)
                self._end_write(write, now_s, is_stored=False)
            else:
                self._writes.append(write)
        while self._loads and self._loads[0].future.done():
            last = self._loads.popleft()
            self._end_load(last)
            if not self._loads:
                self.load_times.end()
        if last is not None and not self.is_transferring:
            # Transfers end in any order, but the store must evict the end of a chain first.
            self._use([last.key])

    def _use(self, keys: Sequence[bytes]) -> int:
        """Marks these pages and their ancestors as used in the store, ancestors last. Returns its
        room for further ones."""
        assert self._store is not None
        with suppressed("marking pages as used"):
            return self._store.use(self.index.chain(keys))
        return self._store.room

    def _discards(self, key: bytes) -> bool:
        """Returns whether the store dropped the key, so that a hung write needs no page."""
        assert self._store is not None
        with suppressed("discarding a page"):
            self._store.discard(key)
            return True
        return False

    def _end_write(self, write: Write, now_s: float, *, is_stored: bool) -> None:
        if is_stored:
            self.stats.num_stored += 1
            self._backoff.worked()
        else:
            self.stats.num_failed += 1
            self._backoff.failed(now_s)
            if self.index.has_key(write.key):  # possibly with another page by now
                self._unwritten[self.index.page_of(write.key)] = write.key
        self.release(write.page)

    def _end_load(self, load: Load) -> None:
        is_here = is_success(load.future)
        if self.index.match([load.key]):  # a sequence has computed it meanwhile
            self._allocator.give_back(load.page)
        elif is_here and self.index.insert(load.key, load.parent, load.page):
            # the load's reference becomes the cache's
            self.num_evictable += 1
            self.stats.num_loaded += 1
        else:  # the page or its parent is lost, or the parent was evicted
            self._allocator.give_back(load.page)
            self.stats.num_lost += not is_here
            self._rest = None

    def is_stored(self, key: bytes) -> bool:
        """Returns whether the store can probably load the page."""
        if self._store is not None:
            with suppressed("looking for a page"):
                return self._store.contains(key)
        return False

    def num_free_excluding(self, cached: Sequence[int]) -> int:
        """Returns how many pages can be had without evicting these."""
        num_kept = sum([self.num_references(page) == 1 for page in cached])
        return self._allocator.num_free + self.num_evictable - num_kept

    def fetch(self, chain: Chain, num_spare: int) -> bool:
        """Starts to load a chain's pages that memory lacks, up to one that the store lacks, into at
        most num_spare pages. Returns whether a load is in progress; if so, call again later."""
        if self._store is None or self._loads:
            return bool(self._loads)
        cached = [self.index.page_of(key) for key, _ in chain if self.index.has_key(key)]
        wanted = [(key, parent) for key, parent in chain if not self.index.has_key(key)]
        self.use(cached)
        for page in cached:  # ancestors must not be evicted for the pages to load
            self.hold(page)
        pages: list[int] = []
        try:
            self._start_loads(wanted, num_spare, pages)
        except Exception:
            logger.exception("K/V on disk: loading pages failed")
            for page in pages:
                self._allocator.give_back(page)
            self.stats.num_lost += max(1, len(pages))
        for page in cached:
            self.release(page)
        # The rest of the chain follows after these loads.
        self._rest = (chain, num_spare - len(pages)) if self._loads else None
        return bool(self._loads)

    def _start_loads(self, wanted: Chain, num_spare: int, pages: list[int]) -> None:
        """Starts as many loads as there is room for, and appends their pages to `pages`."""
        assert self._store is not None
        room = min(self.num_free_excluding(()), self._max_loads, self._store.room)
        end, most = 0, min(num_spare, room, len(wanted))
        while end < most and self._store.contains(wanted[end][0]):
            end += 1
        pages += [self._free_page() for _ in range(end)]
        if not pages:
            return
        targets = [
            (key, self._address_of(page)) for (key, _), page in zip(wanted, pages, strict=False)
        ]
        futures = self._store.load_many(targets)
        self.load_times.begin(futures)
        for (key, parent), page, future in zip(wanted, pages, futures, strict=False):
            self._loads.append(Load(key, parent, page, future))

    def _free_page(self) -> int:
        if not self._allocator.num_free:
            self.evict()
        return self._allocator.take()

    @property
    def is_asking(self) -> bool:
        return self.question.is_open

    @property
    def is_fetching(self) -> bool:
        return bool(self._loads) or self.question.is_open

    @property
    def is_transferring(self) -> bool:
        return bool(self._loads or self._writes) or self.question.is_waited_for

    def wait(self, timeout_s: float) -> None:
        futures = [*self.question.futures, *(write.future for write in self._writes)]
        if self._loads:  # loads are completed in order
            futures.append(self._loads[0].future)
        self._wait_for(futures, self.question.limited(timeout_s))

    def close(self, timeout_s: float = 30.0) -> None:
        """Writes what is not yet in the store, as far as the time allows, closes the store and
        drops all pages. Pages that a hung disk still reads or writes stay in use and mapped."""
        if self._store is not None:
            try:
                self._close_store(self._store, self._clock() + timeout_s, timeout_s)
            except BaseException:  # transfers may still be in progress
                self._keep_memory()
                raise
        self.drop(self.index.clear())

    def _close_store(self, store: PageStore, end_s: float, timeout_s: float) -> None:
        self._rest = None
        self._backoff.end_pause()
        write_until = end_s - (1 - _CLOSE_SHARE) * timeout_s
        while (now_s := self._clock()) < write_until:
            self._write()
            if not self._writes and not self._loads:  # all is written, or writing fails
                break
            self.wait(write_until - now_s)
            self._complete_transfers()
        try:
            is_quiet = store.close(max(0.0, end_s - self._clock()))
        except Exception:
            logger.exception("K/V on disk: closing the store failed")
            is_quiet = False
        self._complete_transfers()
        self._store = None
        num_left = len(self._unwritten) + len(self._writes)
        if num_left:
            logger.warning("K/V on disk: %d pages were not written", num_left)
        if not is_quiet:
            self._keep_memory()

    def check_integrity(self, owners: dict[int, int]) -> None:
        """Adds the cache's references to `owners` (page -> number of holders)."""
        for page in self.index.pages:
            owners[page] = owners.get(page, 0) + 1
        for write in self._writes:
            owners[write.page] = owners.get(write.page, 0) + 1
        evictable = sum(owners[page] == 1 for page in self.index.pages)
        assert evictable == self.num_evictable, f"{evictable}, counted {self.num_evictable}"
        for load in self._loads:
            owners[load.page] = owners.get(load.page, 0) + 1
        assert all(page in self.index for page in self._unwritten)
        self.index.check_integrity()
