"""Fetches one file of a repository into the cache.

The file grows as NAME.incomplete in the folder of blobs and is always a beginning of what the hub
sends, so that a download that was ended in any way goes on from there. It gets its name once all of
it is there and its hash is that of the hub's listing.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from serve.errors import DownloadError
from serve.hub.client import RETRY_WAITS_S, HubClient, Stopped
from serve.hub.listing import RepoFile
from serve.hub.refusals import TransientError
from serve.units import format_memory

MAX_REQUEST_BYTES = 8 << 30
"""Most bytes that one request asks for; content networks refuse very large ones."""
PROGRESS_BYTES = 1 << 20
"""How much a try must add so that the next failure counts as the first one again."""
SLOW_S = 60.0
SLOW_BYTES = 1 << 16
"""A connection that brings less than SLOW_BYTES in SLOW_S is given up for another."""
_READ_BYTES = 4 << 20
_RANGE = re.compile(r"bytes (\d{1,20})-(\d{1,20})/(\d{1,20}|\*)")

logger = logging.getLogger(__name__)

Report = Callable[[int], None]


def partial_bytes(blobs: Path, file: RepoFile) -> int:
    """Returns how many bytes of a file an earlier download has left; 0 if they cannot be right."""
    try:
        size = os.stat(_partial(blobs, file)).st_size
    except OSError:
        return 0
    return size if size <= file.size else 0


def has_blob(blobs: Path, file: RepoFile) -> bool:
    """Returns whether the complete file is in the cache."""
    try:
        return os.stat(blobs / file.digest).st_size == file.size
    except OSError:
        return False


def fetch_blob(
    client: HubClient, url: str, file: RepoFile, blobs: Path, locks: Path, report: Report
) -> None:
    """Fetches a file unless it is in the cache, and goes on with what an earlier try has left.

    report: is told how many bytes are there, often. Raises DownloadError, Stopped, and OSError for
    a folder that cannot be written.
    """
    with _locked(client, locks / f"{file.digest}.lock"):
        if not has_blob(blobs, file):
            path = _partial(blobs, file)
            try:
                _fetch(client, url, file, path, report)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise _disk_full(blobs, file) from error
                raise
            except DownloadError as error:
                if error.code in ("damaged", "refused"):
                    path.unlink(missing_ok=True)
                raise
            os.replace(path, blobs / file.digest)
        report(file.size)


def _fetch(client: HubClient, url: str, file: RepoFile, path: Path, report: Report) -> None:
    with open(path, "r+b", buffering=0, opener=_open_partial) as out:
        transfer = _Transfer(client, url, file, out, report)
        is_resumed = transfer.resume()
        transfer.complete()
        if is_resumed and not transfer.is_right():
            transfer.restart()  # what was left may have been damaged
            transfer.complete()
        if not transfer.is_right():
            raise DownloadError(
                f"{file.path} of {client.repository} is damaged: its checksum is not the one that"
                f" {client.settings.host} lists; it has been removed, try again",
                code="damaged",
            )
        os.fsync(out.fileno())  # the name of a blob is a promise that also a power cut must keep


class _Transfer:
    """The bytes of one file on their way. done: how many are in `out` and in the hash."""

    def __init__(
        self, client: HubClient, url: str, file: RepoFile, out: Any, report: Report
    ) -> None:
        self._client = client
        self._url = url
        self._file = file
        self._out = out
        self._report = report
        self.done = 0
        self._hash = file.new_hash()

    def resume(self) -> bool:
        """Takes what is in the file already. Returns whether that is anything."""
        if os.fstat(self._out.fileno()).st_size > self._file.size:
            self.restart()
        while data := self._out.read(_READ_BYTES):
            if self._client.stop.is_set():
                raise Stopped
            self._hash.update(data)
            self.done += len(data)
        self._report(self.done)
        return self.done > 0

    def restart(self) -> None:
        self._out.seek(0)
        self._out.truncate()
        self.done = 0
        self._hash = self._file.new_hash()
        self._report(0)

    def is_right(self) -> bool:
        found: str = self._hash.hexdigest()
        return found == self._file.digest

    def complete(self) -> None:
        """Requests the rest until all of it is there. Raises what the last of several failures
        without progress between them was."""
        failures, furthest = 0, self.done
        while self.done < self._file.size:
            error = self._request()
            if self.done >= furthest + PROGRESS_BYTES:
                failures = 0
            furthest = max(furthest, self.done)
            if error is None:
                continue
            if failures == len(RETRY_WAITS_S):
                raise error
            self._client.pause(failures, error)
            failures += 1

    def _request(self) -> TransientError | None:
        """Makes one request. Returns why it did not bring all that it asked for, if it did not."""
        first, size = self.done, self._file.size
        last = min(first + MAX_REQUEST_BYTES, size) - 1
        try:
            with self._client.open(
                self._url, first=first, last=None if last == size - 1 else last
            ) as response:
                self._check_range(response, first)
                if response.status_code == 200 and first:
                    self.restart()
                self._take(response)
        except TransientError as error:
            return error
        if self.done > last:
            return None
        return self._client.lost(f"the connection to {self._client.settings.host} was cut off")

    def _check_range(self, response: Any, first: int) -> None:
        """Refuses an answer of another length than the listing has."""
        size = self._file.size
        length = response.headers.get("Content-Length", "")
        if response.status_code == 206:
            found = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
            if not found or int(found[1]) != first:
                raise self._refused("sends another part of it than it was asked for")
            if found[3] not in ("*", str(size)):
                raise self._refused(f"has {found[3]} bytes of it and lists {size}")
        elif length and length != str(size):
            raise self._refused(f"sends {length[:20]} bytes of it and lists {size}")

    def _take(self, response: Any) -> None:
        since_s, taken = time.monotonic(), 0
        for chunk in response.iter_raw():
            if self._client.stop.is_set():
                raise Stopped
            if len(chunk) > self._file.size - self.done:
                raise self._refused(f"sends more than the {self._file.size} bytes that it lists")
            _write(self._out, chunk)
            self._hash.update(chunk)
            self.done += len(chunk)
            self._report(self.done)
            taken += len(chunk)
            now_s = time.monotonic()
            if now_s - since_s >= SLOW_S:
                if taken < SLOW_BYTES:
                    raise self._client.lost(f"{self._client.settings.host} sends almost nothing")
                since_s, taken = now_s, 0

    def _refused(self, what: str) -> DownloadError:
        return DownloadError(
            f"{self._file.path} of {self._client.repository}: {self._client.settings.host} {what};"
            " it has been removed",
            code="refused",
        )


def _write(out: Any, chunk: bytes) -> None:
    view = memoryview(chunk)
    while view:
        view = view[out.write(view) :]


def _partial(blobs: Path, file: RepoFile) -> Path:
    return blobs / f"{file.digest}.incomplete"


def _open_partial(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def _disk_full(blobs: Path, file: RepoFile) -> DownloadError:
    missing = file.size - partial_bytes(blobs, file)
    return DownloadError(
        f"the disk of {blobs} is full, and {format_memory(missing)} of {file.path} are missing;"
        " make room or set HF_HOME to another disk, and try again: what is there is kept",
        code="disk",
    )


@contextmanager
def _locked(client: HubClient, path: Path) -> Iterator[None]:
    """Holds the lock by which Hugging Face's tools keep two downloads of one file apart.

    On a file system without locks there is none, and the hash finds what two writers mix up.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path, mode=0o664)
    is_told = False
    while True:
        try:
            lock.acquire(timeout=0.5)
        except Timeout:
            if not is_told:
                logger.warning("waiting for another process that downloads %s", client.repository)
            is_told = True
            client.wait(0)
            continue
        except NotImplementedError:
            yield
            return
        break
    try:
        yield
    finally:
        lock.release()
