"""The disk tier's index file: which key lies in which slot, across restarts.

The file is a header and records of fixed size. A record has its own checksum and is appended after
its page was written. A file that cannot be read is moved away or replaced; no exception is raised.

It is a log of its own and not an SQLite database, because pages are looked up in memory and the
file is read at start-up only, a change is an append of 64 bytes by the tier's writer thread, and
the files that exist must stay readable.

+--------------------------------------------------------------------------------------+
| header, 128 bytes: magic, version u32, record size u32, page size u64, id [16],      |
| SHA-256 of the identity [32], BLAKE2b-128 of all that, zeros.                        |
| record, 64 bytes: kind u8, key length u8, length u16 (in 4096s), slot u32, key [32], |
| XXH3-64 of the page u64, number u64, BLAKE2b-64 of all that, keyed with the id.      |
| All little-endian. Numbers rise; the later of two records for a key or slot counts.  |
+--------------------------------------------------------------------------------------+
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from memory.tiers.disk_directory import is_private

logger = logging.getLogger(__name__)

VERSION = 1
MAX_KEY_BYTES = 32
UNIT = 4096
_MAGIC = b"MSKVSPIL"
_HEADER = struct.Struct("<8sIIQ16s32s")
_HEADER_BYTES = 128
_RECORD = struct.Struct("<BBHI32sQQ")
RECORD_BYTES = 64
_PUT, _DROP = 1, 2
_CHUNK = 1 << 20


class StoredPage(NamedTuple):
    """A page on disk: `length` bytes from the start of `slot`; length 0: it was dropped."""

    key: bytes
    slot: int
    length: int
    checksum: int


def page_bytes_of(directory: Path) -> int | None:
    """Returns the page size of the tier in this directory; None if it has no index of ours."""
    try:
        if not is_private(os.lstat(directory / "index")):
            return None
        fd = os.open(directory / "index", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            magic, _, _, page_bytes, _, _ = _HEADER.unpack(file.read(_HEADER.size))
    except (OSError, struct.error):
        return None
    return int(page_bytes) if magic == _MAGIC else None


class IndexLog:
    """The index file. One thread at a time uses it. Methods return False for failed writes."""

    def __init__(self, directory: Path, page_bytes: int, identity: bytes) -> None:
        self._path = directory / "index"
        self._page_bytes = page_bytes
        self._identity = hashlib.sha256(identity).digest()
        self._number = 0
        self._size = 0
        self._fd = -1
        self.num_records = 0
        self.id = b""

    @property
    def data_name(self) -> str:
        """The name of the file of pages that this index describes."""
        return f"pages-{self.id.hex()}.kv"

    def open(self, num_slots: int) -> list[StoredPage]:
        """Returns the pages of an earlier process, the oldest first; empty if the file cannot be
        used, in which case a new one is made. Raises OSError if the directory does not work."""
        fd = self._open_existing()
        why = "" if fd < 0 else self._read_header(fd)
        if fd < 0 or why:
            if why:
                logger.warning("K/V on disk in %s: beginning anew (%s)", self._path.parent, why)
            if fd >= 0:
                os.close(fd)
            self.begin_anew()
            return []
        self._fd = fd
        placed, num_bad = self._replay(num_slots)
        if num_bad:
            logger.warning("K/V on disk: %d records of %s are damaged", num_bad, self._path)
        return placed

    def _open_existing(self) -> int:
        """Returns the file's descriptor, or -1 if there is no file. A foreign file is renamed."""
        try:
            status = os.lstat(self._path)
        except FileNotFoundError:
            return -1
        if is_private(status):
            fd = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            magic = os.pread(fd, len(_MAGIC), 0)
            if magic == _MAGIC or not magic:
                return fd
            os.close(fd)
        aside = self._path.with_name(f"index.aside-{os.urandom(4).hex()}")
        os.rename(self._path, aside)
        logger.warning("K/V on disk: %s is not ours; it is %s now", self._path, aside.name)
        return -1

    def _read_header(self, fd: int) -> str:
        """Reads the header. Returns why the file cannot be used, or an empty string."""
        raw = os.pread(fd, _HEADER_BYTES, 0)
        if len(raw) < _HEADER_BYTES:
            return "the index has no whole header"
        _, version, record_bytes, page_bytes, self.id, identity = _HEADER.unpack_from(raw)
        if version != VERSION or record_bytes != RECORD_BYTES:
            return f"the index has version {version}, this is {VERSION}"
        if raw != _header(page_bytes, self.id, identity):
            return "the header is damaged"
        if page_bytes != self._page_bytes:
            return f"pages of {page_bytes} bytes, now {self._page_bytes}"
        return "" if identity == self._identity else "another model, layout or setting"

    def _replay(self, num_slots: int) -> tuple[list[StoredPage], int]:
        by_key: dict[bytes, StoredPage] = {}
        by_slot: dict[int, bytes] = {}
        num_bad = 0
        # Compaction keeps the file far below this size; the rest of a longer file is ignored.
        most = _HEADER_BYTES + RECORD_BYTES * (4 * num_slots + 65_536)
        size = min(os.fstat(self._fd).st_size, most)
        for raw in self._raw_records(size):
            body, own = raw[: _RECORD.size], raw[_RECORD.size :]
            if _digest(body, self.id) != own:
                num_bad += 1
                continue
            kind, key_len, units, slot, key, checksum, number = _RECORD.unpack(body)
            self.num_records += 1
            if number <= self._number:
                continue
            self._number = number
            key = key[:key_len]
            old = by_key.pop(key, None)
            if old is not None:
                by_slot.pop(old.slot, None)
            if kind == _PUT and slot < num_slots and 0 < units * UNIT <= self._page_bytes:
                by_key.pop(by_slot.get(slot, b""), None)
                by_key[key] = StoredPage(key, slot, units * UNIT, checksum)
                by_slot[slot] = key
        # A torn last record is overwritten.
        self._size = _HEADER_BYTES + (size - _HEADER_BYTES) // RECORD_BYTES * RECORD_BYTES
        return list(by_key.values()), num_bad

    def _raw_records(self, size: int) -> Iterator[bytes]:
        for start in range(_HEADER_BYTES, size, _CHUNK):
            chunk = os.pread(self._fd, min(_CHUNK, size - start), start)
            for at in range(0, len(chunk) - RECORD_BYTES + 1, RECORD_BYTES):
                yield chunk[at : at + RECORD_BYTES]

    def begin_anew(self) -> None:
        """Makes an empty index with a new id. Raises OSError."""
        self.id = os.urandom(16)
        self._number = self.num_records = 0
        self._replace(self._write_new([]))

    def append(self, changes: Iterable[StoredPage]) -> bool:
        """Appends records of written and dropped (length 0) pages. Returns False on failure.

        The offset is explicit, so that the next call overwrites what a failed write left.
        """
        records = b"".join(self._record(change) for change in changes)
        try:
            written = os.pwrite(self._fd, records, self._size)
        except OSError as error:
            logger.warning("K/V on disk: the index cannot be written (%s)", error)
            return False
        if written != len(records):
            return False
        self._size += written
        self.num_records += written // RECORD_BYTES
        return True

    def _record(self, change: StoredPage) -> bytes:
        self._number += 1
        body = _RECORD.pack(
            _PUT if change.length else _DROP,
            len(change.key),
            change.length // UNIT,
            change.slot,
            change.key,
            change.checksum,
            self._number,
        )
        return body + _digest(body, self.id)

    def flush(self) -> None:
        """Waits until the records are on the medium. Raises OSError."""
        os.fdatasync(self._fd)

    def rewrite(self, live: Iterable[StoredPage]) -> bool:
        """Replaces the file atomically by one with only these records. Returns False on failure."""
        try:
            self.num_records = 0
            self._replace(self._write_new(live))
        except OSError as error:
            logger.warning("K/V on disk: the index was not compacted (%s)", error)
            return False
        return True

    def _write_new(self, live: Iterable[StoredPage]) -> Path:
        path = self._path.with_name("index.new")
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(_header(self._page_bytes, self.id, self._identity))
            for placed in live:
                file.write(self._record(placed))
                self.num_records += 1
            file.flush()
            os.fsync(file.fileno())
        return path

    def _replace(self, new: Path) -> None:
        os.rename(new, self._path)
        fd = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        self.close()
        self._fd = fd
        self._size = os.fstat(fd).st_size
        directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _header(page_bytes: int, log_id: bytes, identity: bytes) -> bytes:
    fields = _HEADER.pack(_MAGIC, VERSION, RECORD_BYTES, page_bytes, log_id, identity)
    return (fields + hashlib.blake2b(fields, digest_size=16).digest()).ljust(_HEADER_BYTES, b"\0")


def _digest(body: bytes, log_id: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=RECORD_BYTES - _RECORD.size, key=log_id).digest()
