"""The folders of packed weights: which one is used, what may be trusted, and what has to go.

A folder and its files belong to this user or to root, and no other user can write to them. Only the
holder of a folder's lock writes to it. A file appears under its name when it is complete, and is
never changed afterwards: processes have it mapped.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from serve.errors import reason
from serve.models.packed_cache.identity import Identity
from serve.read_ahead import BESIDE
from serve.regular_file import distrust, user_cache

logger = logging.getLogger(__name__)

ENDING, UNFINISHED = ".packed", ".unfinished"
_LOCK = "lock"
_LOCK_POLL_S = 0.2
_LEAST_FREE_BYTES, _LEAST_FREE_SHARE = 2 << 30, 0.05  # of the disk


class NoRoom(Exception):
    """There is no place for a file; the message says why."""


def folders(model: Path, chosen: Path | None) -> list[Path]:
    """Returns the folders in which a model's packed weights may be, the preferred one first.
    chosen: the only one; None: beside the model, and the user's cache, which is preferred for a
    model that is a part of a Python package: what it holds is the installer's."""
    if chosen is not None:
        return [chosen]
    model = model.resolve()
    folder = model if model.is_dir() else model.parent
    beside, cache = folder / BESIDE, user_cache()
    if cache is None:
        return [beside]
    is_in_package = any((parent / "__init__.py").exists() for parent in folder.parents)
    both = [beside, cache / "packed"]
    return both[::-1] if is_in_package else both


def writable(candidates: list[Path]) -> Path:
    """Returns the first folder that can be written to and trusted, which is made if need be.
    NoRoom, with the reason for each, if there is none."""
    problems = []
    for folder in candidates:
        problem = _problem(folder)
        if problem is None:
            return folder
        problems.append(f"{folder}: {problem}")
    raise NoRoom(f"no folder can be used: {'; '.join(problems)}")


def _problem(folder: Path) -> str | None:
    """Makes the folder if need be. Returns why it cannot be used; None if it can."""
    try:
        folder.mkdir(mode=0o700, parents=folder.name != BESIDE, exist_ok=True)
    except FileExistsError:  # something else is there
        return distrust(folder)
    except OSError as error:
        return reason(error)
    problem = distrust(folder)
    if problem is None and not os.access(folder, os.W_OK | os.X_OK):
        return "it cannot be written to"
    return problem


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Waits until no other process writes to the folder, and keeps others from it meanwhile."""
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(lock)


def make_room(folder: Path, identity: Identity, num_bytes: int, max_bytes: int) -> None:
    """Deletes what stopped writers left and older versions of the same weights, and then, until
    num_bytes fit, the files that were not used for the longest time. The caller has the lock.
    NoRoom if they do not fit into max_bytes or the disk."""
    for file in folder.glob(f"*{UNFINISHED}"):
        remove(file)
    for file in folder.glob(f"{identity.file_prefix}*{ENDING}"):
        remove(file)
    if num_bytes > max_bytes:
        raise NoRoom(f"{num_bytes:,} bytes are more than packed_cache_bytes ({max_bytes:,})")
    present = sorted(_files(folder), key=lambda item: item[1].st_mtime_ns)
    total = sum(status.st_size for _, status in present)
    while present and (total + num_bytes > max_bytes or not _fits(folder, num_bytes)):
        file, status = present.pop(0)
        logger.info("packed weights: %s gives way to newer ones", file)
        remove(file)
        total -= status.st_size
    if not _fits(folder, num_bytes):
        raise NoRoom(f"the disk has no room for {num_bytes:,} bytes and what must stay free")


def mark_used(fd: int) -> None:
    """Makes a file the last to be deleted."""
    with contextlib.suppress(OSError):  # root's file, or a disk that is read only
        os.utime(fd)


def remove(file: Path) -> None:
    with contextlib.suppress(OSError):
        file.unlink()


def _files(folder: Path) -> list[tuple[Path, os.stat_result]]:
    found = []
    for file in folder.glob(f"*{ENDING}"):
        with contextlib.suppress(OSError):
            found.append((file, file.lstat()))
    return found


def _fits(folder: Path, num_bytes: int) -> bool:
    usage = shutil.disk_usage(folder)
    left = max(_LEAST_FREE_BYTES, int(usage.total * _LEAST_FREE_SHARE))
    return usage.free - num_bytes >= left
