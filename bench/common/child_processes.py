"""The memory of the child processes of a server that is measured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from serve.machine import process_bytes


def children_bytes(pid: int) -> int:
    """Returns the resident memory of a process's child processes, and of theirs, in bytes; 0 if
    there are none."""
    return sum(process_bytes(child) + children_bytes(child) for child in _children(pid))


def _children(pid: int) -> Iterator[int]:
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            yield from map(int, file.read_text().split())
        except OSError:  # the thread has ended
            continue
