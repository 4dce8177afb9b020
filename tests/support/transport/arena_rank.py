"""A rank of an arena in a process of its own: `python -m tests.support.transport.arena_rank PATH
RANK HOW`. It prints a line for each thing that happened."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from transport.arena import Arena, ExchangeError

ROOT = Path(__file__).parents[3]
PATIENCE_S = 20.0


@contextlib.contextmanager
def started(arena: Arena, rank: int, how: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.support.transport.arena_rank"]
    process = subprocess.Popen(
        [*command, arena.path, str(rank), how],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def main(path: str, rank: int, how: str) -> None:
    arena = Arena.open(path, rank)
    print("open", flush=True)
    if how == "sums":
        add_up(arena, rank)
    elif how == "barriers":  # until something happens
        with contextlib.suppress(ExchangeError):
            while True:
                arena.barrier(PATIENCE_S)
    elif how == "generations":  # the next one is read from the parent after each failure
        for line in sys.stdin:
            arena.join(int(line))
            try:
                while True:
                    arena.barrier(PATIENCE_S)
                    print("passed", flush=True)
            except ExchangeError as error:
                print(type(error).__name__, flush=True)


def add_up(arena: Arena, rank: int) -> None:
    """Each rank writes a word, and adds up all ranks' words behind the barrier."""
    words, total = memoryview(arena.data).cast("Q"), 0
    for step in range(1000):
        row = step % 2 * arena.num_ranks
        words[row + rank] = step * (rank + 1)
        arena.barrier(PATIENCE_S)
        total += sum(words[row : row + arena.num_ranks])
    print(total, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
