"""The disk tier: a page store that keeps pages in the slots of one file.

A key always stands for the same content. It is a hash chain for prefixes, or a unique id for the
pages of a preempted sequence. Any failure of the disk is a miss and a counter. Every load compares
the page's checksum, so a loaded page is the page that was stored.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

from memory.prefix.store_stats import StoreStats
from memory.tiers.block_file import ALIGNMENT, BlockFile, Transfer
from memory.tiers.direct_io import choose_io, open_block_file
from memory.tiers.disk_directory import claim_directory
from memory.tiers.disk_files import open_pages
from memory.tiers.disk_health import DiskHealth
from memory.tiers.disk_index import MAX_KEY_BYTES, IndexLog, StoredPage
from memory.tiers.disk_slots import DiskEntry, SlotTable
from memory.tiers.disk_writer import DiskWriter
from ops.cpu import native_library

logger = logging.getLogger(__name__)

MAX_PAGE_BYTES = 65_535 * ALIGNMENT
_IDLE_SHARE = 0.8  # of the time of `close`, to end transfers; the rest is for the index


class DiskTier:
    """Stores, loads and drops pages, from any thread. The futures end in a thread of the tier."""

    def __init__(
        self,
        directory: str | Path,
        page_bytes: int,
        capacity_bytes: int,
        identity: bytes,
        io: str = "auto",
        *,
        persistent: bool = False,
        depth: int = 64,
        max_requests: int = 1024,
        growth_bytes: int = 256 << 20,
        open_file: Callable[..., BlockFile] = open_block_file,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """identity: the model's fingerprint, its K/V layout and all else that the bytes depend on.

        persistent: unpinned pages survive a restart; otherwise no file is left, even after a kill.
        Raises DiskDirectoryError or another OSError if the directory cannot be used.
        """
        assert page_bytes % ALIGNMENT == 0 and 0 < page_bytes <= MAX_PAGE_BYTES, f"{page_bytes=}"
        assert capacity_bytes >= page_bytes, f"{capacity_bytes=} {page_bytes=}"
        self.page_bytes = page_bytes
        self.capacity_bytes = capacity_bytes
        self._max_requests = max_requests
        self._growth = max(1, growth_bytes // page_bytes)
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._slots = SlotTable(capacity_bytes // page_bytes, self._forget, clock)
        self._requests = 0
        self._health = DiskHealth(str(directory), clock)
        self._is_closed = False
        self._checksum: Callable[[int, int], int] = native_library.library().checksum

        path, self._claim = claim_directory(directory)
        log = IndexLog(path, page_bytes, identity) if persistent else None
        try:
            io = choose_io(path, io, depth=depth)
            num_slots = self._slots.num_slots
            fd, is_direct, placed = open_pages(path, log, page_bytes, num_slots)
            self._slots.adopt(placed)
            try:
                self._file = open_file(fd, is_direct=is_direct, depth=depth, io=io)
            except BaseException:
                os.close(fd)
                raise
        except BaseException:
            if log is not None:
                log.close()
            os.close(self._claim)
            raise
        self.io = self._file.io
        self._writer = DiskWriter(self._file, log, self._live)
        self._want_room()
        atexit.register(self.close)  # if the owner does not close it
        free = shutil.disk_usage(path).free
        if free < capacity_bytes - self._slots.num_begun * page_bytes:
            logger.warning("K/V on disk: %s has only %d MiB free", path, free >> 20)

    def store(
        self, key: bytes, address: int, length: int | None = None, *, pinned: bool = False
    ) -> Future[bool]:
        """Writes `length` bytes (default page_bytes; a multiple of 4096) at `address` under `key`.

        The memory must not change until the future ends. True: `load` may find the page. A key
        that is there already is True at once, without a comparison. pinned: the page is not
        evicted and does not survive a restart; it counts as one `pin`.
        """
        return self.store_many([(key, address)], length, pinned=pinned)[0]

    def store_many(
        self,
        pages: Sequence[tuple[bytes, int]],
        length: int | None = None,
        *,
        pinned: bool = False,
    ) -> list[Future[bool]]:
        """Stores each (key, address) as `store` does, with one submission for all."""
        length = self.page_bytes if length is None else length
        assert 0 < length <= self.page_bytes and length % ALIGNMENT == 0, f"{length=}"
        _check(pages)
        futures, transfers = [], []
        with self._lock:
            for key, address in pages:
                future, transfer = self._begin_store(key, address, length, pinned=pinned)
                futures.append(future)
                if transfer is not None:
                    transfers.append(transfer)
        if transfers:
            self._file.write(transfers)
        return futures

    def _begin_store(
        self, key: bytes, address: int, length: int, *, pinned: bool
    ) -> tuple[Future[bool], Transfer | None]:
        entry = self._slots.entries.get(key)
        if entry is not None:
            self._slots.add_pins(entry, int(pinned))
            return (_ended(True) if entry.stored is None else entry.stored), None
        if self._may_write():
            entry = self._slots.add(key, length, is_pinned=pinned)
        if entry is None:
            self._health.stats.refused += 1
            return _ended(False), None
        future = entry.stored
        assert future is not None
        future.set_running_or_notify_cancel()  # so that it cannot be cancelled
        self._requests += 1
        offset = entry.slot * self.page_bytes

        def done(error: OSError | None) -> None:
            self._end_store(entry, address, error)

        return future, Transfer(address, length, offset, done)

    def _end_store(self, entry: DiskEntry, address: int, error: OSError | None) -> None:
        if error is None:
            entry.checksum = self._checksum(address, entry.length)
        with self._lock:
            self._requests -= 1
            future, entry.stored = entry.stored, None
            self._health.count_write(entry.length, error)
            if error is not None:
                if error.errno == errno.ENOSPC:
                    self._slots.disk_is_full(entry)
                self._slots.drop(entry)
            elif not entry.is_dropped:
                if entry.is_logged:
                    self._writer.note(
                        StoredPage(entry.key, entry.slot, entry.length, entry.checksum)
                    )
                self._slots.settle(entry)
            else:
                self._slots.release(entry)
            is_there = not entry.is_dropped
            waiting, entry.waiting = entry.waiting, []
            self._want_room()
            self._idle.notify_all()
        assert future is not None
        future.set_result(is_there)
        for go_on in waiting:  # False if dropped: its memory may have changed before the checksum
            go_on(is_there)

    def load(self, key: bytes, address: int) -> Future[bool]:
        """Reads the page of `key` to `address`, which belongs to the tier until the future ends.
        False is a miss, and the content of the memory is undefined."""
        return self.load_many([(key, address)])[0]

    def load_many(self, pages: Sequence[tuple[bytes, int]]) -> list[Future[bool]]:
        """Loads each (key, address) as `load` does, with one submission for all."""
        _check(pages)
        futures, transfers = [], []
        with self._lock:
            for key, address in pages:
                future, transfer = self._begin_load(key, address)
                futures.append(future)
                if transfer is not None:
                    transfers.append(transfer)
        if transfers:
            self._file.read(transfers)
        return futures

    def _begin_load(self, key: bytes, address: int) -> tuple[Future[bool], Transfer | None]:
        entry = self._slots.entries.get(key)
        if entry is None or self._is_closed or self._requests >= self._max_requests:
            self._health.stats.misses += 1
            self._health.stats.refused += entry is not None
            return _ended(False), None
        future = _begun()
        entry.readers += 1
        self._slots.settle(entry)
        self._requests += 1
        offset = entry.slot * self.page_bytes

        def done(error: OSError | None) -> None:
            self._end_load(entry, address, future, error)

        transfer = Transfer(address, entry.length, offset, done)
        if entry.stored is None:
            return future, transfer

        def go_on(is_written: bool) -> None:
            if is_written:
                self._file.read([transfer])
            else:
                self._end_load(entry, address, future, None, is_lost=True)

        entry.waiting.append(go_on)
        return future, None

    def _end_load(
        self,
        entry: DiskEntry,
        address: int,
        future: Future[bool],
        error: OSError | None,
        *,
        is_lost: bool = False,
    ) -> None:
        is_right = False
        if error is None and not is_lost:
            is_right = self._checksum(address, entry.length) == entry.checksum
        with self._lock:
            self._requests -= 1
            entry.readers -= 1
            if is_lost:
                self._health.stats.misses += 1
            else:
                self._health.count_read(entry.length, error, is_right=is_right)
            if is_right:
                self._slots.settle(entry)
            elif not is_lost:
                self._slots.drop(entry)
            if entry.is_dropped:
                self._slots.release(entry)
            self._idle.notify_all()
        future.set_result(is_right)

    def contains(self, key: bytes) -> bool:
        """Returns whether the page is there or being written. Only a load compares its checksum."""
        with self._lock:
            return key in self._slots.entries

    def use(self, keys: Sequence[bytes]) -> int:
        """Marks these pages as just used; the last one is evicted last. Returns how many pages
        could be stored without evicting any of these."""
        with self._lock:
            return self._slots.use(keys)

    def discard(self, key: bytes) -> bool:
        """Drops the page, even if pinned. Loads in progress still end; those that wait for its
        write are misses. Returns whether it was there."""
        with self._lock:
            entry = self._slots.entries.get(key)
            if entry is None:
                return False
            self._slots.drop(entry)
            return True

    def pin(self, key: bytes) -> bool:
        """Keeps the page until `unpin` was called as often, or `discard`. Returns whether it is
        there."""
        return self._pin_by_key(key, 1)

    def unpin(self, key: bytes) -> bool:
        """Removes one pin. A page without pins may be evicted, as the most recently used one.
        Returns whether it is there."""
        return self._pin_by_key(key, -1)

    def _pin_by_key(self, key: bytes, change: int) -> bool:
        with self._lock:
            entry = self._slots.entries.get(key)
            if entry is not None:
                self._slots.add_pins(entry, change)
            return entry is not None

    def stats(self) -> StoreStats:
        with self._lock:
            now = replace(self._health.stats)
            now.entries = len(self._slots.entries)
            now.pinned = self._slots.num_pinned
            now.evictions = self._slots.num_evicted
            now.bytes_used = self._slots.num_used * self.page_bytes
            now.requests = self._requests
            now.is_paused = self._health.is_paused
            return now

    @property
    def room(self) -> int:
        """The number of further requests that are accepted now."""
        return max(0, self._max_requests - self._requests)

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Waits until stored pages are on the medium and, if persistent, in the index. Returns
        whether they all are."""
        end_s = time.monotonic() + timeout_s
        with self._lock:
            if not self._idle.wait_for(lambda: self._requests == 0, timeout_s):
                return False
        return self._writer.flush(end_s - time.monotonic())

    def close(self, timeout_s: float = 30.0) -> bool:
        """Waits for transfers, as far as the time allows, and closes the store. Must not be called
        from a future's callback. Later requests are misses.

        Returns False if transfers are still in progress. The kernel may read or write their memory
        at any time, so it must stay mapped; files and lock stay open until the process ends.
        """
        end_s = time.monotonic() + timeout_s
        with self._lock:
            if self._is_closed:
                return self._requests == 0
            self._is_closed = True
            self._idle.wait_for(lambda: self._requests == 0, _IDLE_SHARE * timeout_s)
        atexit.unregister(self.close)
        # In this order, because each one uses what is closed after it.
        has_ended = self._writer.close(end_s - time.monotonic())
        has_ended = has_ended and self._file.close(end_s - time.monotonic())
        with self._lock:
            requests = self._requests
        if has_ended and not requests:
            os.close(self._claim)
        else:
            logger.warning("K/V on disk: the disk does not answer, %d transfers left", requests)
        return requests == 0

    # -- under the lock ------------------------------------------------------------------

    def _may_write(self) -> bool:
        return (
            not self._is_closed
            and self._requests < self._max_requests
            and not self._health.is_paused
        )

    def _forget(self, entry: DiskEntry) -> None:
        if entry.is_logged:
            self._writer.note(StoredPage(entry.key, 0, 0, 0))

    def _want_room(self) -> None:
        """Preallocates disk space ahead of need, in steps."""
        steps = (self._slots.num_begun + self._growth // 2) // self._growth + 1
        self._writer.want_bytes(min(steps * self._growth, self._slots.num_slots) * self.page_bytes)

    def _live(self) -> list[StoredPage]:
        with self._lock:
            return self._slots.logged()


def _check(pages: Sequence[tuple[bytes, int]]) -> None:
    """Checks all arguments before anything is begun, since a begun entry needs its transfer to
    end."""
    for key, address in pages:
        assert 1 <= len(key) <= MAX_KEY_BYTES, f"{len(key)=}"
        assert address % ALIGNMENT == 0, f"{address=}"


def _begun() -> Future[bool]:
    future: Future[bool] = Future()
    future.set_running_or_notify_cancel()  # so that it cannot be cancelled
    return future


def _ended(value: bool) -> Future[bool]:
    future: Future[bool] = Future()
    future.set_result(value)
    return future
