"""Takes all memory of the machine but so many bytes: a limit for whatever runs beside it.

    python -m bench.streaming.ballast BYTES

The system then drops cached pages of files as it does under any limit. The memory is given back
when the standard input ends, or as soon as others need it: this process is the first to be killed.
A line on the standard input makes it take or give back what has changed since. Only for a machine
without swap on which nothing else runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

CHUNK_BYTES = 16 << 20
_LEAST = 64 << 20  # of available memory: with less, everything on the machine stands still
_LOOK_S = 0.05
_MOST_LOOKS = 3
_READY = b"ready\n"


def meminfo(name: str) -> int:
    """Returns a figure of /proc/meminfo in bytes, 0 if there is none."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    return 0


def level(
    chunks: list[mmap.mmap], left: int, available: Callable[[], int], size: int = CHUNK_BYTES
) -> None:
    """Adds or removes chunks until `left` bytes are available, up to one chunk more."""
    while (more := available() - left) >= size:
        for _ in range(max(1, more // size // 2)):  # others take memory meanwhile
            chunk = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(chunk)), 1, size)
            chunks.append(chunk)
    while chunks and available() < left:
        chunks.pop().close()


def hold(left: int) -> None:
    """Leaves so many bytes until the standard input ends. SystemExit if they are used up."""
    chunks: list[mmap.mmap] = []
    looks = 0
    while True:
        level(chunks, left, lambda: meminfo("MemAvailable"))
        os.write(1, _READY)
        while not select.select([0], [], [], _LOOK_S)[0]:
            looks = looks + 1 if meminfo("MemAvailable") < _LEAST else 0
            if looks == _MOST_LOOKS:
                raise SystemExit("the memory that was left is used up: the limit is too small")
        if not os.read(0, 1):
            return


class Ballast:
    """A process that leaves so many bytes of memory, while this is entered. SystemExit where it
    cannot, or had to give up."""

    def __init__(self, left: int) -> None:
        if meminfo("SwapTotal"):
            raise SystemExit("--free is no limit where there is swap: use a cgroup or a guest")
        if left > meminfo("MemAvailable"):
            raise SystemExit(f"--free: only {meminfo('MemAvailable')} bytes are available")
        self._left = left

    def __enter__(self) -> Ballast:
        command = [sys.executable, "-m", "bench.streaming.ballast", str(self._left)]
        root = Path(__file__).parents[2]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, cwd=root
        )
        self._wait()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def level(self) -> None:
        """Leaves as many bytes again."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"\n")
        self._wait()

    def _wait(self) -> None:
        assert self._process.stdout is not None
        if self._process.stdout.read(len(_READY)) != _READY:
            code = self._process.wait()
            raise SystemExit(f"the limit was not held (exit code {code}); was memory needed?")


@contextlib.contextmanager
def limit(left: int | None) -> Iterator[Callable[[], None]]:
    """Leaves so many bytes, or does nothing. Yields what checks and restores that."""
    if left is None:
        yield lambda: None
        return
    with Ballast(left) as ballast:
        yield ballast.level


if __name__ == "__main__":
    Path("/proc/self/oom_score_adj").write_text("1000")
    hold(int(sys.argv[1]))
