"""Opens files that a user or a checkpoint names, and refuses what is not a regular file.

A FIFO or a device in a file's place could wait for ever or never end.
"""

from __future__ import annotations

import io
import os
import stat
from pathlib import Path

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_regular(path: str | Path) -> None:
    """Raises OSError, whose text for users names the kind, if the path leads to no regular file."""
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
