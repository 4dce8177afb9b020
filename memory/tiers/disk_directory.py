"""The disk tier's directory: private, since K/V reveals prompts, and used by one process at a
time."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

_OURS = ("lock", "index", "pages-", ".probe-", "secret")


class DiskDirectoryError(OSError):
    """A directory that cannot hold the disk tier. The message says what to change."""


class DiskDirectoryInUse(DiskDirectoryError):
    """Another process uses the directory."""


def claim_directory(directory: str | Path) -> tuple[Path, int]:
    """Returns the directory's path and the descriptor of its lock, which the caller closes.

    Makes the directory with mode 0700, or sets that mode if it holds only our files. Raises
    DiskDirectoryError.
    """
    path = Path(directory).absolute()
    if path.is_symlink():  # its owner could let it point elsewhere later
        raise DiskDirectoryError(f"{path} is a link; remove it")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    if status.st_uid != os.geteuid():
        raise DiskDirectoryError(f"{path} belongs to another user; choose another directory")
    if stat.S_IMODE(status.st_mode) & 0o077:
        others = [name for name in os.listdir(path) if not name.startswith(_OURS)]
        if others:
            raise DiskDirectoryError(
                f"{path} is open to other users and holds other files; "
                "choose a directory of its own, or make it private (chmod 700)"
            )
        path.chmod(0o700)
    lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise DiskDirectoryInUse(f"{path} is in use by another process") from error
    return path, lock


def check_parent(directory: Path) -> None:
    """Raises DiskDirectoryError if another user can decide what the directory contains: it is
    another user's link (root's excepted), or another user's directory that others can write to."""
    link = directory.lstat()
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (0, os.geteuid()):
        raise DiskDirectoryError(f"{directory} is a link of another user; choose another directory")
    status = directory.stat()
    if status.st_uid != os.geteuid() and stat.S_IMODE(status.st_mode) & 0o022:
        raise DiskDirectoryError(
            f"{directory} belongs to another user and others can write there; "
            "choose another directory"
        )


def is_private(status: os.stat_result) -> bool:
    """Returns whether it is a plain file of this user that no other user can read or write."""
    is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    return is_ours and not stat.S_IMODE(status.st_mode) & 0o077
