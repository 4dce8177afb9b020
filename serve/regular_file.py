"""Opens files that a user or a checkpoint names, and refuses what is not a regular file.

A FIFO or a device in a file's place could wait for ever or never end. What a server keeps for its
next start is used only if no other user could have written it.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import stat
from pathlib import Path

from serve.errors import reason

MAX_RECORDS = 64  # of a kind

logger = logging.getLogger(__name__)

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_regular(path: str | Path) -> None:
    """Raises OSError, whose text for users names the kind, if the path leads to no regular file."""
    if "\0" in str(path):  # os.stat raises ValueError
        raise OSError("a path has no NUL")
    kind = stat.S_IFMT(os.stat(path).st_mode)
    if kind != stat.S_IFREG:
        raise OSError(f"it is {_KINDS.get(kind, 'something else')}, not a regular file")


def open_regular(path: str | Path) -> io.BufferedReader:
    """Opens a regular file for reading, or raises OSError at once."""
    check_regular(path)
    return open(path, "rb", opener=_open_without_waiting)


def _open_without_waiting(path: str, flags: int) -> int:
    # a FIFO that has replaced the file since the check would wait for a writer
    return os.open(path, flags | os.O_NONBLOCK)


def open_trusted(file: Path) -> int | None:
    """Returns a descriptor for reading, None if there is no file or another user could change it;
    whose it is, and whether it is plain, is asked of the open file."""
    if not is_trusted(file.parent):
        return None
    try:
        fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    status = os.fstat(fd)
    if not is_safe_file(status):
        logger.warning("%s is another user's, or open to others: not used", file)
        os.close(fd)
        return None
    return fd


def is_safe_file(status: os.stat_result) -> bool:
    """Returns whether it is of a plain file that no other user but root can change."""
    return stat.S_ISREG(status.st_mode) and _is_safe(status)


def is_trusted(folder: Path) -> bool:
    """Returns whether the path is a directory (a link to one does not count) that belongs to this
    user or to root, and that is writable for its owner only."""
    return distrust(folder) is None


def distrust(folder: Path) -> str | None:
    """Returns why the path is no directory that is_trusted, in words for users; None if it is."""
    try:
        status = folder.lstat()
    except OSError as error:
        return reason(error)
    if stat.S_ISLNK(status.st_mode):
        return "it is a link"
    if not stat.S_ISDIR(status.st_mode):
        return "it is no directory"
    if _is_safe(status):
        return None
    mode = stat.S_IMODE(status.st_mode)
    others = f"other users can write to it (mode {mode:o})"
    return others if mode & 0o022 else "it belongs to another user"


def user_cache() -> Path | None:
    """Returns the user's folder for what can be made again; None for a user without a home, as
    services may be."""
    home = os.environ.get("HOME")
    cache = os.environ.get("XDG_CACHE_HOME") or (home and f"{home}/.cache")
    return Path(cache) / "mergestep" if cache else None


def read_record(folder: Path, name: str, max_bytes: int) -> bytes | None:
    """Returns a small file of a private folder; None if there is none that can be trusted."""
    fd = open_trusted(folder / name)
    if fd is None:
        return None
    try:
        content = os.read(fd, max_bytes + 1)
        with contextlib.suppress(OSError):  # a disk that is read only
            os.utime(fd)
    except OSError:
        return None
    finally:
        os.close(fd)
    return content if len(content) <= max_bytes else None


def write_record(folder: Path, prefix: str, name: str, content: bytes) -> None:
    """Writes a small file whole or not at all, and deletes the oldest beyond MAX_RECORDS whose
    names have this prefix. A folder that cannot be written to, or that others can write to, keeps
    nothing."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not is_trusted(folder):
            return
        _remove_oldest(folder, prefix)
        unfinished = folder / f"{name}.{os.getpid()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(unfinished, flags, 0o600)
        try:
            os.write(fd, content)
        finally:
            os.close(fd)
        unfinished.rename(folder / name)
    except OSError as error:
        logger.info("nothing is kept in %s for the next start: %s", folder, reason(error))


def _remove_oldest(folder: Path, prefix: str) -> None:
    """Deletes records, and what stopped writers left, so that one more may be written."""
    found: list[tuple[int, Path]] = []
    for file in folder.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            found.append((file.lstat().st_mtime_ns, file))
    for _, file in sorted(found)[: max(0, len(found) - MAX_RECORDS + 1)]:
        with contextlib.suppress(OSError):
            file.unlink()


def _is_safe(status: os.stat_result) -> bool:
    is_ours = status.st_uid in (0, os.geteuid())
    return is_ours and not stat.S_IMODE(status.st_mode) & 0o022
