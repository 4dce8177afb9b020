"""The thread that writes the disk tier's index, compacts it and preallocates disk space.

No store or load of a page waits for it.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable

from memory.tiers.block_file import BlockFile
from memory.tiers.disk_index import IndexLog, StoredPage

logger = logging.getLogger(__name__)

_MAX_CHANGES = 65_536
_SLACK_RECORDS = 1024
_PAUSE_S = 30.0  # after an index that could not be written


class DiskWriter:
    """The writing thread and its queue. `note` and `want_bytes` return at once; `flush` and `close`
    wait."""

    def __init__(
        self, file: BlockFile, log: IndexLog | None, live: Callable[[], list[StoredPage]]
    ) -> None:
        """log: None if no page survives a restart. live: returns the pages that do, oldest
        first."""
        self._file = file
        self._log = log
        self._live = live
        self._change = threading.Condition()
        self._changes: list[StoredPage] = []
        self._is_overrun = False
        self._wanted_bytes = self._set_aside = 0
        self._flushes_asked = self._flushes_done = 0
        self._is_closed = False
        self._paused_until = 0.0
        self._must_rewrite = False
        self._rewrite_above = _SLACK_RECORDS
        self._thread = threading.Thread(target=self._run, name="mergestep-disk", daemon=True)
        self._thread.start()

    def note(self, change: StoredPage) -> None:
        """Queues the record of a page that was written or, with length 0, dropped."""
        if self._log is None:
            return
        with self._change:
            if len(self._changes) >= _MAX_CHANGES:
                self._changes.clear()
                self._is_overrun = True
            self._changes.append(change)
            self._change.notify()

    def want_bytes(self, size_bytes: int) -> None:
        """Asks for so many bytes of the file to be preallocated."""
        with self._change:
            if size_bytes > self._wanted_bytes:
                self._wanted_bytes = size_bytes
                self._change.notify()

    def flush(self, timeout_s: float) -> bool:
        """Waits until all pages and records so far are on the medium, pages before records. Returns
        whether they are."""
        with self._change:
            self._flushes_asked += 1
            ticket = self._flushes_asked
            self._change.notify_all()
            self._change.wait_for(lambda: self._flushes_done >= ticket, max(0.0, timeout_s))
            return self._flushes_done >= ticket and not self._must_rewrite

    def close(self, timeout_s: float) -> bool:
        """Writes the queued records, and the index in the order of its pages' last use, and ends
        the thread. Returns False if the thread still writes."""
        with self._change:
            self._is_closed = True
            self._change.notify_all()
        self._thread.join(max(0.0, timeout_s))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while self._take_turn():
            pass
        if self._log is not None:
            self._flush_pages()
            self._log.rewrite(self._live())
            self._log.close()

    def _take_turn(self) -> bool:
        """Waits for work and does it. Returns False if the writer is closed and nothing is left."""
        with self._change:
            self._change.wait_for(self._has_work)
            if self._is_closed and not self._changes:
                return False
            changes, self._changes = self._changes, []
            self._must_rewrite |= self._is_overrun
            self._is_overrun = False
            wanted = self._wanted_bytes
            flushes = self._flushes_asked
        self._preallocate(wanted)
        self._write(changes, is_flush=flushes > self._flushes_done)
        with self._change:
            self._flushes_done = flushes
            self._change.notify_all()
        return True

    def _has_work(self) -> bool:
        return bool(
            self._is_closed
            or self._changes
            or self._wanted_bytes > self._set_aside
            or self._flushes_asked > self._flushes_done
        )

    def _preallocate(self, wanted: int) -> None:
        if wanted <= self._set_aside:
            return
        try:
            self._file.preallocate(wanted)
        except OSError as error:
            # Writes go on into the sparse file; without space a single write fails.
            if error.errno != errno.EOPNOTSUPP:
                logger.warning("K/V on disk: no space can be preallocated (%s)", error)
        self._set_aside = wanted

    def _write(self, changes: list[StoredPage], *, is_flush: bool) -> None:
        log = self._log
        if log is None:
            return
        if is_flush:
            self._flush_pages()
        if not self._must_rewrite and changes and not log.append(changes):
            self._must_rewrite = True
            self._paused_until = time.monotonic() + _PAUSE_S
        self._compact(log)
        if is_flush and not self._must_rewrite:
            try:
                log.flush()
            except OSError as error:
                logger.warning("K/V on disk: the index was not flushed (%s)", error)
                self._must_rewrite = True

    def _compact(self, log: IndexLog) -> None:
        """Rewrites the index if most records are out of date, or a while after a failed write."""
        if self._must_rewrite:
            if time.monotonic() < self._paused_until:
                return
        elif log.num_records <= self._rewrite_above:
            return
        live = self._live()
        self._rewrite_above = 2 * len(live) + _SLACK_RECORDS
        if self._must_rewrite or log.num_records > self._rewrite_above:
            self._must_rewrite = not log.rewrite(live)
            if self._must_rewrite:
                self._paused_until = time.monotonic() + _PAUSE_S

    def _flush_pages(self) -> None:
        try:
            self._file.flush()
        except OSError as error:  # checksums find pages that were lost
            logger.warning("K/V on disk: pages were not flushed (%s)", error)
