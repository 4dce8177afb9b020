"""The disk tier's file of pages: it is reopened or made, and belongs to one process."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from pathlib import Path

from memory.tiers.direct_io import open_direct
from memory.tiers.disk_directory import DiskDirectoryInUse, is_private
from memory.tiers.disk_index import IndexLog, StoredPage

logger = logging.getLogger(__name__)

_HANDOVER_S = 5.0


def open_pages(
    path: Path, log: IndexLog | None, page_bytes: int, num_slots: int
) -> tuple[int, bool, list[StoredPage]]:
    """Opens the file of pages. Returns its descriptor, whether it bypasses the page cache, and the
    pages in it that the log lists. Without a log the file has no name. Raises OSError."""
    placed = [] if log is None else log.open(num_slots)
    pages = path / (f"pages-{os.urandom(16).hex()}.kv" if log is None else log.data_name)
    if log is not None and placed and not (pages.exists() and is_private(pages.lstat())):
        logger.warning("K/V on disk in %s: beginning anew (no file of pages of ours)", path)
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
        placed = [p for p in placed if p.slot * page_bytes + p.length <= size]
        os.ftruncate(fd, num_slots * page_bytes)  # sparse until it is preallocated
    except BaseException:
        os.close(fd)
        raise
    return fd, is_direct, placed


def claim_pages(fd: int) -> None:
    """Locks the file, and waits for the transfers of a killed process.

    A ring outlives its process until its last transfer has ended, and with it the open file and
    the lock.
    """
    end = time.monotonic() + _HANDOVER_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > end:
                raise DiskDirectoryInUse("transfers of another process do not end") from error
            time.sleep(0.01)
        else:
            return


def remove_pages(directory: Path, *, but: str = "") -> None:
    """Removes files of pages that no index refers to."""
    for path in directory.glob("pages-*.kv"):
        if path.name != but and not path.is_dir():
            path.unlink(missing_ok=True)
