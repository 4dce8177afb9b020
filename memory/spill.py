"""The disk tier of K/V memory: pages under keys in one file of slots.

A key names its content for good: a hash chain for prefixes, a unique id for the pages of a
preempted sequence. Whatever goes wrong with the disk is a miss and a counter; a page that comes
back is the page that was stored, for its checksum is compared on every load.
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
from dataclasses import dataclass, fields
from pathlib import Path

from memory.block_file import ALIGNMENT, BlockFile, Transfer
from memory.direct_io import choose_io, open_block_file, open_direct
from memory.spill_directory import claim_directory, claim_pages, remove_pages
from memory.spill_log import MAX_KEY_BYTES, IndexLog, Placed
from memory.spill_slots import Entry, SlotTable
from memory.spill_writer import SpillWriter
from ops import native

logger = logging.getLogger(__name__)

MAX_PAGE_BYTES = 65_535 * ALIGNMENT
_ERRORS_IN_A_ROW = 3
_PAUSE_S, _MAX_PAUSE_S = 1.0, 60.0


@dataclass(slots=True)
class SpillStats:
    """Counters since the start, and the state now (from `entries` on)."""

    hits: int = 0
    misses: int = 0  # for every reason
    stores: int = 0  # pages written
    corrupt: int = 0  # checksum wrong, page dropped
    read_errors: int = 0
    write_errors: int = 0
    refused: int = 0  # too many requests, no room, or writing is paused
    evictions: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    entries: int = 0
    pinned: int = 0
    bytes_used: int = 0
    requests: int = 0  # under way
    is_paused: bool = False


class SpillStore:
    """Store, load and forget pages from any thread; the futures end in a thread of ours."""

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
        """identity: the model's fingerprint, its K/V layout and whatever else the bytes mean.

        persistent: unpinned pages are there after a restart; else no file is left, not even by
        a kill. SpillDirectoryError and other OSErrors where the directory cannot be used.
        """
        assert page_bytes % ALIGNMENT == 0 and 0 < page_bytes <= MAX_PAGE_BYTES, f"{page_bytes=}"
        assert capacity_bytes >= page_bytes, f"{capacity_bytes=} {page_bytes=}"
        self.page_bytes = page_bytes
        self._max_requests = max_requests
        self._growth = max(1, growth_bytes // page_bytes)
        self._clock = clock
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._slots = SlotTable(capacity_bytes // page_bytes, self._forget, clock)
        self._requests = 0
        self._stats = SpillStats()
        self._failures = self._num_pauses = 0
        self._paused_until = 0.0
        self._is_closed = False
        self._checksum: Callable[[int, int], int] = native.library().checksum

        path, self._claim = claim_directory(directory)
        log = IndexLog(path, page_bytes, identity) if persistent else None
        try:
            io = choose_io(path, io, depth=depth)
            self._file = self._open_pages(path, log, io, depth, open_file)
        except BaseException:
            if log is not None:
                log.close()
            os.close(self._claim)
            raise
        self.io = self._file.io
        self._writer = SpillWriter(self._file, log, self._live)
        self._want_room()
        atexit.register(self.close)  # for one that nobody closed
        free = shutil.disk_usage(path).free
        if free < capacity_bytes - self._slots.num_begun * page_bytes:
            logger.warning("K/V on disk: %s has only %d MiB free", path, free >> 20)

    def _open_pages(
        self,
        path: Path,
        log: IndexLog | None,
        io: str,
        depth: int,
        open_file: Callable[..., BlockFile],
    ) -> BlockFile:
        placed = [] if log is None else log.open(self._slots.num_slots)
        pages = path / (f"pages-{os.urandom(16).hex()}.kv" if log is None else log.data_name)
        if log is not None and placed and (pages.is_symlink() or not pages.is_file()):
            logger.warning("K/V on disk in %s: beginning anew (the file of pages is gone)", path)
            log.begin_anew()
            placed, pages = [], path / log.data_name
        if log is not None:
            remove_pages(path, but=pages.name if placed else "")
        flags = os.O_RDWR | os.O_NOFOLLOW | (0 if placed else os.O_CREAT | os.O_EXCL)
        fd, is_direct = open_direct(pages, flags)
        try:
            if log is None:
                pages.unlink()
            else:
                os.fchmod(fd, 0o600)
                claim_pages(fd)
            size = os.fstat(fd).st_size
            self._slots.adopt([p for p in placed if p.slot * self.page_bytes + p.length <= size])
            size = self._slots.num_slots * self.page_bytes
            os.ftruncate(fd, size)  # a hole, until it is set aside
            return open_file(fd, is_direct=is_direct, depth=depth, io=io)
        except BaseException:
            os.close(fd)
            raise

    def store(
        self, key: bytes, address: int, length: int | None = None, *, pinned: bool = False
    ) -> Future[bool]:
        """Write `length` bytes (page_bytes; a multiple of 4096) at `address` under `key`.

        The memory must not change until the future ends: True when `load` may find it. A key
        that is there already is True at once, nothing is compared. pinned: never evicted, not
        there after a restart; counts as one `pin`.
        """
        return self.store_many([(key, address)], length, pinned=pinned)[0]

    def store_many(
        self,
        pages: Sequence[tuple[bytes, int]],
        length: int | None = None,
        *,
        pinned: bool = False,
    ) -> list[Future[bool]]:
        """As `store` for each (key, address), with one submission for all."""
        length = self.page_bytes if length is None else length
        assert 0 < length <= self.page_bytes and length % ALIGNMENT == 0, f"{length=}"
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
        assert 1 <= len(key) <= MAX_KEY_BYTES, f"{len(key)=}"
        entry = self._slots.entries.get(key)
        if entry is not None:
            assert entry.length == length, "a key names its content for good"
            self._slots.add_pins(entry, int(pinned))
            return (_ended(True) if entry.stored is None else entry.stored), None
        if self._may_write():
            entry = self._slots.add(key, length, is_pinned=pinned)
        if entry is None:
            self._stats.refused += 1
            return _ended(False), None
        future = entry.stored
        assert future is not None
        future.set_running_or_notify_cancel()  # so that nobody can cancel it
        self._requests += 1
        offset = entry.slot * self.page_bytes

        def done(error: OSError | None) -> None:
            self._end_store(entry, address, error)

        return future, Transfer(address, length, offset, done)

    def _end_store(self, entry: Entry, address: int, error: OSError | None) -> None:
        if error is None:
            entry.checksum = self._checksum(address, entry.length)
        with self._lock:
            self._requests -= 1
            future, entry.stored = entry.stored, None
            self._count_write(entry.length, error)
            if error is not None:
                if error.errno == errno.ENOSPC:
                    self._slots.disk_is_full(entry)
                self._slots.drop(entry)
            elif not entry.is_dropped:
                if entry.is_logged:
                    self._writer.note(Placed(entry.key, entry.slot, entry.length, entry.checksum))
                self._slots.settle(entry)
            else:
                self._slots.release(entry)
            is_there = not entry.is_dropped
            waiting, entry.waiting = entry.waiting, []
            self._want_room()
            self._idle.notify_all()
        assert future is not None
        future.set_result(is_there)
        for go_on in waiting:
            go_on(error is None)

    def load(self, key: bytes, address: int) -> Future[bool]:
        """Read the page of `key` to `address`. False: a miss, and the memory's content is
        undefined. The memory belongs to the store until the future ends."""
        return self.load_many([(key, address)])[0]

    def load_many(self, pages: Sequence[tuple[bytes, int]]) -> list[Future[bool]]:
        """As `load` for each (key, address), with one submission for all."""
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
            self._stats.misses += 1
            self._stats.refused += entry is not None
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
        entry: Entry,
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
            stats = self._stats
            self._requests -= 1
            entry.readers -= 1
            stats.hits += is_right
            stats.misses += not is_right
            if is_right:
                stats.bytes_read += entry.length
                self._slots.settle(entry)
            elif not is_lost:
                stats.read_errors += error is not None
                stats.corrupt += error is None
                self._slots.drop(entry)
            if entry.is_dropped:
                self._slots.release(entry)
            self._idle.notify_all()
        if error is not None:
            logger.warning("K/V on disk: a page cannot be read (%s)", error)
        future.set_result(is_right)

    def contains(self, key: bytes) -> bool:
        """It is there, or on its way. (Its checksum is compared on loading only.)"""
        with self._lock:
            return key in self._slots.entries

    def discard(self, key: bytes) -> bool:
        """Forget it, pinned or not; loads under way still end. False: it was not there."""
        with self._lock:
            entry = self._slots.entries.get(key)
            if entry is None:
                return False
            self._slots.drop(entry)
            return True

    def pin(self, key: bytes) -> bool:
        """Keep it until as many `unpin` or a `discard`. False: it is not there."""
        return self._pin_by_key(key, 1)

    def unpin(self, key: bytes) -> bool:
        """Take one pin back; without any it may be evicted again, the latest used last."""
        return self._pin_by_key(key, -1)

    def _pin_by_key(self, key: bytes, change: int) -> bool:
        with self._lock:
            entry = self._slots.entries.get(key)
            if entry is not None:
                self._slots.add_pins(entry, change)
            return entry is not None

    def stats(self) -> SpillStats:
        with self._lock:
            now = SpillStats(*(getattr(self._stats, name.name) for name in fields(SpillStats)))
            now.entries = len(self._slots.entries)
            now.pinned = self._slots.num_pinned
            now.evictions = self._slots.num_evicted
            now.bytes_used = self._slots.num_used * self.page_bytes
            now.requests = self._requests
            now.is_paused = self._clock() < self._paused_until
            return now

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Stored pages are on the medium and, where persistent, in the index. False: not all."""
        with self._lock:
            if not self._idle.wait_for(lambda: self._requests == 0, timeout_s):
                return False
        return self._writer.flush(timeout_s)

    def close(self) -> None:
        """After all that is under way; not from a future's callback. Later requests are misses."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._idle.wait_for(lambda: self._requests == 0)
        atexit.unregister(self.close)
        self._writer.close()
        self._file.close()
        os.close(self._claim)

    # -- under the lock ------------------------------------------------------------------

    def _may_write(self) -> bool:
        return (
            not self._is_closed
            and self._requests < self._max_requests
            and self._clock() >= self._paused_until
        )

    def _forget(self, entry: Entry) -> None:
        if entry.is_logged:
            self._writer.note(Placed(entry.key, 0, 0, 0))

    def _count_write(self, length: int, error: OSError | None) -> None:
        """After some errors in a row nothing is written for a while, twice as long each time."""
        if error is None:
            self._stats.stores += 1
            self._stats.bytes_written += length
            self._failures = self._num_pauses = 0
            return
        self._stats.write_errors += 1
        self._failures += 1
        if self._failures >= _ERRORS_IN_A_ROW and self._clock() >= self._paused_until:
            pause = min(_PAUSE_S * 2.0 ** min(self._num_pauses, 10), _MAX_PAUSE_S)
            self._num_pauses += 1
            self._paused_until = self._clock() + pause
            logger.warning("K/V on disk: not writing for %.0f s (%s)", pause, error)

    def _want_room(self) -> None:
        """Disk space is set aside ahead of need, in steps."""
        steps = (self._slots.num_begun + self._growth // 2) // self._growth + 1
        self._writer.want_bytes(min(steps * self._growth, self._slots.num_slots) * self.page_bytes)

    def _live(self) -> list[Placed]:
        with self._lock:
            return self._slots.logged()


def _begun() -> Future[bool]:
    future: Future[bool] = Future()
    future.set_running_or_notify_cancel()  # so that nobody can cancel it
    return future


def _ended(value: bool) -> Future[bool]:
    future: Future[bool] = Future()
    future.set_result(value)
    return future
